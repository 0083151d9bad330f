"""The difference between two variants, paired by case.

Both are measured on the same cases, so what makes a case easy or hard cancels out. The p values and the
interval are about cases like these; `suite_se` says how sure the difference is on exactly these cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from evalpurse.analysis.distributions import normal_quantile, sign_test, t_above, t_quantile
from evalpurse.analysis.errors import NoSharedCasesError
from evalpurse.analysis.estimates import LEVEL, success_counts
from evalpurse.analysis.runs import CaseValues, case_means, mean, variance

TIE = 1e-12
"""Case means closer than this differ by rounding only."""


@dataclass(frozen=True)
class PairedDifference:
    """Candidate minus baseline, over the cases that both have a counted run of; scores in [0, 1].

    `se`, `p_better` and the interval need two cases; with one, `se` and `p_better` are None and the
    interval is everything possible. `fixed` and `broken` are the cases that the candidate newly solves, or
    no longer solves, where a case is solved when more than half of its runs succeed.
    """

    delta: float
    low: float
    high: float
    se: float | None
    suite_se: float | None
    p_better: float | None
    cases: int
    runs_baseline: int
    runs_candidate: int
    repeats_min: int
    repeats_mean: float
    wins: int
    losses: int
    ties: int
    sign_p: float
    fixed: tuple[str, ...]
    broken: tuple[str, ...]

    @property
    def df(self) -> int:
        return self.cases - 1

    def p_above(self, null: float) -> float:
        """One-sided p of "the true difference is at most `null`"; 1.0 when one case says nothing.

        With `null` = -margin this is the non-inferiority test.
        """
        return 1.0 if self.se is None else t_above((self.delta - null) / self.se, self.df)

    def p_below(self, null: float) -> float:
        """One-sided p of "the true difference is at least `null`"."""
        return 1.0 if self.se is None else t_above((null - self.delta) / self.se, self.df)

    def lower_bound(self, alpha: float) -> float:
        """The true difference is above this with one-sided confidence 1 - alpha."""
        if self.se is None:
            return -1.0
        return max(-1.0, self.delta - t_quantile(1 - alpha, self.df) * self.se)

    def detectable(self, alpha: float, power: float = 0.8) -> float | None:
        """The true difference that data with this SE would call better with the given power."""
        if self.se is None:
            return None
        return (normal_quantile(1 - alpha) + normal_quantile(power)) * self.se


def paired_difference(
    baseline: CaseValues, candidate: CaseValues, *, success_threshold: float = 1.0
) -> PairedDifference:
    """d_i = case mean of the candidate - case mean of the baseline; delta = mean d; Student's t on n - 1.

    Raises:
        NoSharedCasesError: no case has a counted run of both.
    """
    shared = sorted(baseline.keys() & candidate.keys())
    if not shared:
        raise NoSharedCasesError(
            f"The baseline has counted runs of {len(baseline)} cases and the candidate of {len(candidate)}, "
            "but no case has both.",
            hint="Run both variants on the same cases.",
            cases_baseline=len(baseline),
            cases_candidate=len(candidate),
        )
    of_a = {case_id: baseline[case_id] for case_id in shared}
    of_b = {case_id: candidate[case_id] for case_id in shared}
    means_a, means_b = case_means(of_a), case_means(of_b)
    differences = [means_b[case_id] - means_a[case_id] for case_id in shared]
    delta, se = mean(differences), guarded_se(differences, of_a, of_b)
    half = 2.0 if se is None else t_quantile(0.5 + LEVEL / 2, len(shared) - 1) * se
    wins = sum(d > TIE for d in differences)
    losses = sum(d < -TIE for d in differences)
    solved_a, solved_b = _solved(of_a, success_threshold), _solved(of_b, success_threshold)
    repeats = [len(of_case) for side in (of_a, of_b) for of_case in side.values()]
    return PairedDifference(
        delta=delta,
        low=max(-1.0, delta - half),
        high=min(1.0, delta + half),
        se=se,
        suite_se=paired_suite_se(of_a, of_b),
        p_better=None if se is None else 1.0 - t_above(delta / se, len(shared) - 1),
        cases=len(shared),
        runs_baseline=sum(len(of_case) for of_case in of_a.values()),
        runs_candidate=sum(len(of_case) for of_case in of_b.values()),
        repeats_min=min(repeats),
        repeats_mean=mean(repeats),
        wins=wins,
        losses=losses,
        ties=len(shared) - wins - losses,
        sign_p=sign_test(wins, losses),
        fixed=tuple(sorted(solved_b - solved_a)),
        broken=tuple(sorted(solved_a - solved_b)),
    )


def guarded_se(differences: list[float], baseline: CaseValues, candidate: CaseValues) -> float | None:
    """SE with one discordant pseudo-pair: sqrt(sum (d_i - delta)^2 + 1 / m_e^2) / n.

    m_e = 2 / mean(1 / m_Ai + 1 / m_Bi) is the number of repeats behind a pair. Without the pair, ten equal
    cases would have an SE of 0 and any difference would be certain. A full pseudo-case would over-correct
    at five repeats, hence the scaling. None for a single case.
    """
    cases = len(differences)
    if cases < 2:
        return None
    inverse = mean([1 / len(baseline[case_id]) + 1 / len(candidate[case_id]) for case_id in baseline])
    squares = variance(differences) * (cases - 1)
    return math.sqrt(squares + (inverse / 2) ** 2) / cases


def paired_suite_se(baseline: CaseValues, candidate: CaseValues) -> float | None:
    """sqrt(sum of s2_Ai / m_Ai + s2_Bi / m_Bi) / n over cases where both have repeats; None without them."""
    repeated = [case_id for case_id in baseline if min(len(baseline[case_id]), len(candidate[case_id])) > 1]
    if not repeated:
        return None
    parts = (
        variance(side[case_id]) / len(side[case_id]) for case_id in repeated for side in (baseline, candidate)
    )
    return math.sqrt(math.fsum(parts)) / len(repeated)


def _solved(values: CaseValues, success_threshold: float) -> set[str]:
    wins = success_counts(values, success_threshold)
    return {case_id for case_id, of_case in values.items() if 2 * wins[case_id] > len(of_case)}
