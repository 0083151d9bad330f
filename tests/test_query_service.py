"""The query service under bombs, deaths and full disks: it answers in time, heals and leaves nothing."""

# ruff: noqa: ASYNC240, S608 - a test's loop may look at a file, and the names in its queries are our own

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import pytest

from evalpurse.home import Home
from evalpurse.store import query_publish
from evalpurse.store.database import Store
from evalpurse.store.errors import QueryFailedError, QueryRefusedError, QueryTimeoutError
from evalpurse.store.policy import PUBLIC
from evalpurse.store.query import QueryService
from evalpurse.store.query_publish import Publisher, remove_abandoned
from evalpurse.store.query_worker import json_safe
from evalpurse.store.records import SuiteRow
from tests.query_home import START, dev_runs, rows

pytestmark = pytest.mark.anyio

TICK_S = 0.01
PROC = Path("/proc")
ENDLESS = "SELECT sum(a.range * b.range % 7) FROM range(10000000) a, range(1000000) b"
BOMBS = {
    "join": ENDLESS,
    "recursion": "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT max(n) FROM r",
    "sort": "SELECT a.range FROM range(200000000) a ORDER BY hash(a.range) DESC LIMIT 1 OFFSET 100000000",
    "aggregate": "SELECT count(DISTINCT hash(range)) FROM range(1000000000)",
    "window": "SELECT max(s) FROM (SELECT sum(range) OVER (ORDER BY hash(range)) AS s FROM range(100000000))",
    "list": "SELECT len(list(range)) FROM range(2000000000)",
    "nested list": "SELECT len(list_transform(x, lambda i: list_sum(list_transform(x, lambda j: i * j))))"
    " FROM (SELECT list(range) AS x FROM range(30000))",
    "string": "WITH RECURSIVE r(s) AS (SELECT 'x' UNION ALL SELECT s || s FROM r) SELECT max(len(s)) FROM r",
    # One call of one scalar function, which no interrupt stops.
    "distance": "SELECT levenshtein(a, b) FROM (SELECT string_agg(md5(range::VARCHAR), '') AS a,"
    " string_agg(md5((range + 1)::VARCHAR), '') AS b FROM range(10000))",
    "regex": "SELECT count(*) FROM (SELECT string_agg(md5(range::VARCHAR), '') AS s FROM range(300000)),"
    " range(1000) WHERE regexp_matches(s, '(a?){900}z' || range)",
    "json": "SELECT json_structure(json_group_array(range)) FROM range(300000000)",
}


@asynccontextmanager
async def serving(home: Home, *, filled: bool = True) -> AsyncIterator[tuple[Store, QueryService]]:
    store = await Store.open(home)
    try:
        if filled:
            await store.append(rows())
        service = QueryService(store, home)
        try:
            yield store, service
        finally:
            await service.close()
    finally:
        await store.close()


class Ticker:
    """Measures how long the event loop was ever kept from running."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def run(self) -> None:
        while True:
            before = time.monotonic()
            await anyio.sleep(TICK_S)
            self.worst_s = max(self.worst_s, time.monotonic() - before - TICK_S)


async def test_every_bomb_ends_in_time_while_the_event_loop_runs_on_and_the_next_query_works(
    home: Home,
) -> None:
    ticker = Ticker()
    ended: dict[str, float] = {}
    with anyio.fail_after(60):
        async with serving(home) as (_, service), anyio.create_task_group() as group:
            group.start_soon(ticker.run)
            waiting = list(BOMBS.items())

            async def explode() -> None:
                while waiting:
                    name, bomb = waiting.pop()
                    started = time.monotonic()
                    with pytest.raises((QueryTimeoutError, QueryFailedError)):
                        await service.query(bomb, timeout_s=0.3)
                    ended[name] = time.monotonic() - started

            async with anyio.create_task_group() as bombs:
                bombs.start_soon(explode)
                bombs.start_soon(explode)
            assert (await service.query("SELECT count(*) FROM runs")).rows == [[12]]
            group.cancel_scope.cancel()
    assert ended.keys() == BOMBS.keys()
    # The timeout, 1 s of grace, and what starting a process takes on a busy machine.
    assert max(ended.values()) < 0.3 + 1.0 + 3.0, ended
    assert ticker.worst_s < 0.5


async def test_process_that_does_not_answer_is_killed_one_second_after_the_timeout(home: Home) -> None:
    with anyio.fail_after(30):
        async with serving(home) as (_, service):
            await service.query("SELECT 1")
            (pid,) = service.pids
            idle_s = cpu_s(pid)
            async with anyio.create_task_group() as group:

                async def stopped() -> None:
                    started = time.monotonic()
                    with pytest.raises(QueryTimeoutError, match=r"within 2 s") as caught:
                        await service.query(ENDLESS, timeout_s=2)
                    assert 2.9 < time.monotonic() - started < 6
                    assert caught.value.code == "query_timeout"

                group.start_soon(stopped)
                await until_busy(pid, idle_s)
                os.kill(pid, signal.SIGSTOP)  # deaf to every interrupt
            assert pid not in service.pids
            assert not alive(pid)
            assert (await service.query("SELECT 2")).rows == [[2]]


async def test_process_killed_while_idle_costs_the_next_query_nothing_but_time(home: Home) -> None:
    with anyio.fail_after(30):
        async with serving(home) as (_, service):
            await service.query("SELECT 1")
            for pid in service.pids:
                os.kill(pid, signal.SIGKILL)
            assert (await service.query("SELECT count(*) FROM cases")).rows == [[3]]


async def test_process_killed_while_it_works_fails_that_query_with_the_reason_and_no_other(
    home: Home,
) -> None:
    with anyio.fail_after(30):
        async with serving(home) as (_, service):
            await service.query("SELECT 1")
            (pid,) = service.pids
            idle_s = cpu_s(pid)
            async with anyio.create_task_group() as group:

                async def doomed() -> None:
                    with pytest.raises(QueryFailedError, match="SIGKILL"):
                        await service.query(ENDLESS)

                group.start_soon(doomed)
                await until_busy(pid, idle_s)
                os.kill(pid, signal.SIGKILL)
            assert (await service.query("SELECT 1")).rows == [[1]]


async def test_cancelled_query_ends_its_process(home: Home) -> None:
    with anyio.fail_after(30):
        async with serving(home) as (_, service):
            await service.query("SELECT 1")
            (pid,) = service.pids
            with anyio.move_on_after(0.3) as scope:
                await service.query(ENDLESS)
            assert scope.cancelled_caught
            assert not alive(pid)
            assert (await service.query("SELECT 1")).rows == [[1]]


async def test_two_queries_run_at_once_and_more_wait_their_turn(home: Home) -> None:
    found: list[int] = []
    most = 0
    with anyio.fail_after(30):
        async with serving(home) as (_, service):
            await service.query("SELECT 1")

            async def ask(number: int) -> None:
                nonlocal most
                result = await service.query(f"SELECT {number}, sum(hash(range) % 7) FROM range(3000000)")
                most = max(most, len(service.pids))
                found.append(result.rows[0][0])

            async with anyio.create_task_group() as group:
                for number in range(6):
                    group.start_soon(ask, number)
    assert sorted(found) == list(range(6))
    assert most == 2


async def test_slow_query_does_not_hold_up_a_quick_one(home: Home) -> None:
    with anyio.fail_after(30):
        async with serving(home) as (_, service), anyio.create_task_group() as group:
            await service.query("SELECT 1")
            (pid,) = service.pids
            idle_s = cpu_s(pid)
            group.start_soon(service.query, ENDLESS)
            await until_busy(pid, idle_s)
            started = time.monotonic()
            assert (await service.query("SELECT count(*) FROM runs")).rows == [[12]]
            assert time.monotonic() - started < 3
            group.cancel_scope.cancel()


async def test_rows_and_bytes_are_limited_and_the_answer_says_so(home: Home) -> None:
    with anyio.fail_after(30):
        async with serving(home) as (_, service):
            few = await service.query("SELECT range FROM range(201)")
            assert (len(few.rows), few.truncated, few.limited_by) == (200, True, "rows")
            exact = await service.query("SELECT range FROM range(200)")
            assert (len(exact.rows), exact.truncated, exact.limited_by) == (200, False, "")
            many = await service.query("SELECT range FROM range(100000000)", limit=1_000)
            assert (len(many.rows), many.rows[-1], many.truncated) == (1_000, [999], True)
            wide = (
                "SELECT range, string_agg(md5(b.x::VARCHAR), '') FROM range(120), range(300) b(x) GROUP BY 1"
            )
            cut = await service.query(wide)
            assert cut.truncated
            assert cut.limited_by == "bytes"
            assert 900_000 < len(json.dumps(cut.rows)) < 1_010_000
            with pytest.raises(QueryFailedError, match="the first row has 3,2"):
                await service.query("SELECT string_agg(md5(range::VARCHAR), '') FROM range(100000)")


@pytest.mark.parametrize(
    "options",
    [{"limit": 0}, {"limit": -1}, {"limit": 1_001}, {"limit": True}]
    + [{"timeout_s": value} for value in (0, -1, 31, float("nan"), float("inf"))],
    ids=str,
)
async def test_limits_out_of_range_are_refused_with_the_range(home: Home, options: dict[str, Any]) -> None:
    async with serving(home, filled=False) as (_, service):
        with pytest.raises(QueryRefusedError, match="it can be"):
            await service.query("SELECT 1", **options)
        assert service.pids == []


async def test_values_arrive_as_json(home: Home) -> None:
    sql = """SELECT 1::DECIMAL(10, 2), DATE '2026-01-02', TIMESTAMP '2026-01-02 10:00:00', INTERVAL 90 SECOND,
        170141183460469231731687303715884105727::HUGEINT, 'nan'::DOUBLE, 1.0 / 0, NULL, [1, 2], {'a': TRUE},
        map {'k': 1}, '550e8400-e29b-41d4-a716-446655440000'::UUID, TIME '10:00:00', '{"a": [1]}'::JSON,
        TIMESTAMPTZ '2026-01-02 10:00:00+02', 9007199254740993, -5"""
    async with serving(home, filled=False) as (_, service):
        result = await service.query(sql)
        assert result.rows == [
            [
                *(1.0, "2026-01-02", "2026-01-02T10:00:00", 90.0),
                *("170141183460469231731687303715884105727", None, None, None, [1, 2], {"a": True}),
                *({"k": 1}, "550e8400-e29b-41d4-a716-446655440000", "10:00:00", '{"a": [1]}'),
                *("2026-01-02T08:00:00+00:00", "9007199254740993", -5),
            ]
        ]
        json.dumps(result.rows, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2**53, 2**53),
        (2**53 + 1, str(2**53 + 1)),
        (-(2**60), str(-(2**60))),
        (True, True),
        (float("-inf"), None),
        (Decimal("0.10"), 0.1),
        (Decimal("12345678901234567890.1"), "12345678901234567890.1"),
        (Decimal("NaN"), None),
        (date(2026, 1, 2), "2026-01-02"),
        (datetime(2026, 1, 2, 3, 4), "2026-01-02T03:04:00"),  # noqa: DTZ001 - the engine gives such times
        (timedelta(minutes=1), 60.0),
        (UUID(int=1), str(UUID(int=1))),
        ({1: (1, None)}, {"1": [1, None]}),
        ({(1, 2): {"a": float("nan")}}, {"[1, 2]": {"a": None}}),
        (["\ud800"], ["\ud800"]),
    ],
    ids=str,
)
async def test_value_becomes_json(value: Any, expected: Any) -> None:
    assert json_safe(value) == expected
    json.dumps(json_safe(value), allow_nan=False)


async def test_binary_values_are_refused() -> None:
    with pytest.raises(TypeError, match="bytes"):
        json_safe([b"x"])


async def test_small_tables_are_always_fresh(home: Home) -> None:
    with anyio.fail_after(30):
        async with serving(home, filled=False) as (store, service):
            for count in range(1, 6):
                await store.append([SuiteRow(f"s{count}", START)])
                result = await service.query("SELECT count(*) FROM suites")
                assert result.rows == [[count]]
                assert result.data_age_s == 0


async def test_tables_of_one_query_are_from_one_moment(home: Home) -> None:
    """A writer adds a run and its score in one transaction; no query may see one without the other."""
    batch = [row for row in dev_runs() if row.TABLE in ("runs", "scores")][:2]
    seen: set[int] = set()
    with anyio.fail_after(30):
        async with serving(home, filled=False) as (store, service), anyio.create_task_group() as group:

            async def write() -> None:
                while True:
                    await store.append(batch)
                    await anyio.sleep(TICK_S)

            group.start_soon(write)
            for _ in range(12):
                await service.query("SELECT count(*) FROM scores")  # so that one of the two is cached
                result = await service.query(
                    "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM scores)"
                )
                runs, scores = result.rows[0]
                assert runs == scores
                seen.add(runs)
            group.cancel_scope.cancel()
    assert len(seen) > 3


async def test_unchanged_tables_are_read_once_and_changed_ones_leave_no_old_copy(
    home: Home, tmp_path: Path
) -> None:
    async with serving(home) as (store, _):
        counted = CountingStore(store)
        publisher = Publisher(counted, home, roots=[tmp_path])
        try:
            for _ in range(3):
                async with publisher.publish(frozenset({"runs", "cases"})) as published:
                    assert set(published.paths) == {"runs", "cases"}
                    assert published.age_s == 0
            assert counted.snapshots == 1
            async with publisher.publish(frozenset({"runs"})) as old:
                await store.append([SuiteRow("more", START)])
                async with publisher.publish(frozenset({"runs"})) as new:
                    assert old.paths != new.paths
                    assert Path(old.paths["runs"]).exists()  # its query still runs
            assert not Path(old.paths["runs"]).exists()
            assert [file.name.partition("-")[0] for file in files_below(tmp_path)] == ["lock", "runs"]
        finally:
            publisher.close()
        assert files_below(tmp_path) == []


async def test_big_table_that_is_being_written_is_reused_for_half_a_second_and_says_its_age(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_publish, "BIG_BYTES", 100)
    monkeypatch.setattr(query_publish, "REUSE_S", 60.0)
    async with serving(home) as (store, _):
        counted = CountingStore(store)
        publisher = Publisher(counted, home, roots=[tmp_path / "home"])
        try:
            async with publisher.publish(frozenset({"runs"})):
                pass
            await store.append([SuiteRow("more", START)])
            async with publisher.publish(frozenset({"runs"})) as published:
                assert 0 < published.age_s < 30
            assert counted.snapshots == 1
            monkeypatch.setattr(query_publish, "REUSE_S", 0.0)
            monkeypatch.setattr(query_publish, "REUSE_FACTOR", 0.0)
            async with publisher.publish(frozenset({"cases", "runs"})):
                pass  # of another snapshot, and at once too old to be used again
            await store.append([SuiteRow("still more", START)])
            async with publisher.publish(frozenset({"runs"})) as published:
                assert published.age_s == 0
            assert counted.snapshots == 3
        finally:
            publisher.close()


async def test_copies_stay_within_a_bound_and_the_longest_unused_go_first(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_publish, "CACHE_BYTES_MAX", 20_000)
    async with serving(home) as (store, _):
        publisher = Publisher(store, home, roots=[tmp_path])
        try:
            for name in sorted(PUBLIC):
                async with publisher.publish(frozenset({name})):
                    pass
            kept = [file for file in files_below(tmp_path) if file.suffix == ".arrow"]
            assert 0 < sum(file.stat().st_size for file in kept) <= 20_000
            assert any(file.name.startswith("variants-") for file in kept)
            assert not any(file.name.startswith("accounts-") for file in kept)
        finally:
            publisher.close()


async def test_tables_too_big_for_one_query_are_refused_with_their_sizes(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_publish, "QUERY_BYTES_MAX", 1_000)
    async with serving(home) as (_, service):
        with pytest.raises(QueryFailedError, match=r"runs 0 MB.*are allowed"):
            await service.query("SELECT count(*) FROM runs")
        assert (await service.query("SELECT 1")).rows == [[1]]


async def test_full_memory_folder_falls_back_to_the_next_one_and_none_left_is_an_error(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, roomy = tmp_path / "full", tmp_path / "roomy"
    full.mkdir()
    roomy.mkdir()
    usage = shutil.disk_usage(tmp_path)

    def disk_usage(path: Path) -> Any:
        return usage._replace(free=0) if Path(path) == full else usage

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    async with serving(home) as (store, _):
        publisher = Publisher(store, home, roots=[full, roomy])
        async with publisher.publish(frozenset({"runs"})) as published:
            assert Path(published.paths["runs"]).is_relative_to(roomy)
        publisher.close()
        publisher = Publisher(store, home, roots=[full])
        with pytest.raises(QueryFailedError, match=r"no room to copy runs.*0 MB free"):
            async with publisher.publish(frozenset({"runs"})):
                pass
        publisher.close()
        assert files_below(full) == []


async def test_copies_are_private_and_gone_after_close(home: Home) -> None:
    with anyio.fail_after(30):
        async with serving(home) as (_, service):
            await service.query("SELECT count(*) FROM runs")
            folders = [folder for folder, _ in service._publisher._folders.values()]
            (folder,) = folders
            assert folder.stat().st_mode & 0o007 == 0
            assert folder.stat().st_mode & 0o020 == 0  # the worker's group must not write
            (pid,) = service.pids
        assert not folder.exists()
        assert not alive(pid)


async def test_folders_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    prefix = query_publish._PREFIX
    program = (
        "import fcntl, os, sys\n"
        "lock = os.open(sys.argv[1] + '/lock', os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    dead, living, young, other = (tmp_path / f"{prefix}{name}" for name in ("dead", "living", "young", "x"))
    other = tmp_path / "someone-elses"
    for folder in (dead, living, young, other):
        folder.mkdir()
    (dead / "lock").touch()
    (dead / "runs-1.arrow").write_bytes(b"old")
    owner = subprocess.Popen(  # noqa: ASYNC220 - a process that only holds a lock
        [sys.executable, "-I", "-c", program, str(living)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner:
        assert owner.stdout
        assert owner.stdout.readline() == b"locked\n"
        remove_abandoned(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            path.name for path in (living, young, other)
        )
        owner.kill()
    remove_abandoned(tmp_path)
    assert not living.exists()


async def test_worker_has_no_rights_and_no_way_out(home: Home) -> None:
    with anyio.fail_after(30):
        async with serving(home) as (_, service):
            await service.query("SELECT count(*) FROM runs")
            (pid,) = service.pids
            assert set(service.isolation) == {"network", "user", "memory"}
            if not (PROC / "self").exists():
                return
            status = dict(
                line.split(":\t", 1) for line in (PROC / str(pid) / "status").read_text().splitlines()
            )
            limits = {
                line[:26].strip(): line[26:].split()[:2]
                for line in (PROC / str(pid) / "limits").read_text().splitlines()
            }
            if os.geteuid() == 0 and service.isolation["user"]:
                assert status["Uid"].split() == ["65534"] * 4
                assert status["Groups"].strip() == ""
                assert int(status["CapEff"], 16) == 0
            assert status["NoNewPrivs"] == "1"
            assert limits["Max core file size"] == limits["Max file size"] == ["0", "0"]
            assert limits["Max processes"] == ["0", "0"]
            assert service.isolation["memory"]
            if service.isolation["network"]:
                interfaces = (PROC / str(pid) / "net/dev").read_text().splitlines()[2:]
                assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]


async def test_memory_of_a_bomb_stays_in_its_process_and_bounded(home: Home) -> None:
    with anyio.fail_after(30):
        async with serving(home) as (_, service), anyio.create_task_group() as group:
            await service.query("SELECT 1")
            (pid,) = service.pids
            peak = 0

            async def watch() -> None:
                nonlocal peak
                while True:
                    peak = max(peak, resident_bytes(pid))
                    await anyio.sleep(TICK_S)

            if (PROC / "self").exists():
                group.start_soon(watch)
            with pytest.raises((QueryFailedError, QueryTimeoutError)):
                await service.query(BOMBS["list"], timeout_s=3)
            group.cancel_scope.cancel()
    assert peak < 1_500_000_000


async def test_out_of_memory_error_says_what_to_do_and_not_which_setting_to_change(home: Home) -> None:
    with anyio.fail_after(30):
        async with serving(home) as (_, service):
            with pytest.raises(QueryFailedError, match="Out of Memory") as caught:
                await service.query("SELECT list(range) FROM range(1000000000)")
            assert "700 MB" in caught.value.hint
            assert "SET" not in str(caught.value)


async def test_closed_service_answers_with_an_error(home: Home) -> None:
    async with serving(home) as (_, service):
        await service.close()
        with pytest.raises(QueryFailedError, match="closed"):
            await service.query("SELECT 1")


async def test_schema_lists_every_table_and_column_with_a_meaning(home: Home) -> None:
    async with serving(home, filled=False) as (_, service):
        tables = await service.schema()
        assert {table.name for table in tables} == set(PUBLIC)
        assert all(table.meaning for table in tables)
        assert all(column.meaning and column.type for table in tables for column in table.columns)
        money = {column.name for column in PUBLIC["runs"].columns if column.name.endswith("_usd")}
        assert money == {"cost_usd", "model_cost_usd", "sandbox_cost_usd"}
        assert service.pids == []


async def test_importing_the_service_loads_no_engine() -> None:
    program = (
        "import sys, evalpurse.store.query\n"
        "print(sorted({'duckdb', 'pyarrow', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    found = await anyio.run_process([sys.executable, "-c", program])
    assert found.stdout.decode().strip() == "[]"


class CountingStore:
    """A store that counts its snapshots."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.snapshots = 0

    @property
    def data_version(self) -> int:
        return self._store.data_version

    async def snapshot(self, statements: Any) -> Any:
        self.snapshots += 1
        return await self._store.snapshot(statements)


async def until_busy(pid: int, idle_s: float) -> None:
    """Waits until a process has worked for 0.2 s more than when it was idle: a query is under way."""
    with anyio.fail_after(10):
        while cpu_s(pid) < idle_s + 0.2:  # noqa: ASYNC110 - the clock of another process sends no event
            await anyio.sleep(TICK_S)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def cpu_s(pid: int) -> float:
    """Processor time of another process."""
    if (PROC / "self").exists():
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return float(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    text = subprocess.run(
        ["ps", "-o", "cputime=", "-p", str(pid)], capture_output=True, check=True, text=True
    )
    parts = reversed(text.stdout.strip().split(":"))
    return sum(float(part) * float(60**place) for place, part in enumerate(parts))


def resident_bytes(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def files_below(folder: Path) -> list[Path]:
    found = folder.glob(f"{query_publish._PREFIX}*/*")
    return sorted(found, key=lambda path: path.name)


def test_temp_folder_is_the_fallback_where_there_is_no_memory_folder() -> None:
    roots = query_publish.default_roots()
    assert Path(tempfile.gettempdir()) in roots
