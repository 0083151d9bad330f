"""From a launch request to a checked plan: cases, variants, order, reuse, money; nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from evalpurse.budget.errors import ExceedsLimitError
from evalpurse.budget.money import format_usd
from evalpurse.runs.cases import Case
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
        found = estimate(
            request,
            cases,
            variants,
            rows,
            free_nusd=self._lab.ledger.free(request.account),
            nusd_per_second={
                variant.name: self._lab.backend.nusd_per_second(variant.spec.machine) for variant in variants
            },
            past=await self._past([variant.digest for variant in variants]),
        )
        return Plan(request, cases, variants, rows, found)

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
                f"cap_usd is {format_usd(request.cap_nusd)}; the worst case of one block "
                f"({len(plan.variants)} variants of one case) is {format_usd(found.block_nusd)}.",
                hint="Raise cap_usd, or lower allowance_usd, the timeouts or the number of variants.",
            )

    async def reused(self, plan: Plan, at: datetime) -> list[Record]:
        """Final rows and scores of the planned runs whose result was paid for before."""
        planned = {row.reuse_run_id: row for row in plan.rows if row.reuse_run_id}
        if not planned:
            return []
        ids = list(planned)
        earlier = [RunRow(**found) for found in await self._lab.store.fetch("runs_by_ids", run_ids=ids)]
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
