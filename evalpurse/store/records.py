"""The rows of the results store: one frozen dataclass a table, its fields the columns in order.

Rows are appended, never edited: what changes over time (an experiment's status, a run's steps) is a new
row. Money is an integer of nano-dollars (`_nusd`), times are timezone-aware UTC, durations are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar


class Record:
    """Base of every row; `TABLE` names where it goes."""

    TABLE: ClassVar[str]


@dataclass(frozen=True)
class SuiteRow(Record):
    TABLE: ClassVar[str] = "suites"
    suite: str
    created_at: datetime


@dataclass(frozen=True)
class CaseRow(Record):
    """One version of a case. The content (input, files, graders) is a blob, so that SQL cannot show it."""

    TABLE: ClassVar[str] = "cases"
    suite: str
    case_id: str
    version: int
    case_digest: str
    split: str
    tags: list[str]
    graders: list[str]
    timeout_s: float
    content_blob: str
    created_at: datetime


@dataclass(frozen=True)
class VariantRow(Record):
    """A label for a variant digest. `spec_blob` is the whole specification as canonical JSON."""

    TABLE: ClassVar[str] = "variants"
    variant: str
    variant_digest: str
    repo: str
    commit_sha: str
    run_command: str
    model: str
    params: str
    parent: str
    description: str
    spec_blob: str
    created_at: datetime


@dataclass(frozen=True)
class WorldRow(Record):
    """A name for an immutable set of files. `manifest_blob` lists them as canonical JSON."""

    TABLE: ClassVar[str] = "worlds"
    world: str
    world_digest: str
    files: int
    bytes: int
    manifest_blob: str
    created_at: datetime


@dataclass(frozen=True)
class ExperimentRow(Record):
    """`rates` is JSON: the price of a second of sandbox in nano-dollars by variant, pinned at the launch."""

    TABLE: ClassVar[str] = "experiments"
    experiment_id: str
    suite: str
    split: str
    strategy: str
    variants: list[str]
    case_count: int
    repeats: int
    run_count: int
    cap_nusd: int
    allowance_nusd: int
    account: str
    max_parallel: int
    backend: str
    prices_digest: str
    baseline: str
    idempotency_key: str
    arguments_digest: str
    reuse: bool
    rates: str
    created_at: datetime


@dataclass(frozen=True)
class ExperimentStatusRow(Record):
    """The newest row of an experiment is its status: running, cancelling, finished, cancelled, failed."""

    TABLE: ClassVar[str] = "experiment_statuses"
    experiment_id: str
    status: str
    reason: str
    at: datetime


@dataclass(frozen=True)
class PlannedRunRow(Record):
    """One case x variant x repeat that an experiment wants; `seq` is its place in launch order."""

    TABLE: ClassVar[str] = "planned_runs"
    run_id: str
    experiment_id: str
    seq: int
    case_id: str
    case_version: int
    case_digest: str
    variant: str
    variant_digest: str
    repeat: int
    reuse_run_id: str


@dataclass(frozen=True)
class RunRow(Record):
    """A run that has ended, once and for ever. Tokens and model cost are what `cost_source` says they are."""

    TABLE: ClassVar[str] = "runs"
    run_id: str
    experiment_id: str
    suite: str
    split: str
    case_id: str
    case_version: int
    case_digest: str
    variant: str
    variant_digest: str
    repeat: int
    outcome: str
    counted: bool
    score: float | None
    attempts: int
    reused_from: str
    cost_nusd: int
    model_cost_nusd: int
    sandbox_cost_nusd: int
    cost_source: str
    input_tokens: int
    output_tokens: int
    duration_s: float
    start_latency_s: float
    exit_code: int | None
    error: str
    answer_blob: str
    log_blob: str
    transcript_blob: str
    artifacts_blob: str
    started_at: datetime | None
    ended_at: datetime


@dataclass(frozen=True)
class AttemptRow(Record):
    """One execution of a run that has ended, and what it was charged."""

    TABLE: ClassVar[str] = "attempts"
    attempt_id: str
    run_id: str
    experiment_id: str
    number: int
    backend: str
    outcome: str
    cost_nusd: int
    hold_nusd: int
    detail: str
    started_at: datetime | None
    ended_at: datetime


@dataclass(frozen=True)
class ScoreRow(Record):
    """One number of one finished run: a grader's score (`weight` > 0) or a free metric (`weight` 0)."""

    TABLE: ClassVar[str] = "scores"
    run_id: str
    experiment_id: str
    case_id: str
    split: str
    variant: str
    grader: str
    name: str
    value: float
    weight: float


@dataclass(frozen=True)
class UsageRow(Record):
    """Model usage of one run: one row a model and source (`reported` by the harness, later `metered`)."""

    TABLE: ClassVar[str] = "usage"
    run_id: str
    experiment_id: str
    attempt_id: str
    split: str
    provider: str
    model: str
    source: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    charged_nusd: int
    at: datetime


@dataclass(frozen=True)
class EventRow(Record):
    """A step of an attempt, recorded before the step is taken; or an event of an experiment."""

    TABLE: ClassVar[str] = "events"
    at: datetime
    experiment_id: str
    run_id: str
    attempt_id: str
    step: str
    detail: str


@dataclass(frozen=True)
class AccountRow(Record):
    """Mirror of one ledger account; the ledger is the truth, this lags it by about a second."""

    TABLE: ClassVar[str] = "accounts"
    account: str
    parent: str
    limit_nusd: int
    posted_nusd: int
    held_nusd: int
    state: str


@dataclass(frozen=True)
class JournalRow(Record):
    """Mirror of one ledger entry."""

    TABLE: ClassVar[str] = "journal"
    seq: int
    operation_id: str
    kind: str
    account: str
    hold_id: str
    amount_nusd: int
    at: datetime
    detail: str
