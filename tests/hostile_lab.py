"""A lab for harnesses that mean harm: real local sandboxes under tight limits, driven through the tools."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evalpurse.budget.accounts import Role
from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.sandboxes.local import LocalBackend
from evalpurse.runs.sandboxes.local_sandbox import LocalSandbox
from evalpurse.runs.sandboxes.protocol import SandboxSpec
from evalpurse.runs.services import Services
from tests.lab_fixtures import PRICES, USD, make_repository
from tests.sandbox_kit import running, skip_without_bubblewrap
from tests.tool_client import Desk, open_desk

ANSWER_42: dict[str, Any] = {"type": "exact", "expected": "42"}
ALLOWANCE_USD = 0.01


class TightBackend(LocalBackend):
    """The local backend with smaller limits, so that reaching one costs the machine little."""

    def __init__(self, home: Home, settings: Settings) -> None:
        super().__init__(home, settings)
        self.tighter: dict[str, int] = {}
        self.names: list[str] = []

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        self.names.append(spec.name)
        return await super().create(replace(spec, limits=replace(spec.limits, **self.tighter)))


@dataclass
class Lab:
    """A desk, the backend behind it, and a repository of an empty harness."""

    desk: Desk
    backend: TightBackend
    repository: Path
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def attack(
        self,
        *runs: str,
        cases: list[dict[str, Any]] | None = None,
        timeout_s: float = 20.0,
        allowance_usd: float = 0.0,
        secrets: list[str] | None = None,
        setup: list[str] | None = None,
    ) -> list[dict[str, Any]]:
        """Runs each command as a variant on all cases; returns what `read_run` tells of each run's log.

        Whatever the harnesses did: every run has one outcome, nothing is held, and nothing runs or is left.
        """
        number = next(self._numbers)
        names = [f"v{number}-{place}" for place in range(len(runs))]
        given = [{"id": "case", "input": "What?", "graders": [ANSWER_42]}] if cases is None else cases
        made = [{"timeout_s": timeout_s, **case} for case in given]
        await self.desk.call("create_cases", suite=f"s{number}", cases=made)
        for name, run in zip(names, runs, strict=True):
            await self.desk.call(
                "create_variant",
                name=name,
                repo=str(self.repository),
                run=run,
                params={"only": name},
                secrets=secrets or [],
                setup=setup or [],
            )
        launched = await self.desk.call(
            "launch_experiment",
            suite=f"s{number}",
            variants=names,
            cap_usd=1,
            allowance_usd=allowance_usd,
            idempotency_key=f"attack {number}",
        )
        experiment_id = launched["experiment"]["experiment_id"]
        status = (await self.desk.call("wait_experiment", experiment_id=experiment_id))["experiment"]
        assert (status["status"], status["done"], status["held_usd"]) == ("finished", status["runs"], 0)
        self.desk.assert_nothing_held()
        assert running(*self.backend.names) == []
        assert [path for path in self.desk.services.home.work.rglob("*") if not path.is_dir()] == []
        rows = await self.desk.services.store.fetch("runs_of", experiment_id=experiment_id)
        rows.sort(key=lambda row: (row["case_id"], row["variant"]))
        return [await self.desk.call("read_run", run_id=row["run_id"]) for row in rows]

    async def read(self, run: dict[str, Any], part: str) -> str:
        """One part of a run from its first page to its last."""
        text, offset, begun = "", 0, False
        while offset or not begun:
            page = await self.desk.call("read_run", run_id=run["run_id"], part=part, offset=offset)
            text, offset, begun = text + page["text"], page.get("next_offset", 0), True
        return text


@asynccontextmanager
async def open_lab(folder: Path, isolation: str) -> AsyncIterator[Lab]:
    """A lab in a home of its own, with ten dollars, a secret and a price list."""
    home = Home(folder / "home").create()
    skip_without_bubblewrap(isolation, home)
    home.path.joinpath("prices.toml").write_text(PRICES, encoding="utf-8")
    settings = Settings(local_isolation=isolation, infra_retry_delay_s=0.0, local_max_parallel=2)
    backend = TightBackend(home, settings)
    async with Services.open(home, settings, backend=backend) as services:
        await services.ledger.set_limit("grant", "workspace", 10 * USD, by=Role.OWNER)
        async with open_desk(services) as desk:
            yield Lab(desk, backend, make_repository(folder / "harness"))
