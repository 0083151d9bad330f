"""The real ledger on a real file, driven at random, against a model that only adds up.

The model keeps no balances: it keeps who holds what and who was charged what, and sums. After every step
the ledger's accounts must equal these sums, no limit may be broken, every hold must have left `held` at most
once, and the journal must rebuild it all.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evalpurse.budget import errors
from evalpurse.budget.accounts import Hold, HoldState, RequestState, Role
from evalpurse.budget.journal import Journal
from evalpurse.budget.ledger import Ledger

T = TypeVar("T")
AMOUNTS = st.one_of(st.integers(0, 40), st.integers(0, 400))
PICKS = st.integers(0, 10_000)


class Unreliable(Journal):
    """Loses the commits it is told to lose."""

    losing: ClassVar[bool] = False

    def _commit(self) -> None:
        if self.losing:
            raise OSError("the disk went away")
        super()._commit()


@dataclass
class Purse:
    """An account as the model knows it: what was corrected at it, not what its balance is."""

    parent: str | None
    limit: int
    state: str = "open"
    corrected: int = 0
    corrected_over: int = 0


@dataclass
class Held:
    hold: Hold
    charged: int | None = None
    released: bool = False

    @property
    def resolved(self) -> bool:
        return self.released or self.charged is not None


@dataclass
class Model:
    purses: dict[str, Purse] = field(default_factory=lambda: {"workspace": Purse(None, 0)})
    holds: dict[str, Held] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    requests: dict[str, str] = field(default_factory=dict)

    def chain(self, name: str) -> Iterator[str]:
        at: str | None = name
        while at is not None:
            yield at
            at = self.purses[at].parent

    def sums(self, name: str) -> tuple[int, int, int]:
        """posted, held, overrun"""
        posted = held = over = 0
        for each in self.holds.values():
            if name in self.chain(each.hold.account):
                if not each.resolved:
                    held += each.hold.amount_nusd
                charged = each.charged or 0
                posted += min(charged, each.hold.amount_nusd)
                over += max(0, charged - each.hold.amount_nusd)
        for below, purse in self.purses.items():
            if name in self.chain(below):
                posted += purse.corrected
                over += purse.corrected_over
        return posted, held, over

    def refusal(self, account: str, amount: int) -> str | None:
        """The code with which a new hold must be refused, if it must."""
        for name in self.chain(account):
            purse = self.purses[name]
            if purse.state != "open":
                return f"account_{purse.state}"
            if sum(self.sums(name)) + amount > purse.limit:
                return "exceeds_limit"
        return None

    def freeze_chain(self, account: str) -> None:
        for name in self.chain(account):
            if self.purses[name].state == "open":
                self.purses[name].state = "frozen"


class LedgerMachine(RuleBasedStateMachine):
    """Each rule does one thing to the ledger and to the model; refusals must be the ones predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(prefix="evalpurse-ledger-"))
        self.model = Model()
        self.count = 0

        class Disk(Unreliable):
            pass

        self.disk = Disk

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        async def within() -> T:
            async with asyncio.timeout(20):
                return await coroutine

        return self.runner.run(within())

    def code(self, coroutine: Coroutine[Any, Any, Any]) -> str | None:
        try:
            self.run(coroutine)
        except errors.BudgetError as error:
            return error.code
        return None

    def new(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def account(self, pick: int) -> str:
        return list(self.model.purses)[pick % len(self.model.purses)]

    def held(self, pick: int) -> Held:
        return list(self.model.holds.values())[pick % len(self.model.holds)]

    @initialize(limit=st.integers(100, 2000))
    def open(self, limit: int) -> None:
        self.ledger = self.run(Ledger.open(self.folder / "ledger.sqlite", journal_type=self.disk))
        self.run(self.ledger.set_limit(self.new("op"), "workspace", limit, by=Role.OWNER))
        self.model.purses["workspace"].limit = limit

    @rule(parent=PICKS, limit=AMOUNTS, owner=st.booleans())
    def open_account(self, parent: int, limit: int, owner: bool) -> None:
        above, name = self.account(parent), self.new("acc")
        expected = None
        for each in self.model.chain(above):
            if self.model.purses[each].state != "open":
                expected = f"account_{self.model.purses[each].state}"
                break
        if expected is None and not owner and limit > self.model.purses[above].limit:
            expected = "exceeds_limit"
        by = Role.OWNER if owner else Role.AGENT
        opening = self.ledger.open_account(self.new("op"), name, parent=above, limit_nusd=limit, by=by)
        assert self.code(opening) == expected
        if expected is None:
            self.model.purses[name] = Purse(above, limit)

    @rule(account=PICKS, amount=AMOUNTS)
    def hold(self, account: int, amount: int) -> None:
        hold = Hold(self.new("h"), self.account(account), amount, "prices", "run")
        expected = self.model.refusal(hold.account, amount)
        assert self.code(self.ledger.hold(hold)) == expected
        if expected is None:
            self.model.holds[hold.hold_id] = Held(hold)
        else:
            self.model.refused.add(hold.hold_id)

    @rule(wanted=st.lists(st.tuples(PICKS, AMOUNTS), max_size=6), atomic=st.booleans(), old=PICKS)
    def hold_many(self, wanted: list[tuple[int, int]], atomic: bool, old: int) -> None:
        before = dict(self.model.holds)
        holds = [Hold(self.new("h"), self.account(pick), amount) for pick, amount in wanted]
        if before and old % 2:
            holds.insert(old % (len(holds) + 1), self.held(old).hold)
        admitted: list[str] = []
        refusal = None
        for hold in holds:
            known = before.get(hold.hold_id)
            if known and known.resolved:
                refusal = "hold_already_released" if known.released else "hold_already_posted"
            elif not known:
                refusal = self.model.refusal(hold.account, hold.amount_nusd)
            if refusal:
                break
            admitted.append(hold.hold_id)
            self.model.holds.setdefault(hold.hold_id, Held(hold))
        if refusal and atomic:
            self.model.holds = before
            assert self.code(self.ledger.hold_many(holds, atomic=True)) == refusal
            return
        result = self.run(self.ledger.hold_many(holds, atomic=atomic))
        assert result.admitted == admitted
        assert [name for name, _ in result.refused] == [hold.hold_id for hold in holds[len(admitted) :]]
        assert [error.code for _, error in result.refused[:1]] == ([refusal] if refusal else [])

    @precondition(lambda self: self.model.holds)
    @rule(pick=PICKS, percent=st.integers(0, 160))
    def settle(self, pick: int, percent: int) -> None:
        held = self.held(pick)
        actual = held.hold.amount_nusd * percent // 100
        expected = None
        if held.resolved and (held.charged or 0) != actual:
            expected = "hold_already_released" if held.released else "exists_with_different_amount"
        assert self.code(self.ledger.settle(held.hold.hold_id, actual, detail="anything")) == expected
        if not held.resolved:
            held.charged = actual
            if actual > held.hold.amount_nusd:
                self.model.freeze_chain(held.hold.account)

    @precondition(lambda self: self.model.holds)
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        held = self.held(pick)
        expected = "hold_already_posted" if held.charged else None
        assert self.code(self.ledger.release(held.hold.hold_id, proof="never started")) == expected
        if not held.resolved:
            held.released = True

    @precondition(lambda self: self.model.holds)
    @rule(pick=PICKS, changed=st.sampled_from(["", "account", "amount_nusd", "prices_digest", "purpose"]))
    def hold_again(self, pick: int, changed: str) -> None:
        held = self.held(pick)
        fields = vars(held.hold) | (
            {changed: 7_777 if changed == "amount_nusd" else "other"} if changed else {}
        )
        names = {"amount_nusd": "amount", "prices_digest": "prices"}
        expected = f"exists_with_different_{names.get(changed, changed)}" if changed else None
        if not changed and held.resolved:
            expected = "hold_already_released" if held.released else "hold_already_posted"
        assert self.code(self.ledger.hold(Hold(**fields))) == expected

    @precondition(lambda self: self.model.refused)
    @rule(pick=PICKS)
    def hold_refused_again(self, pick: int) -> None:
        name = sorted(self.model.refused)[pick % len(self.model.refused)]
        assert self.code(self.ledger.hold(Hold(name, "workspace", 0))) == "id_already_failed"
        assert self.ledger.hold_state(name) is None

    @rule(account=PICKS, limit=st.integers(0, 2000))
    def set_limit(self, account: int, limit: int) -> None:
        name = self.account(account)
        purse = self.model.purses[name]
        posted, held, _ = self.model.sums(name)
        expected = "account_closed" if purse.state == "closed" else None
        if expected is None and limit < posted + held:
            expected = "limit_below_committed"
        assert self.code(self.ledger.set_limit(self.new("op"), name, limit, by=Role.OWNER)) == expected
        if expected is None:
            purse.limit = limit

    @rule(account=PICKS, to=st.sampled_from(["open", "open", "open", "frozen", "closed"]))
    def set_state(self, account: int, to: str) -> None:
        name, operation = self.account(account), self.new("op")
        purse = self.model.purses[name]
        expected = "account_closed" if purse.state == "closed" else None
        if to == "closed" and expected is None:
            in_use = any(
                each.hold.account == name and not each.resolved for each in self.model.holds.values()
            )
            below = any(each.parent == name and each.state != "closed" for each in self.model.purses.values())
            expected = (
                "not_allowed" if purse.parent is None else "account_in_use" if in_use or below else None
            )
        orders = {
            "open": self.ledger.unfreeze(operation, name, reason="", by=Role.OWNER),
            "frozen": self.ledger.freeze(operation, name, reason=""),
            "closed": self.ledger.close(operation, name),
        }
        order = orders.pop(to)
        for unused in orders.values():
            unused.close()
        assert self.code(order) == expected
        if expected is None:
            purse.state = to

    @rule(account=PICKS, amount=st.integers(-60, 60).filter(bool))
    def correct(self, account: int, amount: int) -> None:
        name = self.account(account)
        chain = list(self.model.chain(name))
        sums = {each: self.model.sums(each) for each in chain}
        if amount > 0:
            fits = all(sum(sums[each]) + amount <= self.model.purses[each].limit for each in chain)
            over = 0 if fits else amount
        else:
            over = -min(-amount, *(sums[each][2] for each in chain))
        expected = "invalid_amount" if any(sums[each][0] + amount - over < 0 for each in chain) else None
        correction = self.ledger.correct(self.new("op"), name, amount, "an invoice", by=Role.OWNER)
        assert self.code(correction) == expected
        if expected is None:
            self.model.purses[name].corrected += amount - over
            self.model.purses[name].corrected_over += over
            if over > 0:
                self.model.freeze_chain(name)

    @rule(account=PICKS, grant=st.one_of(st.none(), st.integers(1, 100)))
    def request_and_decide(self, account: int, grant: int | None) -> None:
        name, request = self.account(account), self.new("r")
        closed = self.model.purses[name].state == "closed"
        asked = self.code(self.ledger.request(request, name, 50, "more", by=Role.AGENT))
        assert asked == ("account_closed" if closed else None)
        if not closed:
            self.run(self.ledger.decide(request, grant, by=Role.OWNER))
            self.model.purses[name].limit += grant or 0
            self.model.requests[request] = "denied" if grant is None else "granted"

    @rule(account=PICKS, amounts=st.lists(AMOUNTS, min_size=2, max_size=8), settle=PICKS)
    def all_at_once(self, account: int, amounts: list[int], settle: int) -> None:
        """Concurrent callers are served in the order in which they came."""
        name = self.account(account)
        holds = [Hold(self.new("h"), name, amount) for amount in amounts]
        open_now = [each for each in self.model.holds.values() if not each.resolved]
        expected: list[str | None] = []
        resolving = open_now[settle % len(open_now)] if open_now else None
        if resolving:
            resolving.charged = resolving.hold.amount_nusd // 2
        for hold in holds:
            expected.append(self.model.refusal(name, hold.amount_nusd))
            if expected[-1] is None:
                self.model.holds[hold.hold_id] = Held(hold)
            else:
                self.model.refused.add(hold.hold_id)

        async def together() -> list[str | None]:
            calls: list[Coroutine[Any, Any, HoldState]] = [self.ledger.hold(hold) for hold in holds]
            if resolving:
                hold = resolving.hold
                calls.insert(0, self.ledger.settle(hold.hold_id, hold.amount_nusd // 2))
            done = await asyncio.gather(*calls, return_exceptions=True)
            return [getattr(each, "code", None) for each in done[len(calls) - len(holds) :]]

        assert self.run(together()) == expected

    @rule(account=PICKS, amount=AMOUNTS, settle=PICKS)
    def lose_a_commit(self, account: int, amount: int, settle: int) -> None:
        """What could not become durable did not happen."""
        self.disk.losing = True
        hold = Hold(self.new("h"), self.account(account), amount)
        assert self.code(self.ledger.hold(hold)) == "ledger_unavailable"
        open_now = [each for each in self.model.holds.values() if not each.resolved]
        if open_now:
            name = open_now[settle % len(open_now)].hold.hold_id
            assert self.code(self.ledger.settle(name, 1)) == "ledger_unavailable"
        self.disk.losing = False

    @rule()
    def close_and_open(self) -> None:
        self.run(self.ledger.close_ledger())
        self.ledger = self.run(Ledger.open(self.folder / "ledger.sqlite", journal_type=self.disk))

    @invariant()
    def every_balance_is_the_sum_of_what_happened(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert [account.account for account in self.ledger.accounts()] == list(self.model.purses)
        for account in self.ledger.accounts():
            purse, (posted, held, over) = self.model.purses[account.account], self.model.sums(account.account)
            found = (account.posted_nusd, account.held_nusd, account.overrun_nusd)
            assert found == (posted, held, over), account
            assert (account.limit_nusd, account.state, account.parent) == (
                purse.limit,
                purse.state,
                purse.parent,
            )
            assert posted >= 0
            assert posted + held <= account.limit_nusd
            free = min(
                self.model.purses[name].limit - sum(self.model.sums(name))
                for name in self.model.chain(account.account)
            )
            assert self.ledger.free(account.account) == max(0, free)

    @invariant()
    def every_hold_is_where_the_model_has_it(self) -> None:
        if not hasattr(self, "ledger"):
            return
        open_now = {each.hold.hold_id for each in self.model.holds.values() if not each.resolved}
        assert {hold.hold_id for hold in self.ledger.open_holds()} == open_now
        for name, each in self.model.holds.items():
            state = self.ledger.hold_state(name)
            assert state is not None
            assert state.charged_nusd == (each.charged or 0)
            assert state.state == ("released" if each.released else "settled" if each.resolved else "held")
        decided = {request.request_id: request.state.value for request in self.ledger.requests()}
        assert decided == self.model.requests
        assert self.ledger.requests(RequestState.PENDING) == []

    @invariant()
    def the_journal_rebuilds_it_all(self) -> None:
        if hasattr(self, "ledger"):
            assert self.run(self.ledger.verify()).problems == ()

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.run(self.ledger.close_ledger())
        self.runner.close()
        shutil.rmtree(self.folder)


LedgerMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=35,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLedgerMachine = LedgerMachine.TestCase
