"""What evalpurse itself costs per run: 2,000 and 10,000 runs of a sandbox that does nothing.

Everything else is real: holds, scheduling, grading, rows, blobs, settlement, all durable. The baseline is
the least that keeps the promise of durability: one task a run that calls the same idle sandbox and commits
one row to SQLite (synchronous=FULL). Each measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parent))

PARALLEL = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--child", choices=["evalpurse", "bare"], help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.repeats)
        return
    small, large, bare = (_run("evalpurse", 5), _run("evalpurse", 25), _run("bare", 5))
    per_run = [1000 * found["cpu_s"] / found["runs"] for found in (small, large, bare)]
    result = {
        "runs": small["runs"],
        "cpu_ms_per_run": round(per_run[0], 3),
        "wall_s": round(small["wall_s"], 2),
        "rss_mb": round(small["rss_mb"], 1),
        "cpu_ms_per_run_10k": round(per_run[1], 3),
        "wall_s_10k": round(large["wall_s"], 2),
        "rss_mb_10k": round(large["rss_mb"], 1),
        "growth_10k": round(per_run[1] / per_run[0], 3),
        "bare_cpu_ms_per_run": round(per_run[2], 3),
        "ratio_to_bare": round(per_run[0] / per_run[2], 2),
        "held_nusd_after": small["held_nusd"] + large["held_nusd"],
    }
    print(json.dumps(result) if arguments.json else "\n".join(f"{k:>22} {v}" for k, v in result.items()))


def _run(kind: str, repeats: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", kind, "--repeats", str(repeats)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(kind: str, repeats: int) -> None:
    """One measurement; prints one JSON object."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "bare":
            print(json.dumps(anyio.run(_bare, Path(folder), 400 * repeats)))
            return
        from experiment import IdleBackend, measure

        from evalpurse.config import Settings

        async def run() -> dict[str, Any]:
            found = await measure(
                Path(folder),
                cases=100,
                variants=4,
                repeats=repeats,
                command=["true"],
                settings=Settings(),
                max_parallel=PARALLEL,
                backend=IdleBackend(),
            )
            return asdict(found)

        print(json.dumps(anyio.run(run)))


async def _bare(folder: Path, runs: int) -> dict[str, Any]:
    from experiment import IdleSandbox

    database = sqlite3.connect(folder / "bare.sqlite")
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE runs (run_id TEXT PRIMARY KEY, outcome TEXT, score REAL)")
    limiter = anyio.CapacityLimiter(PARALLEL)

    async def one(number: int) -> None:
        async with limiter:
            sandbox = IdleSandbox(str(number), {})
            await sandbox.start()
            await sandbox.wait()
            output = await sandbox.get()
            with database:
                database.execute("INSERT INTO runs VALUES (?, 'scored', ?)", (number, output.answer == b"42"))
            await sandbox.terminate()

    cpu, wall = time.process_time(), time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number in range(runs):
            tasks.start_soon(one, number)
    database.close()
    return {"runs": runs, "cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


if __name__ == "__main__":
    main()
