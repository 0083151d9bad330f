"""One variant in one row: score, coverage, outcomes, cost and time, each with what it rests on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from evalpurse.analysis.costs import CostPerSuccess, cost_per_success
from evalpurse.analysis.errors import UnknownVariantError
from evalpurse.analysis.estimates import Estimate, estimate, flakiness, success_counts, variance_split
from evalpurse.analysis.runs import CaseValues, RunFact, by_case, case_means, distinct, mean


@dataclass(frozen=True)
class VariantSummary:
    """What the runs of one variant say about it.

    `runs` is every run given, `counted` those with a score, `missing` those that failed for no fault of the
    variant. `coverage` = counted / (counted + missing), None when nothing was tried. Costs, times and tokens
    are of counted runs; cost and tokens a run are means of case means. `flaky_share` and `icc` need repeats.
    """

    variant: str
    cases: int
    runs: int
    counted: int
    missing: int
    reused: int
    score: Estimate | None
    success_rate: float | None
    coverage: float | None
    outcomes: dict[str, int]
    infra_share: float | None
    flaky_share: float | None
    icc: float | None
    cost_per_run_nusd: int | None
    cost_per_success: CostPerSuccess | None
    duration_p50_s: float | None
    duration_p95_s: float | None
    start_latency_p50_s: float | None
    start_latency_p95_s: float | None
    input_tokens_per_run: float | None
    output_tokens_per_run: float | None


def summarise(
    facts: Iterable[RunFact],
    variant: str,
    *,
    score_cases: Collection[str] | None = None,
    success_threshold: float = 1.0,
) -> VariantSummary:
    """Summary of one variant; other variants' runs are passed over.

    `score_cases` limits what is estimated (not the outcome counts) to those cases, so that two summaries of
    one comparison are about the same cases.

    Raises:
        UnknownVariantError: no run is of that variant.
        AnalysisError: a counted run has no score in [0, 1].
    """
    facts = list(facts)
    require_variant(facts, variant)
    own = [fact for fact in distinct(facts) if fact.variant == variant]
    used = [fact for fact in own if fact.counted and (score_cases is None or fact.case_id in score_cases)]
    scores = by_case(used)
    counted = sum(fact.counted for fact in own)
    missing = sum(fact.missing for fact in own)
    infra = sum(fact.outcome == "infra_error" and not fact.counted for fact in own)
    split, flaky = variance_split(scores), flakiness(scores, success_threshold=success_threshold)
    rates = success_rates(scores, success_threshold)
    costs = case_means(by_case(used, lambda fact: fact.cost_nusd))
    return VariantSummary(
        variant=variant,
        cases=len(scores),
        runs=len(own),
        counted=counted,
        missing=missing,
        reused=sum(fact.reused for fact in own),
        score=estimate(scores) if scores else None,
        success_rate=mean(list(rates.values())) if rates else None,
        coverage=share(counted, counted + missing),
        outcomes=dict(sorted(Counter(fact.outcome for fact in own).items())),
        infra_share=share(infra, counted + missing),
        flaky_share=flaky.share if flaky else None,
        icc=split.icc if split else None,
        cost_per_run_nusd=round(mean(list(costs.values()))) if costs else None,
        cost_per_success=cost_per_success(costs, rates) if costs else None,
        duration_p50_s=percentile([fact.duration_s for fact in used], 0.5),
        duration_p95_s=percentile([fact.duration_s for fact in used], 0.95),
        start_latency_p50_s=percentile([fact.start_latency_s for fact in used], 0.5),
        start_latency_p95_s=percentile([fact.start_latency_s for fact in used], 0.95),
        input_tokens_per_run=_mean_of_cases(by_case(used, lambda fact: fact.input_tokens)),
        output_tokens_per_run=_mean_of_cases(by_case(used, lambda fact: fact.output_tokens)),
    )


def require_variant(facts: Collection[RunFact], variant: str) -> None:
    """Raises:
    UnknownVariantError: no run is of that variant; names those that have some.
    """
    known = sorted({fact.variant for fact in facts})
    if variant not in known:
        raise UnknownVariantError(
            f"None of the {len(facts)} runs is of variant '{variant}'.",
            hint=f"Variants with runs: {', '.join(known) or 'none'}.",
            variant=variant,
            known=known,
        )


def success_rates(scores: CaseValues, success_threshold: float) -> dict[str, float]:
    wins = success_counts(scores, success_threshold)
    return {case_id: wins[case_id] / len(of_case) for case_id, of_case in scores.items()}


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def percentile(values: Sequence[float], place: float) -> float | None:
    """The value below which the share `place` lies, linear between neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    position = place * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _mean_of_cases(values: CaseValues) -> float | None:
    return mean(list(case_means(values).values())) if values else None
