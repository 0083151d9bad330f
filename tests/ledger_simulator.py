"""A seeded world in which something really spends, to see whether the ledger always knew.

A provider bills spenders (model calls, sandboxes) whether or not anybody keeps books. A daemon launches them
under holds, crashes at chosen points of a commit, comes back and goes on. After every step, at every account:

    true bill <= posted + held + overrun    and    posted + held <= limit    and    true bill <= limit

and after every crash nothing that was acknowledged is missing and `verify` finds nothing. `Simulation` is
the design; each class in `MUTANTS` changes one decision to one that other systems take, and must be caught.
`simulate(kind, seed, folder)` runs one world. The seed decides everything but how many queued operations the
writer's thread finds at once, so a seed that failed may need a few runs to fail again.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalpurse.budget.accounts import Entry, Hold, HoldPhase, HoldState, Role
from evalpurse.budget.errors import BudgetError
from evalpurse.budget.journal import Journal
from evalpurse.budget.ledger import Ledger
from evalpurse.budget.tree import Tree

CRASH_POINTS = ("before writing", "before commit", "after commit")
ACCOUNTS = ("camp", "exp-a", "exp-b")
PARENTS = {"workspace": None, "camp": "workspace", "exp-a": "camp", "exp-b": "camp"}


class TheoremBrokenError(AssertionError):
    """The world and the books disagree."""


class Killed(SystemExit):
    """Ends the writer thread like a process that is killed: without a word, without a rollback."""


@dataclass
class Spender:
    """Something at the provider. It may bill up to `worst`, but only while it is alive."""

    account: str
    worst: int
    billed: int = 0
    alive: bool = True
    evidence: bool = True
    age: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one world showed: the first violation, if any."""

    seed: int
    violation: str | None
    steps: int
    crashes: int
    launched: int
    acknowledged: int


class CrashingJournal(Journal):
    """A journal whose process can be killed inside a commit."""

    sim: Simulation  # set on a subclass for each world

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._without_sync()

    def reopen(self) -> Tree:
        tree = super().reopen()
        self._without_sync()
        return tree

    def write(self, entries: Sequence[Entry]) -> None:
        self._die_at("before writing")
        super().write(entries)

    def _commit(self) -> None:
        self._die_at("before commit")
        super()._commit()
        self._die_at("after commit")

    def _without_sync(self) -> None:
        # Processes die here, machines do not: what was written survives, and worlds run much faster.
        self._connection.execute("PRAGMA synchronous = OFF")

    def _die_at(self, point: str) -> None:
        if self.sim.dies_at == point:
            self.sim.loop.call_soon_threadsafe(self.sim.dead.set)
            raise Killed


class Simulation:
    """One world, driven by one seed. The methods that mutants change say what the design decides."""

    def __init__(self, seed: int, folder: Path, *, steps: int = 40) -> None:
        self.seed = seed
        self.steps = steps
        self.rng = random.Random(seed)
        self.path = folder / "ledger.sqlite"
        self.spenders: dict[str, Spender] = {}
        self.held: dict[str, Hold] = {}
        self.resolved: dict[str, int] = {}
        self.settling: dict[str, int] = {}
        self.dies_at: str | None = None
        self.crashes = self.count = 0

    async def run(self) -> None:
        """Raises TheoremBrokenError at the first step after which the books are wrong."""
        self.loop = asyncio.get_running_loop()
        self.dead = asyncio.Event()
        self.journal_type = type("Journal", (CrashingJournal,), {"sim": self})
        self.ledger = await Ledger.open(self.path, journal_type=self.journal_type)
        limits = {"workspace": 3000, "camp": self.rng.randint(500, 3000)}
        await self.ledger.set_limit("grant", "workspace", limits["workspace"], by=Role.OWNER)
        for account in ACCOUNTS:
            limit = limits.get(account, self.rng.randint(200, 3000))
            parent = PARENTS[account]
            await self.ledger.open_account(account, account, parent=parent, limit_nusd=limit, by=Role.OWNER)
        for _ in range(self.steps):
            await self.step()
            self.audit()
        await self.check_books()
        await self.ledger.close_ledger()

    async def step(self) -> None:
        chance = self.rng.random()
        if chance < 0.08:
            self.dies_at = self.rng.choice(CRASH_POINTS)
        actions = [self.one_launch() for _ in range(self.rng.choice((0, 1, 2, 5)))]
        actions += [self.batch_launch()] if self.rng.random() < 0.2 else []
        actions += [self.impatient_launch()] if self.rng.random() < 0.2 else []
        actions += [self.collect(name) for name in self.pick_ended()]
        actions += [self.owner_acts()] if self.rng.random() < 0.2 else []
        await self.together(actions)
        if not self.dead.is_set():
            await self.together([self.run_times_out(name) for name in self.pick_late()])
        self.dies_at = None
        self.provider_works()
        if self.dead.is_set():
            await self.restart()
        else:
            await self.time_passes()

    async def together(self, actions: list[Coroutine[Any, Any, None]]) -> None:
        """Runs concurrent callers until they are done or the process is dead."""
        tasks = [asyncio.ensure_future(action) for action in actions]
        if not tasks:
            return
        death = asyncio.ensure_future(self.dead.wait())
        everything = asyncio.ensure_future(asyncio.wait(tasks))
        await asyncio.wait((death, everything), return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, death, everything):
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        await asyncio.gather(death, everything, return_exceptions=True)

    # What the daemon does.

    async def one_launch(self) -> None:
        """A hold first; only when it is durable does anything exist that can spend."""
        hold = self.new_hold()
        try:
            await self.ledger.hold(hold)
        except BudgetError:
            return
        self.acknowledge(hold)
        self.start(hold)

    async def batch_launch(self) -> None:
        holds = [self.new_hold() for _ in range(self.rng.randint(2, 12))]
        result = await self.ledger.hold_many(holds, atomic=False)
        for hold in holds[: len(result.admitted)]:
            self.acknowledge(hold)
            self.start(hold)

    async def impatient_launch(self) -> None:
        """A caller that goes away while it waits: nothing starts, and the hold is found by its id."""
        hold = self.new_hold()
        call = asyncio.ensure_future(self.ledger.hold(hold))
        await asyncio.sleep(0)
        call.cancel()
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        if isinstance(outcome, HoldState):
            self.acknowledge(hold)

    async def collect(self, name: str) -> None:
        """The spender is dead: settle by its bill, or by the worst case when there is no evidence."""
        spender = self.spenders[name]
        await self.settle(name, spender.billed if spender.evidence else self.without_evidence(spender))

    async def run_times_out(self, name: str) -> None:
        """Ends the spender first; what it cost is known then, and settled in a later step."""
        self.spenders[name].alive = False

    async def time_passes(self) -> None:
        """A hold without a spender that was never started is proof enough; age alone is none."""
        for hold in self.ledger.open_holds():
            if hold.hold_id not in self.spenders and self.rng.random() < 0.5:
                await self.ledger.release(hold.hold_id, proof="never started")
                self.resolved[hold.hold_id] = 0

    async def after_restart(self, hold: HoldState) -> None:
        """Adopts what is alive, settles what is dead by its bill, releases what was never started."""
        spender = self.spenders.get(hold.hold_id)
        if spender is None:
            await self.ledger.release(hold.hold_id, proof="never started")
            self.resolved[hold.hold_id] = 0
        elif not spender.alive:
            await self.collect(hold.hold_id)

    def without_evidence(self, spender: Spender) -> int:
        return spender.worst

    # Helpers of the daemon.

    def new_hold(self) -> Hold:
        self.count += 1
        return Hold(f"h{self.count}", self.rng.choice(ACCOUNTS), self.rng.randint(0, 300), "prices", "run")

    def acknowledge(self, hold: Hold) -> None:
        self.held[hold.hold_id] = hold

    def start(self, hold: Hold) -> None:
        self.spenders[hold.hold_id] = Spender(hold.account, hold.amount_nusd)

    async def settle(self, name: str, actual: int) -> None:
        self.settling[name] = actual
        state = await self.ledger.settle(name, actual)
        if state.charged_nusd != actual:
            raise TheoremBrokenError(f"{name} was settled with {actual} and {state.charged_nusd} was charged")
        self.resolved[name] = actual

    async def owner_acts(self) -> None:
        account, operation = self.rng.choice(ACCOUNTS), f"op{self.count}.{self.rng.random()}"
        action = self.rng.choice(("limit", "freeze", "thaw"))
        try:
            if action == "limit":
                await self.ledger.set_limit(operation, account, self.rng.randint(0, 3000), by=Role.OWNER)
            elif action == "freeze":
                await self.ledger.freeze(operation, account, reason="a look")
            else:
                await self.ledger.unfreeze(operation, account, reason="fine", by=Role.OWNER)
        except BudgetError as refusal:
            if refusal.code != "limit_below_committed":
                raise

    # The provider, which knows nothing of holds.

    def provider_works(self) -> None:
        for spender in self.spenders.values():
            if not spender.alive:
                continue
            spender.age += 1
            spender.billed += self.rng.randint(0, spender.worst - spender.billed)
            if self.rng.random() < 0.35:
                spender.alive = False
                spender.evidence = self.rng.random() < 0.8

    def pick_ended(self) -> list[str]:
        return [
            name
            for name, spender in self.spenders.items()
            if not spender.alive and name not in self.resolved and self.rng.random() < 0.7
        ]

    def pick_late(self) -> list[str]:
        return [
            name
            for name, spender in self.spenders.items()
            if spender.alive and name not in self.resolved and self.rng.random() < 0.2
        ]

    # Death and restart.

    async def restart(self) -> None:
        """What a killed process leaves: a file. Spenders live on and keep billing."""
        self.crashes += 1
        engine = self.ledger._engine
        await asyncio.to_thread(engine._writer._thread.join)
        engine.lookup.close()
        engine._reader.close()
        engine._lock.release()
        self.dead.clear()
        self.provider_works()
        self.ledger = await Ledger.open(self.path, journal_type=self.journal_type)
        await self.check_books()
        for hold in self.ledger.open_holds():
            if self.rng.random() < 0.8:
                await self.after_restart(hold)

    # The audit.

    def audit(self) -> None:
        for account in self.ledger.accounts():
            bill = sum(
                spender.billed
                for spender in self.spenders.values()
                if self.under(spender.account, account.account)
            )
            known = account.posted_nusd + account.held_nusd + account.overrun_nusd
            if bill > known:
                raise TheoremBrokenError(f"{account}: the provider billed {bill}, the books know of {known}")
            if account.posted_nusd + account.held_nusd > account.limit_nusd or bill > account.limit_nusd:
                raise TheoremBrokenError(f"{account}: above its limit, the provider billed {bill}")

    async def check_books(self) -> None:
        found = await self.ledger.verify()
        if not found.clean:
            raise TheoremBrokenError(f"verify: {found.problems}")
        for name, hold in self.held.items():
            state = self.ledger.hold_state(name)
            if state is None or (state.amount_nusd, state.account) != (hold.amount_nusd, hold.account):
                raise TheoremBrokenError(f"the acknowledged {hold} is now {state}")
            if name in self.resolved and (state.open or state.charged_nusd != self.resolved[name]):
                raise TheoremBrokenError(f"{name} was settled with {self.resolved[name]} and is now {state}")
            unacknowledged = self.settling.get(name)
            if state.state is HoldPhase.SETTLED and unacknowledged != state.charged_nusd:
                raise TheoremBrokenError(f"{name} was never settled with {state.charged_nusd}")

    def under(self, account: str, above: str) -> bool:
        at: str | None = account
        while at is not None and at != above:
            at = PARENTS[at]
        return at == above


class CheckThenAct(Simulation):
    """Looks at what is free, starts, and writes it down afterwards: what most gateways do."""

    async def one_launch(self) -> None:
        hold = self.new_hold()
        if self.ledger.free(hold.account) < hold.amount_nusd or self.ledger.frozen_by(hold.account):
            return
        await asyncio.sleep(0)
        self.start(hold)
        try:
            await self.ledger.hold(hold)
        except BudgetError:
            return
        self.acknowledge(hold)

    async def settle(self, name: str, actual: int) -> None:
        if self.ledger.hold_state(name):
            await super().settle(name, actual)


class StartBeforeDurable(Simulation):
    """Holds in memory and starts without waiting for the disk."""

    async def one_launch(self) -> None:
        hold = self.new_hold()
        call = asyncio.ensure_future(self.ledger.hold(hold))
        await asyncio.sleep(0)
        if self.ledger.hold_state(hold.hold_id):
            self.start(hold)
        try:
            await call
        except BudgetError:
            return
        self.acknowledge(hold)

    async def settle(self, name: str, actual: int) -> None:
        if self.ledger.hold_state(name):
            await super().settle(name, actual)


class ExpiryVoids(Simulation):
    """Gives holds back when they are old, as ledgers with a timeout do."""

    async def time_passes(self) -> None:
        await super().time_passes()
        for name, spender in self.spenders.items():
            if spender.age >= 3 and name not in self.resolved:
                await self.ledger.release(name, proof="expired")
                self.resolved[name] = 0


class CrashVoids(Simulation):
    """Starts with a clean sheet after a crash."""

    async def after_restart(self, hold: HoldState) -> None:
        await self.ledger.release(hold.hold_id, proof="the daemon crashed")
        self.resolved[hold.hold_id] = 0


class ReleaseOnTimeout(Simulation):
    """Gives the hold back when a run takes too long, and ends the spender afterwards."""

    async def run_times_out(self, name: str) -> None:
        await self.ledger.release(name, proof="timeout")
        self.resolved[name] = 0


class ZeroOnMissingUsage(Simulation):
    """Takes a missing number for nothing."""

    def without_evidence(self, spender: Spender) -> int:
        return 0


MUTANTS: tuple[type[Simulation], ...] = (
    CheckThenAct,
    StartBeforeDurable,
    ExpiryVoids,
    CrashVoids,
    ReleaseOnTimeout,
    ZeroOnMissingUsage,
)


def simulate(kind: type[Simulation], seed: int, folder: Path, *, steps: int = 40) -> Outcome:
    """Runs one world in a fresh subfolder of `folder`, which is removed again."""
    place = folder / f"{kind.__name__}-{seed}"
    place.mkdir()
    world = kind(seed, place, steps=steps)
    violation = None
    loud = threading.excepthook
    threading.excepthook = lambda death: None if death.exc_type is Killed else loud(death)
    try:
        asyncio.run(asyncio.wait_for(world.run(), 60))
    except TheoremBrokenError as broken:
        violation = str(broken)
    finally:
        threading.excepthook = loud
        shutil.rmtree(place)
    return Outcome(seed, violation, steps, world.crashes, len(world.spenders), len(world.held))
