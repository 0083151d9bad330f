"""What agents may read: the public tables, each column's type and meaning, and which rows are filtered out.

A public table is one SELECT over the store, run by the daemon; its result is copied for the worker that runs
agent SQL, which has nothing else. Holdout cases are shown by no row: not the case, nor any run, attempt,
score, usage or event of it. Digests of blobs are never shown. Every field of every record is either public
or in `HIDDEN`, so that a new field is a decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class PublicColumn:
    """One column. `sql` is how the daemon computes it; empty when it is the stored column of that name."""

    name: str
    type: str
    meaning: str
    sql: str = ""


@dataclass(frozen=True)
class PublicTable:
    """One table as agents see it. `source` is what follows FROM in the daemon's own SELECT."""

    name: str
    meaning: str
    columns: tuple[PublicColumn, ...]
    source: str

    @property
    def statement(self) -> str:
        """The SELECT that reads it from the store; its column types are exactly the declared ones."""
        columns = ", ".join(
            f'CAST({column.sql or _stored(column.name)} AS {column.type}) AS "{column.name}"'
            for column in self.columns
        )
        return f"SELECT {columns} FROM {self.source}"  # noqa: S608 - only constants of this module


def _stored(name: str) -> str:
    return f't."{name}"'


def _text(name: str, meaning: str) -> PublicColumn:
    return PublicColumn(name, "VARCHAR", meaning)


def _count(name: str, meaning: str) -> PublicColumn:
    return PublicColumn(name, "BIGINT", meaning)


def _number(name: str, meaning: str) -> PublicColumn:
    return PublicColumn(name, "DOUBLE", meaning)


def _flag(name: str, meaning: str) -> PublicColumn:
    return PublicColumn(name, "BOOLEAN", meaning)


def _time(name: str, meaning: str) -> PublicColumn:
    return PublicColumn(name, "TIMESTAMPTZ", f"{meaning}, UTC")


def _happened(meaning: str) -> PublicColumn:
    """The stored column is `at`, a word that SQL would want quoted."""
    return PublicColumn("happened_at", "TIMESTAMPTZ", f"{meaning}, UTC", 't."at"')


def _texts(name: str, meaning: str) -> PublicColumn:
    return PublicColumn(name, "VARCHAR[]", meaning)


def _money(name: str, meaning: str) -> tuple[PublicColumn, PublicColumn]:
    """Exact integers to add up, and dollars to read."""
    return (
        PublicColumn(f"{name}_nusd", "BIGINT", f"{meaning}, in nano-dollars (10^-9 USD), exact"),
        PublicColumn(f"{name}_usd", "DOUBLE", f"{meaning}, in USD", f't."{name}_nusd" / 1e9'),
    )


# An experiment's split is `dev` or it is hidden: a row that belongs to no known experiment is hidden too.
_DEV: Final = "SELECT e.experiment_id FROM experiments e WHERE e.split = 'dev'"
_DEV_CASE: Final = (
    "EXISTS (SELECT 1 FROM cases c JOIN experiments x ON x.suite = c.suite WHERE c.split = 'dev'"
    " AND x.experiment_id = t.experiment_id AND c.case_id = t.case_id AND c.version = t.case_version)"
)
# The ledger's ids start with the experiment they pay for: `exp_xxxxxxxx.00001.1`.
_PAYS_HOLDOUT: Final = (
    "coalesce(list_has_any(regexp_extract_all(concat_ws(' ', t.hold_id, t.operation_id, t.detail),"
    " 'exp_[0-9A-Za-z]+'), (SELECT list(e.experiment_id) FROM experiments e WHERE e.split <> 'dev')), FALSE)"
)


def _unless_holdout(name: str, meaning: str) -> PublicColumn:
    """Runs of holdout cases are paid in the open, but which run a payment is for stays hidden."""
    return PublicColumn(
        name,
        "VARCHAR",
        f"{meaning}; 'holdout' where it pays for a holdout run",
        f"CASE WHEN {_PAYS_HOLDOUT} THEN 'holdout' ELSE t.\"{name}\" END",
    )


TABLES: Final = (
    PublicTable(
        "suites",
        "Named sets of cases.",
        (_text("suite", "name of the suite"), _time("created_at", "when it was made")),
        "suites t",
    ),
    PublicTable(
        "cases",
        "Versions of dev cases, without their content (input, files, graders). Holdout cases are not here.",
        (
            _text("suite", "suite that it belongs to"),
            _text("case_id", "name of the case within its suite"),
            _count("version", "1, 2, 3, ...: a change makes a new version; the highest is current"),
            _text("case_digest", "identity of this version's content"),
            _text("split", "always 'dev' here"),
            _texts("tags", "labels given by the author"),
            _texts("graders", "kinds of its graders: exact, contains, regex, numeric, json, command"),
            _number("timeout_s", "seconds that a harness gets"),
            _time("created_at", "when this version was made"),
        ),
        "cases t WHERE t.split = 'dev'",
    ),
    PublicTable(
        "variants",
        "Labels for a harness at one commit plus its overlay; two labels with one digest are one variant.",
        (
            _text("variant", "label"),
            _text("variant_digest", "identity of the whole specification"),
            _text("repo", "where the harness source came from"),
            _text("commit_sha", "full commit of the harness"),
            _text("run_command", "command that runs the harness"),
            _text("model", "model it was declared to use, or empty"),
            _text("params", "parameters as JSON text: params->>'$.name' reads one"),
            _text("parent", "label of the variant it was made from, or empty"),
            _text("description", "what was changed and why, by its author"),
            _time("created_at", "when the label was made"),
        ),
        "variants t",
    ),
    PublicTable(
        "worlds",
        "Immutable sets of files that runs start from, mounted read-only.",
        (
            _text("world", "name"),
            _text("world_digest", "identity of all its files"),
            _count("files", "number of files"),
            _count("bytes", "sum of their sizes"),
            _time("created_at", "when it was added"),
        ),
        "worlds t",
    ),
    PublicTable(
        "experiments",
        "Suite x variants x repeats under one cap. Its newest status is in experiment_status.",
        (
            _text("experiment_id", "id, exp_xxxxxxxx"),
            _text("suite", "suite that it ran on"),
            _text("split", "'dev' or 'holdout'; the runs of a holdout experiment are in no table"),
            _text("strategy", "'grid': every combination"),
            _texts("variants", "labels of the variants compared"),
            _count("case_count", "number of cases"),
            _count("repeats", "runs of each case and variant"),
            _count("run_count", "cases x variants x repeats"),
            *_money("cap", "most that the whole experiment may spend"),
            *_money("allowance", "most that one run may spend on models"),
            _text("account", "account of the budget tree that pays"),
            _count("max_parallel", "most runs alive at once"),
            _text("backend", "where sandboxes ran: 'local' or 'modal'"),
            _text("prices_digest", "identity of the price list it was priced with"),
            _text("rates", "JSON: nano-dollars a second of sandbox, by variant"),
            _text("baseline", "variant that the others are compared with, or empty"),
            _flag("reuse", "whether results already paid for may be taken over"),
            _time("created_at", "when it was launched"),
        ),
        "experiments t",
    ),
    PublicTable(
        "experiment_status",
        "The newest status of each experiment, one row an experiment.",
        (
            _text("experiment_id", "the experiment"),
            _text("status", "running, cancelling, finished, cancelled or failed"),
            _text("reason", "why, or empty"),
            _happened("since when"),
        ),
        "experiment_statuses t"
        ' QUALIFY row_number() OVER (PARTITION BY t.experiment_id ORDER BY t."at" DESC, t.rowid DESC) = 1',
    ),
    PublicTable(
        "planned_runs",
        "Runs that an experiment on dev cases wants, in launch order; those that ended are in runs too.",
        (
            _text("run_id", "id, {experiment_id}.{seq}"),
            _text("experiment_id", "the experiment"),
            _count("seq", "place in launch order"),
            _text("case_id", "the case"),
            _count("case_version", "version of the case"),
            _text("case_digest", "identity of that version"),
            _text("variant", "label of the variant"),
            _text("variant_digest", "identity of the variant"),
            _count("repeat", "which repeat of this case and variant, from 1"),
            _text("reuse_run_id", "run whose result is taken over, or empty"),
        ),
        f"planned_runs t WHERE t.experiment_id IN ({_DEV}) AND {_DEV_CASE}",
    ),
    PublicTable(
        "runs",
        "Runs of dev cases that ended, one row each for ever: the table to aggregate.",
        (
            _text("run_id", "id, {experiment_id}.{seq}"),
            _text("experiment_id", "the experiment"),
            _text("suite", "the suite"),
            _text("split", "always 'dev' here"),
            _text("case_id", "the case: group or cluster by it"),
            _count("case_version", "version of the case"),
            _text("case_digest", "identity of that version"),
            _text("variant", "label of the variant"),
            _text("variant_digest", "identity of the variant"),
            _count("repeat", "which repeat of this case and variant"),
            _text(
                "outcome",
                "scored, agent_error, timeout, over_allowance, infra_error, grader_error, unfunded or"
                " cancelled",
            ),
            _flag("counted", "whether it counts in metrics: filter on it before averaging"),
            _number("score", "0 to 1; NULL when it was not graded"),
            _count("attempts", "executions, more than 1 after infrastructure failures"),
            _text("reused_from", "run whose result was taken over at no cost, or empty"),
            *_money("cost", "all that it was charged"),
            *_money("model_cost", "part for model calls"),
            *_money("sandbox_cost", "part for sandbox time"),
            _text("cost_source", "where model usage comes from: 'reported' by the harness, or 'metered'"),
            _count("input_tokens", "tokens sent to models"),
            _count("output_tokens", "tokens received from models"),
            _number("duration_s", "seconds that the harness ran"),
            _number("start_latency_s", "seconds from launch until the harness started"),
            PublicColumn(
                "exit_code", "BIGINT", "exit code of the harness; NULL when it never ended by itself"
            ),
            _text("error", "what went wrong, or empty"),
            _time("started_at", "when the harness started; NULL when it never did"),
            _time("ended_at", "when it ended"),
        ),
        "runs t WHERE t.split = 'dev'",
    ),
    PublicTable(
        "attempts",
        "Executions of runs of dev experiments that ended; a run has more than one after infra failures.",
        (
            _text("attempt_id", "id, {run_id}.{number}"),
            _text("run_id", "the run"),
            _text("experiment_id", "the experiment"),
            _count("number", "1, 2, 3, ..."),
            _text("backend", "where it ran"),
            _text("outcome", "how it ended, as in runs"),
            *_money("cost", "what was charged"),
            *_money("hold", "what was reserved for it"),
            _text("detail", "what happened"),
            _time("started_at", "when its sandbox started; NULL when it never did"),
            _time("ended_at", "when it ended"),
        ),
        f"attempts t WHERE t.experiment_id IN ({_DEV})",
    ),
    PublicTable(
        "scores",
        "Numbers of finished runs of dev cases, long form: one row a run and name.",
        (
            _text("run_id", "the run"),
            _text("experiment_id", "the experiment"),
            _text("case_id", "the case"),
            _text("split", "always 'dev' here"),
            _text("variant", "label of the variant"),
            _text("grader", "grader that gave it, or the harness"),
            _text("name", "name of the score or metric"),
            _number("value", "the number; scores are 0 to 1"),
            _number("weight", "weight in the run's score; 0 for a free metric"),
        ),
        "scores t WHERE t.split = 'dev'",
    ),
    PublicTable(
        "usage",
        "Model usage of runs of dev cases, one row a run, model and source.",
        (
            _text("run_id", "the run"),
            _text("experiment_id", "the experiment"),
            _text("attempt_id", "the attempt"),
            _text("split", "always 'dev' here"),
            _text("provider", "provider that it was priced as"),
            _text("model", "model"),
            _text("source", "'reported' by the harness, or 'metered' by the gateway"),
            _count("requests", "calls"),
            _count("input_tokens", "tokens sent, cached ones included"),
            _count("cached_tokens", "part of input_tokens that was read from a cache"),
            _count("output_tokens", "tokens received"),
            *_money("charged", "what it cost"),
            _happened("when it was recorded"),
        ),
        "usage t WHERE t.split = 'dev'",
    ),
    PublicTable(
        "events",
        "Steps of attempts and of experiments, each recorded before it was taken; dev experiments only.",
        (
            _happened("when"),
            _text("experiment_id", "the experiment, or empty"),
            _text("run_id", "the run, or empty"),
            _text("attempt_id", "the attempt, or empty"),
            _text("step", "what was about to be done"),
            _text("detail", "more about it"),
        ),
        f"events t WHERE t.experiment_id IN ({_DEV})",
    ),
    PublicTable(
        "accounts",
        "Budget accounts, about a second behind the ledger: posted + held never exceeds the limit.",
        (
            _text("account", "name"),
            _text("parent", "account above it, or empty at the top"),
            *_money("limit", "most that it may spend, set by a person"),
            *_money("posted", "spent"),
            *_money("held", "reserved for what is running"),
            _text("state", "open, frozen or closed"),
        ),
        "accounts t QUALIFY row_number() OVER (PARTITION BY t.account ORDER BY t.rowid DESC) = 1",
    ),
    PublicTable(
        "journal",
        "Every entry of the ledger, about a second behind it.",
        (
            _count("seq", "order of entries"),
            _unless_holdout("operation_id", "what was asked, once"),
            _text("kind", "hold, settle, release, set_limit, ..."),
            _text("account", "account that it changed"),
            _unless_holdout("hold_id", "hold it is about, the id of an attempt, or empty"),
            *_money("amount", "amount"),
            _happened("when"),
            _unless_holdout("detail", "why"),
        ),
        "journal t",
    ),
)

PUBLIC: Final[Mapping[str, PublicTable]] = MappingProxyType({table.name: table for table in TABLES})

# Fields of records that no public table shows: the way to content, and what only the daemon needs.
HIDDEN: Final = frozenset(
    {
        "cases.content_blob",
        "variants.spec_blob",
        "worlds.manifest_blob",
        "experiments.idempotency_key",
        "experiments.arguments_digest",
        "runs.answer_blob",
        "runs.log_blob",
        "runs.transcript_blob",
        "runs.artifacts_blob",
    }
)
