"""Reading the ledger's file: what is durable, and nothing else.

A `Reader` never leaves a read transaction open between two calls, or the write-ahead log could not be folded
into the file. A `Snapshot` is one such transaction, on purpose and for a short time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from evalpurse.budget.accounts import (
    BudgetRequest,
    Entry,
    HoldPhase,
    HoldState,
    JournalEntry,
    Kind,
    RequestState,
    Role,
)
from evalpurse.budget.errors import LedgerUnavailableError
from evalpurse.budget.sqlite import connect
from evalpurse.budget.tree import when

HOLDS = """
    SELECT h.seq, h.hold_id, h.account, h.amount_nusd, j.prices_digest, j.detail, h.state, h.posted_nusd,
        h.overrun_nusd
    FROM holds h JOIN journal j ON j.seq = h.seq"""
REQUESTS = """
    SELECT r.seq, r.request_id, j.account, j.amount_nusd, j.detail, r.state, r.granted_nusd, j.role, j.at_us,
        r.decided_us
    FROM requests r JOIN journal j ON j.seq = r.seq"""


class Reader:
    """A reading connection; used from one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._closed = False

    def find(self, operation_id: str) -> Entry | None:
        """The durable entry of an operation."""
        rows = self._rows("SELECT * FROM journal WHERE operation_id = ?", (operation_id,))
        return Entry(*rows[0]) if rows else None

    def found(self, operation_ids: Sequence[str]) -> dict[str, Entry]:
        """The durable entries of many operations, by id."""
        entries: dict[str, Entry] = {}
        for start in range(0, len(operation_ids), 500):
            ids = operation_ids[start : start + 500]
            marks = ",".join("?" * len(ids))
            rows = self._rows(f"SELECT * FROM journal WHERE operation_id IN ({marks})", ids)  # noqa: S608 - only marks
            entries.update((row[3], Entry(*row)) for row in rows)
        return entries

    def hold(self, seq: int) -> HoldState:
        """The durable hold that the journal entry `seq` took."""
        return hold_of(self._rows(f"{HOLDS} WHERE h.seq = ?", (seq,))[0])

    def entries(self, after_seq: int, limit: int) -> list[JournalEntry]:
        """Durable entries in order, at most `limit` of them."""
        rows = self._rows("SELECT * FROM journal WHERE seq > ? ORDER BY seq LIMIT ?", (after_seq, limit))
        return [journal_entry(Entry(*row)) for row in rows]

    def snapshot(self) -> Snapshot:
        """Opens a read transaction; what it shows stays the same until it is closed."""
        return Snapshot(self._path)

    def close(self) -> None:
        """For good: what is read afterwards raises LedgerUnavailableError."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    def _rows(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        if self._closed:
            raise LedgerUnavailableError(f"The ledger {self._path} is closed.")
        try:
            if self._connection is None:
                self._connection = connect(self._path, read_only=True)
            # All rows at once: a statement left half read would keep its snapshot open and the WAL growing.
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            self._drop()
            raise LedgerUnavailableError(
                f"The ledger {self._path} cannot be read: {error}.", hint="Ask again."
            ) from error


class Snapshot:
    """The whole file at one instant, row by row, for an audit."""

    def __init__(self, path: Path) -> None:
        self._connection = connect(path, read_only=True)
        self._connection.execute("BEGIN")

    def rows(self, sql: str) -> Iterator[tuple[Any, ...]]:
        yield from self._connection.execute(sql)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def journal_entry(entry: Entry) -> JournalEntry:
    return JournalEntry(
        seq=entry.seq,
        at=when(entry.at_us),
        kind=Kind(entry.kind),
        operation_id=entry.operation_id,
        account=entry.account,
        hold_id=entry.hold_id or "",
        resolves_seq=entry.resolves_seq,
        amount_nusd=entry.amount_nusd,
        posted_nusd=entry.posted_nusd,
        held_nusd=entry.held_nusd,
        overrun_nusd=entry.overrun_nusd,
        detail=entry.detail,
        role=entry.role or "",
        parent=entry.parent or "",
        prices_digest=entry.prices_digest or "",
        code=entry.code or "",
    )


def hold_of(row: Sequence[Any]) -> HoldState:
    seq, hold_id, account, amount, prices_digest, purpose, state, posted, overrun = row
    return HoldState(
        seq, hold_id, account, amount, prices_digest or "", purpose, HoldPhase(state), posted, overrun
    )


def request_of(row: Sequence[Any]) -> BudgetRequest:
    seq, request_id, account, amount, reason, state, granted, role, asked_us, decided_us = row
    return BudgetRequest(
        seq=seq,
        request_id=request_id,
        account=account,
        amount_nusd=amount,
        reason=reason,
        state=RequestState(state),
        granted_nusd=granted,
        asked_by=Role(role),
        asked_at=when(asked_us),
        decided_at=None if decided_us is None else when(decided_us),
    )
