"""What every run works with: one store, one ledger, one backend and its slots, one price list."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.lowlevel

from evalpurse.budget.errors import LedgerUnavailableError
from evalpurse.budget.ledger import Ledger
from evalpurse.budget.money import NUSD_PER_USD
from evalpurse.budget.prices import Prices
from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.cases import Case, CaseContent, Cases
from evalpurse.runs.errors import SandboxError, UnknownSecretError
from evalpurse.runs.events import EventLog
from evalpurse.runs.sandboxes.protocol import Backend
from evalpurse.runs.sandboxes.secret_values import present_value
from evalpurse.runs.variants import Variants
from evalpurse.store.database import Store
from evalpurse.store.errors import RowsRefusedError, StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_WRITE_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Waits between tries of what must not be left undone; the last one repeats until it succeeds."""

CONTENTS_KEPT = 256


async def _nothing_left(_experiment_id: str) -> None:
    await anyio.lowlevel.checkpoint()


def kept_prices(home: Home, digest: str) -> Path:
    """Where the owner's price file is kept as it was under a digest."""
    return home.path / "prices" / f"{digest}.toml"


@dataclass
class Lab:
    """Shared by all experiments of one daemon."""

    home: Home
    home_id: str
    settings: Settings
    store: Store
    ledger: Ledger
    prices: Prices
    backend: Backend
    cases: Cases
    variants: Variants
    events: EventLog
    slots: anyio.CapacityLimiter
    ready: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint
    """Makes the backend ready for a launch; raises BadLaunchError with what to do when it cannot be."""
    ended: Callable[[str], Awaitable[None]] = _nothing_left
    """Told the id of an experiment that is over: the last moment to end what may be left of it."""
    overruns: dict[str, str] = field(default_factory=dict)
    """Why an experiment froze its chain, for people."""
    _contents: OrderedDict[str, CaseContent] = field(default_factory=OrderedDict)

    async def content(self, case: Case) -> CaseContent:
        """A case's input, files and graders; the last few hundred are kept in memory."""
        kept = self._contents.get(case.case_digest)
        if kept is None:
            kept = await self.cases.content(case)
            self._contents[case.case_digest] = kept
            if len(self._contents) > CONTENTS_KEPT:
                self._contents.popitem(last=False)
        return kept

    def secrets(self, names: Sequence[str]) -> dict[str, str]:
        """Values of the named secrets, read from the home folder at the moment of use.

        Raises:
            UnknownSecretError: a name without a file.
        """
        values: dict[str, str] = {}
        for name in names:
            value = present_value(self.home, name)
            if value is None:
                raise UnknownSecretError(
                    f"Secret {name} is not in this home folder.",
                    hint=f"Its owner adds it with: evalpurse secrets set {name}",
                )
            values[name] = value
        return values

    def prices_of(self, digest: str) -> Prices:
        """The price list that an experiment was launched with; the present one if that is not kept."""
        if digest == self.prices.digest:
            return self.prices
        kept = Prices.load_now(kept_prices(self.home, digest))
        if kept.digest != digest:
            log.warning(
                "price list %s is not kept any more; its experiment goes on with %s",
                digest,
                self.prices.digest,
            )
            return self.prices
        return kept

    @staticmethod
    def usd_text(nusd: int) -> str:
        """Nano-dollars as an exact decimal number of dollars, for a harness to read."""
        return f"{Decimal(nusd) / NUSD_PER_USD:f}"

    async def until_written(self, write: Callable[[], Awaitable[T]]) -> T:
        """Repeats what must not be left undone until it succeeds: a full disk delays, it never drops.

        Raises:
            RowsRefusedError: no repetition would help.
        """
        tries = 0
        while True:
            try:
                return await write()
            except RowsRefusedError:
                raise
            except (StoreError, LedgerUnavailableError, SandboxError) as error:
                wait_s = RETRY_WRITE_S[min(tries, len(RETRY_WRITE_S) - 1)]
                log.warning("could not be done yet, next try in %.1f s: %s", wait_s, error)
                tries += 1
                await anyio.sleep(wait_s)
