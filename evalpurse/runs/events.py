"""Steps of attempts, on their way to the store.

Steps are for people: what a recovery relies on is the hold, the sandbox and the recorded rows. So steps
are collected and written together, at most half a second late.
"""

from __future__ import annotations

import logging

import anyio

from evalpurse.store.database import Store
from evalpurse.store.errors import StoreError
from evalpurse.store.records import EventRow

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.5
BUFFERED_MAX = 100_000


class EventLog:
    """A buffer of events that one task writes; bounded, oldest dropped loudly when the disk stays full."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._buffer: list[EventRow] = []
        self._filled = anyio.Event()

    def add(self, event: EventRow) -> None:
        """Takes an event; it is durable after the next flush."""
        self._buffer.append(event)
        self._filled.set()

    async def flush(self) -> None:
        """Writes all that is buffered; keeps it when the store refuses."""
        rows, self._buffer = self._buffer, []
        if not rows:
            return
        try:
            await self._store.append(rows)
        except StoreError as error:
            self._buffer = (rows + self._buffer)[-BUFFERED_MAX:]
            log.warning("%d events are waiting to be written: %s", len(self._buffer), error)

    async def run(self) -> None:
        """Flushes for ever, half a second after something came."""
        while True:
            await self._filled.wait()
            await anyio.sleep(FLUSH_EVERY_S)
            self._filled = anyio.Event()
            await self.flush()
