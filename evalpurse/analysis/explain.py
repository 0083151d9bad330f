"""A comparison in words: one sentence that can be quoted, and every reason to doubt it.

Numbers in words come from the findings they describe; nothing is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

from evalpurse.analysis.costs import Ratio
from evalpurse.analysis.paired import PairedDifference
from evalpurse.analysis.summary import VariantSummary
from evalpurse.analysis.verdicts import Coverage, Decision, Verdict

CASES_FEW = 20
CASES_TOO_FEW = 10
"""Below this the interval's coverage was never checked; simulations start at 10 cases."""
DRIFT_GAP_S = 12 * 3600.0
ALLOWANCE_SHARE = 0.05
"""Of counted runs ended by the allowance, from which it is the allowance that is being compared."""


@dataclass(frozen=True)
class Findings:
    """One pair, measured; `starts_*` are epoch seconds, sorted, of the runs whose start is known."""

    baseline: VariantSummary
    candidate: VariantSummary
    difference: PairedDifference
    cost: Ratio
    duration: Ratio
    tokens: Ratio
    cases_dropped: int
    cases_baseline_only: int
    cases_candidate_only: int
    worst_case: tuple[float, float]
    starts_baseline: tuple[float, ...]
    starts_candidate: tuple[float, ...]


def sentence(
    findings: Findings, decision: Decision, coverage: Coverage, *, margin: float, alpha: float
) -> str:
    """One sentence: what was found, on how much, and what it costs."""
    baseline, candidate = findings.baseline, findings.candidate
    found = findings.difference
    new, old = f"'{candidate.variant}'", f"'{baseline.variant}'"
    claim = {
        Verdict.BETTER: f"{new} is better than {old}",
        Verdict.WORSE: f"{new} is worse than {old}",
        Verdict.NOT_WORSE: f"{new} is not worse than {old} by {margin:g} or more",
        Verdict.UNDECIDED: f"{new} and {old} cannot be told apart yet",
        Verdict.INDECISIVE_COVERAGE: f"No verdict on {new} against {old}, because {coverage.problem}",
    }[decision.verdict]
    bound = ""
    if decision.verdict is Verdict.NOT_WORSE:
        bound = f"; one-sided, no lower than {found.lower_bound(alpha):+.3f}"
    numbers = (
        f"{_score(candidate)} against {_score(baseline)} on {_count(found.cases, 'shared case')} "
        f"({found.delta:+.3f}, 95 % interval {found.low:+.3f} to {found.high:+.3f}{bound})"
    )
    return f"{claim}: {numbers}{_cost_words(findings.cost, decision, alpha)}."


def _score(summary: VariantSummary) -> str:
    return "no score" if summary.score is None else f"{summary.score.value:.3f}"


def _cost_words(cost: Ratio, decision: Decision, alpha: float) -> str:
    if cost.value is None:
        return ""
    ratio = f"{cost.value:.2f} times the cost"
    if cost.low is not None and cost.high is not None:
        ratio += f" ({cost.low:.2f} to {cost.high:.2f})"
    if decision.cheaper:
        return f", and it is cheaper, at {ratio}"
    if cost.p_less < alpha and not decision.non_inferior:
        return f", at {ratio}, which is not called cheaper because kept quality is not shown"
    return f", at {ratio}"


def warnings(findings: Findings, decision: Decision, *, alpha: float) -> tuple[str, ...]:
    """Every reason to read the numbers with care, the gravest kinds first."""
    return tuple(
        line
        for line in (
            _few_cases(findings.difference, alpha),
            _one_sided(findings.difference, decision, alpha),
            _unshared(findings),
            _missing(findings),
            *(_allowance(side) for side in (findings.baseline, findings.candidate)),
            _drift(findings),
            _no_repeats(findings.difference),
            *(_reused(side) for side in (findings.baseline, findings.candidate)),
        )
        if line
    )


def _few_cases(found: PairedDifference, alpha: float) -> str:
    if found.cases >= CASES_FEW:
        return ""
    detectable = found.detectable(alpha)
    if detectable is None:
        return "One shared case says nothing about others; use at least 20."
    reach = f"a true difference under about {detectable:.2f} will usually stay undetected"
    trust = ", and intervals are unchecked below 10" if found.cases < CASES_TOO_FEW else ""
    return f"Only {found.cases} shared cases: {reach}{trust}."


def _one_sided(found: PairedDifference, decision: Decision, alpha: float) -> str:
    claimed = decision.verdict in (Verdict.BETTER, Verdict.WORSE)
    if not claimed or found.low > 0 or found.high < 0:
        return ""
    return (
        f"The 95 % interval still includes no difference; the claim rests on the one-sided level {alpha:g}."
    )


def _unshared(findings: Findings) -> str:
    alone = findings.cases_baseline_only + findings.cases_candidate_only
    if not alone:
        return ""
    return (
        f"{_count(alone, 'case')} left out: {findings.cases_baseline_only} only the baseline ran, "
        f"{findings.cases_candidate_only} only the candidate."
    )


def _missing(findings: Findings) -> str:
    sides = (findings.baseline, findings.candidate)
    if not any(side.missing for side in sides):
        return ""
    lost = " and ".join(f"{side.missing} of '{side.variant}'" for side in sides)
    dropped = f", {_count(findings.cases_dropped, 'case')} dropped" if findings.cases_dropped else ""
    low, high = findings.worst_case
    return (
        f"Runs missing through infrastructure or grading: {lost}{dropped}; "
        f"whatever they would have scored, the difference lies between {low:+.3f} and {high:+.3f}."
    )


def _allowance(side: VariantSummary) -> str:
    ended = side.outcomes.get("over_allowance", 0)
    if not ended or ended < ALLOWANCE_SHARE * side.counted:
        return ""
    return (
        f"{ended} of {side.counted} runs of '{side.variant}' used up their allowance: "
        "a larger allowance may change its score."
    )


def _drift(findings: Findings) -> str:
    first, second = findings.starts_baseline, findings.starts_candidate
    if not first or not second:
        return ""
    gap_s = max(second[0] - first[-1], first[0] - second[-1])
    if gap_s < DRIFT_GAP_S:
        return ""
    return (
        f"The two variants ran {gap_s / 3600:.0f} hours apart: a model or service that changed in between "
        "looks like an effect of the variant."
    )


def _no_repeats(found: PairedDifference) -> str:
    if found.repeats_min > 1:
        return ""
    return "Some cases have a single run: flakiness and the suite error leave them out."


def _reused(side: VariantSummary) -> str:
    return (
        f"{side.reused} of {side.runs} runs of '{side.variant}' are reused, not new." if side.reused else ""
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
