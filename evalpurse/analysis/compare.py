"""Is the candidate better than the baseline, not worse, cheaper: everything one comparison shows.

Both variants are described on the same cases, those that both have a counted run of, so the difference
shown is the difference of the two scores shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evalpurse.analysis.costs import Ratio, ratio_of_totals
from evalpurse.analysis.errors import AnalysisError, NoSharedCasesError
from evalpurse.analysis.explain import Findings, sentence, warnings
from evalpurse.analysis.paired import PairedDifference, paired_difference
from evalpurse.analysis.runs import RunFact, by_case, case_means, distinct
from evalpurse.analysis.summary import VariantSummary, require_variant, summarise
from evalpurse.analysis.verdicts import (
    Coverage,
    Evidence,
    Verdict,
    adjusted,
    coverage_of,
    decide,
    worst_case,
)


@dataclass(frozen=True)
class Comparison:
    """A candidate against a baseline. Every number is finite or None, so it can be written as JSON.

    Scores and differences are in [0, 1] and [-1, 1]. `p_adjusted` is the one-sided p of "better", Holm
    corrected over `candidates`. `lower_bound` is one-sided at `alpha`, `difference.low/high` two-sided 95 %.
    `detectable` is the true difference that runs like these find four times in five. `worst_case_*` bound
    the difference whatever the missing runs would have scored. `missing_p`: see `Coverage`.
    """

    baseline: VariantSummary
    candidate: VariantSummary
    verdict: Verdict
    non_inferior: bool
    cheaper: bool
    margin: float
    alpha: float
    candidates: int
    difference: PairedDifference
    lower_bound: float
    p_adjusted: float
    detectable: float | None
    cost: Ratio
    duration: Ratio
    tokens: Ratio
    cases_dropped: int
    cases_baseline_only: int
    cases_candidate_only: int
    missing_p: float
    worst_case_low: float
    worst_case_high: float
    warnings: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class _Measured:
    """One pair before any verdict: what `compare_many` corrects over all pairs together."""

    findings: Findings
    coverage: Coverage
    evidence: Evidence


def compare(
    facts: Iterable[RunFact], baseline: str, candidate: str, *, margin: float = 0.05, alpha: float = 0.05
) -> Comparison:
    """Compares two variants by their runs, paired by case. The order of the runs does not matter.

    `margin` is the loss of score that would still count as not worse, stated before looking; `alpha` is the
    one-sided level of every claim.

    Raises:
        UnknownVariantError: a variant has no run.
        NoSharedCasesError: no case has counted runs of both.
        AnalysisError: margin or alpha out of range, or both names the same.
    """
    return compare_many(facts, baseline, [candidate], margin=margin, alpha=alpha)[0]


class Comparable(NamedTuple):
    """Candidates that can be compared with a baseline, and why each other one cannot."""

    candidates: list[str]
    refused: dict[str, AnalysisError]


def comparable(facts: Iterable[RunFact], baseline: str, candidates: Sequence[str]) -> Comparable:
    """Sorts out the candidates that `compare_many` would refuse, so that one does not hide the others.

    Raises:
        UnknownVariantError: the baseline has no run.
    """
    facts = list(facts)
    require_variant(facts, baseline)
    scores = by_case(_tried(facts, baseline))
    found = Comparable([], {})
    for name in candidates:
        try:
            require_variant(facts, name)
            _difference(baseline, name, scores, by_case(_tried(facts, name)))
        except AnalysisError as error:
            found.refused[name] = error
        else:
            found.candidates.append(name)
    return found


def compare_many(
    facts: Iterable[RunFact],
    baseline: str,
    candidates: Sequence[str],
    *,
    margin: float = 0.05,
    alpha: float = 0.05,
) -> list[Comparison]:
    """Compares each candidate with the baseline; all claims together hold at `alpha` (Holm).

    Raises:
        As `compare`, for any of the candidates; `comparable` tells beforehand which.
    """
    _check_question(baseline, candidates, margin, alpha)
    kept = distinct(facts)
    for name in (baseline, *candidates):
        require_variant(kept, name)
    measured = {name: _measure(kept, baseline, name, margin) for name in candidates}
    corrected = adjusted({name: found.evidence for name, found in measured.items()})
    return [
        _conclude(measured[name], corrected[name], margin, alpha, family=len(candidates))
        for name in candidates
    ]


def _check_question(baseline: str, candidates: Sequence[str], margin: float, alpha: float) -> None:
    if not (math.isfinite(margin) and 0 < margin < 1):
        raise AnalysisError(
            f"margin is {margin}; it must be between 0 and 1, for example 0.05.", margin=margin
        )
    if not (math.isfinite(alpha) and 0 < alpha <= 0.5):
        raise AnalysisError(f"alpha is {alpha}; it must be above 0 and at most 0.5.", alpha=alpha)
    if not candidates:
        raise AnalysisError("There is no candidate to compare.", hint="Name at least one variant.")
    if baseline in candidates or len(set(candidates)) < len(candidates):
        raise AnalysisError(
            f"Baseline '{baseline}' and candidates {', '.join(map(repr, candidates))} name a variant twice.",
            hint="Name each variant once.",
        )


def _measure(facts: Sequence[RunFact], baseline: str, candidate: str, margin: float) -> _Measured:
    of_a, of_b = _tried(facts, baseline), _tried(facts, candidate)
    tried_a, tried_b = ({fact.case_id for fact in side} for side in (of_a, of_b))
    scores_a, scores_b = by_case(of_a), by_case(of_b)
    difference = _difference(baseline, candidate, scores_a, scores_b)
    both = tried_a & tried_b
    paired = scores_a.keys() & scores_b.keys()
    in_both = [fact for fact in facts if fact.case_id in both]
    shared_a, shared_b = ([fact for fact in side if fact.case_id in both] for side in (of_a, of_b))
    ratios = [
        ratio_of_totals(
            case_means(by_case(shared_a, value, cases=paired)),
            case_means(by_case(shared_b, value, cases=paired)),
        )
        for value in (_cost, _duration, _tokens)
    ]
    findings = Findings(
        baseline=summarise(in_both, baseline, score_cases=paired),
        candidate=summarise(in_both, candidate, score_cases=paired),
        difference=difference,
        cost=ratios[0],
        duration=ratios[1],
        tokens=ratios[2],
        cases_dropped=len(both) - len(paired),
        cases_baseline_only=len(tried_a - tried_b),
        cases_candidate_only=len(tried_b - tried_a),
        worst_case=worst_case(shared_a, shared_b),
        starts_baseline=_starts(shared_a),
        starts_candidate=_starts(shared_b),
    )
    not_worse = difference.p_above(-margin)
    evidence = Evidence(
        better=difference.p_above(0.0),
        worse=difference.p_below(0.0),
        not_worse=not_worse,
        cheaper=max(not_worse, findings.cost.p_less),
    )
    return _Measured(findings, coverage_of(findings.baseline, findings.candidate), evidence)


def _conclude(
    found: _Measured, evidence: Evidence, margin: float, alpha: float, *, family: int
) -> Comparison:
    findings, difference = found.findings, found.findings.difference
    decision = decide(evidence, alpha=alpha, covered=found.coverage.enough)
    return Comparison(
        baseline=findings.baseline,
        candidate=findings.candidate,
        verdict=decision.verdict,
        non_inferior=decision.non_inferior,
        cheaper=decision.cheaper,
        margin=margin,
        alpha=alpha,
        candidates=family,
        difference=difference,
        lower_bound=difference.lower_bound(alpha),
        p_adjusted=evidence.better,
        detectable=difference.detectable(alpha),
        cost=findings.cost,
        duration=findings.duration,
        tokens=findings.tokens,
        cases_dropped=findings.cases_dropped,
        cases_baseline_only=findings.cases_baseline_only,
        cases_candidate_only=findings.cases_candidate_only,
        missing_p=found.coverage.missing_p,
        worst_case_low=findings.worst_case[0],
        worst_case_high=findings.worst_case[1],
        warnings=warnings(findings, decision, alpha=alpha),
        sentence=sentence(findings, decision, found.coverage, margin=margin, alpha=alpha),
    )


def _difference(
    baseline: str, candidate: str, scores_a: dict[str, list[float]], scores_b: dict[str, list[float]]
) -> PairedDifference:
    try:
        return paired_difference(scores_a, scores_b)
    except NoSharedCasesError as error:
        raise NoSharedCasesError(
            f"'{baseline}' against '{candidate}': {error.message}", hint=error.hint, **error.facts
        ) from error


def _tried(facts: Iterable[RunFact], variant: str) -> list[RunFact]:
    return [fact for fact in facts if fact.variant == variant and fact.tried]


def _starts(facts: Iterable[RunFact]) -> tuple[float, ...]:
    """Start times of counted runs in epoch seconds, sorted."""
    return tuple(sorted(fact.started_at.timestamp() for fact in facts if fact.counted and fact.started_at))


def _cost(fact: RunFact) -> float:
    return float(fact.cost_nusd)


def _duration(fact: RunFact) -> float:
    return fact.duration_s


def _tokens(fact: RunFact) -> float:
    return float(fact.input_tokens + fact.output_tokens)
