"""What a launch would hold, is likely to cost, and can detect: said before any money moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from evalpurse.analysis.planning import minimum_detectable_effect
from evalpurse.budget.money import format_usd
from evalpurse.runs.cases import Case
from evalpurse.runs.plan import blocks
from evalpurse.runs.request import LaunchRequest
from evalpurse.runs.schedule import limits_of, worst_case_nusd
from evalpurse.runs.variants import Variant
from evalpurse.store.records import PlannedRunRow


@dataclass(frozen=True)
class PastCost:
    """What earlier counted runs of a variant digest cost on average, each."""

    runs: int
    mean_nusd: float


@dataclass(frozen=True)
class Estimate:
    """The money and the meaning of a plan.

    `worst_case_nusd` is what holding every new run at once would take; `likely_nusd` rests on earlier runs
    of the same variants (None when a variant has none). `funded_runs` fit into what is free now.
    `detectable` is the smallest true difference in score between two variants, in [0, 1], that the plan
    finds with power 0.8 at one-sided alpha 0.05.
    """

    run_count: int
    new_runs: int
    reused_runs: int
    block_nusd: int
    worst_case_nusd: int
    likely_nusd: int | None
    free_nusd: int
    funded_runs: int
    detectable: float | None
    warnings: Sequence[str]


def estimate(
    request: LaunchRequest,
    cases: Sequence[Case],
    variants: Sequence[Variant],
    plan: Sequence[PlannedRunRow],
    *,
    free_nusd: int,
    nusd_per_second: Mapping[str, int],
    past: Mapping[str, PastCost],
) -> Estimate:
    """Adds up a plan; reads and changes nothing."""
    by_case = {case.case_id: case for case in cases}
    by_name = {variant.name: variant for variant in variants}
    new = [row for row in plan if not row.reuse_run_id]
    worst = {
        row.run_id: worst_case_nusd(
            limits_of(by_case[row.case_id], by_name[row.variant]),
            nusd_per_second[row.variant],
            request.allowance_nusd,
        )
        for row in new
    }
    room_nusd = min(free_nusd, request.cap_nusd)
    funded, left = 0, room_nusd
    for amount in worst.values():
        if amount > left:
            break
        left -= amount
        funded += 1
    likely: float | None = 0.0
    for row in new:
        known = past.get(row.variant_digest)
        likely = None if likely is None or known is None else likely + known.mean_nusd
    detectable = _detectable(len(cases), request.repeats, len(variants))
    found = Estimate(
        run_count=len(plan),
        new_runs=len(new),
        reused_runs=len(plan) - len(new),
        block_nusd=max((sum(worst[row.run_id] for row in block) for block in blocks(new)), default=0),
        worst_case_nusd=sum(worst.values()),
        likely_nusd=None if likely is None else round(likely),
        free_nusd=free_nusd,
        funded_runs=funded,
        detectable=detectable,
        warnings=(),
    )
    return replace(found, warnings=_warnings(found, request, len(cases)))


def _detectable(cases: int, repeats: int, variants: int) -> float | None:
    if cases < 2 or variants < 2:
        return None
    return minimum_detectable_effect(cases, repeats, repeats)


def _warnings(found: Estimate, request: LaunchRequest, cases: int) -> list[str]:
    warnings: list[str] = []
    if found.funded_runs < found.new_runs:
        warnings.append(
            f"{format_usd(min(found.free_nusd, request.cap_nusd))} covers the worst case of "
            f"{found.funded_runs} of {found.new_runs} new runs at once; more start as runs settle below "
            "their worst case, and what never fits ends as unfunded."
        )
    if cases < 20:
        warnings.append(
            f"{cases} cases can show only large effects; 20 or more are needed for less than 12 points."
        )
    return warnings
