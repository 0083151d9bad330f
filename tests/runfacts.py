"""Finished runs for tests of the statistics: written by hand, or drawn from a known truth."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from evalpurse.analysis.runs import RunFact


def fact(variant: str, case_id: str, repeat: int, score: float | None, **changes: Any) -> RunFact:
    """A run; counted when it has a score, else lost to the infrastructure."""
    counted = score is not None
    made = RunFact(
        variant=variant,
        case_id=case_id,
        repeat=repeat,
        outcome="scored" if counted else "infra_error",
        counted=counted,
        score=score,
        cost_nusd=1_000_000,
        duration_s=2.0,
        start_latency_s=0.5,
        input_tokens=100,
        output_tokens=10,
        reused=False,
    )
    return replace(made, **changes)


def grid(variant: str, scores: Mapping[str, Sequence[float | None]], **changes: Any) -> list[RunFact]:
    return [
        fact(variant, case_id, repeat, score, **changes)
        for case_id, of_case in scores.items()
        for repeat, score in enumerate(of_case)
    ]


NORMAL = NormalDist()
BIMODAL_C, BIMODAL_TAU = -0.4189, 3.1797
BIMODAL_MEAN = NORMAL.cdf(BIMODAL_C / math.sqrt(1 + BIMODAL_TAU**2))


def bimodal_values(
    random_: random.Random, cases: int, repeats: int, rho: float = 1.0
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Two variants of equal true mean on cases that are mostly easy or mostly hard.

    p_A = Phi(c + tau z), p_B = Phi(c + tau (rho z + sqrt(1 - rho^2) u)), runs Bernoulli.
    """
    first: dict[str, list[float]] = {}
    second: dict[str, list[float]] = {}
    for number in range(cases):
        z, u = random_.gauss(0, 1), random_.gauss(0, 1)
        mixed = rho * z + math.sqrt(1 - rho**2) * u
        for values, place in ((first, z), (second, mixed)):
            chance = NORMAL.cdf(BIMODAL_C + BIMODAL_TAU * place)
            values[f"c{number}"] = [float(random_.random() < chance) for _ in range(repeats)]
    return first, second
