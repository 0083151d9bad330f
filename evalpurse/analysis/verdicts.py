"""When a difference may be called one: every rule that turns p values and coverage into a verdict.

A verdict needs coverage first and evidence second. "Cheaper" needs two tests at once, lower cost and kept
quality; as both must pass, neither needs a correction (intersection-union, Berger 1982).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from evalpurse.analysis.distributions import fisher_exact, holm
from evalpurse.analysis.runs import RunFact, mean
from evalpurse.analysis.summary import VariantSummary

COVERAGE_MIN = 0.9
MISSING_RATES_P = 0.05
"""Below this, two missing rates differ too much for either score to be trusted."""


class Verdict(StrEnum):
    """What may be said of the candidate's score against the baseline's."""

    BETTER = "better"
    """Higher, at the level asked for."""
    WORSE = "worse"
    """Lower, at the level asked for; perhaps by less than the margin, see `non_inferior`."""
    NOT_WORSE = "not_worse"
    """Neither better nor worse is shown, but worse by the margin or more is ruled out."""
    UNDECIDED = "undecided"
    """The runs do not tell."""
    INDECISIVE_COVERAGE = "indecisive_coverage"
    """Too many runs are missing, or more for one variant than for the other."""


@dataclass(frozen=True)
class Evidence:
    """One-sided p values of the four claims that can be made of a candidate."""

    better: float
    worse: float
    not_worse: float
    cheaper: float


@dataclass(frozen=True)
class Decision:
    verdict: Verdict
    non_inferior: bool
    cheaper: bool


def adjusted(evidence: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """Holm over the candidates, once for each claim. One candidate keeps its p values."""
    by_claim = {
        claim: holm({name: getattr(found, claim) for name, found in evidence.items()})
        for claim in ("better", "worse", "not_worse", "cheaper")
    }
    return {name: Evidence(**{claim: by_claim[claim][name] for claim in by_claim}) for name in evidence}


def decide(evidence: Evidence, *, alpha: float, covered: bool) -> Decision:
    """The verdict at level `alpha` (one-sided). Without coverage nothing is claimed."""
    if not covered:
        return Decision(Verdict.INDECISIVE_COVERAGE, non_inferior=False, cheaper=False)
    non_inferior = evidence.not_worse < alpha
    if evidence.better < alpha:
        verdict = Verdict.BETTER
    elif evidence.worse < alpha:
        verdict = Verdict.WORSE
    else:
        verdict = Verdict.NOT_WORSE if non_inferior else Verdict.UNDECIDED
    return Decision(verdict, non_inferior=non_inferior, cheaper=evidence.cheaper < alpha)


@dataclass(frozen=True)
class Coverage:
    """Whether missing runs leave room for a verdict; `problem` is empty when they do.

    `missing_p`: Fisher's exact p that both variants lose runs at the same rate.
    """

    missing_p: float
    problem: str

    @property
    def enough(self) -> bool:
        return not self.problem


def coverage_of(baseline: VariantSummary, candidate: VariantSummary) -> Coverage:
    p = fisher_exact(baseline.missing, baseline.counted, candidate.missing, candidate.counted)
    for side in (baseline, candidate):
        if side.coverage is not None and side.coverage < COVERAGE_MIN:
            return Coverage(
                p,
                f"'{side.variant}' has {side.counted} of {side.counted + side.missing} runs "
                f"({side.coverage:.1%} coverage, {COVERAGE_MIN:.0%} is needed)",
            )
    if p < MISSING_RATES_P:
        lost = [f"{side.missing} of {side.counted + side.missing}" for side in (baseline, candidate)]
        return Coverage(
            p,
            f"'{baseline.variant}' misses {lost[0]} runs and '{candidate.variant}' {lost[1]}, "
            f"which chance does not explain (p = {p:.2g})",
        )
    return Coverage(p, "")


def worst_case(baseline: Sequence[RunFact], candidate: Sequence[RunFact]) -> tuple[float, float]:
    """Lowest and highest difference that the missing runs allow, had each scored 0 or 1 against us.

    Over the cases that both variants tried; both sequences hold tried runs of those cases only.
    """
    low = _filled(candidate, 0.0) - _filled(baseline, 1.0)
    high = _filled(candidate, 1.0) - _filled(baseline, 0.0)
    return low, high


def _filled(facts: Sequence[RunFact], missing: float) -> float:
    of_case: dict[str, list[float]] = {}
    for fact in facts:
        of_case.setdefault(fact.case_id, []).append(missing if fact.score is None else fact.score)
    return mean([mean(values) for values in of_case.values()])
