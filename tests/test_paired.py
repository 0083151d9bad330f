"""Paired differences and ratios, held to textbook equivalents and to a known truth."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from evalpurse.analysis.costs import ratio_of_totals
from evalpurse.analysis.distributions import holm
from evalpurse.analysis.errors import NoSharedCasesError
from evalpurse.analysis.paired import guarded_se, paired_difference
from tests.runfacts import bimodal_values


def test_difference_without_the_guard_is_the_paired_t_test_of_case_means() -> None:
    random_ = random.Random(7)
    first, second = bimodal_values(random_, cases=40, repeats=3, rho=0.9)
    found = paired_difference(first, second)
    means = [[sum(runs) / len(runs) for runs in side.values()] for side in (first, second)]
    expected = stats.ttest_rel(means[1], means[0], alternative="greater")
    assert found.se is not None
    # sqrt(sum + 1/9) / n against sqrt(sum / (n - 1) / n): undo the guard and its divisor.
    squares = (found.se * 40) ** 2 - 1 / 9
    plain = math.sqrt(squares / 39 / 40)
    assert found.delta / plain == pytest.approx(float(expected.statistic))
    assert found.df == 39


def test_guard_keeps_equal_cases_from_being_certain() -> None:
    first, second = {f"c{i}": [0.0] for i in range(10)}, {f"c{i}": [0.0] for i in range(10)}
    found = paired_difference(first, second)
    assert found.se == pytest.approx(0.1)
    assert found.p_better == 0.5
    assert found.low < -0.2
    assert found.high > 0.2


def test_guard_shrinks_with_repeats_behind_a_pair() -> None:
    five = {f"c{i}": [1.0] * 5 for i in range(10)}
    one = {f"c{i}": [1.0] for i in range(10)}
    assert guarded_se([0.0] * 10, five, five) == pytest.approx(0.02)
    # Behind a pair of one and five runs are 2 / (1 + 1/5) repeats.
    assert guarded_se([0.0] * 10, one, five) == pytest.approx(0.06)


def test_wins_losses_flips_and_repeats_are_counted_by_case() -> None:
    baseline = {
        "fixed": [0.0, 0.0, 1.0],
        "broken": [1.0, 1.0],
        "same": [1.0],
        "up": [0.0, 0.0],
        "alone": [1.0],
    }
    candidate = {
        "fixed": [1.0, 1.0, 0.0],
        "broken": [0.0],
        "same": [1.0, 1.0],
        "up": [1.0, 0.0],
        "other": [1.0],
    }
    found = paired_difference(baseline, candidate)
    assert (found.cases, found.wins, found.losses, found.ties) == (4, 2, 1, 1)
    assert (found.fixed, found.broken) == (("fixed",), ("broken",))
    assert (found.repeats_min, found.repeats_mean) == (1, 2.0)
    assert found.delta == pytest.approx((1 / 3 - 1 + 0 + 0.5) / 4)
    assert found.sign_p == 1.0


def test_sign_test_is_exact() -> None:
    first = {f"c{i}": [0.0] for i in range(12)}
    second = {f"c{i}": [1.0 if i < 9 else 0.0] for i in range(12)}
    assert paired_difference(first, second).sign_p == pytest.approx(2 * 0.5**9)


def test_suite_error_uses_runs_only() -> None:
    first = {"a": [0.0, 1.0], "b": [1.0, 1.0]}
    second = {"a": [0.0, 1.0], "b": [1.0, 0.0]}
    # s2 = 0.5 for three of the four; sqrt(3 * 0.25) / 2
    assert paired_difference(first, second).suite_se == pytest.approx(math.sqrt(0.75) / 2)
    assert paired_difference({"a": [0.0]}, {"a": [1.0]}).suite_se is None


def test_single_shared_case_claims_nothing() -> None:
    found = paired_difference({"a": [0.0]}, {"a": [1.0]})
    assert (found.delta, found.low, found.high, found.se, found.p_better) == (1.0, -1.0, 1.0, None, None)
    assert (found.p_above(0.0), found.p_below(0.0), found.lower_bound(0.05)) == (1.0, 1.0, -1.0)


def test_no_shared_case_is_refused_with_the_numbers() -> None:
    with pytest.raises(NoSharedCasesError, match="counted runs of 1 cases and the candidate of 2"):
        paired_difference({"a": [1.0]}, {"b": [1.0], "c": [0.0]})


def test_non_inferiority_and_its_bound_agree() -> None:
    first, second = bimodal_values(random.Random(3), cases=60, repeats=3, rho=0.99)
    found = paired_difference(first, second)
    bound = found.lower_bound(0.05)
    assert found.p_above(bound) == pytest.approx(0.05)
    assert found.p_above(bound - 0.01) < 0.05 < found.p_above(bound + 0.01)


def test_equal_variants_are_rarely_called_better_and_the_interval_covers_zero() -> None:
    random_ = random.Random(99)
    draws, false_wins, covered = 500, 0, 0
    for _ in range(draws):
        found = paired_difference(*bimodal_values(random_, cases=20, repeats=3, rho=0.96))
        false_wins += found.p_above(0.0) < 0.05
        covered += found.low <= 0.0 <= found.high
    assert false_wins / draws <= 0.075
    assert 0.93 <= covered / draws <= 0.995


VALUES = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.lists(st.sampled_from([0.0, 0.2, 1 / 3, 1.0]), min_size=1, max_size=3),
    min_size=8,
)


@given(first=VALUES, second=VALUES)
def test_swapping_the_variants_mirrors_the_difference(
    first: dict[str, list[float]], second: dict[str, list[float]]
) -> None:
    there, back = paired_difference(first, second), paired_difference(second, first)
    assert (back.delta, back.low, back.high) == (-there.delta, -there.high, -there.low)
    assert (back.wins, back.losses, back.fixed, back.broken) == (
        there.losses,
        there.wins,
        there.broken,
        there.fixed,
    )
    assert back.p_above(0.0) == pytest.approx(there.p_below(0.0))
    assert back.se == there.se


def test_cost_ratio_has_its_interval_around_it() -> None:
    random_ = random.Random(5)
    base = {f"c{i}": random_.lognormvariate(0, 0.6) for i in range(100)}
    cut = {case: cost * 0.7 * random_.lognormvariate(0, 0.2) for case, cost in base.items()}
    found = ratio_of_totals(base, cut)
    assert found.value is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.7 < found.high < 1
    assert found.p_less < 1e-6
    # Against a bootstrap over cases, which is right for a ratio at this size.
    boots = []
    names = list(base)
    for _ in range(500):
        drawn = random_.choices(names, k=100)
        boots.append(math.log(sum(cut[c] for c in drawn) / sum(base[c] for c in drawn)))
    spread = math.sqrt(sum((b - sum(boots) / 500) ** 2 for b in boots) / 499)
    assert math.log(found.high / found.low) / 2 == pytest.approx(1.984 * spread, rel=0.15)


def test_cost_ratio_says_where_it_has_no_meaning() -> None:
    zero, some = {"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 2.0}
    assert ratio_of_totals(zero, zero).note == "Not defined: neither used any."
    assert ratio_of_totals(zero, some).note == "Not defined: the baseline used none, the candidate did."
    free = ratio_of_totals(some, zero)
    assert (free.value, free.low, free.p_less) == (0.0, None, 0.25)
    assert ratio_of_totals({"a": 1.0}, {"a": 0.5}).p_less == 1.0


def test_same_ratio_in_every_case_is_certain_and_equal_costs_are_not_cheaper() -> None:
    some = {"a": 1.0, "b": 2.0, "c": 4.0}
    half = ratio_of_totals(some, {case: cost / 2 for case, cost in some.items()})
    assert (half.value, half.low, half.high, half.p_less) == (0.5, 0.5, 0.5, 0.0)
    assert ratio_of_totals(some, some).p_less == 1.0


def test_holm_adjusts_as_published() -> None:
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert holm({"only": 0.2}) == {"only": 0.2}
