"""What the ledger costs: holds of a whole batch, settles under group commit, and the wait for the disk.

The baseline does the same bookkeeping (four balances, a hold, a journal entry) on the same disk with one
durable SQLite transaction an operation. Both are measured in the same
run. The latency is what callers at a steady 5,000 operations a second wait until their operation is on the
disk, measured from when each was due.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

from evalpurse.budget.accounts import Hold, Role
from evalpurse.budget.ledger import Ledger

CHAIN = ("workspace", "campaign", "experiment", "judge")
BATCH = 2_000
BATCHES = 10
CALLERS = 2_000
STEADY_PER_S = 5_000
STEADY_S = 3.0
BASELINE_S = 1.5
AMOUNT_NUSD = 1_000_000
LOAD_BEFORE = round(os.getloadavg()[0], 2)


async def fresh(folder: Path, name: str) -> Ledger:
    """A ledger with an account under each other, four levels, and plenty of room."""
    ledger = await Ledger.open(folder / f"{name}.sqlite")
    await ledger.set_limit("grant", CHAIN[0], 10**15, by=Role.OWNER)
    for parent, account in pairwise(CHAIN):
        await ledger.open_account(f"open {account}", account, parent=parent, limit_nusd=10**15, by=Role.AGENT)
    return ledger


def holds(prefix: str, count: int) -> list[Hold]:
    return [Hold(f"{prefix}.{at:05d}.1", CHAIN[-1], AMOUNT_NUSD, "0" * 64, "run") for at in range(count)]


async def batches(ledger: Ledger) -> tuple[list[float], list[str]]:
    """Seconds of each batch of holds, one durable transaction each, and the ids that are held now."""
    seconds, ids = [], []
    for batch in range(BATCHES):
        wanted = holds(f"exp_{batch:08d}", BATCH)
        start = time.perf_counter()
        result = await ledger.hold_many(wanted, atomic=True)
        seconds.append(time.perf_counter() - start)
        ids += result.admitted
    return seconds, ids


async def settles(ledger: Ledger, ids: list[str]) -> float:
    """Durable settles a second of many callers, each waiting for its own."""
    todo = iter(ids)

    async def caller(todo: Iterator[str]) -> None:
        for hold_id in todo:
            await ledger.settle(hold_id, AMOUNT_NUSD // 2, detail="scored")

    start = time.perf_counter()
    await asyncio.gather(*(caller(todo) for _ in range(CALLERS)))
    return len(ids) / (time.perf_counter() - start)


async def steady(ledger: Ledger) -> tuple[list[float], float]:
    """Milliseconds from due to durable at a steady rate (holds and settles in turn), and the rate reached."""
    waits: list[float] = []

    async def operation(at: int, due: float) -> None:
        name = f"steady.{at // 2:06d}.1"
        if at % 2 == 0:
            await ledger.hold(Hold(name, CHAIN[-1], AMOUNT_NUSD, "0" * 64, "run"))
        else:
            await ledger.settle(name, AMOUNT_NUSD // 2, detail="scored")
        waits.append((time.perf_counter() - due) * 1e3)

    count = int(STEADY_PER_S * STEADY_S)
    lag = 200  # operations between a hold and its settle, so that the hold is durable by then
    order = [at for pair in range(0, count, 2) for at in (pair, pair - 2 * lag + 1) if at >= 0]
    start = time.perf_counter() + 0.01
    async with asyncio.TaskGroup() as tasks:
        for place, at in enumerate(order):
            due = start + place / STEADY_PER_S
            if (early := due - time.perf_counter()) > 0.0005:
                await asyncio.sleep(early)
            tasks.create_task(operation(at, due))
    return waits, len(order) / (time.perf_counter() - start)


class Baseline:
    """A ledger without a writer of its own: the same rows, one durable SQLite transaction an operation."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = FULL")
        self.db.executescript(
            "CREATE TABLE accounts (account TEXT PRIMARY KEY, lim INTEGER, posted INTEGER, held INTEGER,"
            " CHECK (posted + held <= lim));"
            "CREATE TABLE holds (hold_id TEXT PRIMARY KEY, amount INTEGER, state TEXT, posted INTEGER);"
            "CREATE TABLE journal (seq INTEGER PRIMARY KEY, operation_id TEXT UNIQUE, account TEXT,"
            " amount INTEGER, detail TEXT);"
        )
        self.db.executemany("INSERT INTO accounts VALUES (?, ?, 0, 0)", [(name, 10**15) for name in CHAIN])

    def hold(self, hold_id: str) -> None:
        for name in CHAIN:
            self.db.execute("UPDATE accounts SET held = held + ? WHERE account = ?", (AMOUNT_NUSD, name))
        self.db.execute("INSERT INTO holds VALUES (?, ?, 'held', 0)", (hold_id, AMOUNT_NUSD))
        self._enter(hold_id, AMOUNT_NUSD, "run")

    def settle(self, hold_id: str) -> None:
        actual = AMOUNT_NUSD // 2
        self.db.execute("UPDATE holds SET state = 'settled', posted = ? WHERE hold_id = ?", (actual, hold_id))
        for name in CHAIN:
            self.db.execute(
                "UPDATE accounts SET held = held - ?, posted = posted + ? WHERE account = ?",
                (AMOUNT_NUSD, actual, name),
            )
        self._enter(f"{hold_id}#settle", actual, "scored")

    def _enter(self, operation_id: str, amount: int, detail: str) -> None:
        self.db.execute(
            "INSERT INTO journal (operation_id, account, amount, detail) VALUES (?, ?, ?, ?)",
            (operation_id, CHAIN[-1], amount, detail),
        )

    def committed(self, operation: Callable[[str], None], ids: Sequence[str]) -> list[float]:
        """Milliseconds of each, for at most `BASELINE_S` seconds."""
        waits: list[float] = []
        until = time.perf_counter() + BASELINE_S
        for hold_id in ids:
            began = time.perf_counter()
            self.db.execute("BEGIN IMMEDIATE")
            operation(hold_id)
            self.db.execute("COMMIT")
            waits.append((time.perf_counter() - began) * 1e3)
            if time.perf_counter() > until:
                break
        return waits


def baseline(path: Path) -> dict[str, float]:
    ledger = Baseline(path)
    with closing(ledger.db):
        ids = [f"exp.{at:06d}.1" for at in range(BATCH)]
        held = ledger.committed(ledger.hold, ids)
        settled = ledger.committed(ledger.settle, ids[: len(held)])
    return {
        "holds_per_s": 1e3 / statistics.mean(held),
        "settles_per_s": 1e3 / statistics.mean(settled),
        "p50_ms": statistics.median(settled),
    }


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


async def measure(folder: Path) -> dict[str, Any]:
    """Baseline, ledger, baseline again: the machine is rarely the same for ten seconds."""
    before = baseline(folder / "before.sqlite")
    ledger = await fresh(folder, "ledger")
    cpu = time.process_time()
    seconds, ids = await batches(ledger)
    hold_cpu_us = (time.process_time() - cpu) / len(ids) * 1e6
    cpu = time.process_time()
    settled_per_s = await settles(ledger, ids)
    settle_cpu_us = (time.process_time() - cpu) / len(ids) * 1e6
    waits, reached = await steady(ledger)
    verification = await ledger.verify()
    if not verification.clean:
        raise SystemExit(f"the ledger does not add up: {verification.problems}")
    await ledger.close_ledger()
    after = baseline(folder / "after.sqlite")
    direct = {key: statistics.mean((before[key], after[key])) for key in before}
    batch_per_s = BATCH / statistics.median(seconds)
    return {
        "batch_holds_per_s": round(batch_per_s),
        "batch_2000_holds_ms": round(statistics.median(seconds) * 1e3, 1),
        "settles_per_s": round(settled_per_s),
        "submit_to_durable_p50_ms": round(percentile(waits, 50), 2),
        "submit_to_durable_p99_ms": round(percentile(waits, 99), 2),
        "steady_reached_per_s": round(reached),
        "cpu_us_per_hold": round(hold_cpu_us, 1),
        "cpu_us_per_settle": round(settle_cpu_us, 1),
        "baseline_holds_per_s": round(direct["holds_per_s"]),
        "baseline_settles_per_s": round(direct["settles_per_s"]),
        "baseline_commit_p50_ms": round(direct["p50_ms"], 2),
        "ratio_batch_holds": round(batch_per_s / direct["holds_per_s"], 1),
        "ratio_settles": round(settled_per_s / direct["settles_per_s"], 1),
        "journal_entries_verified": verification.entries,
        "processors": os.cpu_count(),
        "load_before": LOAD_BEFORE,
    }


TABLE = (
    ("2,000 holds over four levels, one durable transaction", "batch_holds_per_s", "a second"),
    ("  one SQLite commit each", "baseline_holds_per_s", "a second"),
    ("  ratio", "ratio_batch_holds", "x"),
    ("settles, group commit, 2,000 callers", "settles_per_s", "a second"),
    ("  one SQLite commit each", "baseline_settles_per_s", "a second"),
    ("  ratio", "ratio_settles", "x"),
    ("submit to durable at a steady 5,000/s, p50", "submit_to_durable_p50_ms", "ms"),
    ("submit to durable at a steady 5,000/s, p99", "submit_to_durable_p99_ms", "ms"),
    ("  rate reached", "steady_reached_per_s", "a second"),
    ("  one SQLite commit, p50", "baseline_commit_p50_ms", "ms"),
    ("processor time of a hold", "cpu_us_per_hold", "us"),
    ("processor time of a settle", "cpu_us_per_settle", "us"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evalpurse-bench-") as folder:
        result = asyncio.run(measure(Path(folder)))
    if arguments.json:
        print(json.dumps(result))
        return
    for label, key, unit in TABLE:
        print(f"{label:<56} {result[key]:>12,} {unit}")


if __name__ == "__main__":
    main()
