"""The results store when it is killed, the disk is full, the engine gives up or the log is damaged."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import duckdb
import pytest

from evalpurse.home import Home
from evalpurse.store import engine as engine_module
from evalpurse.store import writer as writer_module
from evalpurse.store.blobs import Blobs
from evalpurse.store.database import Options, Store
from evalpurse.store.disk import free_bytes
from evalpurse.store.errors import DiskFullError, StoreBrokenError, StoreUnreadableError
from tests.store_rows import BARE, event, score

pytestmark = pytest.mark.anyio


async def count(store: Store, table: str = "events") -> int:
    found = await store.snapshot({"it": f"SELECT count(*) AS n FROM {table}"})  # noqa: S608 - the tests' own names
    number: int = found["it"].column("n")[0].as_py()
    return number


def wal(home: Home) -> Path:
    return Path(f"{home.results_file}.wal")


def crashed_copy(home: Home, to: Path) -> Home:
    """The files of an open store as a kill would leave them; a child copies, so that no lock is lost."""
    subprocess.run(["cp", "-r", str(home.path), str(to)], check=True)
    return Home(to)


# kill -9

KILLED = """
import asyncio, sys
from pathlib import Path
from evalpurse.home import Home
from evalpurse.store.database import Store
from tests.store_rows import BARE, event, score

async def work(store, first, lane):
    number = first
    while True:
        run_id = f"{lane}-{number}"
        blob = await store.blobs.put_async([run_id.encode()])
        await store.append([event(number, run_id=run_id), *(score(run_id, name) for name in "abc")])
        sys.stdout.write(f"{run_id}\\n")
        sys.stdout.flush()
        number += 1

async def main():
    store = await Store.open(Home(Path(sys.argv[1])), BARE)
    store.blobs.put(b"opened")
    await asyncio.gather(*(work(store, int(sys.argv[2]), lane) for lane in range(6)))

asyncio.run(main())
"""


def kill_in_the_middle(home: Home, cycle: int, after_s: float) -> list[str]:
    """Runs the child, kills it, and returns what it acknowledged."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(home.path), str(cycle * 100_000)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    ) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(after_s)  # not a wait for something: the moment of the kill is the test's input
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read()
    # The last line may be cut off by the kill: then it was not acknowledged.
    return [line for line in (first + rest).split("\n")[:-1] if line]


async def test_killed_at_any_moment_nothing_acknowledged_is_lost_and_nothing_is_half_there(
    home: Home,
) -> None:
    moments = random.Random(7)
    acknowledged: list[str] = []
    for cycle in range(8):
        acknowledged += await anyio.to_thread.run_sync(
            kill_in_the_middle, home, cycle, moments.uniform(0.0, 0.3)
        )
    assert len(acknowledged) > 100
    store = await Store.open(home, BARE)
    try:
        found = await store.snapshot({table: f"SELECT run_id FROM {table}" for table in ("events", "scores")})  # noqa: S608
        events = Counter(found["events"].column("run_id").to_pylist())
        scores = Counter(found["scores"].column("run_id").to_pylist())
        blobs = {run_id: store.blobs.get(store.blobs.put(run_id.encode())) for run_id in acknowledged}
    finally:
        await store.close()
    assert set(acknowledged) <= set(events)
    assert set(events.values()) == {1}
    assert scores == dict.fromkeys(events, 3)
    assert all(content.decode() == run_id for run_id, content in blobs.items())


# The engine gives up. Its own fault injection makes a checkpoint fail as a full disk does: for good.


async def break_engine(store: Store) -> None:
    def fail(cursor: duckdb.DuckDBPyConnection) -> None:
        cursor.execute("SET debug_checkpoint_abort = 'before_header'").fetchall()
        with pytest.raises(duckdb.FatalException, match="Checkpoint aborted"):
            cursor.execute("CHECKPOINT").fetchall()
        with pytest.raises(duckdb.FatalException, match="invalidated"):
            cursor.execute("SELECT 1").fetchall()

    await store.append([event(-1)])  # a checkpoint needs something to do
    await anyio.to_thread.run_sync(store._engine.read, fail)


@pytest.fixture
async def store(home: Home) -> Any:
    store = await Store.open(home, BARE)
    yield store
    await store.close()


async def test_reads_and_writes_go_on_after_the_engine_gave_up(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    for round_ in range(3):
        await break_engine(store)
        with anyio.fail_after(20):
            if round_ % 2:
                assert await count(store) == 1 + round_ * 22
                await store.append([event(number) for number in range(21)])
            else:
                await asyncio.gather(*(store.append([event(number)]) for number in range(20)), count(store))
                await store.append([event(20)])
        assert await count(store) == (round_ + 1) * 22
    assert caplog.text.count("broke and is opened again") == 3


async def test_readers_that_are_under_way_finish_when_the_engine_is_replaced(store: Store) -> None:
    await store.append([event(number) for number in range(1000)])
    slow = "SELECT count(*) AS n FROM events a, events b WHERE hash(a.run_id, b.run_id) % 7 = 3"

    async def read() -> None:
        with anyio.move_on_after(20) as scope:
            await count(store)
            await store.snapshot({"it": slow})
        assert not scope.cancelled_caught

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(read)
        await break_engine(store)
        await store.append([event(1)])
    assert await count(store) == 1002


async def test_a_commit_that_breaks_the_engine_is_stored_once(store: Store) -> None:
    """The commit succeeds, the checkpoint that it sets off does not, and the error is that of the commit."""

    def arm(cursor: duckdb.DuckDBPyConnection) -> None:
        cursor.execute("SET debug_checkpoint_abort = 'before_header'").fetchall()
        cursor.execute("SET wal_autocheckpoint = '1B'").fetchall()

    opening = store._engine._opening
    await anyio.to_thread.run_sync(store._engine.read, arm)
    with anyio.fail_after(20):
        await asyncio.gather(
            *(store.append([event(number), score(f"run-{number}", "a")]) for number in range(10))
        )
    assert store._engine._opening == opening + 1
    assert await count(store) == 10
    assert await count(store, "scores") == 10


async def test_a_caller_is_told_when_the_database_cannot_be_opened_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await break_engine(store)
    with monkeypatch.context() as patch:

        def refuse(*_args: Any, **_more: Any) -> None:
            raise duckdb.IOException("the device is gone")

        patch.setattr(engine_module, "connect", refuse)
        with pytest.raises(StoreBrokenError, match="cannot be opened again now: the device is gone"):
            await store.append([event(1)])
        with pytest.raises(StoreBrokenError):
            await count(store)
    await store.append([event(2)])
    assert await count(store) == 2  # the one of `break_engine` and this one


async def test_a_defect_in_the_writer_fails_its_callers_instead_of_leaving_them(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = await Store.open(home, BARE)

    def defect(*_args: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(writer_module, "_commit", defect)
    with anyio.fail_after(5), pytest.raises(Exception, match="a defect"):
        await store.append([event(1)])
    monkeypatch.undo()
    await store.append([event(2)])
    assert await count(store) == 1
    await store.close()


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = (
        sys.platform == "linux"
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("mounting a file system of 20 MB needs root on Linux")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, *, leave_bytes: int = 0) -> Path:
    filler = folder / "filler"
    with filler.open("wb") as file:
        size = free_bytes(folder) - leave_bytes
        os.posix_fallocate(file.fileno(), 0, size // 4096 * 4096)
    return filler


async def test_a_full_disk_is_said_with_numbers_nothing_is_half_written_and_space_is_all_it_takes(
    small_disk: Path,
) -> None:
    home = Home(small_disk / "home").create()
    store = await Store.open(home, BARE)
    await store.append([event(number) for number in range(100)])
    store.blobs.put(b"before")
    filler = fill(small_disk, leave_bytes=200_000)
    too_much = [event(number, detail=random.Random(number).randbytes(500).hex()) for number in range(3000)]
    for _ in range(2):
        with pytest.raises(
            DiskFullError, match=r"The disk is full \(0\.\d MB free at .*home\).*nothing was written"
        ) as full:
            await store.append([score("run-x", "a"), *too_much])
        assert full.value.facts["free_bytes"] < 1_000_000
        assert (await count(store), await count(store, "scores")) == (100, 0)

    with pytest.raises(DiskFullError, match="writing a blob of"):
        store.blobs.put(os.urandom(1_000_000))
    with pytest.raises(DiskFullError, match="writing blobs"):
        store.blobs.put_many([os.urandom(50_000) for _ in range(20)])
    assert store.blobs.get(store.blobs.put(b"before")) == b"before"

    filler.unlink()
    await store.append(too_much)
    big = os.urandom(1_000_000)
    assert store.blobs.get(store.blobs.put(big)) == big
    assert await count(store) == 3100
    await store.close()
    again = await Store.open(home, BARE)
    assert (await count(again), await count(again, "scores")) == (3100, 0)
    await again.close()


async def test_no_checkpoint_is_tried_without_room_and_closing_and_opening_still_work(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home(small_disk / "home").create()
    store = await Store.open(home, BARE)
    await store.append([event(number, detail="x" * 1000) for number in range(2000)])
    fill(small_disk)
    await store.close()
    assert "no checkpoint: too little room" in caplog.text
    assert wal(home).stat().st_size > 1_000_000
    again = await Store.open(home, BARE)
    assert await count(again) == 2000
    await again.close()


async def test_the_reserve_lets_a_write_through_on_a_full_disk(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home(small_disk / "home").create()
    store = await Store.open(home, Options(ballast_bytes=8 << 20, ballast_only_above_free_bytes=0))
    await store.append([event(0)])
    store._writer._ballast.keep()  # what an idle second does
    assert (home.path / "ballast").stat().st_blocks * 512 >= 8 << 20
    fill(small_disk)
    await store.append(
        [event(number, detail=random.Random(number).randbytes(500).hex()) for number in range(1000)]
    )
    assert "the disk is full: deleted the reserve" in caplog.text
    assert await count(store) == 1001
    await store.close()


async def test_a_full_disk_at_the_first_start_is_said_and_leaves_nothing_that_hinders_the_next(
    small_disk: Path,
) -> None:
    home = Home(small_disk / "home").create()
    filler = fill(small_disk)
    with pytest.raises(DiskFullError, match="opening the results"):
        await Store.open(home, BARE)
    filler.unlink()
    store = await Store.open(home, BARE)
    await store.append([event(1)])
    await store.close()


async def test_the_reserve_is_real_bytes_and_goes_with_the_store(home: Home) -> None:
    store = await Store.open(home, Options(ballast_bytes=1 << 20, ballast_only_above_free_bytes=0))
    await store.append([event(1)])
    ballast = home.path / "ballast"
    with anyio.fail_after(20):
        while not ballast.exists():  # noqa: ASYNC110 - made in the first idle second, without an event
            await anyio.sleep(0.05)
    assert ballast.stat().st_blocks * 512 >= 1 << 20
    await store.close()
    assert not ballast.exists()


async def test_there_is_no_reserve_where_room_is_short(home: Home) -> None:
    store = await Store.open(home, Options(ballast_bytes=1 << 20, ballast_only_above_free_bytes=1 << 60))
    store._writer._ballast.keep()
    assert not (home.path / "ballast").exists()
    await store.close()


# A damaged log


async def log_with_rows(home: Home, to: Path) -> Home:
    """A killed store with 30 rows in its write-ahead log, one transaction each."""
    store = await Store.open(home, BARE)
    for number in range(30):
        await store.append([event(number, detail=f"payload-{number:04d}")])
    copy = crashed_copy(home, to)
    await store.close()
    return copy


async def test_a_truncated_log_opens_with_whole_transactions_only(home: Home, tmp_path: Path) -> None:
    whole = await log_with_rows(home, tmp_path / "whole")
    size = wal(whole).stat().st_size
    seen, ends = [], []
    for number, keep in enumerate((size - 1, size - 40, size // 2, size // 3, 40, 0)):
        cut = crashed_copy(whole, tmp_path / f"cut{number}")
        os.truncate(wal(cut), keep)
        store = await Store.open(cut, BARE)
        (rows,) = (await store.snapshot({"it": "SELECT run_id FROM events"})).values()
        await store.append([event(99)])
        await store.close()
        seen.append(rows.num_rows)
        assert rows.column("run_id").to_pylist() == [f"run-{place}" for place in range(rows.num_rows)]
        ends.append(bool(store.notices))
    assert seen == sorted(seen, reverse=True)
    assert 30 > seen[0] >= seen[2] > 0
    assert ends[:4] == [True] * 4  # what was cut off is said, and the log is kept


async def test_a_damaged_log_is_kept_aside_and_its_good_part_is_used(
    home: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = await log_with_rows(home, tmp_path / "damaged")
    content = wal(damaged).read_bytes()
    wal(damaged).write_bytes(content.replace(b"payload-0020", b"paXload-0020"))
    store = await Store.open(damaged, BARE)
    try:
        assert await count(store) == 20
        (notice,) = store.notices
        await store.append([event(99)])
    finally:
        await store.close()
    assert "write-ahead log" in notice
    assert notice in [record.message for record in caplog.records if record.levelno == logging.CRITICAL]
    (kept,) = damaged.backups.rglob("*.wal")
    assert str(kept.parent) in notice
    assert kept.read_bytes() == content.replace(b"payload-0020", b"paXload-0020")
    again = await Store.open(damaged, BARE)
    assert (again.notices, await count(again)) == ((), 21)
    await again.close()


async def test_a_log_that_is_rubbish_from_its_start_is_kept_aside(home: Home, tmp_path: Path) -> None:
    damaged = await log_with_rows(home, tmp_path / "damaged")
    rubbish = b"\xff" * 5000
    wal(damaged).write_bytes(rubbish)
    store = await Store.open(damaged, BARE)
    try:
        assert await count(store) == 0
        assert "last 5000 of 5000 bytes" in store.notices[0]
    finally:
        await store.close()
    (kept,) = damaged.backups.rglob("*.wal")
    assert kept.read_bytes() == rubbish


async def test_a_log_without_its_database_is_kept_aside(home: Home, tmp_path: Path) -> None:
    orphan = await log_with_rows(home, tmp_path / "orphan")
    content = wal(orphan).read_bytes()
    orphan.results_file.unlink()
    store = await Store.open(orphan, BARE)
    try:
        assert await count(store) == 0
        assert "is missing, but its write-ahead log was there" in store.notices[0]
    finally:
        await store.close()
    (kept,) = orphan.backups.rglob("*.wal")
    assert kept.read_bytes() == content


async def test_a_damaged_database_file_is_left_as_it_is(home: Home) -> None:
    store = await Store.open(home, BARE)
    await store.append([event(1)])
    await store.close()
    content = bytearray(home.results_file.read_bytes())
    content[20] ^= 0xFF  # in the main header
    home.results_file.write_bytes(content)
    with pytest.raises(StoreUnreadableError, match="cannot be opened"):
        await Store.open(home, BARE)
    assert home.results_file.read_bytes() == content
    assert list(home.backups.iterdir()) == []


async def test_an_idle_store_moves_its_log_into_the_file(home: Home) -> None:
    store = await Store.open(home, BARE)
    await store.append([event(number, detail="x" * 2000) for number in range(1500)])
    with anyio.fail_after(20):
        while store._engine.wal_bytes:  # noqa: ASYNC110 - done in the first idle second, without an event
            await anyio.sleep(0.05)
    assert await count(store) == 1500
    await store.close()
    assert not wal(home).exists()


def test_blobs_on_a_small_disk_need_only_space(small_disk: Path) -> None:
    blobs = Blobs(small_disk / "blobs")
    blobs.put(b"first")
    filler = fill(small_disk)
    with pytest.raises(DiskFullError):
        blobs.put_many([os.urandom(60_000) for _ in range(10)])
    filler.unlink()
    assert blobs.get(blobs.put(b"after")) == b"after"
    blobs.close()
