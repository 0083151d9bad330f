"""How small an effect a planned size can find, and what size an effect needs: asked before paying.

Noise within a case comes from the suite's own runs once enough cases have repeats, and until then from a
profile of suites like it; every answer says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from evalpurse.analysis.distributions import normal_quantile
from evalpurse.analysis.errors import AnalysisError
from evalpurse.analysis.estimates import variance_split
from evalpurse.analysis.runs import RunFact, by_case, distinct, mean


@dataclass(frozen=True)
class Profile:
    """A kind of suite: mean score, variance between cases and within a case (of one run)."""

    name: str
    mean: float
    between: float
    within: float


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("bimodal", 0.45, 0.18, 0.0675),
        Profile("noisy", 0.42, 0.10, 0.1436),
        Profile("solved", 0.80, 0.08, 0.08),
    )
}
DEFAULT_PROFILE = PROFILES["bimodal"]
SD_DELTA = 0.15
"""Spread over cases of the true effect of one edit to a harness; another harness has about twice that."""
OWN_CASES_MIN = 10
"""Cases with repeats from which their own noise is believed rather than a profile's."""
REPEATS_MAX = 20
"""More repeats than this to reach an effect counts as out of reach: add cases instead."""


@dataclass(frozen=True)
class Noise:
    """Variance of one run within a case, and where the number is from."""

    within: float
    source: str


def noise_of(facts: Iterable[RunFact], *, profile: Profile = DEFAULT_PROFILE) -> Noise:
    """From the runs given, pooled over variants, when one has repeats on enough cases; else the profile's."""
    facts = distinct(facts)
    splits = [
        variance_split(by_case(fact for fact in facts if fact.variant == variant))
        for variant in sorted({fact.variant for fact in facts})
    ]
    own = [split for split in splits if split and split.repeated_cases >= OWN_CASES_MIN]
    if not own:
        return Noise(profile.within, f"profile {profile.name}")
    cases = sum(split.repeated_cases for split in own)
    return Noise(
        mean([split.within for split in own]), f"own repeats on {cases} cases of {len(own)} variants"
    )


def minimum_detectable_effect(
    cases: int,
    repeats: int,
    repeats_baseline: int | None = None,
    *,
    within: float = DEFAULT_PROFILE.within,
    sd_delta: float = SD_DELTA,
    alpha: float = 0.05,
    power: float = 0.8,
) -> float:
    """MDE = (z_{1-alpha} + z_power) sqrt((sd_delta^2 + w2 / m_A + w2 / m_B) / n), as a difference of scores.

    The usual sample-size formula of a one-sided paired test, with the variance of a paired difference of
    case means. `repeats_baseline` differs from `repeats` when the baseline's runs are reused.

    Raises:
        AnalysisError: cases or repeats below 1, or another number out of range.
    """
    if repeats_baseline is None:
        repeats_baseline = repeats
    _check(cases=cases, repeats=repeats, repeats_baseline=repeats_baseline)
    per_case = _pair_variance(within, sd_delta, repeats_baseline, repeats)
    return _factor(alpha, power) * math.sqrt(per_case / cases)


def cases_needed(
    effect: float,
    repeats: int,
    *,
    within: float = DEFAULT_PROFILE.within,
    sd_delta: float = SD_DELTA,
    alpha: float = 0.05,
    power: float = 0.8,
) -> int:
    """The fewest cases on which a true difference of `effect` is found with the given power.

    Raises:
        AnalysisError: the effect is not between 0 and 1, or repeats is below 1.
    """
    _check(repeats=repeats)
    _check_effect(effect)
    needed = _pair_variance(within, sd_delta, repeats, repeats) * (_factor(alpha, power) / effect) ** 2
    return max(2, math.ceil(needed - 1e-9))


@dataclass(frozen=True)
class Size:
    """Cases and repeats a variant for an effect; `repeats` is None when no number of repeats suffices.

    `floor` is the smallest effect that these cases can show with repeats without end.
    """

    cases: int
    repeats: int | None
    floor: float
    advice: str


def size_for(
    effect: float,
    suite_cases: int,
    *,
    within: float = DEFAULT_PROFILE.within,
    sd_delta: float = SD_DELTA,
    alpha: float = 0.05,
    power: float = 0.8,
) -> Size:
    """The cheapest size for an effect: cases first, one repeat each, then repeats on all cases.

    With v = (effect / factor)^2: n = (sd_delta^2 + 2 w2) / v cases at one repeat; if the suite is smaller,
    m = 2 w2 / (v n - sd_delta^2) repeats on all of it.

    Raises:
        AnalysisError: the effect is not between 0 and 1, or the suite is empty.
    """
    _check(suite_cases=suite_cases)
    _check_effect(effect)
    factor = _factor(alpha, power)
    floor = factor * sd_delta / math.sqrt(suite_cases)
    once = cases_needed(effect, 1, within=within, sd_delta=sd_delta, alpha=alpha, power=power)
    if once <= suite_cases:
        return Size(once, 1, floor, f"{once} of {suite_cases} cases, one repeat each.")
    room = (effect / factor) ** 2 * suite_cases - sd_delta**2
    repeats = max(1, math.ceil(2 * within / room - 1e-9)) if room > 0 else REPEATS_MAX + 1
    if repeats <= REPEATS_MAX:
        return Size(suite_cases, repeats, floor, f"All {suite_cases} cases, {repeats} repeats each.")
    least = cases_needed(effect, REPEATS_MAX, within=within, sd_delta=sd_delta, alpha=alpha, power=power)
    advice = (
        f"{suite_cases} cases cannot show {effect:g} with {REPEATS_MAX} repeats or fewer, and nothing under "
        f"{floor:.3f} with any number; add cases (at least {least}, or {once} with one repeat each)."
    )
    return Size(suite_cases, None, floor, advice)


@dataclass(frozen=True)
class PlannedPower:
    """What a planned experiment can find; `sentence` says it with its assumptions."""

    detectable: float
    cases: int
    repeats: int
    within: float
    within_source: str
    sd_delta: float
    sentence: str


def planned_power(
    cases: int,
    repeats: int,
    *,
    facts: Iterable[RunFact] = (),
    profile: Profile = DEFAULT_PROFILE,
    alpha: float = 0.05,
    power: float = 0.8,
) -> PlannedPower:
    """What a dry run shows: the smallest true difference that the planned size finds.

    `facts` are earlier runs of the same suite, for their own noise.

    Raises:
        AnalysisError: cases or repeats below 1.
    """
    noise = noise_of(facts, profile=profile)
    found = minimum_detectable_effect(cases, repeats, within=noise.within, alpha=alpha, power=power)
    sentence = (
        f"{cases} cases x {repeats} repeats detect a true difference of {found:.3f} with power {power:.0%} "
        f"(alpha {alpha:g} one-sided; noise from {noise.source}); smaller ones will usually stay undecided."
    )
    return PlannedPower(found, cases, repeats, noise.within, noise.source, SD_DELTA, sentence)


def _factor(alpha: float, power: float) -> float:
    if not (0 < alpha < 1 and 0 < power < 1 and alpha < power):
        raise AnalysisError(f"alpha {alpha} and power {power} must be between 0 and 1, alpha below power.")
    return normal_quantile(1 - alpha) + normal_quantile(power)


def _pair_variance(within: float, sd_delta: float, repeats_a: int, repeats_b: int) -> float:
    if not (math.isfinite(within) and within >= 0 and math.isfinite(sd_delta) and sd_delta >= 0):
        raise AnalysisError(f"within {within} and sd_delta {sd_delta} must be finite and 0 or more.")
    return sd_delta**2 + within / repeats_a + within / repeats_b


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise AnalysisError(f"{name} is {value}; it must be at least 1.", parameter=name, value=value)


def _check_effect(effect: float) -> None:
    if not (math.isfinite(effect) and 0 < effect <= 1):
        raise AnalysisError(f"The effect is {effect}; it must be above 0 and at most 1.", effect=effect)
