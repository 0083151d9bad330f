"""The ledger's schema and how a file gets from one version to the next.

The version is SQLite's `user_version`; a step is a `.sql` file of the schema folder, in the order of its
number. All missing steps are one transaction, after a copy of the file was made: a ledger is at its old
version or at the new one, never between.
"""

from __future__ import annotations

import re
import sqlite3
import time
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from evalpurse.budget.errors import LedgerDamagedError, LedgerMigrationError, LedgerNewerError

APPLICATION_ID = 0x45505253
"""`EPRS` in the file's header: tells a ledger from any other SQLite file."""

_STEP_FILE = re.compile(r"([0-9]{4})_([a-z0-9_]+)\.sql")


class Step(NamedTuple):
    version: int
    name: str
    sql: str


def steps() -> list[Step]:
    """Every step there is, oldest first."""
    return sorted(
        Step(int(match[1]), match[2], file.read_text(encoding="utf-8"))
        for file in files("evalpurse.budget.schema").iterdir()
        if (match := _STEP_FILE.fullmatch(file.name))
    )


def migrate(connection: sqlite3.Connection, path: Path, known: list[Step]) -> None:
    """Brings the open ledger at `path` to the newest known version; does nothing when it is there.

    Raises LedgerNewerError, LedgerDamagedError (another program's file) or LedgerMigrationError.
    """
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    newest = known[-1].version
    if version > newest:
        raise LedgerNewerError(
            f"The ledger {path} has version {version}; this evalpurse knows versions up to {newest}.",
            hint="Install the newer evalpurse that wrote it; nothing was changed.",
            version=version,
            newest=newest,
        )
    _check_is_ours(connection, path, version)
    missing = [step for step in known if step.version > version]
    if not missing:
        return
    copy = _copy_aside(connection, path, version) if version else None
    try:
        connection.executescript(_script(missing))
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        kept = f"The copy made before it is {copy}." if copy else ""
        raise LedgerMigrationError(
            f"The ledger {path} could not be brought from version {version} to {newest}: {error}.",
            hint=f"Nothing was changed. {kept}".strip(),
            version=version,
            newest=newest,
        ) from error


def _script(missing: list[Step]) -> str:
    now_us = time.time_ns() // 1000
    body = "".join(
        f"{step.sql}\nINSERT INTO migrations VALUES ({step.version}, '{step.name}', 'done', {now_us});\n"
        for step in missing
    )
    return (
        f"BEGIN IMMEDIATE;\n{body}PRAGMA application_id = {APPLICATION_ID};\n"
        f"PRAGMA user_version = {missing[-1].version};\nCOMMIT;"
    )


def _check_is_ours(connection: sqlite3.Connection, path: Path, version: int) -> None:
    marked = int(connection.execute("PRAGMA application_id").fetchone()[0])
    tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if marked == APPLICATION_ID or (version == 0 and marked == 0 and tables == 0):
        return
    raise LedgerDamagedError(
        f"{path} is a database, but not a ledger of evalpurse.",
        hint="Move it away, or name another home folder.",
        application_id=marked,
    )


def _copy_aside(connection: sqlite3.Connection, path: Path, version: int) -> Path:
    folder = path.parent / "backups"
    folder.mkdir(mode=0o700, exist_ok=True)
    copy = folder / f"{path.stem}-v{version}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.sqlite"
    target = sqlite3.connect(copy)
    try:
        connection.backup(target)
    finally:
        target.close()
    copy.chmod(0o600)
    return copy
