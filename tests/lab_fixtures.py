"""A small world for tests of experiments: a harness repository, cases, variants, a purse."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalpurse.budget.accounts import Role
from evalpurse.budget.money import NUSD_PER_USD
from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.cases import CaseSpec
from evalpurse.runs.request import LaunchRequest
from evalpurse.runs.services import Services
from evalpurse.runs.variants import VariantSpec
from tests.fake_backend import FakeBackend, Sandboxes

USD = NUSD_PER_USD

PRICES = """\
[[price]]
model = "toy-model"
from = 2026-01-01
input_usd_per_mtok = 1.0
output_usd_per_mtok = 2.0
"""


def make_repository(folder: Path, files: dict[str, str] | None = None) -> Path:
    """A git repository with one commit."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (files or {"README": "a harness\n"}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *arguments], check=True, stdin=subprocess.DEVNULL)
    return folder


def case(number: int, **changes: Any) -> CaseSpec:
    """A case whose right answer is 42."""
    fields: dict[str, Any] = {
        "id": f"case-{number:02d}",
        "input": f"What is it, {number}?",
        "graders": [{"type": "exact", "expected": "42"}],
    }
    return CaseSpec.model_validate(fields | changes)


@asynccontextmanager
async def open_lab(
    home: Home,
    sandboxes: Sandboxes,
    *,
    settings: Settings | None = None,
    retry_delay_s: float = 0.0,
    **backend: Any,
) -> AsyncIterator[Services]:
    """Services over fake sandboxes, quick to retry."""
    chosen = replace(settings or Settings(), infra_retry_delay_s=retry_delay_s)
    async with Services.open(home, chosen, backend=FakeBackend(sandboxes, **backend)) as services:
        yield services


async def furnish(
    services: Services,
    repository: Path,
    *,
    cases: int = 3,
    variants: Sequence[str] = ("base", "new"),
    purse_usd: float = 100,
    run: str = "true",
) -> None:
    """Cases in suite `qa`, variants that differ in a parameter, and a purse."""
    await services.ledger.set_limit("grant", "workspace", round(purse_usd * USD), by=Role.OWNER)
    await services.cases.create("qa", [case(number) for number in range(cases)])
    for name in variants:
        spec = VariantSpec(name=name, repo=str(repository), run=run, params={"which": name})
        await services.variants.create(spec)


def request(**changes: Any) -> LaunchRequest:
    """A launch of suite `qa` with both variants."""
    fields: dict[str, Any] = {
        "suite": "qa",
        "variants": ("base", "new"),
        "repeats": 2,
        "cap_nusd": 10 * USD,
        "allowance_nusd": USD // 100,
        "idempotency_key": "one",
        "max_parallel": 4,
    }
    return LaunchRequest(**(fields | changes))
