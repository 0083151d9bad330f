"""Estimates of one variant, held to public reference values and to a known truth."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from evalpurse.analysis import distributions
from evalpurse.analysis.costs import cost_per_success
from evalpurse.analysis.errors import AnalysisError, UnknownVariantError
from evalpurse.analysis.estimates import estimate, flakiness, pass_at_k, pass_hat_k, variance_split
from evalpurse.analysis.runs import RunFact
from evalpurse.analysis.summary import percentile, summarise
from tests.runfacts import BIMODAL_MEAN, bimodal_values, fact, grid

# Gross investment of ten firms, 1935 to 1954 (Grunfeld 1950; public domain).
GRUNFELD = """
317.6 391.8 410.6 257.7 330.8 461.2 512 448 499.6 547.5 561.2 688.1 568.9 529.2 555.1 642.9 755.9 891.2 1304.4 1486.7
209.9 355.3 469.9 262.3 230.4 361.6 472.8 445.6 361.6 288.2 258.7 420.3 420.5 494.5 405.1 418.8 588.2 645.5 641 459.3
33.1 45 77.2 44.6 48.1 74.4 113 91.9 61.3 56.8 93.6 159.9 147.2 146.3 98.3 93.5 135.2 157.3 179.5 189.6
40.29 72.76 66.26 51.6 52.41 69.41 68.35 46.8 47.4 59.57 88.78 74.12 62.68 89.36 78.98 100.66 160.62 145 174.93 172.49
39.68 50.73 74.24 53.51 42.65 46.48 61.4 39.67 62.24 52.32 63.21 59.37 58.02 70.34 67.42 55.74 80.3 85.4 91.9 81.43
20.36 25.98 25.94 27.53 24.6 28.54 43.41 42.81 27.84 32.6 39.03 50.17 51.85 64.03 68.16 77.34 95.3 99.49 127.52 135.72
24.43 23.21 32.78 32.54 26.65 33.71 43.5 34.46 44.28 70.8 44.12 48.98 48.51 50 50.59 42.53 64.77 72.68 73.86 89.51
12.93 25.9 35.05 22.89 18.84 28.57 48.51 43.34 37.02 37.81 39.27 53.46 55.56 49.56 32.04 32.24 54.38 71.78 90.08 68.6
26.63 23.39 30.65 20.89 28.78 26.93 32.08 32.21 35.69 62.47 52.32 56.95 54.32 40.53 32.54 43.48 56.49 65.98 66.11 49.34
2.54 2 2.19 1.99 2.03 1.81 2.14 1.86 0.93 1.18 1.36 2.24 3.81 5.66 4.21 3.42 4.67 6 6.53 5.12
"""  # noqa: E501  (a table of numbers: one firm a line)


def tau_bench() -> dict[str, list[float]]:
    """tau-bench airline with gpt-4o: 14, 12, 10, 4, 10 cases with 0, 1, 2, 3, 4 of 4 successes.

    The counts follow from the published pass^1..4 of .420, .273, .220, .200.
    """
    wins = [won for won, cases in enumerate((14, 12, 10, 4, 10)) for _ in range(cases)]
    return {f"t{i}": [1.0] * won + [0.0] * (4 - won) for i, won in enumerate(wins)}


def test_score_of_the_grunfeld_panel_has_its_cluster_robust_error() -> None:
    firms = [list(map(float, line.split())) for line in GRUNFELD.split("\n") if line]
    found = estimate({f"firm{i}": years for i, years in enumerate(firms)}, bounded=False)
    assert (found.cases, found.runs, found.method) == (10, 200, "cluster_t")
    assert found.value == pytest.approx(145.95825, abs=1e-9)
    assert found.se == pytest.approx(62.8737343789, abs=1e-8)
    assert found.low == pytest.approx(3.72798, abs=1e-5)
    assert found.high == pytest.approx(288.18852, abs=1e-5)


def test_tau_bench_counts_give_the_published_values() -> None:
    runs = tau_bench()
    found, split, flaky = estimate(runs), variance_split(runs), flakiness(runs)
    assert split is not None
    assert flaky is not None
    assert found.value == pytest.approx(0.42)
    assert found.se == pytest.approx(0.0522162, abs=1e-7)
    assert found.suite_se == pytest.approx(0.0270801, abs=1e-7)
    assert split.between == pytest.approx(0.0996599, abs=1e-7)
    assert split.within == pytest.approx(0.1466667, abs=1e-7)
    assert split.icc == pytest.approx(0.4045844, abs=1e-7)
    assert flaky.share == pytest.approx(0.52)
    assert [round(pass_hat_k(runs, k).value, 3) for k in (1, 2, 3, 4)] == [0.42, 0.273, 0.22, 0.2]
    assert [round(pass_at_k(runs, k).value, 4) for k in (1, 2, 3, 4)] == [0.42, 0.5667, 0.66, 0.72]


def test_pass_at_k_and_pass_hat_k_of_two_in_five() -> None:
    runs = {"a": [1.0, 1.0, 0.0, 0.0, 0.0], "b": [1.0, 0.0, 1.0, 0.0, 0.0]}
    assert [pass_at_k(runs, k).value for k in (1, 2, 3)] == pytest.approx([0.4, 0.7, 0.9])
    assert [pass_hat_k(runs, k).value for k in (1, 2, 3)] == pytest.approx([0.4, 0.1, 0.0])


def test_pass_at_k_leaves_out_cases_with_too_few_runs_and_refuses_when_none_has_enough() -> None:
    runs = {"a": [1.0, 0.0, 1.0], "b": [0.0]}
    assert pass_at_k(runs, 2).cases == 1
    with pytest.raises(AnalysisError, match="k is 4, and the most counted runs that a case has is 3"):
        pass_at_k(runs, 4)
    with pytest.raises(AnalysisError, match="k is 0"):
        pass_hat_k(runs, 0)


def test_all_failures_and_all_successes_get_a_jeffreys_interval() -> None:
    failed = estimate({f"c{i}": [0.0, 0.0] for i in range(20)})
    assert (failed.low, failed.method) == (0.0, "jeffreys")
    assert failed.high == pytest.approx(0.1166, abs=5e-5)
    passed = estimate({f"c{i}": [1.0] for i in range(20)})
    assert passed.high == 1.0
    assert passed.low == pytest.approx(1 - 0.1166, abs=5e-5)


def test_equal_partial_scores_do_not_claim_certainty() -> None:
    found = estimate({f"c{i}": [0.5] for i in range(20)})
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.35
    assert found.high > 0.65


def test_one_case_gives_no_narrow_interval() -> None:
    found = estimate({"only": [0.0, 1.0, 1.0]})
    assert (found.low, found.high, found.se, found.method) == (0.0, 1.0, None, "one_case")
    assert found.suite_se == pytest.approx(1 / 3)
    unbounded = estimate({"only": [7.0]}, bounded=False)
    assert (unbounded.low, unbounded.high) == (None, None)


def test_unequal_repeats_weigh_cases_and_not_runs() -> None:
    found = estimate({"often": [1.0] * 9, "once": [0.0]})
    assert found.value == 0.5
    assert (found.cases, found.runs) == (2, 10)


def test_interval_of_clustered_runs_covers_the_true_mean() -> None:
    random_ = random.Random(20_241)
    draws, covered, naive = 600, 0, 0
    for _ in range(draws):
        runs, _ = bimodal_values(random_, cases=20, repeats=5)
        found = estimate(runs)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= BIMODAL_MEAN <= found.high
        pooled = estimate(
            {f"{case}/{i}": [v] for case, of_case in runs.items() for i, v in enumerate(of_case)}
        )
        assert pooled.low is not None
        assert pooled.high is not None
        naive += pooled.low <= BIMODAL_MEAN <= pooled.high
    assert 0.925 <= covered / draws <= 0.975
    assert naive / draws < 0.75, "runs taken as independent must be seen to fail, or this test proves nothing"


def test_cost_per_success_is_a_ratio_of_totals() -> None:
    costs = {"a": 10.0, "b": 30.0, "c": 20.0}
    found = cost_per_success(costs, {"a": 1.0, "b": 0.0, "c": 0.5})
    assert found.value_nusd == 40
    assert found.low_nusd is not None
    assert found.high_nusd is not None
    assert 0 <= found.low_nusd < 40 < found.high_nusd
    nothing = cost_per_success(costs, {"a": 0.0, "b": 0.0, "c": 0.0})
    assert nothing.value_nusd is None
    assert nothing.note == "No run of 3 cases succeeded."


def test_summary_shows_outcomes_coverage_and_what_was_left_out() -> None:
    facts = [
        *grid("base", {"a": [1.0, 0.0], "b": [1.0, 1.0]}),
        fact("base", "c", 0, 0.0, outcome="timeout", duration_s=60.0),
        fact("base", "c", 1, None),
        fact("base", "d", 0, None, outcome="grader_error"),
        fact("base", "e", 0, None, outcome="unfunded"),
        fact("base", "f", 0, None, outcome="cancelled"),
        fact("other", "a", 0, 1.0),
    ]
    found = summarise(facts, "base")
    assert (found.runs, found.counted, found.missing, found.cases) == (9, 5, 2, 3)
    assert found.coverage == pytest.approx(5 / 7)
    assert found.infra_share == pytest.approx(1 / 7)
    assert found.outcomes == {
        "cancelled": 1,
        "grader_error": 1,
        "infra_error": 1,
        "scored": 4,
        "timeout": 1,
        "unfunded": 1,
    }
    assert found.score is not None
    assert found.score.value == pytest.approx(0.5)
    assert found.flaky_share == 0.5
    assert found.cost_per_run_nusd == 1_000_000
    assert found.cost_per_success is not None
    assert found.cost_per_success.value_nusd == 2_000_000
    assert found.duration_p50_s == 2.0
    assert found.input_tokens_per_run == 100


def test_summary_of_a_variant_that_only_failed_has_no_score() -> None:
    found = summarise([fact("base", "a", 0, None)], "base")
    assert found.score is None
    assert found.cost_per_success is None
    assert found.coverage == 0.0
    unfunded = summarise([fact("base", "a", 0, None, outcome="unfunded")], "base")
    assert unfunded.coverage is None


def test_unknown_variant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownVariantError, match=r"None of the 1 runs.*'typo'.*Variants with runs: base\."):
        summarise([fact("base", "a", 0, 1.0)], "typo")


@pytest.mark.parametrize("score", [None, float("nan"), 1.5, -0.1])
def test_counted_run_without_a_usable_score_is_refused(score: float | None) -> None:
    with pytest.raises(AnalysisError, match="Run base/a/0 counts with the score"):
        summarise([replace(fact("base", "a", 0, 1.0), score=score)], "base")


def test_reused_run_beside_its_original_is_one_run() -> None:
    original = fact("base", "a", 0, 1.0)
    again = fact("base", "a", 0, 1.0, reused=True)
    found = summarise([again, original, again, fact("base", "b", 0, 0.0, reused=True)], "base")
    assert (found.counted, found.reused) == (2, 1)


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([7.0], 0.95) == 7.0
    assert percentile([], 0.5) is None


SCORES = st.dictionaries(
    st.sampled_from([f"case{i}" for i in range(8)]),
    st.lists(st.sampled_from([None, 0.0, 0.25, 1 / 3, 0.5, 1.0]), min_size=1, max_size=4),
    min_size=1,
    max_size=8,
)


@given(scores=SCORES, seed=st.integers(0, 1000))
def test_order_of_runs_changes_no_digit(scores: dict[str, list[float | None]], seed: int) -> None:
    facts = grid("base", scores)
    shuffled = list(facts)
    random.Random(seed).shuffle(shuffled)
    assert summarise(shuffled, "base") == summarise(facts, "base")


@given(scores=SCORES)
def test_names_of_cases_change_no_digit(scores: dict[str, list[float | None]]) -> None:
    renamed = {f"{case[::-1]} renamed": runs for case, runs in scores.items()}
    assert summarise(grid("base", renamed), "base") == summarise(grid("base", scores), "base")


@given(scores=SCORES, case=st.sampled_from(["case0", "case7", "new"]))
def test_run_lost_to_infrastructure_changes_nothing_in_the_score(
    scores: dict[str, list[float | None]], case: str
) -> None:
    facts: list[RunFact] = grid("base", scores)
    before, after = summarise(facts, "base"), summarise([*facts, fact("base", case, 99, None)], "base")
    assert after.score == before.score
    assert after.cost_per_success == before.cost_per_success
    assert after.missing == before.missing + 1


@given(
    table=st.tuples(*[st.integers(0, 40)] * 4),
    df=st.integers(1, 200),
    t=st.floats(-30, 30),
    place=st.floats(0.001, 0.999),
)
def test_tail_probabilities_equal_those_of_scipy_stats(
    table: tuple[int, int, int, int], df: int, t: float, place: float
) -> None:
    a, b, c, d = table
    assert distributions.fisher_exact(a, b, c, d) == pytest.approx(
        float(stats.fisher_exact(np.array([[a, b], [c, d]])).pvalue), abs=1e-9
    )
    if a + b:
        assert distributions.sign_test(a, b) == pytest.approx(float(stats.binomtest(a, a + b).pvalue))
    assert distributions.t_above(t, df) == pytest.approx(float(stats.t.sf(t, df)), rel=1e-9)
    assert distributions.t_quantile(place, df) == pytest.approx(
        float(stats.t.ppf(place, df)), rel=1e-9, abs=1e-12
    )
    assert distributions.beta_quantile(place, a + 0.5, b + 0.5) == pytest.approx(
        float(stats.beta.ppf(place, a + 0.5, b + 0.5)), rel=1e-9
    )


def test_importing_the_statistics_loads_no_heavy_library() -> None:
    code = (
        "import sys, evalpurse.analysis.compare, evalpurse.analysis.planning;"
        "print(sorted({'numpy', 'scipy', 'duckdb'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
