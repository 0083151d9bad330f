"""Everything that a daemon serves, opened together and closed in order: the one set of services that the
tools, the command line and the pages share."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio
import anyio.to_thread

from evalpurse.budget.accounts import ROOT
from evalpurse.budget.ledger import Ledger
from evalpurse.budget.prices import Prices
from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.cases import Cases
from evalpurse.runs.errors import LedgerLostError
from evalpurse.runs.events import EventLog
from evalpurse.runs.experiments import Experiments
from evalpurse.runs.images import Builder, Images
from evalpurse.runs.lab import Lab, kept_prices
from evalpurse.runs.mirror import Mirror
from evalpurse.runs.results import Results
from evalpurse.runs.sandboxes.modal_backend import ModalBackend
from evalpurse.runs.sandboxes.modal_world import ModalWorlds
from evalpurse.runs.sandboxes.protocol import Backend
from evalpurse.runs.sweep import Sweep
from evalpurse.runs.variants import Variants
from evalpurse.runs.vault import Vault
from evalpurse.runs.warm import WarmBases, Warmer
from evalpurse.runs.worlds import Worlds
from evalpurse.store.database import Store
from evalpurse.store.query import QueryService

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    """Open services of one home folder."""

    home: Home
    settings: Settings
    store: Store
    ledger: Ledger
    prices: Prices
    backend: Backend
    modal: ModalBackend
    sweep: Sweep
    cases: Cases
    variants: Variants
    experiments: Experiments
    results: Results
    queries: QueryService
    vault: Vault
    worlds: Worlds
    warmer: Warmer

    async def drain(self) -> None:
        """Starts nothing new and lets go of what runs; sandboxes go on for the next daemon."""
        await self.experiments.leave()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, home: Home, settings: Settings, *, backend: Backend | None = None
    ) -> AsyncIterator[Services]:
        """Opens store, ledger and backend, takes up unfinished experiments, and closes all at the end.

        Raises:
            StoreError, BudgetError: the data is locked by another process, newer than this version, or
                damaged; the message says what to do.
        """
        async with AsyncExitStack() as stack:
            lab, worlds = await _open_lab(stack, home, settings, backend)
            store, ledger = lab.store, lab.ledger
            modal, warmer = _modal(home, settings, worlds, store)
            stack.push_async_callback(modal.close)
            remote = replace(
                lab,
                backend=modal,
                slots=anyio.CapacityLimiter(settings.modal_max_live),
                ready=modal.connect,
                ended=modal.stop_app,
            )
            labs = {"local": lab, "modal": remote}
            queries = QueryService(store, home)
            stack.push_async_callback(queries.close)
            mirror = Mirror(store, ledger)
            vault = Vault(home, settings, store, ledger, functools.partial(_connected, modal))
            async with anyio.create_task_group() as tasks:
                experiments = Experiments(labs, tasks)
                tasks.start_soon(lab.events.run)
                tasks.start_soon(mirror.run)
                tasks.start_soon(vault.run)
                await experiments.recover()
                sweep = Sweep(modal, store, ledger)
                tasks.start_soon(sweep.keep_sweeping, settings.sweep_every_s)
                tasks.start_soon(warmer.keep_warm, settings.warm_every_s)
                results = Results(lab, experiments)
                yield cls(
                    home,
                    settings,
                    store,
                    ledger,
                    lab.prices,
                    lab.backend,
                    modal,
                    sweep,
                    lab.cases,
                    lab.variants,
                    experiments,
                    results,
                    queries,
                    vault,
                    worlds,
                    warmer,
                )
                await experiments.leave()
                with anyio.CancelScope(shield=True):
                    await lab.events.flush()
                    await mirror.copy()
                tasks.cancel_scope.cancel()


async def _open_lab(
    stack: AsyncExitStack, home: Home, settings: Settings, backend: Backend | None
) -> tuple[Lab, Worlds]:
    """Data, money and this machine's sandboxes; the stack closes what was opened, in order."""
    store = await Store.open(home)
    stack.push_async_callback(store.close)
    ledger = await Ledger.open(home.ledger_file)
    stack.push_async_callback(ledger.close_ledger)
    check_ledger_belongs(ledger, await store.fetch("experiments"))
    prices = await Prices.load(home.path / "prices.toml")
    await anyio.to_thread.run_sync(keep_prices, home, prices.digest)
    chosen = backend if backend is not None else _local(home, settings)
    stack.push_async_callback(chosen.close)
    worlds = Worlds(store, home)
    lab = Lab(
        home=home,
        home_id=home.identity(),
        settings=settings,
        store=store,
        ledger=ledger,
        prices=prices,
        backend=chosen,
        cases=Cases(store),
        variants=Variants(store, home, worlds),
        events=EventLog(store),
        slots=anyio.CapacityLimiter(settings.local_max_parallel),
    )
    return lab, worlds


def _modal(home: Home, settings: Settings, worlds: Worlds, store: Store) -> tuple[ModalBackend, Warmer]:
    """Connects, and imports `modal`, when the first experiment needs it."""
    volumes = ModalWorlds(
        worlds.files, home.identity(), lambda: backend.client, environment=settings.modal_environment
    )
    bases = WarmBases(home)
    builder = Builder(lambda: backend, home, settings, store.blobs)

    async def repo_of(variant_digest: str) -> str:
        rows = await store.fetch("variant_by_digest", variant_digest=variant_digest)
        return str(rows[0]["repo"]) if rows else ""

    backend = ModalBackend(
        home, settings, images=lambda _: Images(home, builder, bases, repo_of), worlds=volumes.volume
    )
    return backend, Warmer(home, bases, builder)


async def _connected(backend: ModalBackend) -> Any:
    """The backend's own client, connected when it is first wanted."""
    await backend.connect()
    return backend.client


def check_ledger_belongs(ledger: Ledger, experiments: Sequence[dict[str, Any]]) -> None:
    """A ledger that is new beside results that were paid for has lost what was spent: nobody may go on by it.

    Raises:
        LedgerLostError: says how many experiments it knows nothing of.
    """
    if experiments and len(ledger.accounts()) == 1 and ledger.account(ROOT).limit_nusd == 0:
        raise LedgerLostError(
            f"The ledger is empty, but the results hold {len(experiments)} experiments that were paid for.",
            hint="Put back ledger.sqlite from your own backup of this home folder. To begin anew on purpose, "
            "move results.duckdb and blobs away as well.",
        )


def keep_prices(home: Home, digest: str) -> None:
    """Keeps the owner's price file as it is now: an experiment goes on at the prices it was launched with."""
    kept = kept_prices(home, digest)
    if not kept.exists():
        given = home.path / "prices.toml"
        content = given.read_bytes() if given.exists() else b""
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        draft = kept.with_suffix(".new")
        draft.write_bytes(content)
        draft.replace(kept)


def _local(home: Home, settings: Settings) -> Backend:
    from evalpurse.runs.sandboxes.local import LocalBackend

    return LocalBackend(home, settings)
