"""From a launch request to a checked plan: cases, variants, order, reuse, money; nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from evalpurse.budget.errors import BudgetError, ExceedsLimitError
from evalpurse.budget.money import format_usd
from evalpurse.budget.prices import ModelUsage
from evalpurse.runs.cases import Case
from evalpurse.runs.charge import CostSource
from evalpurse.runs.errors import BadLaunchError, HiddenError
from evalpurse.runs.estimate import Estimate, PastCost, estimate
from evalpurse.runs.lab import Lab
from evalpurse.runs.plan import launch_order, reuse_key
from evalpurse.runs.request import LaunchRequest
from evalpurse.runs.rows import reused_run_row
from evalpurse.runs.variants import Variant
from evalpurse.store.records import PlannedRunRow, Record, RunRow, ScoreRow


@dataclass(frozen=True)
class Plan:
    """A launch that could be: every planned run in launch order, and what it would take."""

    request: LaunchRequest
    cases: Sequence[Case]
    variants: Sequence[Variant]
    rows: Sequence[PlannedRunRow]
    estimate: Estimate
    rates: Mapping[str, int]
    """Nano-dollars a second of sandbox, by variant."""


class Planner:
    """Makes plans for one lab."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    async def plan(self, request: LaunchRequest) -> Plan:
        """Checks a request against what exists.

        Raises:
            BadLaunchError: an argument is out of range, or the batch too large.
            HiddenError: a split whose runs an agent may not start.
            UnknownSuiteError, UnknownCaseError, EmptySuiteError, UnknownVariantError, UnknownSecretError,
            UnknownAccountError: names that do not exist, with the nearest ones.
        """
        request.check()
        if request.account.startswith("exp_"):
            raise BadLaunchError(
                f"account is {request.account!r}, which belongs to an experiment and ends with it.",
                hint="Name workspace, or another purse from budget_status.",
            )
        if request.split != "dev":
            raise HiddenError(
                f"split is {request.split!r}; experiments run on 'dev' only.",
                hint="Holdout cases are kept for checking a finished candidate.",
            )
        cases = await self._lab.cases.select(request.suite, request.split, list(request.case_ids) or None)
        variants = [await self._lab.variants.get(name) for name in request.variants]
        for variant in variants:
            self._lab.backend.check(variant.spec.machine, variant.spec.network)
            self._lab.secrets(variant.spec.secrets)
        self._check_size(request, len(cases))
        rows = launch_order(request.experiment_id, cases, variants, request.repeats)
        if request.reuse and self._lab.settings.reuse:
            rows = await self._with_reuse(rows, request)
        rates = {one.name: self._lab.backend.nusd_per_second(one.spec.machine) for one in variants}
        found = estimate(
            request,
            cases,
            variants,
            rows,
            free_nusd=self._lab.ledger.free(request.account),
            nusd_per_second=rates,
            past=await self._past([variant.digest for variant in variants]),
        )
        frozen = self._lab.ledger.frozen_by(request.account)
        if frozen:
            warning = f"Account {frozen} is frozen: a launch is refused until its owner has released it."
            found = replace(found, warnings=(warning, *found.warnings))
        if found.new_runs and found.block_nusd > request.cap_nusd:
            warning = f"{self._small_cap(request, found, len(variants))} A launch is refused."
            found = replace(found, warnings=(warning,))
        return Plan(request, cases, variants, rows, found, rates)

    @staticmethod
    def _small_cap(request: LaunchRequest, found: Estimate, variants: int) -> str:
        return (
            f"cap_usd is {format_usd(request.cap_nusd)}; the worst case of one block "
            f"({variants} variants of one case) is {format_usd(found.block_nusd)}."
        )

    def check_money(self, plan: Plan) -> None:
        """The rules a launch must pass and a dry run only reports.

        Raises:
            ExceedsLimitError: the cap is above what the account has free.
            BadLaunchError: the cap does not even cover one block.
        """
        request, found = plan.request, plan.estimate
        if request.cap_nusd > found.free_nusd:
            raise ExceedsLimitError(
                f"cap_usd is {format_usd(request.cap_nusd)}; account {request.account} has "
                f"{format_usd(found.free_nusd)} free.",
                hint="Lower cap_usd, or ask the owner with request_budget.",
                account=request.account,
                need_nusd=request.cap_nusd,
                free_nusd=found.free_nusd,
            )
        if found.new_runs and found.block_nusd > request.cap_nusd:
            raise BadLaunchError(
                self._small_cap(request, found, len(plan.variants)),
                hint="Raise cap_usd, or lower allowance_usd, the timeouts or the number of variants.",
            )

    async def reused(self, plan: Plan, at: datetime) -> list[Record]:
        """Final rows and scores of the planned runs whose result was paid for before."""
        planned = {row.reuse_run_id: row for row in plan.rows if row.reuse_run_id}
        if not planned:
            return []
        ids = list(planned)
        earlier = [RunRow(**found) for found in await self._lab.store.fetch("runs_by_ids", run_ids=ids)]
        earlier = await self._at_present_prices(earlier)
        rows: list[Record] = [reused_run_row(planned[row.run_id], row, at) for row in earlier]
        for found in await self._lab.store.fetch("scores_by_run_ids", run_ids=ids):
            row = planned[found["run_id"]]
            score = ScoreRow(**found)
            rows.append(
                replace(
                    score,
                    run_id=row.run_id,
                    experiment_id=row.experiment_id,
                    case_id=row.case_id,
                    variant=row.variant,
                )
            )
        return rows

    async def _at_present_prices(self, runs: Sequence[RunRow]) -> list[RunRow]:
        """Reused runs with what their reported usage costs now: new runs compare with them fairly."""
        usage: dict[str, list[ModelUsage]] = {}
        found = await self._lab.store.fetch("usage_by_run_ids", run_ids=[run.run_id for run in runs])
        for row in found:
            usage.setdefault(row["run_id"], []).append(
                ModelUsage(
                    model=row["model"],
                    provider=row["provider"],
                    input_tokens=row["input_tokens"],
                    cached_tokens=row["cached_tokens"],
                    output_tokens=row["output_tokens"],
                    requests=row["requests"],
                )
            )
        return [self._repriced(run, usage.get(run.run_id, [])) for run in runs]

    def _repriced(self, run: RunRow, usage: Sequence[ModelUsage]) -> RunRow:
        if run.cost_source != CostSource.REPORTED.value or not usage:
            return run
        now = datetime.now(UTC)
        try:
            cost_nusd = sum(self._lab.prices.cost(one, now).cost_nusd for one in usage)
        except BudgetError:
            return run  # a model that has no price any more keeps what it cost
        return replace(run, model_cost_nusd=cost_nusd)

    def _check_size(self, request: LaunchRequest, cases: int) -> None:
        runs = cases * len(request.variants) * request.repeats
        allowed = self._lab.settings.batch_runs_max
        if runs > allowed:
            repeats = allowed // (cases * len(request.variants))
            raise BadLaunchError(
                f"{cases} cases x {len(request.variants)} variants x {request.repeats} repeats are {runs} "
                f"runs; one experiment may have {allowed}.",
                hint=f"With these cases and variants, repeats can be at most {repeats}."
                if repeats
                else "Take fewer cases (case_ids) or fewer variants.",
                runs=runs,
                allowed=allowed,
            )

    async def _with_reuse(self, rows: Sequence[PlannedRunRow], request: LaunchRequest) -> list[PlannedRunRow]:
        """Marks runs of the same variant digest, case digest, repeat and allowance that exist already."""
        found = await self._lab.store.fetch(
            "paid_runs",
            variant_digests=[row.variant_digest for row in rows],
            case_digests=[row.case_digest for row in rows],
            repeats=[row.repeat for row in rows],
            allowance_nusd=request.allowance_nusd,
            backend=request.backend,
        )
        known = {(row["variant_digest"], row["case_digest"], row["repeat"]): row["run_id"] for row in found}
        return [replace(row, reuse_run_id=known.get(reuse_key(row), "")) for row in rows]

    async def _past(self, digests: Sequence[str]) -> dict[str, PastCost]:
        found = await self._lab.store.fetch("past_costs", variant_digests=list(digests))
        return {row["variant_digest"]: PastCost(row["runs"], row["mean_nusd"]) for row in found}
