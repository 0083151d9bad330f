"""Rows for tests of the store: whole records of which a test names only what it is about."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, get_type_hints

from evalpurse.store.database import Options
from evalpurse.store.records import EventRow, ExperimentRow, ExperimentStatusRow, Record, RunRow, ScoreRow

BARE = Options(ballast_bytes=0)
START = datetime(2026, 5, 17, 12, 30, 15, 123456, tzinfo=UTC)

R = TypeVar("R", bound=Record)

_SAMPLES: dict[Any, Any] = {
    bool: True,
    datetime: START,
    float: 0.25,
    int: 7,
    list[str]: ["one", "zwei \u00fc"],
    str: "text \u2603 with 'quotes' and $signs",
    float | None: None,
    int | None: -3,
    datetime | None: None,
}


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def sample(record: type[R], **given: Any) -> R:
    """A row with a value of the right type in every column, and those that are given."""
    return record(**{**_defaults(record), **given})


_known: dict[type[Record], dict[str, Any]] = {}


def _defaults(record: type[Record]) -> dict[str, Any]:
    if record not in _known:
        hints = get_type_hints(record)
        _known[record] = {field.name: _SAMPLES[hints[field.name]] for field in fields(record)}  # type: ignore[arg-type]
    return _known[record]


def event(number: int, **given: Any) -> EventRow:
    return sample(EventRow, **{"at": at(number), "run_id": f"run-{number}", **given})


def score(run_id: str, name: str) -> ScoreRow:
    return sample(ScoreRow, run_id=run_id, name=name)


def run(run_id: str, **given: Any) -> RunRow:
    plain: dict[str, Any] = {
        "experiment_id": "exp_1",
        "suite": "s",
        "split": "dev",
        "outcome": "scored",
        "counted": True,
        "score": 1.0,
        "reused_from": "",
    }
    return sample(RunRow, run_id=run_id, **{**plain, **given})


def experiment(experiment_id: str, **given: Any) -> ExperimentRow:
    return sample(ExperimentRow, experiment_id=experiment_id, **given)


def status(experiment_id: str, word: str, seconds: float) -> ExperimentStatusRow:
    return ExperimentStatusRow(experiment_id, word, "because", at(seconds))
