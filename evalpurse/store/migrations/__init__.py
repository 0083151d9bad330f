"""Schema changes: an ordered list of small named steps, each recorded with its outcome in its transaction.

A database is always at the last step that committed, so a killed migration resumes where it stopped. A step
is a `NNNN_name.sql` file here, or a function in `FUNCTIONS`; one that alters existing tables makes one DDL
change only, and is never edited once released.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import NamedTuple

import duckdb

from evalpurse import __version__
from evalpurse.store.errors import MigrationError

log = logging.getLogger(__name__)

FILE_NAME = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")

BOOK_KEEPING = """
CREATE TABLE IF NOT EXISTS meta (key VARCHAR NOT NULL, value VARCHAR NOT NULL);
CREATE TABLE IF NOT EXISTS migrations (
  number BIGINT NOT NULL,
  name VARCHAR NOT NULL,
  outcome VARCHAR NOT NULL,
  app_version VARCHAR NOT NULL,
  duration_s DOUBLE NOT NULL,
  applied_at TIMESTAMPTZ NOT NULL
);
"""


class Migration(NamedTuple):
    """One step. `apply` works inside the transaction and returns its outcome, one line for the record."""

    number: int
    name: str
    apply: Callable[[duckdb.DuckDBPyConnection], str]


FUNCTIONS: Mapping[int, Migration] = {}


def all_migrations() -> tuple[Migration, ...]:
    """Every step, in order; their numbers are 1, 2, 3 and so on."""
    steps = dict(FUNCTIONS)
    for file in files(__name__).iterdir():
        if named := FILE_NAME.fullmatch(file.name):
            steps[int(named[1])] = from_sql(int(named[1]), named[2], file.read_text(encoding="utf-8"))
    return tuple(steps[number] for number in range(1, len(steps) + 1))


def from_sql(number: int, name: str, sql: str) -> Migration:
    """A step that runs SQL statements."""

    def apply(connection: duckdb.DuckDBPyConnection) -> str:
        statements = connection.extract_statements(sql)
        for statement in statements:
            connection.execute(statement).fetchall()
        return f"ran {len(statements)} statements"

    return Migration(number, name, apply)


def migrate(connection: duckdb.DuckDBPyConnection, steps: Sequence[Migration], *, version: int) -> None:
    """Brings a database from `version` (0: empty) through the steps above it.

    Raises:
        MigrationError: a step failed; it was rolled back and the ones before it stay.
    """
    for step in steps:
        if step.number > version:
            _apply(connection, step)


def _apply(connection: duckdb.DuckDBPyConnection, step: Migration) -> None:
    started = time.monotonic()
    connection.execute("BEGIN TRANSACTION")
    try:
        if step.number == 1:
            connection.execute(BOOK_KEEPING).fetchall()
        outcome = step.apply(connection)
        connection.execute(
            "INSERT INTO migrations VALUES (?, ?, ?, ?, ?, ?)",
            [step.number, step.name, outcome, __version__, time.monotonic() - started, datetime.now(UTC)],
        ).fetchall()
        connection.execute("DELETE FROM meta WHERE key = 'schema_version'").fetchall()
        connection.execute("INSERT INTO meta VALUES ('schema_version', ?)", [str(step.number)]).fetchall()
    except Exception as error:
        connection.execute("ROLLBACK")
        raise MigrationError(
            f"Schema change {step.number} ({step.name}) failed and was rolled back: {error}",
            hint="The data is as it was; use the version of evalpurse that wrote it, and report this.",
            number=step.number,
            name=step.name,
        ) from error
    connection.execute("COMMIT")
    log.info("schema change %d (%s): %s", step.number, step.name, outcome)
