"""Sizes and the effects they find, held to the published table and to simulation."""

from __future__ import annotations

import math
import random

import pytest

from evalpurse.analysis.errors import AnalysisError
from evalpurse.analysis.planning import (
    PROFILES,
    cases_needed,
    minimum_detectable_effect,
    noise_of,
    planned_power,
    size_for,
)
from tests.runfacts import bimodal_values, fact, grid


@pytest.mark.parametrize(
    ("profile", "sizes"),
    [
        ("bimodal", {(20, 5): 12.4, (100, 1): 9.9, (100, 3): 6.5, (100, 5): 5.5, (200, 5): 3.9}),
        ("noisy", {(20, 5): 15.7, (100, 1): 13.8, (100, 5): 7.0, (200, 3): 6.0, (200, 5): 5.0}),
        ("solved", {(30, 5): 10.6, (50, 5): 8.2, (100, 5): 5.8, (200, 1): 7.5}),
    ],
)
def test_minimum_detectable_effects_are_those_of_the_table(
    profile: str, sizes: dict[tuple[int, int], float]
) -> None:
    within = PROFILES[profile].within
    for (cases, repeats), points in sizes.items():
        assert 100 * minimum_detectable_effect(cases, repeats, within=within) == pytest.approx(
            points, abs=0.051
        )


def test_reused_baseline_with_more_repeats_lowers_the_effect() -> None:
    assert minimum_detectable_effect(100, 1, repeats_baseline=5) < minimum_detectable_effect(100, 1)
    with pytest.raises(AnalysisError, match="repeats_baseline is 0"):
        minimum_detectable_effect(100, 1, repeats_baseline=0)


def test_cases_needed_is_the_fewest() -> None:
    cases = cases_needed(0.05, 5)
    assert minimum_detectable_effect(cases, 5) <= 0.05 < minimum_detectable_effect(cases - 1, 5)


def test_size_takes_cases_before_repeats() -> None:
    few = size_for(0.10, 200)
    assert (few.repeats, few.cases < 200) == (1, True)
    more = size_for(0.05, 200)
    assert more.cases == 200
    assert more.repeats == 3
    assert minimum_detectable_effect(200, 3) <= 0.05 < minimum_detectable_effect(200, 2)


def test_size_out_of_reach_names_the_floor_and_the_cases_that_would_do() -> None:
    found = size_for(0.05, 20)
    assert found.repeats is None
    assert found.floor == pytest.approx(0.0834, abs=1e-4)
    assert found.floor == pytest.approx(2.4865 * 0.15 / math.sqrt(20), abs=1e-5)
    least = cases_needed(0.05, 20)
    assert f"at least {least}," in found.advice
    assert minimum_detectable_effect(least, 20) <= 0.05


@pytest.mark.parametrize("bad", [{"cases": 0, "repeats": 1}, {"cases": 10, "repeats": 0}])
def test_empty_plans_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(AnalysisError, match="is 0; it must be at least 1"):
        minimum_detectable_effect(**bad)


@pytest.mark.parametrize("effect", [0.0, -0.1, 1.5, float("nan")])
def test_effects_out_of_range_are_refused(effect: float) -> None:
    with pytest.raises(AnalysisError, match="The effect is"):
        size_for(effect, 100)


def test_own_repeats_replace_the_profile_once_there_are_enough() -> None:
    few = grid("base", {f"c{i}": [0.0, 1.0] for i in range(9)})
    assert noise_of(few).source == "profile bimodal"
    enough = [*few, fact("base", "c9", 0, 1.0), fact("base", "c9", 1, 0.0)]
    own = noise_of(enough)
    assert own.within == pytest.approx(0.5)
    assert own.source == "own repeats on 10 cases of 1 variants"
    plan = planned_power(100, 5, facts=enough)
    assert plan.detectable == pytest.approx(minimum_detectable_effect(100, 5, within=0.5))
    assert "own repeats on 10 cases" in plan.sentence


def test_plan_without_runs_says_which_profile_it_assumes() -> None:
    plan = planned_power(100, 5)
    assert plan.sentence == (
        "100 cases x 5 repeats detect a true difference of 0.055 with power 80% "
        "(alpha 0.05 one-sided; noise from profile bimodal); smaller ones will usually stay undecided."
    )


def test_profile_noise_is_what_its_generator_makes() -> None:
    first, _ = bimodal_values(random.Random(11), cases=4000, repeats=5)
    own = noise_of(grid("base", first))
    assert own.within == pytest.approx(PROFILES["bimodal"].within, abs=0.004)
