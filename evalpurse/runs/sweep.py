"""Ends sandboxes that cost money and belong to no attempt any more.

A sandbox is an orphan when it is provably of this home folder (its tags, to the letter), its attempt has no
open hold, and nobody here is using it. Nobody else's is ever touched.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from evalpurse.budget.ledger import Ledger
from evalpurse.errors import EvalpurseError
from evalpurse.runs.sandboxes.modal_backend import ModalBackend
from evalpurse.store.database import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Swept:
    """What a sweep found: names of sandboxes that it ended, and how many it left to their attempts."""

    ended: Sequence[str]
    kept: int


class Sweep:
    """Looks through the Apps of all experiments that ran on Modal."""

    def __init__(self, backend: ModalBackend, store: Store, ledger: Ledger) -> None:
        self._backend = backend
        self._store = store
        self._ledger = ledger
        self._sweeping = anyio.Lock()

    async def sweep(self) -> Swept:
        """Ends every orphan.

        Raises:
            BadLaunchError: no package or no credentials; says what to do.
            SandboxError: Modal failed; sweep again.
        """
        async with self._sweeping:
            await self._backend.connect()
            ended, kept = [], 0
            for experiment_id in await self._experiments():
                async for name, remote in self._backend.owned({"experiment": experiment_id}):
                    if self._has_hold(name) or self._backend.uses(name):
                        kept += 1
                        continue
                    log.warning("sandbox %s has no attempt any more; it is ended", name)
                    await self._backend.end(name, remote)
                    ended.append(name)
            return Swept(ended, kept)

    async def keep_sweeping(self, every_s: float) -> None:
        """Sweeps once Modal is in use, then now and then; a sweep that fails is tried again the next time."""
        if await self._experiments():
            await self._try()
        while True:
            await anyio.sleep(every_s)
            if self._backend.connected:
                await self._try()

    async def _try(self) -> None:
        try:
            await self.sweep()
        except EvalpurseError as error:
            log.warning("sandboxes on Modal could not be swept: %s", error)

    async def _experiments(self) -> list[str]:
        rows = await self._store.fetch("experiments")
        return [row["experiment_id"] for row in rows if row["backend"] == self._backend.name]

    def _has_hold(self, name: str) -> bool:
        return any(hold.hold_id == name for hold in self._ledger.open_holds(name))
