"""The ledger's file: who may open it, how it grows up, and what it survives."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import anyio
import pytest

from evalpurse.budget import errors, migrations
from evalpurse.budget.accounts import AccountState, Entry, Hold, Role
from evalpurse.budget.journal import Journal
from evalpurse.budget.ledger import Ledger
from evalpurse.budget.tree import Tree

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def content(path: Path, new: bytes | None = None) -> bytes:
    if new is not None:
        path.write_bytes(new)
    return path.read_bytes()


def edit(path: Path, *statements: str) -> None:
    """Changes a closed ledger's file behind its back, past its triggers."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("DROP TRIGGER journal_is_never_edited")
        connection.execute("DROP TRIGGER journal_is_never_shortened")
        for statement in statements:
            assert connection.execute(statement).rowcount == 1
        connection.commit()


async def with_some_money(path: Path, journal_type: type[Journal] = Journal) -> Ledger:
    ledger = await Ledger.open(path, journal_type=journal_type)
    await ledger.set_limit("grant", "workspace", 1_000_000, by=Role.OWNER)
    await ledger.open_account("o1", "exp", parent=None, limit_nusd=1_000_000, by=Role.AGENT)
    for at in range(4):
        await ledger.hold(Hold(f"h{at}", "exp", 100))
    await ledger.settle("h0", 60)
    return ledger


async def test_two_processes_cannot_own_one_ledger(path: Path) -> None:
    ledger = await with_some_money(path)
    with pytest.raises(errors.LedgerLockedError) as caught:
        await Ledger.open(path)
    assert caught.value.facts["pid"] == os.getpid()
    code = (
        "import asyncio, pathlib, sys\n"
        "from evalpurse.budget.ledger import Ledger\n"
        "asyncio.run(Ledger.open(pathlib.Path(sys.argv[1])))\n"
    )
    other = await anyio.run_process([sys.executable, "-c", code, str(path)], check=False)
    assert b"LedgerLockedError" in other.stderr
    await ledger.close_ledger()
    ledger = await Ledger.open(path)
    assert (await ledger.verify()).clean
    await ledger.close_ledger()


async def test_a_folder_that_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(errors.LedgerUnavailableError, match="No such file"):
        await Ledger.open(tmp_path / "nowhere" / "ledger.sqlite")


async def test_a_newer_ledger_is_refused_and_left_alone(path: Path) -> None:
    await (await with_some_money(path)).close_ledger()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    before = content(path)
    with pytest.raises(errors.LedgerNewerError) as caught:
        await Ledger.open(path)
    assert caught.value.facts["version"] == 99
    assert content(path) == before


@pytest.mark.parametrize("other", [b"not a database at all" * 100, b"SQLite format 3\x00" + b"\xff" * 4096])
async def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path, other: bytes) -> None:
    content(path, other)
    with pytest.raises(errors.LedgerDamagedError):
        await Ledger.open(path)
    assert content(path) == other


async def test_another_programs_database_is_refused_and_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    with pytest.raises(errors.LedgerDamagedError, match="not a ledger"):
        await Ledger.open(path)


async def test_a_migration_is_one_transaction_after_a_copy(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await with_some_money(path)).close_ledger()
    real = migrations.steps()
    second = migrations.Step(2, "add_notes", "CREATE TABLE notes (text TEXT NOT NULL);")
    broken = migrations.Step(3, "break", "CREATE TABLE more (x INTEGER);\nINSERT INTO nowhere VALUES (1);")
    monkeypatch.setattr("evalpurse.budget.sqlite.steps", lambda: [*real, second, broken])
    with pytest.raises(errors.LedgerMigrationError) as caught:
        await Ledger.open(path)
    (copy,) = (path.parent / "backups").iterdir()
    assert str(copy) in str(caught.value)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        made = connection.execute("SELECT name FROM sqlite_master WHERE name IN ('notes', 'more')")
        assert made.fetchall() == []
    copy.unlink()

    monkeypatch.setattr("evalpurse.budget.sqlite.steps", lambda: [*real, second])
    ledger = await Ledger.open(path)
    assert ledger.account("exp").posted_nusd == 60
    assert (await ledger.verify()).clean
    await ledger.close_ledger()
    (copy,) = (path.parent / "backups").iterdir()
    with closing(sqlite3.connect(path)) as connection:
        done = connection.execute("SELECT version, name, outcome FROM migrations").fetchall()
        assert done == [(1, "ledger", "done"), (2, "add_notes", "done")]
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        assert connection.execute("SELECT sum(posted_nusd) FROM journal").fetchone() == (60,)


async def test_the_journal_cannot_be_edited_or_shortened(path: Path) -> None:
    await (await with_some_money(path)).close_ledger()
    with closing(sqlite3.connect(path)) as connection:
        for statement in ("UPDATE journal SET amount_nusd = 0", "DELETE FROM journal"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(statement)


@pytest.mark.parametrize(
    ("tampering", "says"),
    [
        ("UPDATE accounts SET posted_nusd = 59 WHERE account = 'exp'", "Account 'exp'"),
        ("UPDATE accounts SET held_nusd = 0 WHERE account = 'workspace'", "Account 'workspace'"),
        ("UPDATE accounts SET limit_nusd = 2000000 WHERE account = 'exp'", "Account 'exp'"),
        ("UPDATE accounts SET state = 'frozen' WHERE account = 'exp'", "Account 'exp'"),
        ("UPDATE holds SET state = 'released' WHERE hold_id = 'h1'", "Hold of entry 5"),
        ("UPDATE holds SET posted_nusd = 61 WHERE hold_id = 'h0'", "Hold of entry 4"),
        ("DELETE FROM holds WHERE hold_id = 'h2'", "Hold of entry 6"),
        ("DELETE FROM journal WHERE operation_id = 'h3'", "Hold of entry 7"),
        ("DELETE FROM journal WHERE operation_id = 'h1'", "entry 5 is missing"),
        ("UPDATE journal SET amount_nusd = 61 WHERE kind = 'settle'", "should have moved"),
        ("UPDATE journal SET posted_nusd = 61 WHERE kind = 'settle'", "should have moved"),
        ("UPDATE journal SET held_nusd = -99 WHERE kind = 'settle'", "should have moved"),
        ("UPDATE journal SET resolves_seq = 5 WHERE kind = 'settle'", "never taken"),
        ("UPDATE journal SET amount_nusd = 99 WHERE operation_id = 'grant'", "above its limit"),
        ("UPDATE journal SET account = 'ghost' WHERE operation_id = 'h3'", "unknown account"),
        ("UPDATE journal SET parent = 'ghost' WHERE operation_id = 'o1'", "under the unknown"),
        ("UPDATE journal SET overrun_nusd = 5 WHERE operation_id = 'grant'", "should not have moved"),
    ],
)
async def test_verify_finds_what_somebody_changed_behind_its_back(
    path: Path, tampering: str, says: str
) -> None:
    ledger = await with_some_money(path)
    assert (await ledger.verify()).clean
    await ledger.close_ledger()
    edit(path, tampering)
    ledger = await Ledger.open(path)
    found = await ledger.verify()
    assert not found.clean
    assert any(says in problem for problem in found.problems), found.problems
    await ledger.close_ledger()


async def test_verify_finds_a_memory_that_went_astray(path: Path) -> None:
    ledger = await with_some_money(path)
    ledger._engine.tree.nodes["exp"].held += 1
    ledger._engine.tree.holds.pop("h3")
    problems = (await ledger.verify()).problems
    assert [problem for problem in problems if "'exp'" in problem and "memory say" in problem]
    assert [problem for problem in problems if "'h3'" in problem and "memory say" in problem]
    await ledger.close_ledger()


async def test_verify_is_right_while_money_moves(path: Path) -> None:
    ledger = await with_some_money(path)
    stop = False

    async def busy(name: int) -> int:
        at = 0
        while not stop:
            await ledger.hold(Hold(f"b{name}.{at}", "exp", 10))
            await ledger.settle(f"b{name}.{at}", at % 11)
            at += 1
        return at

    with anyio.fail_after(30):
        workers = [asyncio.create_task(busy(name)) for name in range(8)]
        for _ in range(5):
            assert (await ledger.verify()).problems == ()
        stop = True
        done = await asyncio.gather(*workers)
        assert min(done) > 0
        await ledger.close_ledger()


class Flaky(Journal):
    """Fails when told to, in the place it is told."""

    failing: ClassVar[str] = ""

    def write(self, entries: Sequence[Entry]) -> None:
        if self.failing == "write":
            raise sqlite3.OperationalError("database or disk is full")
        super().write(entries)

    def _commit(self) -> None:
        if self.failing == "next commit":
            type(self).failing = ""
            raise sqlite3.OperationalError("disk I/O error")
        if self.failing == "commit":
            raise sqlite3.OperationalError("disk I/O error")
        super()._commit()
        if self.failing == "after commit":
            raise sqlite3.OperationalError("disk I/O error")

    def reopen(self) -> Tree:
        if self.failing == "everything":
            raise sqlite3.OperationalError("unable to open database file")
        return super().reopen()


@pytest.fixture
def flaky() -> type[Flaky]:
    class Fresh(Flaky):
        pass

    return Fresh


@pytest.mark.parametrize("where", ["write", "commit", "after commit"])
async def test_a_failed_commit_fails_its_batch_and_the_ledger_goes_on(
    path: Path, flaky: type[Flaky], where: str
) -> None:
    ledger = await with_some_money(path, flaky)
    before = ledger.accounts()
    flaky.failing = where
    with anyio.fail_after(20):
        attempts = [ledger.hold(Hold(f"n{at}", "exp", 7)) for at in range(30)]
        results = await asyncio.gather(*attempts, ledger.settle("h1", 9), return_exceptions=True)
        assert {type(result) for result in results} == {errors.LedgerUnavailableError}
        if where != "after commit":
            assert ledger.accounts() == before
        flaky.failing = ""
        await asyncio.gather(*(ledger.hold(Hold(f"n{at}", "exp", 7)) for at in range(30)))
        assert (await ledger.settle("h1", 9)).posted_nusd == 9
        assert ledger.account("exp").held_nusd == 200 + 30 * 7
        assert ledger.account("exp").posted_nusd == 69
        assert (await ledger.verify()).problems == ()
        await ledger.close_ledger()


class Gated(Flaky):
    """Stands still at the start of a commit, until the gate opens."""

    closed: ClassVar[bool] = False
    arrived: ClassVar[threading.Event]
    gate: ClassVar[threading.Event]

    def write(self, entries: Sequence[Entry]) -> None:
        if self.closed:
            self.arrived.set()
            assert self.gate.wait(20)
        super().write(entries)


@pytest.fixture
def gated() -> type[Gated]:
    class Fresh(Gated):
        arrived = threading.Event()
        gate = threading.Event()

    return Fresh


async def test_what_was_decided_on_top_of_a_failed_batch_fails_with_it(
    path: Path, gated: type[Gated]
) -> None:
    ledger = await with_some_money(path, gated)
    gated.closed, gated.failing = True, "next commit"
    with anyio.fail_after(20):
        first = asyncio.create_task(
            ledger.open_account("o2", "new", parent="exp", limit_nusd=9, by=Role.AGENT)
        )
        await anyio.to_thread.run_sync(gated.arrived.wait)
        # Each of these would be fine on what the disk has; they were decided on what it never got.
        on_top = [ledger.hold(Hold("on top", "exp", 5)), ledger.settle("h1", 5)]
        second = [asyncio.create_task(call) for call in on_top]
        await asyncio.sleep(0)
        assert ledger.account("exp").held_nusd == 205
        gated.gate.set()
        failed = await asyncio.gather(first, *second, return_exceptions=True)
        assert {type(error) for error in failed} == {errors.LedgerUnavailableError}
        gated.closed = False
        with pytest.raises(errors.AccountNotFoundError):
            await ledger.hold(Hold("later", "new", 5))
        assert ledger.account("exp").held_nusd == 300
        assert (await ledger.verify()).problems == ()
        await ledger.close_ledger()


async def test_closing_and_correcting_in_one_commit_leaves_the_account_closed(
    path: Path, gated: type[Gated]
) -> None:
    ledger = await with_some_money(path, gated)
    await ledger.open_account("o2", "done", parent=None, limit_nusd=9, by=Role.AGENT)
    gated.closed = True
    with anyio.fail_after(20):
        waiting: list[asyncio.Task[object]] = [asyncio.create_task(ledger.hold(Hold("first", "exp", 5)))]
        await anyio.to_thread.run_sync(gated.arrived.wait)
        gated.closed = False
        waiting += [
            asyncio.create_task(ledger.close("c1", "done")),
            asyncio.create_task(ledger.correct("c2", "done", 50, "a late invoice", by=Role.OWNER)),
            asyncio.create_task(ledger.set_limit("l1", "workspace", 2_000_000, by=Role.OWNER)),
            asyncio.create_task(ledger.request("r1", "workspace", 5, "more", by=Role.AGENT)),
        ]
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(ledger.decide("r1", 5, by=Role.OWNER)))
        waiting.append(asyncio.create_task(ledger.set_limit("l2", "workspace", 3_000_000, by=Role.OWNER)))
        waiting.append(asyncio.create_task(ledger.unfreeze("u1", "workspace", reason="seen", by=Role.OWNER)))
        await asyncio.sleep(0)
        gated.gate.set()
        await asyncio.gather(*waiting)
        assert (await ledger.verify()).problems == ()
        await ledger.close_ledger()
    ledger = await Ledger.open(path)
    assert ledger.account("done").state is AccountState.CLOSED
    assert ledger.account("done").overrun_nusd == 50
    assert ledger.account("workspace").limit_nusd == 3_000_000
    assert ledger.account("workspace").state is AccountState.OPEN
    await ledger.close_ledger()


async def test_a_ledger_that_cannot_be_read_again_says_so_and_comes_back_by_itself(
    path: Path, flaky: type[Flaky]
) -> None:
    class Down(flaky):  # type: ignore[misc, valid-type]
        def write(self, entries: Sequence[Entry]) -> None:
            if self.failing == "everything":
                raise sqlite3.OperationalError("disk I/O error")
            super().write(entries)

    ledger = await with_some_money(path, Down)
    Down.failing = "everything"
    with anyio.fail_after(20):
        for _ in range(3):
            with pytest.raises(errors.LedgerUnavailableError):
                await ledger.hold(Hold("n1", "exp", 7))
        Down.failing = ""
        while True:
            try:
                await ledger.hold(Hold("n1", "exp", 7))
                break
            except errors.LedgerUnavailableError:
                await asyncio.sleep(0.001)
        assert ledger.account("exp").held_nusd == 307
        assert (await ledger.verify()).problems == ()
        await ledger.close_ledger()


async def test_a_full_disk_is_said_and_the_ledger_resumes_when_there_is_space(path: Path) -> None:
    ledger = await with_some_money(path)
    connection = ledger._engine._writer._journal._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + 2}")

    async def fill() -> tuple[int, str]:
        for at in range(1000):
            try:
                await ledger.hold(Hold(f"n{at}", "exp", 7, purpose="x" * 1000))
            except errors.LedgerUnavailableError as error:
                return at, str(error)
        raise AssertionError("the file grew without end")

    with anyio.fail_after(20):
        admitted, error = await fill()
        assert "disk is full" in error
        assert ledger.account("exp").held_nusd == 300 + 7 * admitted
        # The writer opened the file afresh, which lifted the limit: there is space again.
        assert (await ledger.hold(Hold(f"n{admitted}", "exp", 7, purpose="x" * 1000))).open
        assert (await ledger.verify()).problems == ()
        await ledger.close_ledger()


async def test_the_database_itself_refuses_a_commit_above_a_limit(path: Path) -> None:
    ledger = await with_some_money(path)
    ledger._engine.tree.nodes["exp"].limit *= 10
    ledger._engine.tree.nodes["workspace"].limit *= 10
    with anyio.fail_after(20):
        with pytest.raises(errors.LedgerUnavailableError, match="CHECK"):
            await ledger.hold(Hold("too much", "exp", 1_000_000))
        assert ledger.account("exp").limit_nusd == 1_000_000
        assert ledger.hold_state("too much") is None
        assert (await ledger.verify()).problems == ()
        await ledger.close_ledger()


async def test_a_hold_that_memory_lost_track_of_is_not_resolved_twice_on_disk(path: Path) -> None:
    ledger = await with_some_money(path)
    tree = ledger._engine.tree
    resolved = tree.holds["h1"]
    await ledger.settle("h1", 10)
    tree.holds["h1"] = resolved
    for node in tree.nodes["exp"].chain:
        node.held += 100
    with anyio.fail_after(20):
        with pytest.raises(errors.LedgerUnavailableError):
            await ledger.settle("h1", 20)
        assert ledger.account("exp").posted_nusd == 70
        assert (await ledger.verify()).problems == ()
        await ledger.close_ledger()


async def test_a_program_that_writes_to_the_open_ledger_is_noticed(path: Path) -> None:
    ledger = await with_some_money(path)
    with closing(sqlite3.connect(path)) as intruder:
        intruder.execute("UPDATE accounts SET limit_nusd = limit_nusd * 2 WHERE account = 'exp'")
        intruder.commit()
    with anyio.fail_after(20):
        with pytest.raises(errors.LedgerUnavailableError, match="Another program wrote"):
            await ledger.hold(Hold("n1", "exp", 7))
        assert not (await ledger.verify()).clean
        await ledger.close_ledger()


CHILD = Path(__file__).with_name("ledger_child.py")


def killed_at_random(path: Path, seed: int) -> list[dict[str, str | int]]:
    """Runs a child that spends as fast as it can, kills it, and returns what it was told is durable."""
    rng = random.Random(seed)
    command = [sys.executable, str(CHILD), str(path), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        told = [child.stdout.readline() for _ in range(rng.randint(1, 400))]
        child.send_signal(signal.SIGKILL)
        told += child.stdout.readlines()
    assert child.returncode == -signal.SIGKILL
    return [json.loads(line) for line in told if line.endswith(b"\n")]


async def test_kill_minus_nine_loses_nothing_that_was_acknowledged(path: Path) -> None:
    told: list[dict[str, str | int]] = []
    for seed in range(6):
        told += await anyio.to_thread.run_sync(killed_at_random, path, seed)
        ledger = await Ledger.open(path)
        assert (await ledger.verify()).problems == ()
        last = {str(each["hold_id"]): each for each in told}
        for hold_id, each in last.items():
            state = ledger.hold_state(hold_id)
            assert state is not None, hold_id
            if each["did"] != "hold":
                assert (state.open, state.charged_nusd) == (False, each["actual"])
        account = ledger.account("workspace")
        assert account.posted_nusd + account.held_nusd <= account.limit_nusd
        await ledger.close_ledger()
    assert len(told) > 100
