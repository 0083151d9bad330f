"""The one open DuckDB instance of this process.

Nothing else in the process may open the database file, by any means: DuckDB's lock on it would be lost and
a second writer could erase rows without an error. All work goes through cursors handed out here, each used
by one thread, and when the engine declares the instance broken (a failed checkpoint does that) all cursors
are waited for, everything is closed and the file is opened again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import duckdb

from evalpurse.store.errors import StoreBrokenError, StoreClosedError

log = logging.getLogger(__name__)

T = TypeVar("T")

# Readable by DuckDB 1.5, so that a downgrade stays possible for one release.
STORAGE_VERSION = "v1.5.0"
MEMORY_BYTES_MAX = 1 << 30
THREADS_MAX = 8

# After one of the first two the instance answers nothing any more. The third is what `Engine.replace`, and
# nothing else, does to work that is under way on such an instance.
BROKEN = (duckdb.FatalException, duckdb.InternalException, duckdb.InterruptException)


class Use(NamedTuple):
    """A cursor, and the number of the opening that it belongs to."""

    cursor: duckdb.DuckDBPyConnection
    opening: int


def connect(path: Path, *, read_only: bool = False) -> duckdb.DuckDBPyConnection:
    """Opens a database file with the settings that the store relies on."""
    config: dict[str, Any] = {
        "memory_limit": f"{_memory_bytes() // (1 << 20)}MiB",
        "threads": max(1, min(THREADS_MAX, os.cpu_count() or 1)),
        # The writer decides when there is room for a checkpoint: a failed one breaks the instance.
        "wal_autocheckpoint": "1TB",
    }
    if not read_only:
        config["storage_compatibility_version"] = STORAGE_VERSION
    root = duckdb.connect(str(path), read_only=read_only, config=config)
    root.execute("SET enable_progress_bar = false")  # it prints to stdout, where JSON-RPC may live
    root.execute("SET GLOBAL TimeZone = 'UTC'")
    root.execute("PRAGMA disable_checkpoint_on_shutdown")
    return root


def _memory_bytes() -> int:
    if not hasattr(os, "sysconf"):
        return MEMORY_BYTES_MAX
    return min(MEMORY_BYTES_MAX, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)


class Engine:
    """Hands out cursors of one open database; every method may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._wal = Path(f"{path}.wal")
        self._changed = threading.Condition()
        self._root: duckdb.DuckDBPyConnection | None = connect(path)
        self._opening = 1
        self._busy: set[duckdb.DuckDBPyConnection] = set()
        self._replacing = False
        self._closed = False

    @property
    def wal_bytes(self) -> int:
        """Size of the write-ahead log (a stat does not open the file)."""
        try:
            return self._wal.stat().st_size
        except FileNotFoundError:
            return 0

    @contextmanager
    def use(self) -> Iterator[Use]:
        """A cursor of one's own, for one thread, closed at the end.

        Raises:
            StoreClosedError: the engine was closed.
            StoreBrokenError: the database broke and could not be opened again yet.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._replacing)
            if self._closed:
                raise StoreClosedError("The store is closed.")
            if self._root is None:
                self._open_again()
            assert self._root is not None  # noqa: S101 - _open_again raises where it fails
            cursor = self._root.cursor()
            opening = self._opening
            self._busy.add(cursor)
        try:
            yield Use(cursor, opening)
        finally:
            with self._changed:
                self._busy.discard(cursor)
                cursor.close()
                self._changed.notify_all()

    def read(self, function: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
        """Calls a function that only reads with a cursor; once more when the database broke under it."""
        try:
            with self.use() as use:
                return function(use.cursor)
        except BROKEN as error:
            self.replace(use.opening, error)
        with self.use() as use:
            return function(use.cursor)

    def replace(self, opening: int, reason: BaseException) -> None:
        """Closes a broken instance and opens the file again, unless another thread already did.

        Raises:
            StoreBrokenError: the file cannot be opened now; the next use tries again.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._replacing)
            if self._closed or opening != self._opening:
                return
            log.error("the results database broke and is opened again: %s", reason)
            self._replacing = True
            try:
                for cursor in self._busy:
                    cursor.interrupt()
                self._changed.wait_for(lambda: not self._busy)
                if self._root is not None:
                    self._root.close()
                    self._root = None
                self._open_again()
            finally:
                self._replacing = False
                self._changed.notify_all()

    def _open_again(self) -> None:
        try:
            self._root = connect(self.path)
        except duckdb.Error as error:
            raise StoreBrokenError(
                f"{self.path} broke and cannot be opened again now: {error}",
                hint="Free disk space if there is none; the next call tries again.",
            ) from error
        self._opening += 1

    def close(self) -> None:
        """Waits for the cursors that are out, then closes; a second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._busy and not self._replacing)
            if self._root is not None:
                self._root.close()
                self._root = None
