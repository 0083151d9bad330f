"""The one thread that makes operations durable: it takes everything queued and commits it as one.

The event loop never waits for the disk, and one sync to the disk serves everybody who is waiting. After an
error the writer reads the ledger afresh and stands still until the loop has taken that over: nothing that
was decided on top of a failed batch is ever written.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from evalpurse.budget.accounts import Entry
from evalpurse.budget.journal import Journal
from evalpurse.budget.tree import Tree

log = logging.getLogger(__name__)

BATCH_ENTRIES_MAX = 20_000


class Operation:
    """What becomes durable as a whole, and who waits for it."""

    __slots__ = ("entries", "error", "is_durable", "waiters")

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.is_durable = False
        self.error: Exception | None = None
        self.waiters: list[asyncio.Future[None]] = []


class Failure:
    """A batch that did not become durable, why, and what the disk says now (None: it cannot be read)."""

    def __init__(self, operations: list[Operation], error: Exception, tree: Tree | None) -> None:
        self.operations = operations
        self.error = error
        self.tree = tree
        self.taken_over = threading.Event()


class Writer:
    """Owns the journal from `start` to `stop`; calls back on the event loop."""

    def __init__(
        self,
        journal: Journal,
        *,
        on_durable: Callable[[list[Operation]], None],
        on_failure: Callable[[Failure], None],
    ) -> None:
        self._journal = journal
        self._on_durable = on_durable
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._stopping = False
        self._unreadable: Exception | None = None
        # A daemon thread: an interpreter that is on its way out must not wait for a full disk.
        self._thread = threading.Thread(target=self._run, name="evalpurse-ledger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, operation: Operation) -> None:
        """An operation without entries only asks to be told when everything before it is durable."""
        self._queue.put(operation)

    def take_queued(self) -> list[Operation]:
        """Removes what nobody has started to write."""
        operations = []
        try:
            while True:
                if (operation := self._queue.get_nowait()) is None:
                    self._stopping = True
                else:
                    operations.append(operation)
        except Empty:
            return operations

    def stop(self) -> None:
        """Writes what is queued and ends; blocks, so call it in a thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if (batch := self._next_batch()) and not self._write(batch):
                    return
        finally:
            self._journal.close()

    def _next_batch(self) -> list[Operation]:
        batch: list[Operation] = []
        entries = 0
        operation = self._queue.get()
        try:
            while operation is not None:
                batch.append(operation)
                entries += len(operation.entries)
                if entries >= BATCH_ENTRIES_MAX:
                    return batch
                operation = self._queue.get_nowait()
            self._stopping = True
        except Empty:
            pass
        return batch

    def _write(self, batch: list[Operation]) -> bool:
        """Whether anybody is there to be told."""
        try:
            if self._unreadable:
                raise self._unreadable  # noqa: TRY301 - takes the same way as a failed commit
            if entries := [entry for operation in batch for entry in operation.entries]:
                self._journal.write(entries)
        except Exception as error:
            log.exception("a ledger batch of %d operations did not become durable", len(batch))
            failure = Failure(batch, error, self._reloaded())
            if not self._tell(lambda: self._on_failure(failure)):
                return False
            while not failure.taken_over.wait(timeout=1.0):
                if self._loop.is_closed():
                    return False
            return True
        return self._tell(lambda: self._on_durable(batch))

    def _reloaded(self) -> Tree | None:
        try:
            tree = self._journal.reopen()
        except Exception as error:
            log.exception("the ledger cannot be read; the next operation tries again")
            self._unreadable = error
            return None
        self._unreadable = None
        return tree

    def _tell(self, callback: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: its owner went away without closing the ledger
            return False
        return True
