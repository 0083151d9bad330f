"""Experiments end to end over scripted sandboxes: order, money, retries, cancel, reuse, recovery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import pytest

from evalpurse.analysis.runs import MISSING_OUTCOMES
from evalpurse.budget.accounts import HoldState, Role
from evalpurse.budget.errors import ExceedsLimitError, LedgerUnavailableError
from evalpurse.home import Home
from evalpurse.runs.errors import BadLaunchError, IdempotencyConflictError
from evalpurse.runs.experiments import Status
from evalpurse.runs.lab import Lab
from evalpurse.runs.outcomes import TREATMENTS, Outcome
from evalpurse.runs.recover import recover
from evalpurse.runs.request import LaunchRequest
from evalpurse.runs.sandboxes.protocol import EndReason, SandboxSpec
from evalpurse.runs.schedule import ExperimentRunner
from evalpurse.runs.services import Services
from evalpurse.store.errors import StoreError
from evalpurse.store.records import AttemptRow, ExperimentRow, Record
from tests.fake_backend import Sandboxes, Script
from tests.lab_fixtures import PRICES, USD, furnish, make_repository, open_lab, request

pytestmark = pytest.mark.anyio


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "harness")


async def run(services: Services, wanted: LaunchRequest) -> Status:
    """Launches and waits for the end."""
    with anyio.fail_after(30):
        launched = await services.experiments.launch(wanted, by=Role.AGENT)
        return await services.experiments.wait(launched.status.experiment_id, 30)


async def runs_of(services: Services, status: Status) -> list[dict[str, Any]]:
    return await services.store.fetch("runs_of", experiment_id=status.experiment_id)


def assert_balanced(services: Services, status: Status) -> None:
    """Nothing is held, and no account is above its limit."""
    assert status.held_nusd == 0
    assert services.ledger.open_holds() == []
    for account in services.ledger.accounts():
        assert account.posted_nusd + account.held_nusd <= account.limit_nusd


async def test_every_run_ends_scored_and_settled(home: Home, repository: Path) -> None:
    sandboxes = Sandboxes()
    async with open_lab(home, sandboxes, nusd_per_second=1000) as services:
        await furnish(services, repository)
        status = await run(services, request())
        assert (status.status, status.ended) == ("finished", {"scored": 12})
        assert sandboxes.live_max <= 4
        assert sandboxes.alive == {}
        rows = await runs_of(services, status)
        assert {row["score"] for row in rows} == {1.0}
        assert sum(row["cost_nusd"] for row in rows) == status.spent_nusd > 0
        assert_balanced(services, status)
        assert (await services.ledger.verify()).clean


async def test_variants_of_one_case_and_repeat_go_out_together_breadth_first(
    home: Home, repository: Path
) -> None:
    sandboxes = Sandboxes()
    async with open_lab(home, sandboxes) as services:
        await furnish(services, repository)
        status = await run(services, request(max_parallel=1))
        planned = await services.store.fetch("planned_runs_of", experiment_id=status.experiment_id)
        order = {row["run_id"]: row for row in planned}
        went = [order[name.rpartition(".")[0]] for name in sandboxes.created]
        blocks = [{(row["case_id"], row["repeat"]) for row in went[i : i + 2]} for i in range(0, 12, 2)]
        assert all(len(block) == 1 for block in blocks)
        assert [row["repeat"] for row in went] == [1] * 6 + [2] * 6
        firsts = [went[i]["variant"] for i in range(0, 6, 2)]
        assert set(firsts) == {"base", "new"}


@pytest.mark.parametrize(
    ("script", "outcome", "score"),
    [
        (Script(answer="41"), "scored", 0.0),
        (Script(exit_code=3), "agent_error", 0.0),
        (Script(exit_code=-11), "agent_error", 0.0),
        (Script(reason=EndReason.MEMORY, exit_code=-9), "agent_error", 0.0),
        (Script(reason=EndReason.TIMEOUT, exit_code=-9), "timeout", 0.0),
        (Script(over_allowance=True), "over_allowance", 0.0),
        (Script(reason=EndReason.LOST), "infra_error", None),
        (Script(create_error="no room"), "infra_error", None),
    ],
)
async def test_an_end_of_a_harness_has_one_outcome(
    home: Home, repository: Path, script: Script, outcome: str, score: float | None
) -> None:
    async with open_lab(home, Sandboxes(choose=lambda spec: script)) as services:
        await furnish(services, repository, cases=1)
        status = await run(services, request(repeats=1))
        assert status.ended == {outcome: 2}
        assert {row["score"] for row in await runs_of(services, status)} == {score}
        assert_balanced(services, status)


async def test_an_infrastructure_failure_makes_a_new_attempt_not_a_new_run(
    home: Home, repository: Path
) -> None:
    def first_is_lost(spec: SandboxSpec) -> Script:
        return Script(reason=EndReason.LOST) if spec.tags["attempt"] == "1" else Script()

    async with open_lab(home, Sandboxes(choose=first_is_lost)) as services:
        await furnish(services, repository, cases=1)
        status = await run(services, request(repeats=1))
        assert status.ended == {"scored": 2}
        rows = await runs_of(services, status)
        assert {row["attempts"] for row in rows} == {2}
        # No usage was reported by the lost attempts: each is charged its whole allowance.
        assert {row["cost_nusd"] for row in rows} == {USD // 100}
        attempts = await services.store.fetch("attempts_of_experiment", experiment_id=status.experiment_id)
        assert sorted(row["outcome"] for row in attempts) == ["infra_error"] * 2 + ["scored"] * 2


async def test_missing_usage_is_charged_as_the_whole_allowance(home: Home, repository: Path) -> None:
    async with open_lab(home, Sandboxes(choose=lambda spec: Script(usage=None))) as services:
        await furnish(services, repository, cases=1)
        status = await run(services, request(repeats=1))
        assert status.spent_nusd == 2 * (USD // 100)
        assert {row["cost_source"] for row in await runs_of(services, status)} == {"assumed"}


async def test_reported_usage_is_priced_and_marked(home: Home, repository: Path) -> None:
    home.path.joinpath("prices.toml").write_text(PRICES, encoding="utf-8")
    usage = [{"model": "toy-model", "input_tokens": 1000, "output_tokens": 100}]
    async with open_lab(home, Sandboxes(choose=lambda spec: Script(usage=usage))) as services:
        await furnish(services, repository, cases=1)
        status = await run(services, request(repeats=1))
        assert status.spent_nusd == 2 * 1_200_000
        rows = await runs_of(services, status)
        assert {(row["cost_source"], row["input_tokens"], row["output_tokens"]) for row in rows} == {
            ("reported", 1000, 100)
        }


async def test_usage_above_the_allowance_is_recorded_in_full_and_freezes(
    home: Home, repository: Path
) -> None:
    home.path.joinpath("prices.toml").write_text(PRICES, encoding="utf-8")
    usage = [{"model": "toy-model", "input_tokens": 1_000_000, "output_tokens": 0}]
    async with open_lab(home, Sandboxes(choose=lambda spec: Script(usage=usage))) as services:
        await furnish(services, repository)
        status = await run(services, request(max_parallel=1))
        account = services.ledger.account(status.experiment_id)
        assert account.posted_nusd + account.overrun_nusd == status.ended["over_allowance"] * USD
        assert status.ended["unfunded"] == 12 - status.ended["over_allowance"] > 0
        assert services.ledger.frozen_by("workspace") == "workspace"
        assert services.ledger.open_holds() == []


async def test_a_purse_too_small_for_the_batch_pays_for_whole_blocks_and_stops_inside_it(
    home: Home, repository: Path
) -> None:
    async with open_lab(home, Sandboxes(choose=lambda spec: Script(usage=None))) as services:
        await furnish(services, repository, purse_usd=0.05)
        status = await run(services, request(cap_nusd=5 * USD // 100))
        assert status.ended == {"scored": 4, "unfunded": 8}
        assert status.spent_nusd == 4 * (USD // 100)
        scored = [row for row in await runs_of(services, status) if row["outcome"] == "scored"]
        assert [(row["case_id"], row["variant"]) for row in scored] == [
            ("case-00", "base"),
            ("case-00", "new"),
            ("case-01", "new"),
            ("case-01", "base"),
        ]
        assert_balanced(services, status)


async def test_money_that_comes_back_starts_more_runs(home: Home, repository: Path) -> None:
    async with open_lab(home, Sandboxes()) as services:
        await furnish(services, repository, purse_usd=0.02)
        status = await run(services, request(cap_nusd=2 * USD // 100))
        assert status.ended == {"scored": 12}


async def test_two_launches_at_the_last_dollar_never_spend_more_than_it(home: Home, repository: Path) -> None:
    async with open_lab(home, Sandboxes(choose=lambda spec: Script(usage=None))) as services:
        await furnish(services, repository, purse_usd=0.05)
        found: list[Status | ExceedsLimitError] = []

        async def launch(key: str) -> None:
            try:
                found.append(
                    await run(services, request(cap_nusd=USD // 20, idempotency_key=key, reuse=False))
                )
            except ExceedsLimitError as error:
                found.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(launch, "a")
            tasks.start_soon(launch, "b")
        refused = [one for one in found if isinstance(one, ExceedsLimitError)]
        assert len(refused) == 1
        assert refused[0].facts["free_nusd"] == USD // 100
        assert services.ledger.account("workspace").posted_nusd == 4 * (USD // 100)
        assert services.ledger.open_holds() == []


async def test_experiments_that_share_a_purse_wait_for_each_others_money(
    home: Home, repository: Path
) -> None:
    async with open_lab(home, Sandboxes()) as services:
        await furnish(services, repository, purse_usd=0.04)
        found: list[Status] = []

        async def launch(key: str) -> None:
            found.append(await run(services, request(cap_nusd=USD // 50, idempotency_key=key, reuse=False)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(launch, "a")
            tasks.start_soon(launch, "b")
        assert [status.ended for status in found] == [{"scored": 12}, {"scored": 12}]


async def test_the_same_key_means_the_same_experiment(home: Home, repository: Path) -> None:
    sandboxes = Sandboxes()
    async with open_lab(home, sandboxes) as services:
        await furnish(services, repository)
        first = await run(services, request())
        again = await services.experiments.launch(request(), by=Role.AGENT)
        assert again.existing
        assert again.status.experiment_id == first.experiment_id
        assert len(sandboxes.created) == 12
        with pytest.raises(IdempotencyConflictError, match=first.experiment_id):
            await services.experiments.launch(request(repeats=3), by=Role.AGENT)


async def test_concurrent_launches_with_one_key_start_one_experiment(home: Home, repository: Path) -> None:
    sandboxes = Sandboxes()
    async with open_lab(home, sandboxes) as services:
        await furnish(services, repository)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(run, services, request())
        assert len(sandboxes.created) == 12


async def test_paid_results_are_reused_at_no_cost_and_shown_as_such(home: Home, repository: Path) -> None:
    sandboxes = Sandboxes(choose=lambda spec: Script(usage=None))
    async with open_lab(home, sandboxes) as services:
        await furnish(services, repository)
        await run(services, request())
        spent = services.ledger.account("workspace").posted_nusd
        again = await run(services, request(idempotency_key="two", repeats=3))
        assert again.ended == {"scored": 18}
        assert len(sandboxes.created) == 12 + 6
        assert services.ledger.account("workspace").posted_nusd == spent + 6 * (USD // 100)
        rows = await runs_of(services, again)
        assert sum(bool(row["reused_from"]) for row in rows) == 12
        fresh = await run(services, request(idempotency_key="three", reuse=False))
        assert sum(bool(row["reused_from"]) for row in await runs_of(services, fresh)) == 0
        other = await run(services, request(idempotency_key="four", allowance_nusd=USD // 50))
        assert sum(bool(row["reused_from"]) for row in await runs_of(services, other)) == 0


async def test_cancel_ends_what_runs_and_settles_everything(home: Home, repository: Path) -> None:
    gate = anyio.Event()
    sandboxes = Sandboxes(choose=lambda spec: Script(gate=gate))
    async with open_lab(home, sandboxes) as services:
        await furnish(services, repository)
        launched = await services.experiments.launch(request(), by=Role.AGENT)
        with anyio.fail_after(30):
            await sandboxes.any_started.wait()
            status = await services.experiments.cancel(launched.status.experiment_id, "changed my mind")
        assert (status.status, status.note, status.ended) == (
            "cancelled",
            "changed my mind",
            {"cancelled": 12},
        )
        assert sandboxes.alive == {}
        assert_balanced(services, status)
        again = await services.experiments.cancel(status.experiment_id, "twice")
        assert again.note == "changed my mind"


async def test_a_daemon_that_leaves_and_comes_back_goes_on_with_the_same_sandboxes(
    home: Home, repository: Path
) -> None:
    gate = anyio.Event()
    sandboxes = Sandboxes(choose=lambda spec: Script(gate=gate))
    async with open_lab(home, sandboxes) as services:
        await furnish(services, repository)
        launched = await services.experiments.launch(request(), by=Role.AGENT)
        with anyio.fail_after(30):
            while len(sandboxes.started) < 4:
                sandboxes.any_started = anyio.Event()
                await sandboxes.any_started.wait()
    assert len(sandboxes.alive) == 4
    gate.set()
    async with open_lab(home, sandboxes) as services:
        with anyio.fail_after(30):
            status = await services.experiments.wait(launched.status.experiment_id, 30)
        assert (status.status, status.ended) == ("finished", {"scored": 12})
        assert set(sandboxes.started.values()) == {1}
        assert len(sandboxes.started) == 12
        assert_balanced(services, status)


async def test_cancelling_a_wait_does_not_cancel_the_experiment(home: Home, repository: Path) -> None:
    gate = anyio.Event()
    async with open_lab(home, Sandboxes(choose=lambda spec: Script(gate=gate))) as services:
        await furnish(services, repository)
        launched = await services.experiments.launch(request(), by=Role.AGENT)
        with anyio.move_on_after(0.05):
            await services.experiments.wait(launched.status.experiment_id, 30)
        gate.set()
        with anyio.fail_after(30):
            status = await services.experiments.wait(launched.status.experiment_id, 30)
        assert status.ended == {"scored": 12}


async def test_a_result_that_cannot_be_written_yet_is_written_later_and_once(
    home: Home, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalpurse.runs.lab.RETRY_WRITE_S", (0.0,))
    async with open_lab(home, Sandboxes()) as services:
        await furnish(services, repository)
        append, settle, refused = services.store.append, services.ledger.settle, Counter[str]()

        async def full_disk(rows: Iterable[Record]) -> None:
            rows = list(rows)
            if any(isinstance(row, AttemptRow) for row in rows) and refused["append"] < 5:
                refused["append"] += 1
                raise StoreError("the disk is full")
            await append(rows)

        async def locked(hold_id: str, actual_nusd: int, *, detail: str = "") -> HoldState:
            if refused["settle"] < 5:
                refused["settle"] += 1
                raise LedgerUnavailableError("the disk is full")
            return await settle(hold_id, actual_nusd, detail=detail)

        monkeypatch.setattr(services.store, "append", full_disk)
        monkeypatch.setattr(services.ledger, "settle", locked)
        status = await run(services, request())
        assert refused == {"append": 5, "settle": 5}
        assert status.ended == {"scored": 12}
        assert len(await runs_of(services, status)) == 12
        assert_balanced(services, status)


async def test_an_experiment_that_cannot_be_taken_up_keeps_its_money_held_and_stops_no_other(
    home: Home, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = anyio.Event()
    sandboxes = Sandboxes(choose=lambda spec: Script(gate=gate))
    async with open_lab(home, sandboxes) as services:
        await furnish(services, repository)
        stuck = await services.experiments.launch(request(), by=Role.AGENT)
        going = await services.experiments.launch(request(idempotency_key="two", reuse=False), by=Role.AGENT)
        held = services.ledger.account(stuck.status.experiment_id).held_nusd
    gate.set()

    async def recover_one(lab: Lab, experiment: ExperimentRow) -> ExperimentRunner:
        if experiment.experiment_id == stuck.status.experiment_id:
            raise LookupError("a case is gone")
        return await recover(lab, experiment)

    monkeypatch.setattr("evalpurse.runs.experiments.recover", recover_one)
    async with open_lab(home, sandboxes) as services:
        with anyio.fail_after(30):
            status = await services.experiments.wait(going.status.experiment_id, 30)
        assert status.ended == {"scored": 12}
        left = await services.experiments.status(stuck.status.experiment_id)
        assert (left.status, left.held_nusd) == ("running", held)
        assert "a case is gone" in left.note


def test_what_analysis_calls_missing_is_what_the_outcome_table_does_not_count() -> None:
    outside = {Outcome.UNFUNDED, Outcome.CANCELLED}
    missing = {
        outcome.value for outcome, how in TREATMENTS.items() if not how.counted and outcome not in outside
    }
    assert missing == MISSING_OUTCOMES


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"repeats": 0}, "repeats is 0"),
        ({"repeats": 10**9}, "repeats is 1000000000"),
        ({"repeats": 1000, "max_parallel": 4}, ""),
        ({"cap_nusd": 0}, "cap_usd"),
        ({"cap_nusd": -1}, "cap_usd"),
        ({"cap_nusd": 1}, "worst case of one block"),
        ({"allowance_nusd": -1}, "allowance_usd"),
        ({"variants": ()}, "variants is empty"),
        ({"variants": ("base", "base")}, "more than once"),
        ({"baseline": "other"}, "baseline 'other'"),
        ({"strategy": "race"}, "strategy"),
        ({"max_parallel": -1}, "max_parallel"),
        ({"idempotency_key": ""}, "idempotency_key"),
    ],
)
async def test_a_launch_out_of_range_is_refused_and_holds_nothing(
    home: Home, repository: Path, changes: dict[str, Any], text: str
) -> None:
    async with open_lab(home, Sandboxes()) as services:
        await furnish(services, repository)
        if not text:
            status = await services.experiments.dry_run(request(**changes))
            assert status.run_count == 6000
            return
        with pytest.raises(BadLaunchError, match=text):
            await services.experiments.launch(request(**changes), by=Role.AGENT)
        assert [account.account for account in services.ledger.accounts()] == ["workspace"]


async def test_a_cap_above_the_free_purse_is_refused_with_both_numbers(home: Home, repository: Path) -> None:
    async with open_lab(home, Sandboxes()) as services:
        await furnish(services, repository, purse_usd=1)
        with pytest.raises(ExceedsLimitError, match=r"\$10.*\$1"):
            await services.experiments.launch(request(), by=Role.AGENT)
