"""Many small blobs in one SQLite file, written in groups.

A file of its own costs each small blob half a millisecond of processor time and two syncs; a row here costs
ten microseconds and shares one sync with everything that is queued at that moment.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from evalpurse.store.disk import free_bytes, is_disk_full
from evalpurse.store.errors import DiskFullError, NewerSchemaError, StoreClosedError, StoreError

log = logging.getLogger(__name__)

VERSION = 1
GROUP_ROWS_MAX = 1_000


class Row(NamedTuple):
    """A digest (32 bytes) and the compressed content that it names."""

    digest: bytes
    content: bytes


class _Request(NamedTuple):
    rows: Sequence[Row]
    done: Future[None]


class Pack:
    """Owns the file and its writing thread from construction to `close()`; safe from any thread.

    Raises:
        NewerSchemaError: the file was written by a newer evalpurse; it was left as it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reading = threading.Lock()
        self._reader = self._connect()
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="evalpurse-blobs", daemon=True)
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            self._check_version(version)
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA journal_size_limit = 16777216")
            if version < VERSION:
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS blobs (digest BLOB PRIMARY KEY, content BLOB NOT NULL)"
                )
                connection.execute(f"PRAGMA user_version = {VERSION}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_version(self, version: int) -> None:
        if version > VERSION:
            raise NewerSchemaError(
                f"{self.path} has version {version}; this evalpurse knows up to {VERSION}.",
                hint="Use the newer evalpurse that wrote it.",
                found=version,
                known=VERSION,
            )

    def submit(self, rows: Sequence[Row]) -> Future[None]:
        """Queues rows; the future is done when they are durable, or holds the reason why they are not."""
        done: Future[None] = Future()
        with self._closing:
            if self._closed:
                raise StoreClosedError("The store is closed; no blob was written.")
            self._queue.put(_Request(rows, done))
        return done

    def get(self, digest: bytes) -> bytes | None:
        """The compressed content under a digest, or None; raises what SQLite raises."""
        with self._reading:
            found = self._reader.execute("SELECT content FROM blobs WHERE digest = ?", (digest,)).fetchone()
        return found[0] if found else None

    def has(self, digest: bytes) -> bool:
        """Whether there is a row, which is not read."""
        with self._reading:
            return (
                self._reader.execute("SELECT 1 FROM blobs WHERE digest = ?", (digest,)).fetchone() is not None
            )

    def close(self) -> None:
        """Writes what is queued and closes the file."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        with self._reading:
            self._reader.close()

    def _run(self) -> None:
        connection = self._connect()
        while (group := self._next_group()) is not None:
            try:
                _insert(connection, group)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told to those who wait
                told = self._told(error)
                for request in group:
                    request.done.set_exception(told)
            else:
                for request in group:
                    request.done.set_result(None)
        connection.close()

    def _next_group(self) -> list[_Request] | None:
        request = self._queue.get()
        group: list[_Request] = []
        rows = 0
        while request is not None:
            # From here on a caller's cancellation cannot end the future before its result is set.
            if request.done.set_running_or_notify_cancel():
                group.append(request)
                rows += len(request.rows)
            if rows >= GROUP_ROWS_MAX:
                return group
            try:
                request = self._queue.get_nowait()
            except queue.Empty:
                return group
        if not group:
            return None
        self._queue.put(None)  # nothing follows the end: it is found again after this group
        return group

    def _told(self, error: Exception) -> StoreError:
        if is_disk_full(error):
            folder = self.path.parent
            return DiskFullError(folder, free_bytes=free_bytes(folder), doing="writing blobs")
        return StoreError(f"Blobs could not be written to {self.path}: {error}")


def _insert(connection: sqlite3.Connection, group: Sequence[_Request]) -> None:
    rows = [row for request in group for row in request.rows]
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.executemany("INSERT OR IGNORE INTO blobs VALUES (?, ?)", rows)
        connection.execute("COMMIT")
    except BaseException:
        # SQLite has rolled back already after some errors (a full disk is one).
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
