"""The ledger's file: SQLite in WAL mode, every commit on the disk before it counts (`synchronous=FULL`).

`Journal` is the one writer: `write` appends entries and carries what they say over to accounts, holds and
requests, in one transaction. The balances' CHECK is the last line of defence: a commit that would break a
limit fails as a whole.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from evalpurse.budget.accounts import Account, AccountState, Entry, Kind, RequestState
from evalpurse.budget.errors import InvariantBrokenError, LedgerUnavailableError
from evalpurse.budget.reader import HOLDS, REQUESTS, hold_of, request_of
from evalpurse.budget.sqlite import open_for_writing
from evalpurse.budget.tree import Tree

_CHUNKS = (512, 64, 8, 1)
"""Rows of one statement. One statement for many rows, not `executemany`: that gives the interpreter lock
away at every row, and gets it back from a busy event loop up to 5 ms later."""

RESOLVING = frozenset((Kind.SETTLE.value, Kind.OVERRUN.value, Kind.RELEASE.value))
_HOLD = Kind.HOLD.value
_ABOUT_ACCOUNTS = frozenset(
    kind.value for kind in (Kind.SET_LIMIT, Kind.FREEZE, Kind.UNFREEZE, Kind.CLOSE, Kind.GRANT, Kind.DENY)
)
_NEW_STATE = {
    Kind.FREEZE.value: AccountState.FROZEN.value,
    Kind.UNFREEZE.value: AccountState.OPEN.value,
    Kind.CLOSE.value: AccountState.CLOSED.value,
}


def _statements(template: str, columns: int) -> dict[int, str]:
    row = f"({','.join('?' * columns)})"
    return {rows: template.replace("$rows", ",".join([row] * rows)) for rows in _CHUNKS}


_INSERT_ENTRIES = _statements("INSERT INTO journal VALUES $rows", len(Entry._fields))
_INSERT_HOLDS = _statements("INSERT INTO holds VALUES $rows", 7)
_RESOLVE_HOLDS = _statements(
    "UPDATE holds SET state = v.column2, posted_nusd = v.column3, overrun_nusd = v.column4"
    " FROM (VALUES $rows) AS v WHERE holds.seq = v.column1 AND holds.state = 'held'",
    4,
)
_UPDATE_ACCOUNT = """
    UPDATE accounts SET posted_nusd = posted_nusd + ?, held_nusd = held_nusd + ?,
        overrun_nusd = overrun_nusd + ?, limit_nusd = COALESCE(?, limit_nusd) + ?,
        state = CASE state WHEN 'closed' THEN state ELSE COALESCE(?, state) END, seq = ?
    WHERE account = ?"""


class _Change:
    """What a batch does to one account."""

    __slots__ = ("held", "limit", "overrun", "posted", "raised", "seq", "state")

    def __init__(self) -> None:
        self.posted = self.held = self.overrun = self.raised = self.seq = 0
        self.limit: int | None = None
        self.state: str | None = None


class Journal:
    """The one writing connection; used from one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file and brings it to the newest version.

        Raises LedgerNewerError, LedgerDamagedError, LedgerMigrationError or LedgerUnavailableError.
        """
        self.path = path
        self._connection = open_for_writing(path)
        self._chains: dict[str, tuple[str, ...]] = {}
        self._data_version = 0

    def load(self) -> Tree:
        """Everything that is live: all accounts and requests, the open holds, the last sequence number."""
        connection = self._connection
        connection.execute("BEGIN")
        try:
            self._data_version = self._seen_version()
            accounts = [
                Account(name, parent, limit, posted, held, overrun, AccountState(state))
                for name, parent, limit, posted, held, overrun, state, _ in connection.execute(
                    "SELECT * FROM accounts ORDER BY rowid"
                )
            ]
            self._chains = _chains(accounts)
            holds = connection.execute(f"{HOLDS} WHERE h.state = 'held'")
            requests = connection.execute(f"{REQUESTS} ORDER BY r.seq")
            return Tree(
                last_seq=int(connection.execute("SELECT max(seq) FROM journal").fetchone()[0]),
                accounts=accounts,
                holds=map(hold_of, holds.fetchall()),
                requests=map(request_of, requests.fetchall()),
            )
        finally:
            connection.execute("ROLLBACK")

    def write(self, entries: Sequence[Entry]) -> None:
        """Makes the entries durable, all or none; the caller reloads after any error."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._check_untouched()
            _in_chunks(connection, _INSERT_ENTRIES, entries)
            self._carry_over(entries)
            self._commit()
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def reopen(self) -> Tree:
        """A fresh connection and what it finds; after an error nothing of the old one is trusted."""
        self._connection.close()
        self._connection = open_for_writing(self.path)
        return self.load()

    def close(self) -> None:
        self._connection.close()

    def _commit(self) -> None:
        self._connection.execute("COMMIT")

    def _check_untouched(self) -> None:
        if self._seen_version() != self._data_version:
            raise LedgerUnavailableError(
                f"Another program wrote to {self.path} while it was in use.",
                hint="Only this process may write to a ledger that it has open; run verify.",
            )

    def _seen_version(self) -> int:
        # Changes only when another connection has committed.
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def _carry_over(self, entries: Sequence[Entry]) -> None:
        connection = self._connection
        changes: dict[str, _Change] = {}
        for entry in entries:
            if entry.kind == Kind.OPEN_ACCOUNT.value:
                connection.execute(
                    "INSERT INTO accounts VALUES (?, ?, ?, 0, 0, 0, 'open', ?)",
                    (entry.account, entry.parent, entry.amount_nusd, entry.seq),
                )
                self._chains[entry.account] = (entry.account, *self._chains[entry.parent or ""])
            elif entry.kind == Kind.REQUEST.value:
                connection.execute(
                    "INSERT INTO requests VALUES (?, ?, 'pending', 0, NULL)", (entry.seq, entry.operation_id)
                )
            else:
                self._add_up(entry, changes)
        self._carry_over_holds(entries)
        rows = [
            (each.posted, each.held, each.overrun, each.limit, each.raised, each.state, each.seq, account)
            for account, each in changes.items()
        ]
        if rows:
            done = connection.executemany(_UPDATE_ACCOUNT, rows).rowcount
            _expect(done, len(rows), "accounts")

    def _add_up(self, entry: Entry, changes: dict[str, _Change]) -> None:
        kind = entry.kind
        if entry.posted_nusd or entry.held_nusd or entry.overrun_nusd:
            for account in self._chains[entry.account]:
                change = changes.get(account) or changes.setdefault(account, _Change())
                change.posted += entry.posted_nusd
                change.held += entry.held_nusd
                change.overrun += entry.overrun_nusd
                change.seq = entry.seq
                if entry.overrun_nusd > 0 and change.state != AccountState.CLOSED.value:
                    change.state = AccountState.FROZEN.value
        if kind not in _ABOUT_ACCOUNTS:
            return
        change = changes.setdefault(entry.account, _Change())
        change.seq = entry.seq
        if kind in _NEW_STATE:
            change.state = _NEW_STATE[kind]
        elif kind == Kind.SET_LIMIT.value:
            change.limit, change.raised = entry.amount_nusd, 0
        elif kind in (Kind.GRANT.value, Kind.DENY.value):
            change.raised += entry.amount_nusd
            self._decide(entry)

    def _decide(self, entry: Entry) -> None:
        state = RequestState.GRANTED if entry.kind == Kind.GRANT.value else RequestState.DENIED
        done = self._connection.execute(
            "UPDATE requests SET state = ?, granted_nusd = ?, decided_us = ?"
            " WHERE seq = ? AND state = 'pending'",
            (state.value, entry.amount_nusd, entry.at_us, entry.resolves_seq),
        ).rowcount
        _expect(done, 1, "requests")

    def _carry_over_holds(self, entries: Sequence[Entry]) -> None:
        # Inserted before they are resolved: a hold may be taken and settled in one batch.
        new = [
            (e.seq, e.operation_id, e.account, e.amount_nusd, "held", 0, 0)
            for e in entries
            if e.kind == _HOLD
        ]
        _in_chunks(self._connection, _INSERT_HOLDS, new)
        resolved = [
            (
                entry.resolves_seq,
                "released" if entry.kind == Kind.RELEASE.value else "settled",
                entry.posted_nusd,
                entry.overrun_nusd,
            )
            for entry in entries
            if entry.kind in RESOLVING
        ]
        _expect(_in_chunks(self._connection, _RESOLVE_HOLDS, resolved), len(resolved), "holds")


def _in_chunks(connection: sqlite3.Connection, sql: dict[int, str], rows: Sequence[tuple[Any, ...]]) -> int:
    """Runs a statement over all rows, many at a time; how many rows it changed."""
    at = changed = 0
    for size in _CHUNKS:
        while len(rows) - at >= size:
            values = list(chain.from_iterable(rows[at : at + size]))
            changed += connection.execute(sql[size], values).rowcount
            at += size
    return changed


def _expect(changed: int, expected: int, what: str) -> None:
    if changed != expected:
        raise InvariantBrokenError(
            f"{changed} of {expected} {what} were as memory had them; the batch was rolled back.",
            hint="Run `evalpurse budget verify`.",
        )


def _chains(accounts: Sequence[Account]) -> dict[str, tuple[str, ...]]:
    chains: dict[str, tuple[str, ...]] = {}
    for account in accounts:
        chains[account.account] = (account.account, *(chains[account.parent] if account.parent else ()))
    return chains
