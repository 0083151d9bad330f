"""What one variant's runs say about it: every estimate is a mean over cases, clustered by case.

Runs of one case resemble each other, so n cases with five repeats each are n pieces of evidence, not 5 n.
No interval has width zero, and none is made from fewer than two cases by pretending.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from evalpurse.analysis.distributions import beta_quantile, t_quantile
from evalpurse.analysis.errors import AnalysisError
from evalpurse.analysis.runs import CaseValues, case_means, mean, variance

LEVEL = 0.95
"""Of every two-sided interval that is shown."""

Method = Literal["cluster_t", "jeffreys", "one_case"]


@dataclass(frozen=True)
class Estimate:
    """A mean over cases with its interval, in the unit of its values.

    `se` and the interval are about cases like these; `suite_se` is about exactly these cases (only the runs
    are random), None without repeats. `low` and `high` are None when one unbounded case gives no interval.
    """

    value: float
    low: float | None
    high: float | None
    se: float | None
    suite_se: float | None
    cases: int
    runs: int
    method: Method


def estimate(values: CaseValues, *, bounded: bool = True) -> Estimate:
    """Mean of the case means, SE = s(case means) / sqrt(n), interval by Student's t with n - 1 df.

    This is the cluster-robust SE of a regression on a constant with balanced repeats (Liang and Zeger
    1986; for evals Miller 2024). `bounded` values lie in [0, 1]: the interval is cut there, and when all
    case means are equal it is Jeffreys' Beta(k + 1/2, n - k + 1/2) with k = n times the mean (Brown, Cai
    and DasGupta 2001), because an SE of 0 would claim certainty.

    Raises:
        AnalysisError: there is no case.
    """
    if not values:
        raise AnalysisError("There is no counted run, so there is nothing to estimate.")
    means = list(case_means(values).values())
    cases, centre = len(means), mean(means)
    runs = sum(len(of_case) for of_case in values.values())
    se = math.sqrt(variance(means) / cases) if cases > 1 else None
    low, high, method = _interval(centre, se, cases, bounded=bounded)
    return Estimate(centre, low, high, se, suite_se(values), cases, runs, method)


def _interval(
    centre: float, se: float | None, cases: int, *, bounded: bool
) -> tuple[float | None, float | None, Method]:
    if bounded and (se == 0.0 or (se is None and centre in (0.0, 1.0))):
        return (*_jeffreys(centre * cases, cases), "jeffreys")
    if se is None:
        return (0.0, 1.0, "one_case") if bounded else (None, None, "one_case")
    half = t_quantile(0.5 + LEVEL / 2, cases - 1) * se
    low, high = centre - half, centre + half
    return (max(0.0, low), min(1.0, high), "cluster_t") if bounded else (low, high, "cluster_t")


def _jeffreys(successes: float, cases: int) -> tuple[float, float]:
    a, b = successes + 0.5, cases - successes + 0.5
    low = 0.0 if successes == 0 else beta_quantile(0.5 - LEVEL / 2, a, b)
    high = 1.0 if successes == cases else beta_quantile(0.5 + LEVEL / 2, a, b)
    return low, high


def suite_se(values: CaseValues) -> float | None:
    """sqrt(sum of s2_i / m_i) / n over the cases with at least two runs; None when there are none."""
    repeated = [of_case for of_case in values.values() if len(of_case) > 1]
    if not repeated:
        return None
    return math.sqrt(math.fsum(variance(of_case) / len(of_case) for of_case in repeated)) / len(repeated)


@dataclass(frozen=True)
class VarianceSplit:
    """Variance of a single run, between cases and within a case; `icc` is the share between, or None."""

    between: float
    within: float
    icc: float | None
    repeated_cases: int


def variance_split(values: CaseValues) -> VarianceSplit | None:
    """Method of moments: within = mean of s2_i, between = var(case means) - mean of s2_i / m_i, at least 0.

    A case with one run has no s2_i of its own and takes the mean of the others. None without repeats or
    with a single case.
    """
    own = {case_id: variance(of_case) for case_id, of_case in values.items() if len(of_case) > 1}
    if not own or len(values) < 2:
        return None
    within = mean(own.values())
    noise = mean([own.get(case_id, within) / len(of_case) for case_id, of_case in values.items()])
    between = max(0.0, variance(list(case_means(values).values())) - noise)
    total = between + within
    return VarianceSplit(between, within, between / total if total > 0 else None, len(own))


def pass_at_k(values: CaseValues, k: int, *, success_threshold: float = 1.0) -> Estimate:
    """Chance that at least one of k runs succeeds: mean of 1 - C(m - c, k) / C(m, k) (Chen et al. 2021).

    A run succeeds at or above the threshold; only cases with at least k runs take part.

    Raises:
        AnalysisError: k is below 1, or no case has k runs.
    """
    return _passes(
        values, k, success_threshold, lambda runs, won: 1 - math.comb(runs - won, k) / math.comb(runs, k)
    )


def pass_hat_k(values: CaseValues, k: int, *, success_threshold: float = 1.0) -> Estimate:
    """Chance that all of k runs succeed (pass^k): mean of C(c, k) / C(m, k) (Yao et al. 2024).

    Never the pooled rate to the power of k, which would call a case's runs independent.

    Raises:
        AnalysisError: k is below 1, or no case has k runs.
    """
    return _passes(values, k, success_threshold, lambda runs, won: math.comb(won, k) / math.comb(runs, k))


def _passes(
    values: CaseValues, k: int, success_threshold: float, chance: Callable[[int, int], float]
) -> Estimate:
    enough = {case_id: of_case for case_id, of_case in values.items() if len(of_case) >= k}
    if k < 1 or not enough:
        most = max((len(of_case) for of_case in values.values()), default=0)
        raise AnalysisError(
            f"k is {k}, and the most counted runs that a case has is {most}.",
            hint=f"Choose k from 1 to {most}, or run more repeats." if most else "Run the cases first.",
            k=k,
            repeats_max=most,
        )
    wins = success_counts(enough, success_threshold)
    found = estimate({case_id: [chance(len(enough[case_id]), wins[case_id])] for case_id in enough})
    return replace(found, runs=sum(len(of_case) for of_case in enough.values()))


def success_counts(values: CaseValues, success_threshold: float) -> dict[str, int]:
    return {
        case_id: sum(value >= success_threshold for value in of_case) for case_id, of_case in values.items()
    }


@dataclass(frozen=True)
class Flakiness:
    """How much repeats of one case disagree, over the cases that have repeats.

    `share` of cases that sometimes succeed and sometimes not; `disagreement`: chance that two runs of a
    case differ; `consistency`: 1 when every case always ends the same way, 0 when each is a coin toss.
    """

    share: float
    disagreement: float
    consistency: float
    cases: int


def flakiness(values: CaseValues, *, success_threshold: float = 1.0) -> Flakiness | None:
    """By success rates p_i of cases with m_i > 1: share of 0 < p < 1, mean 2 p (1 - p) m / (m - 1),
    mean (2 p - 1)^2. None without repeats."""
    repeated = {case_id: of_case for case_id, of_case in values.items() if len(of_case) > 1}
    if not repeated:
        return None
    wins = success_counts(repeated, success_threshold)
    rates = [(wins[case_id] / len(of_case), len(of_case)) for case_id, of_case in repeated.items()]
    return Flakiness(
        share=sum(0.0 < rate < 1.0 for rate, _ in rates) / len(rates),
        disagreement=mean([2 * rate * (1 - rate) * runs / (runs - 1) for rate, runs in rates]),
        consistency=mean([(2 * rate - 1) ** 2 for rate, _ in rates]),
        cases=len(rates),
    )
