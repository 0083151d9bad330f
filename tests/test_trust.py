"""What an attacker of the promises has tried once stays tried: money, records, honest comparisons."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest

from evalpurse.analysis.runs import RunFact
from evalpurse.budget.accounts import Role
from evalpurse.home import Home
from evalpurse.runs.errors import (
    BadCasesError,
    BadLaunchError,
    CaseExistsError,
    LedgerLostError,
)
from evalpurse.runs.experiments import Status
from evalpurse.runs.sandboxes.protocol import SandboxSpec
from evalpurse.runs.services import Services
from evalpurse.server.link import Address
from evalpurse.server.show import plain, usd
from evalpurse.store.records import AttemptRow, Record
from tests.fake_backend import Sandboxes, Script
from tests.lab_fixtures import PRICES, USD, case, furnish, make_repository, open_lab, request

pytestmark = pytest.mark.anyio


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "harness")


async def finished(services: Services, experiment_id: str) -> Status:
    with anyio.fail_after(30):
        return await services.experiments.wait(experiment_id, 30)


async def started(sandboxes: Sandboxes, count: int) -> None:
    with anyio.fail_after(30):
        while len(sandboxes.started) < count:
            sandboxes.any_started = anyio.Event()
            await sandboxes.any_started.wait()


async def outcomes(services: Services, experiment_id: str) -> Counter[str]:
    """Rows a run, which must be one."""
    rows = await services.store.fetch("runs_of", experiment_id=experiment_id)
    assert max(Counter(row["run_id"] for row in rows).values()) == 1
    return Counter(row["outcome"] for row in rows)


async def test_no_experiment_spends_from_the_account_of_another(home: Home, repository: Path) -> None:
    gate = anyio.Event()
    async with open_lab(home, Sandboxes(choose=lambda spec: Script(gate=gate))) as services:
        await furnish(services, repository)
        parent = await services.experiments.launch(request(), by=Role.AGENT)
        child = request(account=parent.status.experiment_id, idempotency_key="child", cap_nusd=USD)
        with pytest.raises(BadLaunchError, match="belongs to an experiment"):
            await services.experiments.launch(child, by=Role.AGENT)
        gate.set()
        assert (await finished(services, parent.status.experiment_id)).status == "finished"


async def test_a_run_that_waits_for_its_retry_ends_once_when_it_is_cancelled(
    home: Home, repository: Path
) -> None:
    failing = Sandboxes(choose=lambda spec: Script(create_error="no room"))
    async with open_lab(home, failing, retry_delay_s=600.0) as services:
        await furnish(services, repository)
        launched = await services.experiments.launch(request(), by=Role.AGENT)
        experiment_id = launched.status.experiment_id
        with anyio.fail_after(30):
            while len(await services.store.fetch("attempts_of_experiment", experiment_id=experiment_id)) < 12:
                await services.store.append([])
            status = await services.experiments.cancel(experiment_id, "enough")
        assert (status.status, status.ended) == ("cancelled", {"cancelled": 12})
        assert await outcomes(services, experiment_id) == {"cancelled": 12}
        assert services.ledger.open_holds() == []


async def test_time_without_a_daemon_is_not_charged_above_the_hold(home: Home, repository: Path) -> None:
    gate = anyio.Event()
    sandboxes = Sandboxes(choose=lambda spec: Script(gate=gate))
    async with open_lab(home, sandboxes, nusd_per_second=1_000_000) as services:
        await furnish(services, repository)
        launched = await services.experiments.launch(request(), by=Role.AGENT)
        await started(sandboxes, 4)
    for sandbox in sandboxes.alive.values():
        sandbox.created_at = datetime.now(UTC) - timedelta(days=3)
    gate.set()
    async with open_lab(home, sandboxes, nusd_per_second=1_000_000) as services:
        status = await finished(services, launched.status.experiment_id)
        account = services.ledger.account(status.experiment_id)
        assert (status.ended, account.overrun_nusd) == ({"scored": 12}, 0)
        assert services.ledger.frozen_by("workspace") == ""


async def test_a_rate_that_changes_does_not_reprice_what_is_held_or_launched(
    home: Home, repository: Path
) -> None:
    gate = anyio.Event()
    sandboxes = Sandboxes(choose=lambda spec: Script(gate=gate))
    async with open_lab(home, sandboxes, nusd_per_second=1000) as services:
        await furnish(services, repository)
        launched = await services.experiments.launch(request(), by=Role.AGENT)
        await started(sandboxes, 4)
    gate.set()
    async with open_lab(home, sandboxes, nusd_per_second=10**9) as services:
        status = await finished(services, launched.status.experiment_id)
        assert status.ended == {"scored": 12}
        assert status.spent_nusd < USD // 100
        held = await services.store.fetch("attempts_of_experiment", experiment_id=status.experiment_id)
        assert {row["hold_nusd"] for row in held} == {held[0]["hold_nusd"]}


async def test_an_experiment_goes_on_at_the_prices_it_was_launched_with(home: Home, repository: Path) -> None:
    prices = home.path / "prices.toml"
    prices.write_text(PRICES, encoding="utf-8")
    usage = [{"model": "toy-model", "input_tokens": 1000, "output_tokens": 0}]
    gate = anyio.Event()
    sandboxes = Sandboxes(choose=lambda spec: Script(gate=gate, usage=usage))
    async with open_lab(home, sandboxes) as services:
        await furnish(services, repository)
        launched = await services.experiments.launch(request(), by=Role.AGENT)
        await started(sandboxes, 4)
    gate.set()
    prices.write_text(PRICES.replace("1.0", "0.5"), encoding="utf-8")
    async with open_lab(home, sandboxes) as services:
        first = await finished(services, launched.status.experiment_id)
        assert first.spent_nusd == 12 * 1_000_000
        again = await services.experiments.launch(request(idempotency_key="two"), by=Role.AGENT)
        rows = await services.store.fetch("runs_of", experiment_id=again.status.experiment_id)
        # Reused: free, and compared at the prices that a new run beside it would have.
        assert {(row["cost_nusd"], row["model_cost_nusd"]) for row in rows} == {(0, 500_000)}


async def test_rows_that_were_lost_after_their_settlement_cost_only_their_own_runs(
    home: Home, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = anyio.Event()

    def first_block_only(spec: SandboxSpec) -> Script:
        return Script(usage=None) if spec.name.endswith((".00000.1", ".00001.1")) else Script(gate=gate)

    sandboxes = Sandboxes(choose=first_block_only)
    async with open_lab(home, sandboxes) as services:
        await furnish(services, repository)
        append = services.store.append

        async def lose_results(rows: Iterable[Record]) -> None:
            rows = list(rows)
            if not any(isinstance(row, AttemptRow) for row in rows):
                await append(rows)

        monkeypatch.setattr(services.store, "append", lose_results)
        launched = await services.experiments.launch(request(), by=Role.AGENT)
        experiment_id = launched.status.experiment_id
        with anyio.fail_after(30):
            while services.ledger.account(experiment_id).posted_nusd < 2 * USD // 100:
                await services.experiments.wait(experiment_id, 0.05)
    monkeypatch.undo()
    gate.set()
    async with open_lab(home, sandboxes) as services:
        status = await finished(services, experiment_id)
        assert (status.status, status.ended) == ("finished", {"scored": 12})
        rows = await services.store.fetch("runs_of", experiment_id=experiment_id)
        assert sum(row["cost_nusd"] for row in rows) == status.spent_nusd


async def test_a_ledger_that_was_lost_is_not_taken_for_a_new_one(home: Home, repository: Path) -> None:
    async with open_lab(home, Sandboxes()) as services:
        await furnish(services, repository)
        launched = await services.experiments.launch(request(), by=Role.AGENT)
        await finished(services, launched.status.experiment_id)
    for file in home.path.glob("ledger.sqlite*"):
        file.unlink()
    with pytest.raises(LedgerLostError, match="1 experiments that were paid for"):
        async with open_lab(home, Sandboxes()):
            raise AssertionError("it opened")


async def test_an_agent_neither_changes_nor_tests_holdout_cases(home: Home, repository: Path) -> None:
    async with open_lab(home, Sandboxes()) as services:
        hidden = case(1, split="holdout")
        await services.cases.create("qa", [hidden, case(2)])
        for guess in (hidden, case(1), case(1, split="holdout", input="other")):
            with pytest.raises(CaseExistsError, match="cannot be used") as told:
                await services.cases.create("qa", [guess], replace=True, by=Role.AGENT)
            assert "content" not in str(told.value)
        with pytest.raises(BadCasesError, match="another split"):
            await services.cases.create("qa", [case(2, split="holdout")], replace=True, by=Role.AGENT)


def test_a_run_that_was_cut_while_it_ran_is_missing_and_one_that_never_began_is_not() -> None:
    fact = RunFact("v", "c", 1, "cancelled", False, None, 0, 0.0, 0.0, 0, 0, False)
    assert not fact.missing
    assert replace(fact, started_at=datetime.now(UTC)).missing


def test_a_copied_home_does_not_lead_to_the_daemon_of_the_original(home: Home, tmp_path: Path) -> None:
    Address(pid=1, version="0", socket="/nowhere", home=str(home.path)).write(home)
    assert Address.read(home) is not None
    copy = Home(tmp_path / "copy")
    shutil.copytree(home.path, copy.path)
    assert Address.read(copy) is None


def test_what_a_harness_wrote_is_shown_and_not_obeyed() -> None:
    assert plain("a\x1b[2Jb\nc\td") == "a\\x1b[2Jb\nc\td"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "$0.00"),
        (0.5, "$0.50"),
        (0.05, "$0.05"),
        (1e-9, "$0.000000001"),
        (1234.5, "$1,234.50"),
        (None, "-"),
    ],
)
def test_small_money_is_shown_whole(value: float | None, text: str) -> None:
    assert usd(value) == text
