"""Quantiles and tail probabilities, the only place that needs scipy.

`scipy.special` has them without the second that importing `scipy.stats` takes; tests hold the two equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def t_quantile(probability: float, df: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(df, probability))


def t_above(t: float, df: int) -> float:
    """P(T > t) for Student's T."""
    from scipy.special import stdtr

    return float(stdtr(df, -t))


def normal_quantile(probability: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(probability))


def beta_quantile(probability: float, a: float, b: float) -> float:
    from scipy.special import betaincinv

    return float(betaincinv(a, b, probability))


def sign_test(wins: int, losses: int) -> float:
    """Exact two-sided p of the sign test; ties must be left out. 1.0 when nothing was decided."""
    from scipy.special import bdtr

    decided = wins + losses
    if decided == 0:
        return 1.0
    return min(1.0, 2.0 * float(bdtr(min(wins, losses), decided, 0.5)))


def fisher_exact(a: int, b: int, c: int, d: int) -> float:
    """Two-sided p of Fisher's exact test on [[a, b], [c, d]]: all tables at most as likely as this one."""
    row, column, total = a + b, a + c, a + b + c + d

    def log_likelihood(x: int) -> float:
        return _log_choose(column, x) + _log_choose(total - column, row - x) - _log_choose(total, row)

    observed = log_likelihood(a)
    lowest, highest = max(0, row + column - total), min(row, column)
    # The slack keeps tables of equal likelihood in, whatever the rounding of lgamma.
    at_most = (log_likelihood(x) for x in range(lowest, highest + 1))
    return min(1.0, math.fsum(math.exp(log) for log in at_most if log <= observed + 1e-7))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p of each claim, so that all of them together are wrong with at most the level tested at.

    Holm 1979: the k-th smallest of n is multiplied by n - k + 1, then made monotone.
    """
    adjusted: dict[str, float] = {}
    highest = 0.0
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, p * (len(p_values) - place)))
        adjusted[name] = highest
    return adjusted
