"""The input of every statistic: one fact a run, and how the facts of one case are gathered.

A run either counts (it has a score), is missing (it should have counted and something else failed), or is
outside (nobody tried). Missing is never read as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from evalpurse.analysis.errors import AnalysisError

MISSING_OUTCOMES = frozenset({"infra_error", "grader_error"})
"""Not counted, though the run was tried: lowers coverage. So does a run that was cancelled while it ran:
which runs a cancellation cuts depends on how they went. Every other uncounted outcome is outside it."""

CaseValues = Mapping[str, Sequence[float]]
"""One number a counted run, by case; no case is empty."""


@dataclass(frozen=True)
class RunFact:
    """One run that has ended.

    `case_id` names one version of a case: pass different names for versions that differ. `score` is in
    [0, 1], None when the run is not counted. `cost_nusd` is what the run cost when it was carried out,
    also for a reused run: a variant does not become cheap by being measured twice.
    """

    variant: str
    case_id: str
    repeat: int
    outcome: str
    counted: bool
    score: float | None
    cost_nusd: int
    duration_s: float
    start_latency_s: float
    input_tokens: int
    output_tokens: int
    reused: bool
    started_at: datetime | None = None

    @property
    def missing(self) -> bool:
        cut_short = self.outcome == "cancelled" and self.started_at is not None
        return not self.counted and (self.outcome in MISSING_OUTCOMES or cut_short)

    @property
    def tried(self) -> bool:
        """Whether the run belongs to the coverage: counted, or missing."""
        return self.counted or self.missing


def distinct(facts: Iterable[RunFact]) -> list[RunFact]:
    """The facts without reused runs that stand beside their original, or beside another reuse of it.

    Runs of several experiments may be compared together; a run that two of them share is still one run.
    """
    facts = list(facts)
    seen = {(fact.variant, fact.case_id, fact.repeat) for fact in facts if not fact.reused}
    kept = [fact for fact in facts if not fact.reused]
    for fact in facts:
        key = (fact.variant, fact.case_id, fact.repeat)
        if fact.reused and key not in seen:
            seen.add(key)
            kept.append(fact)
    return kept


def score_of(fact: RunFact) -> float:
    """The score of a counted run.

    Raises:
        AnalysisError: the score is missing or not in [0, 1].
    """
    score = fact.score
    if score is None or not math.isfinite(score) or not 0.0 <= score <= 1.0:
        raise AnalysisError(
            f"Run {fact.variant}/{fact.case_id}/{fact.repeat} counts with the score {score}; "
            "a counted run has a score from 0 to 1.",
            hint="Give it a score, or mark it as not counted.",
            case_id=fact.case_id,
            variant=fact.variant,
        )
    return float(score)


def by_case(
    facts: Iterable[RunFact],
    value: Callable[[RunFact], float] = score_of,
    *,
    cases: Collection[str] | None = None,
) -> dict[str, list[float]]:
    """One value a counted run, gathered by case; only the named cases when `cases` is given."""
    gathered: dict[str, list[float]] = {}
    for fact in facts:
        if fact.counted and (cases is None or fact.case_id in cases):
            gathered.setdefault(fact.case_id, []).append(value(fact))
    return gathered


def case_means(values: CaseValues) -> dict[str, float]:
    return {case_id: mean(of_case) for case_id, of_case in values.items()}


def mean(values: Collection[float]) -> float:
    """The mean, exact to the last digit: it does not depend on the order of the values."""
    return math.fsum(values) / len(values)


def variance(values: Collection[float]) -> float:
    """The sample variance (ddof 1) of at least two values."""
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)
