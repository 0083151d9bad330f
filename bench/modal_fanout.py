"""2,000 runs on a fake Modal, 500 alive at a time, against the bare client in the same process.

The fake runs in a process of its own, so that its CPU is not counted. Bare is create, exec, wait, terminate
and detach of the unmodified client. Ours is the same with source, case, collection, grading, store, ledger.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from experiment import harness_repository

from evalpurse.budget.accounts import Role
from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.cases import CaseSpec
from evalpurse.runs.request import LaunchRequest
from evalpurse.runs.sandboxes.modal_client import load
from evalpurse.runs.sandboxes.modal_sandbox import ModalSandbox
from evalpurse.runs.services import Services
from evalpurse.runs.variants import VariantSpec
from tests.fake_modal import FakeModalProcess, client_environment

RUNS = 2_000
ALIVE = 500
BARE = 400
BARE_AT_ONCE = 50
ALIVE_S = 15
ANSWER = 'printf 42 > "$EVALPURSE_OUT/answer.txt"; printf \'{"usage": []}\' > "$EVALPURSE_OUT/metrics.json"'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--runs", type=int, default=RUNS)
    arguments = parser.parse_args()
    folder = Path("/dev/shm")  # noqa: S108 (the fake's own place, in memory)
    with (
        FakeModalProcess(folder=folder if folder.is_dir() else None) as fake,
        client_environment(fake),
        tempfile.TemporaryDirectory() as place,
    ):
        result = anyio.run(_measure, fake, Path(place), arguments.runs)
    print(json.dumps(result) if arguments.json else "\n".join(f"{k:>26} {v}" for k, v in result.items()))


async def _measure(fake: FakeModalProcess, place: Path, runs: int) -> dict[str, float]:
    settings = Settings(modal_creates_per_s=1000, modal_max_live=ALIVE)
    repository = harness_repository(place / "harness")
    with anyio.fail_after(290):
        async with Services.open(Home(place / "home").create(), settings) as services:
            await _furnish(services, repository, runs // 20)
            overhead_ms = await _start_overhead_ms(services)
            bare_ms = await _bare_cpu_ms(services)
            await anyio.sleep(6)  # idle connections of the client go after 5 s
            fds, rss = _fds(), _rss_kb()
            watch = _Watch(services, rss)
            cpu, wall = time.process_time(), time.perf_counter()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch.run)
                status = await _run(services, "sleeper", "fanout", repeats=20, parallel=ALIVE)
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                tasks.cancel_scope.cancel()
            await anyio.sleep(6)
            leaked = _fds() - fds
    if status.ended != {"scored": status.run_count} or status.held_nusd:
        sys.exit(f"not every run was scored and settled: {status}")
    per_run_ms = 1000 * cpu / status.run_count
    return {
        "cpu_ms_per_run_over_bare": round(per_run_ms - bare_ms, 2),
        "kb_per_live_sandbox": round(watch.kb_per_live, 1),
        "leaked_fds": max(0, leaked),
        "creates_per_s": round(watch.creates_per_s, 1),
        "start_overhead_ms": round(overhead_ms, 1),
        "cpu_ms_per_run": round(per_run_ms, 2),
        "bare_cpu_ms_per_run": round(bare_ms, 2),
        "runs": status.run_count,
        "peak_live": fake.peak_live,
        "wall_s": round(wall, 1),
    }


async def _furnish(services: Services, repository: Path, cases: int) -> None:
    await services.ledger.set_limit("grant", "workspace", 10**15, by=Role.OWNER)
    grader = {"type": "exact", "expected": "42"}
    specs = [
        CaseSpec.model_validate({"id": f"c{n:04d}", "input": "?", "graders": [grader]}) for n in range(cases)
    ]
    await services.cases.create("bench", specs)
    for name, run in (("quick", ANSWER), ("sleeper", f"sleep {ALIVE_S}; {ANSWER}")):
        await services.variants.create(VariantSpec(name=name, repo=str(repository), run=run))


async def _run(
    services: Services, variant: str, key: str, *, repeats: int, parallel: int, **more: Any
) -> Any:
    request = LaunchRequest(
        suite="bench",
        variants=(variant,),
        repeats=repeats,
        cap_nusd=10**14,
        allowance_nusd=0,
        idempotency_key=key,
        max_parallel=parallel,
        backend="modal",
        **more,
    )
    launched = await services.experiments.launch(request, by=Role.AGENT)
    return await services.experiments.wait(launched.status.experiment_id, 280)


async def _start_overhead_ms(services: Services) -> float:
    """From a made sandbox to a started harness with one run at a time, less a bare command in a sandbox."""
    starts, bare = [], []
    original = ModalSandbox.start

    async def timed(sandbox: ModalSandbox) -> None:
        remote: Any = sandbox._remote  # noqa: SLF001 (the same sandbox, without ours around it)
        bare.append(await _took_ms(lambda: _bare_exec(remote)))
        starts.append(await _took_ms(lambda: original(sandbox)))

    ModalSandbox.start = timed  # type: ignore[assignment,method-assign]
    try:
        await _run(services, "quick", "starts", repeats=10, parallel=1, case_ids=("c0000",))
    finally:
        ModalSandbox.start = original  # type: ignore[method-assign]
    # The first one packs the source.
    return statistics.median(starts[1:]) - statistics.median(bare[1:])


async def _bare_exec(sandbox: Any) -> None:
    process = await sandbox.exec.aio("true")
    await process.wait.aio()


async def _took_ms(work: Callable[[], Awaitable[None]]) -> float:
    begun = time.perf_counter()
    await work()
    return 1000 * (time.perf_counter() - begun)


async def _bare_cpu_ms(services: Services) -> float:
    modal, client = load(), services.modal.client
    app = await services.modal.app("bare")
    image = modal.Image.from_registry("python:3.12-slim")
    await image.build.aio(app)
    limit = anyio.CapacityLimiter(BARE_AT_ONCE)

    async def one() -> None:
        async with limit:
            sandbox = await modal.Sandbox.create.aio(
                "sleep", "infinity", app=app, image=image, client=client, timeout=600
            )
            process = await sandbox.exec.aio("true")
            await process.stdout.read.aio()
            await process.wait.aio()
            await sandbox.terminate.aio()
            await sandbox.detach.aio()

    cpu = time.process_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(BARE):
            tasks.start_soon(one)
    return 1000 * (time.process_time() - cpu) / BARE


class _Watch:
    """What is seen from beside: how fast the first ones came, and what each further live one takes.

    Memory is the growth from a fifth of `ALIVE` to the most that were alive, so that what an experiment takes
    by itself (its plan, its rows) is not counted.
    """

    def __init__(self, services: Services, rss_kb: float) -> None:
        self._services = services
        self._rss_kb = rss_kb
        self.kb_per_live = 0.0
        self.creates_per_s = 0.0
        self._most = 0

    async def run(self) -> None:
        begun, low = time.perf_counter(), (0, self._rss_kb)
        while True:
            live = len(self._services.modal.live)
            if not low[0] and live >= ALIVE * 0.2:
                gc.collect()
                low = (live, _rss_kb())
            if not self.creates_per_s and live >= ALIVE * 0.8:
                self.creates_per_s = live / (time.perf_counter() - begun)
            if live > max(self._most, ALIVE * 0.8):
                self._most = live
                gc.collect()
                self.kb_per_live = (_rss_kb() - low[1]) / (live - low[0])
            await anyio.sleep(0.1)


def _fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _rss_kb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


if __name__ == "__main__":
    main()
