"""Adding a world of 10,000 files, and what it costs a run, against `sha256sum` of the same files.

Both read the same files from the same cache, in turn; the median of three rounds counts. `add` also writes
every content once and builds the world's folder; `again` finds all contents there already.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from evalpurse.runs.sandboxes.world_files import WorldFiles

FILES = 10_000
FILE_BYTES = 20_000
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--file-bytes", type=int, default=FILE_BYTES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evalpurse-bench-") as folder:
        result = measure(Path(folder), arguments.files, arguments.file_bytes)
    for name, value in result.items():
        print(f"{name:28} {value}")
    if arguments.json:
        print(json.dumps(result))


def measure(folder: Path, count: int, file_bytes: int) -> dict[str, float | int]:
    """Times in seconds, and their ratios to `sha256sum`."""
    source = folder / "source"
    for number in range(count):
        path = source / f"d{number % 100:02d}" / f"f{number:05d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(file_bytes))
    hashes, adds, agains = [], [], []
    for number in range(ROUNDS):
        hashes.append(timed(lambda: sha256sum(source)))
        files = WorldFiles(folder / f"home-{number}")
        adds.append(timed(lambda files=files: files.add(source)))  # type: ignore[misc]
        agains.append(timed(lambda files=files: files.add(source)))  # type: ignore[misc]
    digest = files.add(source).manifest.digest
    check_s = median(timed(lambda: files.check(digest)) for _ in range(5))
    verify_s = median(timed(lambda: files.verify(digest)) for _ in range(ROUNDS))
    bare_s = median(hashes)
    return {
        "files": count,
        "bytes": count * file_bytes,
        "sha256sum_s": round(bare_s, 3),
        "add_s": round(median(adds), 3),
        "again_s": round(median(agains), 3),
        "verify_s": round(verify_s, 3),
        "mount_check_ms": round(1000 * check_s, 1),
        "add_ratio_to_sha256sum": round(median(adds) / bare_s, 2),
        "again_ratio_to_sha256sum": round(median(agains) / bare_s, 2),
        "verify_ratio_to_sha256sum": round(verify_s / bare_s, 2),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def sha256sum(folder: Path) -> None:
    """As a person would: one process, all files."""
    command = 'find "$1" -type f -print0 | sort -z | xargs -0 sha256sum >/dev/null'
    subprocess.run(["sh", "-c", command, "sh", str(folder)], check=True, stdin=subprocess.DEVNULL)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
