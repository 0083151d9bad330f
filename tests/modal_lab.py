"""Experiments on the fake Modal: services, a furnished home and a launch of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalpurse.budget.accounts import Role
from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.services import Services
from evalpurse.runs.variants import VariantSpec
from tests.fake_modal import FakeApi, FakeModal, client_environment
from tests.lab_fixtures import USD, case, request

SETTINGS = Settings(
    infra_retry_delay_s=0.0, modal_creates_per_s=1000, modal_max_live=50, modal_cpu=1.0, modal_memory_mb=512
)

ANSWER = (
    'printf 42 > "$EVALPURSE_OUT/answer.txt"; '
    'printf \'{"usage": [], "steps": 1}\' > "$EVALPURSE_OUT/metrics.json"'
)
"""A harness that answers, and says that it called no model."""


@asynccontextmanager
async def fake_modal(**settings: Any) -> AsyncIterator[FakeApi]:
    """A fake whose sandboxes are machines of their own; skips where there can be none."""
    try:
        fake = await FakeModal(mode="bwrap", **settings).__aenter__()
    except RuntimeError as error:
        pytest.skip(str(error))
    try:
        with client_environment(fake):
            yield fake
    finally:
        await fake.__aexit__(None, None, None)


@asynccontextmanager
async def modal_services(home: Home, **settings: Any) -> AsyncIterator[Services]:
    async with Services.open(home, replace(SETTINGS, **settings)) as services:
        yield services


async def furnish(
    services: Services,
    repository: Path,
    *,
    cases: int = 2,
    variants: Sequence[str] = ("base", "new"),
    run: str = ANSWER,
    purse_usd: float = 100,
    case_changes: dict[str, Any] | None = None,
    **spec: Any,
) -> None:
    await services.ledger.set_limit("grant", "workspace", round(purse_usd * USD), by=Role.OWNER)
    await services.cases.create("qa", [case(number, **(case_changes or {})) for number in range(cases)])
    for name in variants:
        await services.variants.create(
            VariantSpec(name=name, repo=str(repository), run=run, params={"which": name}, **spec)
        )


async def run_all(services: Services, wait_s: float = 30, **changes: Any) -> Any:
    """Launches and waits; the experiment's status."""
    launched = await services.experiments.launch(
        request(backend="modal", repeats=1, **changes), by=Role.AGENT
    )
    return await services.experiments.wait(launched.status.experiment_id, wait_s)


async def rows_of(services: Services, experiment_id: str) -> list[dict[str, Any]]:
    return await services.store.fetch("runs_of", experiment_id=experiment_id)
