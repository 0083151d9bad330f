"""The account tree in memory: the rules of money, with no clock, no disk and no await.

Every method that changes something checks the whole chain of accounts first, then changes all of it, and
returns the journal entry that says so. At every account, always: 0 <= posted, 0 <= held and
posted + held <= limit; a parent's balances are the sums of what happened at it and below it; a hold leaves
`held` exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from evalpurse.budget import errors
from evalpurse.budget.accounts import (
    RESOLVE_SUFFIX,
    Account,
    AccountState,
    BudgetRequest,
    Entry,
    Hold,
    HoldPhase,
    HoldState,
    Kind,
    Role,
)
from evalpurse.budget.money import format_usd

INT64_MAX = 2**63 - 1

_REFUSED_FOR_EVER = (
    errors.AccountNotFoundError,
    errors.AccountFrozenError,
    errors.AccountClosedError,
    errors.ExceedsLimitError,
)
"""Refusals that depend on the moment: a hold id that met one is used up."""


class Node:
    """One account and its balances; `chain` is the account itself and everything above it."""

    __slots__ = ("chain", "held", "limit", "name", "overrun", "parent", "posted", "state")

    def __init__(self, name: str, parent: Node | None, limit: int) -> None:
        self.name = name
        self.parent = parent
        self.chain: tuple[Node, ...] = (self, *(parent.chain if parent else ()))
        self.limit = limit
        self.posted = 0
        self.held = 0
        self.overrun = 0
        self.state = AccountState.OPEN

    def snapshot(self) -> Account:
        return Account(
            account=self.name,
            parent=self.parent.name if self.parent else None,
            limit_nusd=self.limit,
            posted_nusd=self.posted,
            held_nusd=self.held,
            overrun_nusd=self.overrun,
            state=self.state,
        )


class Tree:
    """All accounts, the holds that are open (or resolved and not yet durable), and all requests."""

    def __init__(
        self,
        *,
        last_seq: int = 0,
        accounts: Iterable[Account] = (),
        holds: Iterable[HoldState] = (),
        requests: Iterable[BudgetRequest] = (),
    ) -> None:
        """`accounts` come with every parent before its children."""
        self.last_seq = last_seq
        self.nodes: dict[str, Node] = {}
        for account in accounts:
            node = Node(account.account, self.nodes.get(account.parent or ""), account.limit_nusd)
            node.posted, node.held = account.posted_nusd, account.held_nusd
            node.overrun, node.state = account.overrun_nusd, account.state
            self.nodes[node.name] = node
        self.holds = {hold.hold_id: hold for hold in holds}
        self.requests = {request.request_id: request for request in requests}

    def node(self, account: str) -> Node:
        found = self.nodes.get(account)
        if found is None:
            raise errors.AccountNotFoundError(
                f"There is no account {account!r}.",
                hint="budget_status lists the accounts there are.",
                account=account,
            )
        return found

    def free(self, account: str) -> int:
        return min(each.limit - each.posted - each.held - each.overrun for each in self.node(account).chain)

    def hold(self, hold: Hold, at_us: int) -> Entry:
        """Reserves the amount on the whole chain, or raises and changes nothing."""
        chain, amount = self.node(hold.account).chain, hold.amount_nusd
        for each in chain:
            if each.state is not AccountState.OPEN:
                raise not_open(each)
            if each.posted + each.held + each.overrun + amount > each.limit:
                raise _exceeds(each, amount)
        for each in chain:
            each.held += amount
        entry = self.entry(
            at_us, Kind.HOLD, hold.hold_id, hold.account, amount,
            hold_id=hold.hold_id, held=amount, detail=hold.purpose, prices_digest=hold.prices_digest,
        )  # fmt: skip
        self.holds[hold.hold_id] = HoldState(
            entry.seq, hold.hold_id, hold.account, amount, hold.prices_digest, hold.purpose, HoldPhase.HELD
        )
        return entry

    def refuse(self, hold: Hold, refusal: errors.BudgetError, at_us: int) -> Entry | None:
        """The entry that uses up the id of a refused hold; None when the refusal would be the same always."""
        if not isinstance(refusal, _REFUSED_FOR_EVER):
            return None
        return self.entry(
            at_us, Kind.HOLD_REFUSED, hold.hold_id, hold.account, hold.amount_nusd,
            hold_id=hold.hold_id, detail=hold.purpose, prices_digest=hold.prices_digest, code=refusal.code,
        )  # fmt: skip

    def take_back(self, entries: list[Entry]) -> None:
        """Undoes the newest entries, all of them holds, of a batch that turned out not to fit."""
        for entry in reversed(entries):
            if entry.seq != self.last_seq or entry.kind != Kind.HOLD:
                raise errors.InvariantBrokenError(f"Only the newest holds can be taken back, not {entry}.")
            for each in self.nodes[entry.account].chain:
                each.held -= entry.held_nusd
            del self.holds[entry.operation_id]
            self.last_seq -= 1

    def settle(self, hold: HoldState, actual_nusd: int, detail: str, at_us: int) -> Entry:
        """Charges an open hold in full, whatever was held; more than the hold freezes the chain."""
        kind = Kind.OVERRUN if actual_nusd > hold.amount_nusd else Kind.SETTLE
        return self._resolve(hold, kind, actual_nusd, detail, at_us)

    def release(self, hold: HoldState, proof: str, at_us: int) -> Entry:
        return self._resolve(hold, Kind.RELEASE, 0, proof, at_us)

    def _resolve(self, hold: HoldState, kind: Kind, actual_nusd: int, detail: str, at_us: int) -> Entry:
        name, account, amount = hold.hold_id, hold.account, hold.amount_nusd
        if hold.state is not HoldPhase.HELD:
            raise errors.InvariantBrokenError(f"Hold {name} would leave `held` a second time.")
        posted = min(actual_nusd, amount)
        overrun = actual_nusd - posted
        self.move(self.nodes[account], posted=posted, held=-amount, overrun=overrun)
        state = HoldPhase.RELEASED if kind is Kind.RELEASE else HoldPhase.SETTLED
        self.holds[name] = HoldState(  # not dataclasses.replace: three times slower, and this is the hot path
            hold.seq, name, account, amount, hold.prices_digest, hold.purpose, state, posted, overrun
        )
        return self.entry(
            at_us,
            kind,
            name + RESOLVE_SUFFIX,
            account,
            actual_nusd,
            hold_id=name,
            resolves=hold.seq,
            posted=posted,
            held=-amount,
            overrun=overrun,
            detail=detail,
        )

    def move(self, node: Node, *, posted: int, held: int, overrun: int) -> None:
        """Adds to the balances of a chain; an overrun freezes it. All or nothing."""
        for each in node.chain:
            if each.held + held < 0 or each.posted + posted < 0 or each.overrun + overrun < 0:
                raise errors.InvariantBrokenError(f"A balance of account {each.name!r} would be negative.")
            if each.posted + posted + each.held + held > each.limit:
                raise errors.InvariantBrokenError(f"Account {each.name!r} would exceed its limit.")
            if each.posted + each.overrun + posted + overrun > INT64_MAX:
                raise errors.AmountOverflowError(
                    f"What account {each.name!r} has spent would no longer fit a 64-bit integer.",
                    hint="Check the unit of the amount; the hold stays open.",
                    account=each.name,
                )
        for each in node.chain:
            each.posted += posted
            each.held += held
            each.overrun += overrun
            if overrun > 0 and each.state is AccountState.OPEN:
                each.state = AccountState.FROZEN

    def entry(
        self,
        at_us: int,
        kind: Kind,
        operation_id: str,
        account: str,
        amount: int,
        *,
        hold_id: str | None = None,
        resolves: int | None = None,
        posted: int = 0,
        held: int = 0,
        overrun: int = 0,
        detail: str = "",
        role: Role | None = None,
        parent: str | None = None,
        prices_digest: str | None = None,
        code: str | None = None,
    ) -> Entry:
        self.last_seq += 1
        # `.value`: SQLite binds a plain str several times faster than a subclass of it.
        return Entry(
            self.last_seq, at_us, kind.value, operation_id, account, hold_id, resolves,
            amount, posted, held, overrun, detail, role.value if role else None, parent, prices_digest, code,
        )  # fmt: skip


def when(at_us: int) -> datetime:
    """Microseconds since 1970 as a UTC datetime."""
    return datetime.fromtimestamp(at_us / 1e6, tz=UTC)


def not_open(node: Node) -> errors.BudgetError:
    if node.state is AccountState.CLOSED:
        return errors.AccountClosedError(
            f"Account {node.name!r} is closed.", hint="Open another account.", account=node.name
        )
    return errors.AccountFrozenError(
        f"Account {node.name!r} is frozen: it takes nothing new.",
        hint="Its owner looks with `evalpurse budget status`, then: "
        f"evalpurse budget unfreeze {node.name} --reason '...'",
        account=node.name,
    )


def _exceeds(node: Node, amount: int) -> errors.ExceedsLimitError:
    free = node.limit - node.posted - node.held - node.overrun
    spent = node.posted + node.overrun
    return errors.ExceedsLimitError(
        f"{format_usd(amount)} is needed and {format_usd(free)} is free in account {node.name!r}"
        f" (limit {format_usd(node.limit)}, spent {format_usd(spent)}, held {format_usd(node.held)}).",
        hint="Use less, wait until holds settle, or ask the owner for more with request_budget.",
        account=node.name,
        need_nusd=amount,
        free_nusd=free,
        limit_nusd=node.limit,
        spent_nusd=spent,
        held_nusd=node.held,
    )
