"""How the ledger's file is opened: SQLite in WAL mode, every commit on the disk before it counts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from evalpurse.budget.errors import LedgerDamagedError, LedgerUnavailableError
from evalpurse.budget.migrations import migrate, steps

BUSY_TIMEOUT_S = 5.0
SQLITE_VERSION_MIN = (3, 35, 0)


def open_for_writing(path: Path) -> sqlite3.Connection:
    connection = connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = 1")  # macOS: fsync alone stops at the drive's cache
        connection.execute("PRAGMA checkpoint_fullfsync = 1")
        migrate(connection, path, steps())
        path.chmod(0o600)
    except sqlite3.Error as error:
        connection.close()
        raise _cannot_open(path, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < SQLITE_VERSION_MIN:
        raise LedgerUnavailableError(
            f"Python was built with SQLite {sqlite3.sqlite_version}; the ledger needs 3.35 or newer.",
            hint="Use another Python.",
        )
    address = path.absolute().as_uri() + ("?mode=ro" if read_only else "?mode=rwc")
    try:
        return sqlite3.connect(
            address, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise _cannot_open(path, error) from error


def _cannot_open(path: Path, error: sqlite3.Error) -> LedgerDamagedError | LedgerUnavailableError:
    if isinstance(error, sqlite3.OperationalError):
        return LedgerUnavailableError(
            f"The ledger {path} cannot be opened: {error}.",
            hint="Check that the folder exists, is writable and has room; then try again.",
        )
    return LedgerDamagedError(
        f"The ledger {path} cannot be read: {error}.",
        hint="It was left as it is. Put back a copy from the backups folder.",
    )
