"""Copies the ledger's journal and balances into the results store, so that SQL sees money too.

The ledger is the truth; the copy is about a second late and is never read back.
"""

from __future__ import annotations

import logging

import anyio

from evalpurse.budget.errors import BudgetError
from evalpurse.budget.ledger import Ledger
from evalpurse.store.database import Store
from evalpurse.store.errors import StoreError
from evalpurse.store.records import AccountRow, JournalRow

log = logging.getLogger(__name__)

EVERY_S = 1.0
ENTRIES_A_COPY = 20_000


class Mirror:
    """Follows one ledger into one store."""

    def __init__(self, store: Store, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        self._copied: int | None = None

    async def run(self) -> None:
        """Copies for ever, once a second; a failure delays the copy and is said."""
        while True:
            try:
                await self.copy()
            except (StoreError, BudgetError) as error:
                log.warning("the journal's mirror is late: %s", error)
            await anyio.sleep(EVERY_S)

    async def copy(self) -> None:
        """Copies what is new since the last copy, then the balances, if anything is new."""
        if self._copied is None:
            found = await self._store.fetch("journal_max_seq")
            self._copied = found[0]["seq"] or 0
        fresh = False
        while entries := await self._ledger.journal(self._copied, ENTRIES_A_COPY):
            rows = [
                JournalRow(
                    entry.seq,
                    entry.operation_id,
                    entry.kind,
                    entry.account,
                    entry.hold_id,
                    entry.amount_nusd,
                    entry.at,
                    entry.detail,
                )
                for entry in entries
            ]
            await self._store.append(rows)
            self._copied = entries[-1].seq
            fresh = True
        if fresh:
            accounts = [
                AccountRow(
                    account.account,
                    account.parent or "",
                    account.limit_nusd,
                    account.spent_nusd,  # with what went above a hold: it is spent too
                    account.held_nusd,
                    account.state,
                )
                for account in self._ledger.accounts()
            ]
            await self._store.replace(AccountRow, accounts)
