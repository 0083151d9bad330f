"""A comparison as a tool shows it: verdicts, refusals, warnings and words."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalpurse.analysis.compare import Comparison, comparable, compare, compare_many
from evalpurse.analysis.errors import AnalysisError, NoSharedCasesError, UnknownVariantError
from evalpurse.analysis.runs import RunFact
from evalpurse.analysis.verdicts import Evidence, Verdict, adjusted, decide
from tests.runfacts import fact, grid


def solved(variant: str, cases: int, failing: int, repeats: int = 2, **changes: object) -> list[RunFact]:
    """`cases` cases of which the first `failing` always fail."""
    scores: dict[str, list[float | None]] = {
        f"c{i:03d}": [0.0 if i < failing else 1.0] * repeats for i in range(cases)
    }
    return grid(variant, scores, **changes)


def dearer(facts: list[RunFact], factor: float, seed: int = 1) -> list[RunFact]:
    """The same runs at another price, with some noise."""
    random_ = random.Random(seed)
    return [
        replace(one, cost_nusd=round(one.cost_nusd * factor * random_.uniform(0.9, 1.1))) for one in facts
    ]


def test_clear_win_is_better_and_says_so_in_one_sentence() -> None:
    found = compare([*solved("old", 40, 20), *solved("new", 40, 5)], "old", "new")
    assert found.verdict is Verdict.BETTER
    assert found.difference.delta == pytest.approx(0.375)
    assert found.difference.fixed == tuple(f"c{i:03d}" for i in range(5, 20))
    assert found.lower_bound > 0
    assert found.sentence == (
        "'new' is better than 'old': 0.875 against 0.500 on 40 shared cases "
        f"(+0.375, 95 % interval {found.difference.low:+.3f} to {found.difference.high:+.3f}), "
        "at 1.00 times the cost (1.00 to 1.00)."
    )
    assert found.warnings == ()


def test_scores_shown_differ_by_the_difference_shown() -> None:
    facts = [
        *solved("old", 30, 10),
        *solved("new", 30, 12),
        *grid("old", {"extra": [0.0, 0.0]}),
        *grid("old", {"lost": [0.0]}),
        fact("new", "lost", 0, None),
    ]
    found = compare(facts, "old", "new")
    assert found.baseline.score is not None
    assert found.candidate.score is not None
    assert found.candidate.score.value - found.baseline.score.value == pytest.approx(found.difference.delta)
    assert (found.cases_dropped, found.cases_baseline_only, found.cases_candidate_only) == (1, 1, 0)
    assert any("1 case left out: 1 only the baseline ran, 0 only the candidate" in w for w in found.warnings)


def test_cheaper_needs_kept_quality() -> None:
    base = dearer(solved("old", 60, 20), 1.0)
    kept = compare([*base, *dearer(solved("new", 60, 20), 0.3, seed=2)], "old", "new")
    assert (kept.verdict, kept.non_inferior, kept.cheaper) == (Verdict.NOT_WORSE, True, True)
    assert kept.cost.high is not None
    assert kept.cost.high < 1
    assert "and it is cheaper, at 0.30 times the cost" in kept.sentence

    lost = compare([*base, *dearer(solved("new", 60, 40), 0.3, seed=2)], "old", "new")
    assert (lost.verdict, lost.non_inferior, lost.cheaper) == (Verdict.WORSE, False, False)
    assert "which is not called cheaper because kept quality is not shown" in lost.sentence

    same = compare([*base, *dearer(solved("new", 60, 20), 1.0, seed=3)], "old", "new")
    assert (same.verdict, same.cheaper) == (Verdict.NOT_WORSE, False)


def test_margin_decides_what_is_not_worse() -> None:
    facts = [*solved("old", 60, 20), *solved("new", 60, 21)]
    assert compare(facts, "old", "new", margin=0.10).verdict is Verdict.NOT_WORSE
    strict = compare(facts, "old", "new", margin=0.01)
    assert strict.verdict is Verdict.UNDECIDED
    assert "cannot be told apart yet" in strict.sentence


def test_low_coverage_gets_no_verdict_however_large_the_difference() -> None:
    new = [replace(one, outcome="infra_error", counted=False, score=None) if i % 8 == 0 else one
           for i, one in enumerate(solved("new", 40, 0))]  # fmt: skip
    found = compare([*solved("old", 40, 40), *new], "old", "new")
    assert found.verdict is Verdict.INDECISIVE_COVERAGE
    assert (found.cheaper, found.non_inferior) == (False, False)
    assert "'new' has 70 of 80 runs (87.5% coverage, 90% is needed)" in found.sentence
    assert found.worst_case_low < found.difference.delta <= found.worst_case_high
    assert any(line.startswith("Runs missing through infrastructure or grading: 0 of 'old' and 10 of 'new'")
               for line in found.warnings)  # fmt: skip


def test_missing_rates_that_differ_get_no_verdict_even_with_coverage() -> None:
    new = [replace(one, outcome="infra_error", counted=False, score=None) if i % 12 == 0 else one
           for i, one in enumerate(solved("new", 60, 0))]  # fmt: skip
    found = compare([*solved("old", 60, 60), *new], "old", "new")
    assert found.candidate.coverage is not None
    assert found.candidate.coverage > 0.9
    assert found.missing_p < 0.05
    assert found.verdict is Verdict.INDECISIVE_COVERAGE
    assert "'old' misses 0 of 120 runs and 'new' 10 of 120" in found.sentence


def test_unfunded_runs_are_outside_coverage() -> None:
    left = [fact("new", f"c{i:03d}", 9, None, outcome="unfunded") for i in range(40)]
    found = compare([*solved("old", 40, 40), *solved("new", 40, 0), *left], "old", "new")
    assert found.verdict is Verdict.BETTER
    assert found.candidate.coverage == 1.0
    assert found.candidate.outcomes["unfunded"] == 40


def test_worst_case_bounds_fill_missing_runs_against_and_for_the_candidate() -> None:
    facts = [
        *grid("old", {"a": [1.0, 0.0], "b": [1.0, None]}),
        *grid("new", {"a": [1.0, None], "b": [1.0, 1.0]}),
    ]
    found = compare(facts, "old", "new")
    # Candidate (1/2 + 1)/2 against baseline (1/2 + 1)/2; then (1 + 1)/2 against (1/2 + 1/2)/2.
    assert (found.worst_case_low, found.worst_case_high) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("facts", "error", "words"),
    [
        ([*solved("old", 3, 1)], UnknownVariantError, "None of the 6 runs is of variant 'new'"),
        (
            [*grid("old", {"a": [1.0]}), *grid("new", {"b": [1.0], "c": [0.0]})],
            NoSharedCasesError,
            "'old' against 'new': The baseline has counted runs of 1 cases and the candidate of 2",
        ),
        (
            [*grid("old", {"a": [1.0]}), fact("new", "a", 0, None)],
            NoSharedCasesError,
            "counted runs of 1 cases and the candidate of 0",
        ),
        ([], UnknownVariantError, "None of the 0 runs is of variant 'old'"),
    ],
)
def test_question_without_an_answer_is_refused_with_the_numbers(
    facts: list[RunFact], error: type[AnalysisError], words: str
) -> None:
    with pytest.raises(error, match=words):
        compare(facts, "old", "new")


def test_candidate_without_results_does_not_hide_the_others() -> None:
    facts = [*solved("old", 3, 1), *solved("new", 3, 1), fact("lost", "c000", 0, None)]
    found = comparable(facts, "old", ["new", "lost", "typo"])
    assert found.candidates == ["new"]
    assert isinstance(found.refused["lost"], NoSharedCasesError)
    assert isinstance(found.refused["typo"], UnknownVariantError)
    with pytest.raises(UnknownVariantError, match="'gone'"):
        comparable(facts, "gone", ["new"])


@pytest.mark.parametrize(
    ("margin", "alpha", "candidates", "words"),
    [
        (0.0, 0.05, ["new"], "margin is 0.0"),
        (float("nan"), 0.05, ["new"], "margin is nan"),
        (0.05, 0.0, ["new"], "alpha is 0.0"),
        (0.05, 0.6, ["new"], "alpha is 0.6"),
        (0.05, 0.05, [], "no candidate"),
        (0.05, 0.05, ["old"], "name a variant twice"),
        (0.05, 0.05, ["new", "new"], "name a variant twice"),
    ],
)
def test_bad_question_is_refused(margin: float, alpha: float, candidates: list[str], words: str) -> None:
    facts = [*solved("old", 3, 1), *solved("new", 3, 1)]
    with pytest.raises(AnalysisError, match=words):
        compare_many(facts, "old", candidates, margin=margin, alpha=alpha)


def test_several_candidates_are_held_to_a_higher_bar_than_one() -> None:
    facts = [*solved("old", 40, 20, repeats=1), *solved("new", 40, 16, repeats=1)]
    others = [one for name in ("x", "y", "z") for one in solved(name, 40, 20, repeats=1)]
    alone = compare(facts, "old", "new")
    among = compare_many([*facts, *others], "old", ["new", "x", "y", "z"])[0]
    assert alone.verdict is Verdict.BETTER
    assert among.verdict is Verdict.NOT_WORSE
    assert among.p_adjusted == pytest.approx(min(1.0, 4 * alone.p_adjusted))
    assert among.difference == alone.difference
    assert any("claim rests on the one-sided level 0.05" in line for line in alone.warnings)


def test_every_claim_is_corrected_on_its_own() -> None:
    found = adjusted({"a": Evidence(0.01, 0.99, 0.001, 0.02), "b": Evidence(0.03, 0.97, 0.02, 0.5)})
    assert found["a"] == Evidence(0.02, 1.0, 0.002, 0.04)
    assert found["b"] == Evidence(0.03, 1.0, 0.02, 0.5)
    decided = decide(Evidence(0.5, 0.04, 0.001, 0.2), alpha=0.05, covered=True)
    assert (decided.verdict, decided.non_inferior) == (Verdict.WORSE, True)


def test_warnings_name_every_reason_for_doubt() -> None:
    monday = datetime(2026, 3, 2, tzinfo=UTC)
    old = [replace(one, started_at=monday, reused=True) for one in solved("old", 8, 2, repeats=1)]
    new = [
        replace(one, started_at=monday + timedelta(hours=30), outcome="over_allowance" if i < 2 else "scored")
        for i, one in enumerate(solved("new", 8, 2, repeats=1))
    ]
    text = "\n".join(compare([*old, *new], "old", "new").warnings)
    assert "Only 8 shared cases" in text
    assert "intervals are unchecked below 10" in text
    assert "2 of 8 runs of 'new' used up their allowance" in text
    assert "ran 30 hours apart" in text
    assert "Some cases have a single run" in text
    assert "8 of 8 runs of 'old' are reused, not new." in text


def test_variants_that_ran_side_by_side_raise_no_drift_warning() -> None:
    start = datetime(2026, 3, 2, 23, 59, tzinfo=UTC)
    facts = [
        replace(one, started_at=start + timedelta(minutes=i))
        for i, one in enumerate([*solved("old", 30, 5), *solved("new", 30, 5)])
    ]
    assert compare(facts, "old", "new").warnings == ()


def test_one_shared_case_is_undecided_and_said_to_say_nothing() -> None:
    found = compare([*grid("old", {"a": [0.0, 0.0]}), *grid("new", {"a": [1.0, 1.0]})], "old", "new")
    assert found.verdict is Verdict.UNDECIDED
    assert found.warnings == ("One shared case says nothing about others; use at least 20.",)


def test_free_runs_have_no_cost_ratio_and_are_never_cheaper() -> None:
    facts = [*solved("old", 40, 10, cost_nusd=0), *solved("new", 40, 10, cost_nusd=0)]
    found = compare(facts, "old", "new")
    assert (found.cost.value, found.cheaper) == (None, False)
    assert found.cost.note == "Not defined: neither used any."
    assert found.sentence.endswith(").")


SCORES = st.dictionaries(
    st.sampled_from([f"case{i}" for i in range(6)]),
    st.lists(st.sampled_from([None, 0.0, 0.25, 1 / 3, 1.0]), min_size=1, max_size=3),
    min_size=2,
)


def _try(facts: list[RunFact], baseline: str, candidate: str) -> Comparison | None:
    try:
        return compare(facts, baseline, candidate)
    except NoSharedCasesError:
        return None


@given(old=SCORES, new=SCORES, seed=st.integers(0, 99))
def test_comparison_is_json_and_ignores_the_order_of_runs(
    old: dict[str, list[float | None]], new: dict[str, list[float | None]], seed: int
) -> None:
    facts = [*grid("old", old), *grid("new", new, cost_nusd=0 if seed % 3 == 0 else 7)]
    shuffled = list(facts)
    random.Random(seed).shuffle(shuffled)
    found = _try(facts, "old", "new")
    assert _try(shuffled, "old", "new") == found
    if found:
        json.dumps(asdict(found), allow_nan=False)


@given(old=SCORES, new=SCORES)
def test_swapped_comparison_mirrors_its_verdict(
    old: dict[str, list[float | None]], new: dict[str, list[float | None]]
) -> None:
    facts = [*grid("old", old), *grid("new", new)]
    there, back = _try(facts, "old", "new"), _try(facts, "new", "old")
    assert (there is None) == (back is None)
    if not there or not back:
        return
    assert back.difference.delta == -there.difference.delta
    assert (back.worst_case_low, back.worst_case_high) == (-there.worst_case_high, -there.worst_case_low)
    mirror = {Verdict.BETTER: Verdict.WORSE, Verdict.WORSE: Verdict.BETTER}
    if there.verdict in mirror or back.verdict in mirror:
        assert back.verdict is mirror[there.verdict]
    assert (back.verdict is Verdict.INDECISIVE_COVERAGE) == (there.verdict is Verdict.INDECISIVE_COVERAGE)


@given(old=SCORES, new=SCORES)
def test_more_lost_runs_never_move_the_difference(
    old: dict[str, list[float | None]], new: dict[str, list[float | None]]
) -> None:
    facts = [*grid("old", old), *grid("new", new)]
    before = _try(facts, "old", "new")
    after = _try([*facts, fact("new", "case0", 99, None), fact("old", "elsewhere", 99, None)], "old", "new")
    if before and after:
        assert after.difference == before.difference
        assert after.baseline.score == before.baseline.score
        assert after.candidate.score == before.candidate.score
        assert after.cost == before.cost
