"""A tour of a real Modal account in two minutes: everything that runs depend on, tried once, for cents.

What it can cost is held before the first sandbox exists and settled from lifetimes at limits. Whatever
happens on the way, every sandbox, App, volume and secret that it made is ended or removed, and looked for
again: that nothing is left is one of the checks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import anyio

from evalpurse.budget.accounts import Hold, Role
from evalpurse.budget.errors import AccountNotFoundError
from evalpurse.budget.ledger import Ledger
from evalpurse.budget.money import as_usd, format_usd
from evalpurse.config import Settings
from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.runs.sandboxes.protocol import Machine
from evalpurse.runs.smoke_tour import CPU, LIFETIME_S, MEMORY_MB, REACH, SANDBOXES, Check, Connect, Tour

ACCOUNT = "smoke"


class SmokeError(EvalpurseError):
    """The tour cannot begin; nothing was made."""

    code: ClassVar[str] = "smoke_refused"


@dataclass(frozen=True)
class Report:
    """What a tour found. Latencies are seconds, a list of [p50, p95, how many] each; money is dollars."""

    ok: bool
    checks: Sequence[Check]
    latency: dict[str, list[float]]
    price: dict[str, Any]
    seconds: float

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


class Smoke:
    """Tours one at a time. `reach` is an address that an open sandbox can be expected to reach."""

    def __init__(
        self,
        home: Home,
        settings: Settings,
        ledger: Ledger,
        connect: Connect,
        *,
        reach: tuple[str, int] = REACH,
    ) -> None:
        self._home = home
        self._settings = settings
        self._ledger = ledger
        self._connect = connect
        self._reach = reach
        self._one = anyio.Lock()

    async def run(self, max_nusd: int, *, by: Role) -> Report:
        """One tour that costs at most `max_nusd`, from a purse that has it.

        Raises:
            EvalpurseError: there is no way in, or the purse refuses; nothing was made.
            SmokeError: the worst case is above `max_nusd`; says what it is.
        """
        async with self._one:
            began = time.monotonic()
            tour = Tour(self._home, self._settings, self._connect, self._reach)
            await tour.enter()
            try:
                await self._settle_earlier(tour)
                per_s = tour.rates.nusd_per_second(Machine(), cpu=CPU[1], memory_mb=MEMORY_MB[1])
                worst = per_s * LIFETIME_S * (SANDBOXES + 1)
                await self._hold(tour.name, worst, max_nusd, by)
            except BaseException:
                await tour.leave()
                raise
            cost = worst
            try:
                await tour.look_around()
            finally:
                with anyio.CancelScope(shield=True):
                    lifetimes = await tour.end()
                    cost = min(worst, sum(math.ceil(each) * per_s for each in lifetimes))
                    await self._ledger.settle(tour.name, cost, detail="smoke")
            price = {
                "usd_per_sandbox_hour": as_usd(per_s * 3600),
                "worst_case_usd": as_usd(worst),
                "charged_usd": as_usd(cost),
                "rates": tour.rates.source,
                "cpu": CPU[1],
                "memory_mb": MEMORY_MB[1],
            }
            ok = not any(check.state in ("fail", "skip") for check in tour.checks)
            seconds = round(time.monotonic() - began, 2)
            return Report(ok, tour.checks, tour.latency(), price, seconds)

    async def _hold(self, name: str, worst: int, most: int, by: Role) -> None:
        if worst > most:
            raise SmokeError(
                f"The worst case of the tour is {format_usd(worst)} ({SANDBOXES + 1} sandboxes of {CPU[1]} "
                f"cores and {MEMORY_MB[1]} MiB for {LIFETIME_S} s), above --max-usd {format_usd(most)}.",
                hint="Allow that much; what it really costs is charged.",
                worst_nusd=worst,
                max_nusd=most,
            )
        try:
            account = self._ledger.account(ACCOUNT)
        except AccountNotFoundError:
            await self._ledger.open_account(f"open:{name}", ACCOUNT, parent=None, limit_nusd=most, by=by)
        else:
            limit = account.posted_nusd + account.held_nusd + most
            await self._ledger.set_limit(f"limit:{name}", ACCOUNT, limit, by=by)
        await self._ledger.hold(Hold(name, ACCOUNT, worst, purpose="smoke"))

    async def _settle_earlier(self, tour: Tour) -> None:
        """A tour that a dead daemon left: its sandboxes are ended, and its whole hold is charged."""
        for hold in self._ledger.open_holds("smoke."):
            await tour.end_app(hold.hold_id)
            await self._ledger.settle(hold.hold_id, hold.amount_nusd, detail="smoke, left by a dead daemon")
