"""Ratios of what two variants use (money, time, tokens), and what a success costs.

A ratio is always of totals, never a mean of ratios: one cheap case must not weigh as much as a dear one.
Where a ratio has no meaning it is None and `note` says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from evalpurse.analysis.distributions import t_above, t_quantile
from evalpurse.analysis.estimates import LEVEL
from evalpurse.analysis.runs import mean, variance


@dataclass(frozen=True)
class Ratio:
    """Candidate / baseline over the shared cases; below 1 means less.

    `p_less` is the one-sided p of "the true ratio is 1 or more", 1.0 where nothing can be said.
    """

    value: float | None
    low: float | None
    high: float | None
    p_less: float
    cases: int
    note: str = ""


def ratio_of_totals(baseline: Mapping[str, float], candidate: Mapping[str, float]) -> Ratio:
    """R = sum b_i / sum a_i of case means; SE(log R) = s(b_i / mean b - a_i / mean a) / sqrt n.

    The interval is R exp(+-t SE) with n - 1 df (delta method on the log; Cochran, Sampling Techniques,
    ch. 6). Both mappings name the same cases and hold numbers that are 0 or more.
    """
    cases = len(baseline)
    pairs = [(baseline[case_id], candidate[case_id]) for case_id in baseline]
    mean_a, mean_b = mean([a for a, _ in pairs]), mean([b for _, b in pairs])
    if mean_a == 0:
        note = "neither used any" if mean_b == 0 else "the baseline used none, the candidate did"
        return Ratio(None, None, None, 1.0, cases, f"Not defined: {note}.")
    if mean_b == 0:
        # No spread to make an SE from: only the sign of each case is evidence.
        p_less = 0.5 ** sum(a > 0 for a, _ in pairs)
        return Ratio(0.0, None, None, p_less, cases, "The candidate used none.")
    value = mean_b / mean_a
    if cases < 2:
        return Ratio(value, None, None, 1.0, cases, "One case gives no interval.")
    se = math.sqrt(variance([b / mean_b - a / mean_a for a, b in pairs]) / cases)
    if se == 0:
        return Ratio(value, value, value, 0.0 if value < 1 else 1.0, cases, "The same ratio in every case.")
    half = t_quantile(0.5 + LEVEL / 2, cases - 1) * se
    p_less = t_above(-math.log(value) / se, cases - 1)
    return Ratio(value, value * math.exp(-half), value * math.exp(half), p_less, cases)


@dataclass(frozen=True)
class CostPerSuccess:
    """Nano-dollars a success; None when nothing succeeded, as `note` says."""

    value_nusd: int | None
    low_nusd: int | None
    high_nusd: int | None
    note: str = ""


def cost_per_success(costs_nusd: Mapping[str, float], success_rates: Mapping[str, float]) -> CostPerSuccess:
    """R = sum c_i / sum s_i of case means; SE = s((c_i - R s_i) / mean s) / sqrt n, Student's t on n - 1.

    The ratio estimator of Cochran, Sampling Techniques, ch. 6; both mappings name the same cases.
    """
    cases = len(costs_nusd)
    mean_success = mean(list(success_rates.values()))
    if mean_success == 0:
        return CostPerSuccess(None, None, None, f"No run of {cases} cases succeeded.")
    value = mean(list(costs_nusd.values())) / mean_success
    if cases < 2:
        return CostPerSuccess(round(value), None, None, "One case gives no interval.")
    residuals = [
        (costs_nusd[case_id] - value * success_rates[case_id]) / mean_success for case_id in costs_nusd
    ]
    half = t_quantile(0.5 + LEVEL / 2, cases - 1) * math.sqrt(variance(residuals) / cases)
    return CostPerSuccess(round(value), round(max(0.0, value - half)), round(value + half))
