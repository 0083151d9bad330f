"""All writes to the results, in one thread and in groups.

Whatever is queued when the thread looks becomes one transaction: one INSERT a table, one commit, one wake-up
of the event loop. A transaction costs milliseconds however small it is, so after each one the thread rests
twice as long as it took, or until as many calls are waiting as there were callers: under load the groups grow
instead of the bill, and a lone caller never waits.

The rows of a call are stored together or not at all. When a group fails it is split in two until the call
that cannot be stored fails alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import duckdb

from evalpurse.store.columns import Layout, arrow_table, layout_of
from evalpurse.store.disk import Ballast, free_bytes, is_disk_full
from evalpurse.store.engine import BROKEN, Engine
from evalpurse.store.errors import (
    DiskFullError,
    RowsRefusedError,
    StatementError,
    StoreBrokenError,
    StoreClosedError,
    StoreError,
)
from evalpurse.store.records import Record
from evalpurse.store.statements import Statement

log = logging.getLogger(__name__)

GROUP_ROWS_MAX = 20_000
REST_FACTOR = 30.0
REST_S_MAX = 0.1
REST_SLICE_S = 0.002
IDLE_S = 1.0
CHECKPOINT_WAL_BYTES = 1 << 20  # worth a checkpoint when nothing else happens
CHECKPOINT_BUSY_WAL_BYTES = 32 << 20  # worth interrupting for
CHECKPOINT_SPARE_BYTES = 16 << 20


@dataclass(slots=True, eq=False)
class Call:
    """One write that a caller waits for: rows, rows that replace a whole table, or a named statement."""

    done: asyncio.Future[None]
    rows: Sequence[Record] = ()
    replaces: type[Record] | None = None
    statement: Statement | None = None
    parameters: Mapping[str, Any] | None = None
    error: StoreError | None = None


class _Step(NamedTuple):
    """One statement of a transaction; `batch` is the Arrow table that it inserts."""

    sql: str
    batch: Any = None
    parameters: Mapping[str, Any] | None = None


class Writer:
    """Owns the writing thread from construction to `close()`."""

    def __init__(self, engine: Engine, ballast: Ballast, loop: asyncio.AbstractEventLoop) -> None:
        self.commits = 0
        self._engine = engine
        self._ballast = ballast
        self._loop = loop
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._closing = False
        self._untidy = True
        self._rested_at = 0.0
        self._expected = 1
        self._thread = threading.Thread(target=self._run, name="evalpurse-writer", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Queues a write; from the event loop only, so that nothing is queued behind the end.

        Raises:
            StoreClosedError: the store is closing.
        """
        if self._closing:
            raise StoreClosedError("The store is closed; nothing was written.")
        self._queue.put(call)

    def stop(self) -> None:
        """Takes no more writes; from the event loop, like `submit`. What is queued is still written."""
        self._closing = True
        self._queue.put(None)

    def join(self) -> None:
        """Waits for the end of the thread."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while (group := self._next_group()) is not None:
                self._work(group)
            self._tidy(1)
            self._ballast.remove()
        except BaseException as error:  # a defect here must not leave callers waiting for ever
            self._closing = True
            log.critical("the results writer ended", exc_info=True)
            while (call := self._queue.get()) is not None:
                _fail([call], StoreError(f"The results writer ended: {error}", hint="Restart the daemon."))
                self._wake([call])
            raise

    def _work(self, group: Sequence[Call]) -> None:
        if not group:
            self._tidy(CHECKPOINT_WAL_BYTES)
            return
        started = time.monotonic()
        self._store(group)
        self._untidy = True
        ended = time.monotonic()
        self._expected = len(group) + self._queue.qsize()
        self._rested_at = ended + min(REST_S_MAX, REST_FACTOR * (ended - started))
        self._wake(group)
        if self._engine.wal_bytes > CHECKPOINT_BUSY_WAL_BYTES:
            self._tidy(CHECKPOINT_BUSY_WAL_BYTES)

    def _next_group(self) -> list[Call] | None:
        """All that is queued, up to a bound; empty when nothing came for a while, None at the end."""
        try:
            first = self._queue.get(timeout=IDLE_S if self._untidy else None)
        except queue.Empty:
            return []
        if first is None:
            return None
        self._rest()
        group, rows = [first], len(first.rows)
        while rows < GROUP_ROWS_MAX:
            try:
                call = self._queue.get_nowait()
            except queue.Empty:
                break
            if call is None:
                self._queue.put(None)  # nothing follows the end: it is found again after this group
                break
            group.append(call)
            rows += len(call.rows)
        return group

    def _rest(self) -> None:
        """Until enough time has passed, or all who were being served are back: then nobody else will come."""
        while not self._closing and self._queue.qsize() + 1 < self._expected:
            rest_s = self._rested_at - time.monotonic()
            if rest_s <= 0:
                return
            time.sleep(min(rest_s, REST_SLICE_S))

    def _wake(self, group: Sequence[Call]) -> None:
        try:
            self._loop.call_soon_threadsafe(_resolve, group)
        except RuntimeError:  # the loop is closed: nobody waits any more, but a failure must be seen
            for call in group:
                if call.error:
                    log.error("a write that nobody waits for failed: %s", call.error)  # noqa: TRY400 - not the RuntimeError

    def _store(self, group: Sequence[Call], *, last_try: bool = False) -> None:
        """Stores a group, or sets the error of those of its calls that cannot be stored."""
        opening = 0
        try:
            with self._engine.use() as use:
                opening = use.opening
                _commit(use.cursor, group)
            self._stored(group)
        except BROKEN as error:
            if self._mend(group, opening, error) and not last_try:
                self._store(group, last_try=True)
        except StoreClosedError as error:
            _fail(group, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to the callers it belongs to
            if is_disk_full(error):
                if self._ballast.drop() and not last_try:
                    self._store(group, last_try=True)
                else:
                    _fail(group, self._disk_full())
            elif len(group) == 1:
                _fail(group, _told(error, group[0]))
            else:
                middle = len(group) // 2
                self._store(group[:middle])
                self._store(group[middle:])

    def _mend(self, group: Sequence[Call], opening: int, error: Exception) -> bool:
        """Opens the broken database again; true when the group is not in it and has to be stored."""
        if is_disk_full(error):
            self._ballast.drop()
        broken = StoreBrokenError(
            f"The results database broke while this was written, and none of it was stored: {error}",
            hint="The database was opened again: try again.",
        )
        _fail(group, broken)
        try:
            self._engine.replace(opening, error)
            landed = self._engine.read(lambda cursor: _landed(cursor, group))
        except (StoreError, duckdb.Error) as again:
            _fail(group, again if isinstance(again, StoreError) else broken)
            return False
        if landed:
            self._stored(group)
        return not landed

    def _stored(self, group: Sequence[Call]) -> None:
        _fail(group, None)
        self.commits += 1

    def _disk_full(self) -> DiskFullError:
        folder = self._engine.path.parent
        return DiskFullError(folder, free_bytes=free_bytes(folder), doing="writing results")

    def _tidy(self, wal_bytes_min: int) -> None:
        """Moves a log of some size into the database file, and sees to the ballast."""
        self._untidy = False
        if self._engine.wal_bytes >= wal_bytes_min:
            self._checkpoint(self._engine.wal_bytes)
        self._ballast.keep()

    def _checkpoint(self, wal_bytes: int) -> None:
        folder = self._engine.path.parent
        # A checkpoint without room breaks the instance. The file may grow by about the size of the log, and
        # twice that and the log itself has to fit.
        if free_bytes(folder) < 4 * wal_bytes + CHECKPOINT_SPARE_BYTES:
            log.warning("no checkpoint: too little room in %s for a log of %d bytes", folder, wal_bytes)
            return
        opening = 0
        try:
            with self._engine.use() as use:
                opening = use.opening
                use.cursor.execute("CHECKPOINT").fetchall()
        except BROKEN as error:
            if is_disk_full(error):
                self._ballast.drop()
            self._reopen_quietly(opening, error)
        except (duckdb.Error, StoreError) as error:
            log.warning("no checkpoint: %s", error)

    def _reopen_quietly(self, opening: int, error: Exception) -> None:
        try:
            self._engine.replace(opening, error)
        except StoreError as again:
            log.error("%s", again)  # noqa: TRY400 - its text is complete; the next use tries again


def _commit(cursor: duckdb.DuckDBPyConnection, group: Sequence[Call]) -> None:
    """Writes a group in one transaction."""
    steps = _steps(group)
    cursor.execute("BEGIN TRANSACTION")
    try:
        for step in steps:
            batch = step.batch  # noqa: F841 - an INSERT finds its rows under this name
            cursor.execute(step.sql, step.parameters or None).fetchall()
    except BROKEN:
        raise
    except BaseException:
        cursor.execute("ROLLBACK")
        raise
    # Only here: COMMIT of a transaction in which something failed reports success and keeps nothing.
    cursor.execute("COMMIT")


def _steps(group: Sequence[Call]) -> list[_Step]:
    """The statements of a group: one INSERT a table, cut where a call must see the rows before it."""
    steps: list[_Step] = []
    rows: defaultdict[type[Record], list[Record]] = defaultdict(list)
    for call in group:
        if call.statement or call.replaces:
            steps += _inserts(rows)
            rows.clear()
        if call.statement:
            steps.append(_Step(call.statement.sql, parameters=call.parameters))
        if call.replaces:
            steps.append(_Step(f"DELETE FROM {layout_of(call.replaces).table}"))  # noqa: S608 - a name of ours
        for row in call.rows:
            rows[type(row)].append(row)
    return steps + _inserts(rows)


def _inserts(rows: Mapping[type[Record], Sequence[Record]]) -> list[_Step]:
    return [_insert(layout_of(record), many) for record, many in rows.items()]


def _insert(layout: Layout, rows: Sequence[Record]) -> _Step:
    sql = f"INSERT INTO {layout.table} ({layout.names}) SELECT {layout.names} FROM batch"  # noqa: S608
    return _Step(sql, batch=arrow_table(layout, rows))


def _landed(cursor: duckdb.DuckDBPyConnection, group: Sequence[Call]) -> bool:
    """Whether a group of which the COMMIT failed is stored after all: it is, or it is not, as a whole."""
    last = {type(row): row for call in group for row in call.rows}
    for record, row in last.items():
        layout = layout_of(record)
        sql = f"SELECT {layout.names} FROM {layout.table} ORDER BY rowid DESC LIMIT 1"  # noqa: S608
        found = cursor.execute(sql).fetchall()
        if not found or not all(map(_same, found[0], layout.values(row))):
            return False
    return bool(last)


def _same(stored: Any, given: Any) -> bool:
    both_nan = (
        isinstance(given, float) and math.isnan(given) and isinstance(stored, float) and math.isnan(stored)
    )
    return bool(stored == given) or both_nan


def _told(error: Exception, call: Call) -> StoreError:
    """An error of one call, in words for its caller."""
    if isinstance(error, StoreError):
        return error
    if call.statement:
        return StatementError(f"Statement '{call.statement.name}' failed: {error}", name=call.statement.name)
    tables = sorted({row.TABLE for row in call.rows if isinstance(row, Record)})
    return RowsRefusedError(
        f"{len(call.rows)} rows for {', '.join(tables)} were refused: {error}",
        hint="None of them was stored.",
    )


def _fail(group: Sequence[Call], error: StoreError | None) -> None:
    for call in group:
        call.error = error


def _resolve(group: Sequence[Call]) -> None:
    """Tells the callers, on their event loop; a cancelled one is not there to hear of a failure."""
    for call in group:
        if call.done.done():
            if call.error:
                log.error("a write whose caller was cancelled failed: %s", call.error)
        elif call.error:
            call.done.set_exception(call.error)
        else:
            call.done.set_result(None)
