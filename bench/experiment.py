"""One experiment of harnesses that do nothing, in a fresh home: what the benchmarks of runs share."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import anyio

from evalpurse.budget.accounts import Role
from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.cases import CaseSpec
from evalpurse.runs.request import LaunchRequest
from evalpurse.runs.sandboxes.protocol import (
    Backend,
    Ended,
    EndReason,
    ExecResult,
    Machine,
    Network,
    Output,
    Prepared,
    SandboxSpec,
)
from evalpurse.runs.services import Services
from evalpurse.runs.variants import VariantSpec


@dataclass
class IdleSandbox:
    """A sandbox that is done as soon as it is started, with the answer of a perfect harness."""

    name: str
    tags: Mapping[str, str]
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    async def start(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def wait(self) -> Ended:
        await anyio.lowlevel.checkpoint()
        return Ended(EndReason.EXITED, 0, self.created_at, datetime.now(UTC))

    async def stop(self) -> Ended:
        return await self.wait()

    async def get(self) -> Output:
        await anyio.lowlevel.checkpoint()
        metrics = b'{"usage": [], "steps": 3}'
        return Output(b"42", False, metrics, None, b"", None)

    async def exec(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes],
        timeout_s: float,
        fetch: Sequence[str] = (),
    ) -> ExecResult:
        raise NotImplementedError(
            f"an idle sandbox runs no grader command: {command}, {files}, {timeout_s}, {fetch}"
        )

    async def terminate(self) -> None:
        await anyio.lowlevel.checkpoint()


class IdleBackend:
    """Makes sandboxes that do nothing."""

    name = "idle"
    can_vanish = False
    isolation_statement = "none: nothing is run"

    def check(self, machine: Machine, network: Network) -> None:
        return None

    def nusd_per_second(self, machine: Machine) -> int:
        return 1_000

    def start_kind(self, variant_digest: str) -> str:
        return ""

    async def prepare(
        self,
        prepared: Prepared,
        setup: Sequence[str],
        env: Mapping[str, str],
        machine: Machine,
        *,
        done: bool,
    ) -> None:
        await anyio.lowlevel.checkpoint()

    async def create(self, spec: SandboxSpec) -> IdleSandbox:
        await anyio.lowlevel.checkpoint()
        return IdleSandbox(spec.name, spec.tags)

    async def find(self, name: str) -> None:
        return None

    async def list(self, tags: Mapping[str, str]) -> Sequence[str]:
        return []

    async def close(self) -> None:
        return None


@dataclass(frozen=True)
class Measured:
    """Cost of one experiment from launch to the last settled run: seconds, and peak resident MB."""

    runs: int
    cpu_s: float
    wall_s: float
    rss_mb: float
    spent_nusd: int
    held_nusd: int
    outcomes: dict[str, int]


def harness_repository(folder: Path) -> Path:
    """A git repository with one file."""
    folder.mkdir(parents=True)
    (folder / "README").write_text("nothing to see\n", encoding="utf-8")
    git = ["git", "-C", str(folder), "-c", "user.name=bench", "-c", "user.email=bench@localhost"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *arguments], check=True, stdin=subprocess.DEVNULL)
    return folder


async def measure(
    folder: Path,
    *,
    cases: int,
    variants: int,
    repeats: int,
    command: list[str],
    settings: Settings,
    max_parallel: int,
    backend: Backend | None = None,
) -> Measured:
    """Runs cases x variants x repeats of a command and measures this process; bounded to ten minutes."""
    repository = harness_repository(folder / "harness")
    settings = replace(settings, local_max_parallel=max_parallel)
    async with Services.open(Home(folder / "home").create(), settings, backend=backend) as services:
        await services.ledger.set_limit("grant", "workspace", 10**15, by=Role.OWNER)
        specs = [
            CaseSpec.model_validate(
                {"id": f"case-{n:03d}", "input": "?", "graders": [{"type": "exact", "expected": "42"}]}
            )
            for n in range(cases)
        ]
        await services.cases.create("bench", specs)
        names = [f"v{n}" for n in range(variants)]
        for number, name in enumerate(names):
            spec = VariantSpec(name=name, repo=str(repository), run=command, params={"n": number})
            await services.variants.create(spec)
        request = LaunchRequest(
            suite="bench",
            variants=tuple(names),
            repeats=repeats,
            cap_nusd=10**15,
            allowance_nusd=10**6,
            idempotency_key="bench",
            max_parallel=max_parallel,
        )
        cpu, wall = time.process_time(), time.perf_counter()
        launched = await services.experiments.launch(request, by=Role.AGENT)
        status = await services.experiments.wait(launched.status.experiment_id, 600)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        scale = 1 if sys.platform == "darwin" else 1024
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6
        return Measured(status.done, cpu, wall, rss, status.spent_nusd, status.held_nusd, dict(status.ended))
