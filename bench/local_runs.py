"""2,000 local runs of `true` against a bare loop that spawns as many processes in as many folders.

Both sides are measured in turn, three rounds, and the median round counts: without isolation, and, where
bubblewrap works, one round with every process of both sides inside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parent))

from experiment import Measured, measure

from evalpurse.config import Settings

RUNS = 2_000
PARALLEL = 32
ROUNDS = 3
BUBBLEWRAP = [
    "bwrap",
    "--ro-bind",
    "/",
    "/",
    "--dev",
    "/dev",
    "--proc",
    "/proc",
    "--unshare-pid",
    "--unshare-net",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    result: dict[str, float | int] = {}
    for isolation, prefix in (("off", []), ("require", BUBBLEWRAP)):
        if prefix and not _works([*prefix, "true"]):
            print("bubblewrap does not work here: the isolated half is left out", file=sys.stderr)
            continue
        tag = "_isolated" if prefix else ""
        rounds = sorted((_round(isolation, prefix) for _ in range(1 if prefix else ROUNDS)), key=_ratio)
        found, bare_s = rounds[len(rounds) // 2]
        result |= {
            f"wall_s{tag}": round(found.wall_s, 2),
            f"bare_wall_s{tag}": round(bare_s, 2),
            f"ratio_to_bare{tag}": round(found.wall_s / bare_s, 2),
            f"cpu_ms_per_run{tag}": round(1000 * found.cpu_s / found.runs, 2),
            f"runs{tag}": found.runs,
        }
    print(json.dumps(result) if arguments.json else "\n".join(f"{k:>26} {v}" for k, v in result.items()))


def _round(isolation: str, prefix: list[str]) -> tuple[Measured, float]:
    bare_s = _bare(prefix)
    found = anyio.run(_ours, isolation)
    if found.outcomes != {"scored": RUNS}:
        sys.exit(f"not every run was scored: {found.outcomes}")
    return found, bare_s


def _ratio(measured: tuple[Measured, float]) -> float:
    return measured[0].wall_s / measured[1]


def _works(command: list[str]) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, check=False).returncode == 0


def _bare(prefix: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        for number in range(RUNS):
            place = Path(folder) / str(number)
            place.mkdir()
            subprocess.run([*prefix, "true"], cwd=place, check=True, stdin=subprocess.DEVNULL)
        return time.perf_counter() - start


async def _ours(isolation: str) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        return await measure(
            Path(folder),
            cases=100,
            variants=4,
            repeats=5,
            command=["true"],
            settings=Settings(local_isolation=isolation),
            max_parallel=PARALLEL,
        )


if __name__ == "__main__":
    main()
