"""The rows that a run leaves in the store, built from how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from evalpurse.runs.charge import CostSource
from evalpurse.runs.job import Job, Result
from evalpurse.runs.outcomes import TREATMENTS, Outcome
from evalpurse.runs.sandboxes.protocol import Output
from evalpurse.store.blobs import Blobs
from evalpurse.store.records import (
    AttemptRow,
    ExperimentRow,
    PlannedRunRow,
    RunRow,
    ScoreRow,
    UsageRow,
)


async def keep_output(blobs: Blobs, output: Output | None) -> dict[str, str]:
    """Puts each part of an output into a blob and returns the digests; an absent part has none ("")."""
    names = ("answer", "log", "transcript", "artifacts")
    parts = {name: getattr(output, name, None) or b"" for name in names}
    kept = [name for name, part in parts.items() if part]
    digests = await blobs.put_async([parts[name] for name in kept]) if kept else []
    return dict.fromkeys(parts, "") | dict(zip(kept, digests, strict=True))


def attempt_row(job: Job, result: Result, backend: str) -> AttemptRow:
    """One attempt's end and charge; its detail says what went wrong, and why money was charged unproved."""
    return AttemptRow(
        attempt_id=job.attempt_id,
        run_id=job.planned.run_id,
        experiment_id=job.planned.experiment_id,
        number=job.number,
        backend=backend,
        outcome=result.outcome.value,
        cost_nusd=result.charge.total_nusd,
        hold_nusd=job.hold_nusd,
        detail=f"{result.error} {result.charge.note}".strip(),
        started_at=result.ended.started_at if result.ended else None,
        ended_at=result.at,
    )


def run_row(job: Job, result: Result, kept: Mapping[str, str], intended_at: datetime) -> RunRow:
    """A run's final row; its cost is that of all its attempts, its start latency counts from the intent."""
    ended, charge = result.ended, result.charge
    treatment = TREATMENTS[result.outcome]
    score = result.graded.score if result.graded is not None else treatment.fixed_score
    return replace(
        _bare_run_row(job.planned, job.suite, job.split, result.outcome, result.error, result.at),
        score=score if treatment.counted else None,
        attempts=job.number,
        cost_nusd=job.charged_before_nusd + charge.total_nusd,
        model_cost_nusd=charge.model_nusd,
        sandbox_cost_nusd=charge.sandbox_nusd,
        cost_source=charge.source.value,
        input_tokens=charge.input_tokens,
        output_tokens=charge.output_tokens,
        duration_s=(ended.ended_at - ended.started_at).total_seconds() if ended else 0.0,
        start_latency_s=max(0.0, (ended.started_at - intended_at).total_seconds()) if ended else 0.0,
        exit_code=ended.exit_code if ended else None,
        answer_blob=kept["answer"],
        log_blob=kept["log"],
        transcript_blob=kept["transcript"],
        artifacts_blob=kept["artifacts"],
        started_at=ended.started_at if ended else None,
    )


def unstarted_run_row(
    planned: PlannedRunRow,
    experiment: ExperimentRow,
    outcome: Outcome,
    reason: str,
    at: datetime,
    *,
    attempts: int,
    charged_nusd: int,
) -> RunRow:
    """The final row of a run whose turn never came: it counts nowhere and cost what earlier attempts did."""
    bare = _bare_run_row(planned, experiment.suite, experiment.split, outcome, reason, at)
    return replace(bare, attempts=attempts, cost_nusd=charged_nusd)


def reused_run_row(planned: PlannedRunRow, earlier: RunRow, at: datetime) -> RunRow:
    """The final row of a run whose result was paid for before: shown as reused, at no cost."""
    return replace(
        earlier,
        run_id=planned.run_id,
        experiment_id=planned.experiment_id,
        case_id=planned.case_id,
        case_version=planned.case_version,
        variant=planned.variant,
        repeat=planned.repeat,
        reused_from=earlier.run_id,
        cost_nusd=0,
        ended_at=at,
    )


def score_rows(job: Job, result: Result) -> list[ScoreRow]:
    """Grader scores and the harness's own numbers (weight 0, no grader)."""
    planned = job.planned
    values: list[tuple[str, str, float, float]] = []
    if result.graded is not None:
        values += [(score.grader, score.name, score.value, score.weight) for score in result.graded.scores]
    if result.metrics is not None:
        values += [("", name, value, 0.0) for name, value in result.metrics.numbers.items()]
    return [
        ScoreRow(
            planned.run_id,
            planned.experiment_id,
            planned.case_id,
            job.split,
            planned.variant,
            grader,
            name,
            value,
            weight,
        )
        for grader, name, value, weight in values
    ]


def usage_rows(job: Job, result: Result) -> list[UsageRow]:
    """Model usage of one attempt, one row a reported entry."""
    return [
        UsageRow(
            run_id=job.planned.run_id,
            experiment_id=job.planned.experiment_id,
            attempt_id=job.attempt_id,
            split=job.split,
            provider=priced.provider,
            model=priced.model,
            source=result.charge.source.value,
            requests=usage.requests,
            input_tokens=usage.input_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            charged_nusd=priced.cost_nusd,
            at=result.at,
        )
        for usage, priced in result.charge.usage
    ]


def _bare_run_row(
    planned: PlannedRunRow, suite: str, split: str, outcome: Outcome, error: str, at: datetime
) -> RunRow:
    return RunRow(
        run_id=planned.run_id,
        experiment_id=planned.experiment_id,
        suite=suite,
        split=split,
        case_id=planned.case_id,
        case_version=planned.case_version,
        case_digest=planned.case_digest,
        variant=planned.variant,
        variant_digest=planned.variant_digest,
        repeat=planned.repeat,
        outcome=outcome.value,
        counted=TREATMENTS[outcome].counted,
        score=None,
        attempts=0,
        reused_from="",
        cost_nusd=0,
        model_cost_nusd=0,
        sandbox_cost_nusd=0,
        cost_source=CostSource.NONE.value,
        input_tokens=0,
        output_tokens=0,
        duration_s=0.0,
        start_latency_s=0.0,
        exit_code=None,
        error=error,
        answer_blob="",
        log_blob="",
        transcript_blob="",
        artifacts_blob="",
        started_at=None,
        ended_at=at,
    )
