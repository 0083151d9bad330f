"""Getting from a home folder to an open, current database, without ever making a loss worse.

Whatever is found is looked at read-only first. A file that is newer, foreign or unreadable is left exactly
as it is. A damaged write-ahead log is moved aside, never deleted, and its good part is used.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import duckdb

from evalpurse.home import Home
from evalpurse.store.disk import free_bytes, is_disk_full
from evalpurse.store.engine import Engine, connect
from evalpurse.store.errors import (
    DiskFullError,
    ForeignDatabaseError,
    MigrationError,
    NewerSchemaError,
    StoreError,
    StoreLockedError,
    StoreUnreadableError,
)
from evalpurse.store.folders import sync_folder
from evalpurse.store.migrations import Migration, migrate

log = logging.getLogger(__name__)

_WAL_TROUBLE = re.compile(r"Corrupt WAL file|Failure while replaying WAL")
_WAL_BAD_FROM = re.compile(r"at byte position (\d+)")
_WAL_SUFFIXES = (".wal", ".wal.checkpoint")


class Opened(NamedTuple):
    """An open database, and what people should know about how it was opened."""

    engine: Engine
    notices: tuple[str, ...]


def open_database(home: Home, steps: Sequence[Migration]) -> Opened:
    """Opens the results of a home folder, creating or migrating them; the caller holds the data lock.

    Raises:
        NewerSchemaError, ForeignDatabaseError, StoreUnreadableError: the file was left as it is.
        MigrationError: the step was rolled back; the backup is named.
        DiskFullError: there is no room to create or migrate.
    """
    path = home.results_file
    try:
        if not path.exists():
            notices = _set_orphans_aside(home)
            _create(path, steps)
            return Opened(Engine(path), notices)
        found, notices = _look(home)
        version = _known_version(path, found, steps)
        aside = None if notices else _copy_wal(home)  # a damaged log is in the backups already
        engine = Engine(path)
    except (duckdb.Error, OSError) as error:
        raise _unreadable(path, error) from error
    try:
        notices = (*notices, *_check_log(home, engine, aside))
        if version < len(steps):
            notices = (*notices, _migrate_with_backup(home, engine, steps, version))
    except BaseException:
        engine.close()
        raise
    return Opened(engine, notices)


def _create(path: Path, steps: Sequence[Migration]) -> None:
    # Made beside its place and renamed: a results file that exists is a whole one.
    unfinished = path.with_suffix(".new")
    for leftover in (unfinished, Path(f"{unfinished}.wal")):
        leftover.unlink(missing_ok=True)
    connection = connect(unfinished)
    try:
        migrate(connection, steps, version=0)
        connection.execute("CHECKPOINT")
    finally:
        connection.close()
    unfinished.replace(path)
    sync_folder(path.parent)


def _look(home: Home) -> tuple[int | None, tuple[str, ...]]:
    """The schema version (None: not ours), read without changing the file; mends a damaged log."""
    path = home.results_file
    try:
        return _version_of(path), ()
    except duckdb.Error as error:
        if not _WAL_TROUBLE.search(str(error)) or is_disk_full(error):
            raise
        reason = error
    notice, kept = _set_wal_aside(home, reason)
    try:
        return _version_of(path), (notice,)
    except duckdb.Error:
        if not kept:
            raise
        # The part before the damage is a copy; the whole log is in the backups.
        Path(f"{path}.wal").unlink()
        log.critical("no part of the damaged write-ahead log could be used")
        return _version_of(path), (notice,)


def _version_of(path: Path) -> int | None:
    connection = connect(path, read_only=True)
    try:
        found = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall()
        return int(found[0][0])
    except (duckdb.CatalogException, duckdb.BinderException, IndexError, ValueError):
        return None
    finally:
        connection.close()


def _set_wal_aside(home: Home, reason: duckdb.Error) -> tuple[str, bool]:
    """Moves the log files into the backups; leaves a copy of the part before the damage, if it is known."""
    path = home.results_file
    folder = _move_wal(home)
    good = _WAL_BAD_FROM.search(str(reason))
    damaged, *others = folder.iterdir()
    if good and not others:  # of two log files it is not known which one the place is in
        Path(f"{path}.wal").write_bytes(damaged.read_bytes()[: int(good[1])])
    notice = (
        f"The write-ahead log of {path} is damaged ({reason}). It was moved to {folder}; results after the "
        "damage are missing here. Money is not affected: compare with `evalpurse budget verify`."
    )
    log.critical(notice)
    return notice, path.with_name(damaged.name).exists()


def _copy_wal(home: Home) -> Path | None:
    """A copy of a log that is about to be continued; None when there is none, or no room."""
    log_file = Path(f"{home.results_file}.wal")
    if not log_file.exists():
        return None
    folder = home.backups / f"wal-{_stamp()}"
    try:
        folder.mkdir(parents=True)
        return Path(shutil.copyfile(log_file, folder / log_file.name))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        log.warning("the write-ahead log was not copied before it is continued: %s", error)
        return None


def _check_log(home: Home, engine: Engine, aside: Path | None) -> tuple[str, ...]:
    """Whether the whole log was used: what DuckDB takes for a torn end, it cuts off at the next write.

    A torn end is what a kill in the middle of a write leaves. But one wrong length in the middle looks the
    same, and all that follows it would be gone.
    """
    if aside is None:
        return ()
    with engine.use() as use:
        try:
            use.cursor.execute("DELETE FROM meta WHERE key = 'log_continued_at'").fetchall()
            use.cursor.execute("INSERT INTO meta VALUES ('log_continued_at', ?)", [_stamp()]).fetchall()
        except duckdb.Error as error:
            log.warning("whether the whole log was used is not known: %s; a copy is %s", error, aside)
            return ()
    before, now = aside.read_bytes(), Path(f"{engine.path}.wal").read_bytes()
    if now.startswith(before):
        shutil.rmtree(aside.parent)
        return ()
    used = bisect_left(range(len(before)), True, key=lambda size: not now.startswith(before[: size + 1]))
    sync_folder(aside.parent)
    notice = (
        f"The last {len(before) - used} of {len(before)} bytes of the write-ahead log of {home.results_file} "
        "were not whole and are not used. After a kill a few thousand are normal. "
        f"The whole log is kept: {aside}."
    )
    log.error(notice)
    return (notice,)


def _set_orphans_aside(home: Home) -> tuple[str, ...]:
    """A log whose database is gone would keep a new one from opening."""
    if not any(Path(f"{home.results_file}{suffix}").exists() for suffix in _WAL_SUFFIXES):
        return ()
    folder = _move_wal(home)
    notice = f"{home.results_file} is missing, but its write-ahead log was there; it was moved to {folder}."
    log.critical(notice)
    return (notice,)


def _move_wal(home: Home) -> Path:
    folder = home.backups / f"wal-{_stamp()}"
    folder.mkdir(parents=True)
    for suffix in _WAL_SUFFIXES:
        if (log_file := Path(f"{home.results_file}{suffix}")).exists():
            log_file.replace(folder / log_file.name)
    sync_folder(folder)
    sync_folder(home.path)
    return folder


def _known_version(path: Path, version: int | None, steps: Sequence[Migration]) -> int:
    if version is None:
        raise ForeignDatabaseError(
            f"{path} is a DuckDB database, but not one of evalpurse's (it has no schema version).",
            hint="Move it away, or choose another home folder with EVALPURSE_HOME.",
            path=str(path),
        )
    if version > len(steps):
        raise NewerSchemaError(
            f"{path} has schema {version}; this evalpurse knows schemas up to {len(steps)}.",
            hint="Use the newer evalpurse that wrote it, or restore a backup from `backups/`.",
            path=str(path),
            found=version,
            known=len(steps),
        )
    return version


def _migrate_with_backup(home: Home, engine: Engine, steps: Sequence[Migration], version: int) -> str:
    with engine.use() as use:
        use.cursor.execute("CHECKPOINT").fetchall()  # all data is in the one file that is copied
        backup = _back_up(home, version)
        try:
            migrate(use.cursor, steps, version=version)
        except MigrationError as error:
            error.hint = f"{error.hint} A backup from before is {backup}."
            raise
        use.cursor.execute("CHECKPOINT").fetchall()  # no schema change is left to be replayed from the log
    notice = f"The results were brought from schema {version} to {len(steps)}; a backup is {backup}."
    log.warning(notice)
    return notice


def _back_up(home: Home, version: int) -> Path:
    source = home.results_file
    free, needed = free_bytes(home.path), 2 * source.stat().st_size
    if free < needed:
        raise StoreError(
            f"A backup and the change of schema need {needed / 1e6:,.0f} MB; {free / 1e6:,.0f} MB are free.",
            hint="Free some space and start again; nothing was changed.",
            free_bytes=free,
            needed_bytes=needed,
        )
    backup = home.backups / f"results-schema{version}-{_stamp()}.duckdb"
    backup.parent.mkdir(parents=True, exist_ok=True)
    # A child copies: opening and closing the file in this process would drop DuckDB's lock on it.
    python_copy = [sys.executable, "-c", "import shutil, sys; shutil.copyfile(*sys.argv[1:])"]
    copy = ["cp"] if shutil.which("cp") else python_copy
    done = subprocess.run([*copy, str(source), str(backup)], capture_output=True, text=True, check=False)
    if done.returncode or backup.stat().st_size != source.stat().st_size:
        raise StoreError(f"The backup {backup} could not be made: {done.stderr.strip()}", path=str(backup))
    descriptor = os.open(backup, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)
    sync_folder(backup.parent)
    return backup


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")


def _unreadable(path: Path, error: Exception) -> StoreError:
    if is_disk_full(error):
        return DiskFullError(path.parent, free_bytes=free_bytes(path.parent), doing="opening the results")
    if "Could not set lock" in str(error):
        return StoreLockedError(
            f"Another program has {path} open: {error}", hint="Close it there and start again."
        )
    return StoreUnreadableError(
        f"{path} cannot be opened: {error}",
        hint="It was left as it is. Restore a backup from `backups/`, or move it away to start afresh.",
        path=str(path),
    )
