"""The design survives every seeded world; each known-bad policy is caught in some of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ledger_simulator import MUTANTS, Simulation, simulate

SEEDS = 100
RAM = Path("/dev/shm")  # noqa: S108 - a fresh private folder is made inside


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that exists: worlds are many, and none of them survives."""
    if not os.access(RAM, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=RAM) as made:
        yield Path(made)


def test_the_design_never_lets_a_bill_exceed_the_books(folder: Path) -> None:
    outcomes = [simulate(Simulation, seed, folder) for seed in range(SEEDS)]
    broken = [outcome for outcome in outcomes if outcome.violation]
    assert broken == []
    assert sum(outcome.crashes for outcome in outcomes) > SEEDS
    assert sum(outcome.launched for outcome in outcomes) > 10 * SEEDS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_known_bad_policy_is_caught(mutant: type[Simulation], folder: Path) -> None:
    for seed in range(SEEDS):
        if (outcome := simulate(mutant, seed, folder)).violation:
            assert "billed" in outcome.violation
            return
    pytest.fail(f"{SEEDS} worlds did not show that {mutant.__name__} is wrong")
