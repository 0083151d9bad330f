"""Between the tree in memory and the file: who waits for what, and what happens when the disk says no.

Everything here runs on one event loop. `durable` hands an entry to the writer in the same step in which the
tree decided it; after a failed commit the tree is replaced by what is on the disk, and everything that was
decided and not yet durable fails.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from evalpurse.budget.accounts import Entry, JournalEntry
from evalpurse.budget.errors import LedgerLockedError, LedgerUnavailableError
from evalpurse.budget.journal import RESOLVING, Journal
from evalpurse.budget.reader import Reader
from evalpurse.budget.tree import Tree
from evalpurse.budget.writer import Failure, Operation, Writer
from evalpurse.errors import EvalpurseError
from evalpurse.store.errors import StoreLockedError
from evalpurse.store.lock import DataLock

Known = tuple[Entry, Operation | None]
"""An entry, and the operation to wait for while it is not durable."""


class Engine:
    """One open ledger file and its live tree."""

    def __init__(self, path: Path, lock: DataLock, journal: Journal, tree: Tree) -> None:
        """Private: use `Engine.open`."""
        self.path = path
        self.tree = tree
        self.lookup = Reader(path)
        self._lock = lock
        self._reader = Reader(path)
        self._reading = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._recent: dict[str, tuple[Entry, Operation]] = {}
        self._down: Exception | None = None
        self._probing = False
        self._closed = False
        self._writer = Writer(journal, on_durable=self._on_durable, on_failure=self._on_failure)
        self._writer.start()

    @classmethod
    async def open(cls, path: Path, journal_type: type[Journal]) -> Engine:
        return cls(path, *await anyio.to_thread.run_sync(_open, path, journal_type))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            self.lookup.close()
            await anyio.to_thread.run_sync(self._stop)
        self._lock.release()

    def check_ready(self) -> None:
        """Raises LedgerUnavailableError while nothing can be decided."""
        if self._closed:
            raise LedgerUnavailableError(
                f"The ledger {self.path} is closed.", hint="Ask again when the daemon is back."
            )
        if self._down is not None:
            if not self._probing:
                self._probing = True
                self._writer.put(Operation([]))
            raise _unavailable(self.path, self._down)

    def find(self, operation_id: str) -> Known | None:
        """The entry of an id, durable or on its way."""
        if recent := self._recent.get(operation_id):
            return recent
        entry = self.lookup.find(operation_id)
        return (entry, None) if entry else None

    def find_many(self, operation_ids: Sequence[str]) -> dict[str, Known]:
        known: dict[str, Known] = {
            name: (entry, None) for name, entry in self.lookup.found(operation_ids).items()
        }
        for name in operation_ids:
            if recent := self._recent.get(name):
                known[name] = recent
        return known

    async def durable(self, entries: list[Entry]) -> None:
        """Queues the entries as one operation at once, then waits until it is on the disk."""
        operation = Operation(entries)
        for entry in entries:
            self._recent[entry.operation_id] = (entry, operation)
        self._writer.put(operation)
        await self.wait(operation)

    async def wait(self, operation: Operation) -> None:
        if operation.is_durable:
            return
        if operation.error is not None:
            raise _unavailable(self.path, operation.error)
        # A future for each waiter: cancelling one of them must not touch the operation or the others.
        waiter = self._loop.create_future()
        operation.waiters.append(waiter)
        await waiter

    async def barrier(self) -> None:
        """Waits until everything that is queued now is durable."""
        operation = Operation([])
        self._writer.put(operation)
        await self.wait(operation)

    async def journal(self, after_seq: int, limit: int) -> list[JournalEntry]:
        return await anyio.to_thread.run_sync(self._read_journal, after_seq, limit)

    def _read_journal(self, after_seq: int, limit: int) -> list[JournalEntry]:
        with self._reading:
            self.check_ready()
            return self._reader.entries(after_seq, limit)

    def _stop(self) -> None:
        with self._reading:
            self._reader.close()
        self._writer.stop()  # the last connection to go folds the write-ahead log into the file

    def _on_durable(self, operations: list[Operation]) -> None:
        recent, holds = self._recent, self.tree.holds
        for operation in operations:
            operation.is_durable = True
            for entry in operation.entries:
                del recent[entry.operation_id]
                if entry.kind in RESOLVING and entry.hold_id:
                    # From now on the disk answers for it: memory keeps only what can still change.
                    holds.pop(entry.hold_id, None)
            for waiter in operation.waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _on_failure(self, failure: Failure) -> None:
        failed = [*failure.operations, *self._writer.take_queued()]
        self._recent.clear()
        self._probing = False
        self._down = failure.error if failure.tree is None else None
        if failure.tree is not None:
            self.tree = failure.tree
        failure.taken_over.set()
        for operation in failed:
            operation.error = failure.error
            for waiter in operation.waiters:
                if not waiter.done():
                    waiter.set_exception(_unavailable(self.path, failure.error))


def _open(path: Path, journal_type: type[Journal]) -> tuple[DataLock, Journal, Tree]:
    try:
        lock = DataLock(path.with_name(f"{path.name}.lock"))
    except StoreLockedError as error:
        raise LedgerLockedError(
            f"The ledger {path} is in use by process {error.facts.get('pid') or 'unknown'}.",
            hint="Ask that process (`evalpurse daemon status`), or stop it first.",
            **error.facts,
        ) from error
    except OSError as error:
        raise _unavailable(path, error) from error
    try:
        journal = journal_type(path)
        try:
            return lock, journal, journal.load()
        except BaseException:
            journal.close()
            raise
    except BaseException:
        lock.release()
        raise


def _unavailable(path: Path, error: Exception) -> LedgerUnavailableError:
    cause = (error.message if isinstance(error, EvalpurseError) else str(error)).rstrip(".")
    return LedgerUnavailableError(
        f"The ledger {path} could not take the operation, so it does not count: {cause}.",
        hint="Start nothing new. Free some disk space if it is full, then ask again with the same id.",
        cause=cause,
    )
