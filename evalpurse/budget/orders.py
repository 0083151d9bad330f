"""Orders: everything that is done to accounts besides holds, one function a kind.

Like the tree they change, they know no clock and no disk: each checks, changes and returns its journal
entry, or raises and changes nothing. Who may give an order is checked here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from evalpurse.budget import errors
from evalpurse.budget.accounts import (
    DECIDE_SUFFIX,
    ROOT,
    AccountState,
    BudgetRequest,
    Entry,
    HoldPhase,
    Kind,
    RequestState,
    Role,
)
from evalpurse.budget.money import AMOUNT_NUSD_MAX, format_usd
from evalpurse.budget.tree import Node, Tree, not_open, when

REQUESTS_PENDING_MAX = 100

_OWNER_ONLY = frozenset((Kind.SET_LIMIT, Kind.UNFREEZE, Kind.CORRECT, Kind.GRANT, Kind.DENY))


@dataclass(frozen=True)
class Order:
    """What somebody wants done, once. All fields but `by` belong to the id."""

    kind: Kind
    operation_id: str
    account: str
    by: Role
    amount_nusd: int = 0
    detail: str = ""
    parent: str | None = None


def check_role(order: Order) -> None:
    """Raises NotAllowedError unless the role may give this order."""
    allowed = order.by is Role.OWNER or (order.by is Role.AGENT and order.kind not in _OWNER_ONLY)
    if not allowed:
        raise errors.NotAllowedError(
            f"The role {order.by} may not {order.kind.replace('_', ' ')} (account {order.account!r}).",
            hint="A person with the owner token can; an agent asks with request_budget.",
            role=str(order.by),
            kind=str(order.kind),
            account=order.account,
        )


def carry_out(tree: Tree, order: Order, at_us: int) -> Entry:
    """Checks the order, changes the tree and returns the journal entry; or raises and changes nothing."""
    check_role(order)
    return _BY_KIND[order.kind](tree, order, at_us)


def _open_account(tree: Tree, order: Order, at_us: int) -> Entry:
    above = tree.node(order.parent or ROOT)
    if order.account in tree.nodes:
        raise errors.AccountExistsError(
            f"Account {order.account!r} was opened by another operation.",
            hint="Choose another name, or use the account as it is.",
            account=order.account,
        )
    for each in above.chain:
        if each.state is not AccountState.OPEN:
            raise not_open(each)
    if order.by is not Role.OWNER and order.amount_nusd > above.limit:
        raise errors.ExceedsLimitError(
            f"A limit of {format_usd(order.amount_nusd)} is above {format_usd(above.limit)}, the limit of its"
            f" parent {above.name!r}.",
            hint="Choose a limit inside the parent's, or ask the owner for more with request_budget.",
            account=above.name,
            need_nusd=order.amount_nusd,
            limit_nusd=above.limit,
        )
    tree.nodes[order.account] = Node(order.account, above, order.amount_nusd)
    return _entry(tree, order, at_us)


def _set_limit(tree: Tree, order: Order, at_us: int) -> Entry:
    node = _not_closed(tree, order.account)
    committed = node.posted + node.held
    if order.amount_nusd < committed:
        raise errors.LimitBelowCommittedError(
            f"Account {node.name!r} has spent {format_usd(node.posted)} and holds {format_usd(node.held)}:"
            f" its limit cannot go down to {format_usd(order.amount_nusd)}.",
            hint=f"The lowest limit now is {format_usd(committed)}; less is possible as holds settle.",
            account=node.name,
            limit_nusd=order.amount_nusd,
            committed_nusd=committed,
        )
    node.limit = order.amount_nusd
    return _entry(tree, order, at_us)


def _freeze(tree: Tree, order: Order, at_us: int) -> Entry:
    _not_closed(tree, order.account).state = AccountState.FROZEN
    return _entry(tree, order, at_us)


def _unfreeze(tree: Tree, order: Order, at_us: int) -> Entry:
    _not_closed(tree, order.account).state = AccountState.OPEN
    return _entry(tree, order, at_us)


def _close(tree: Tree, order: Order, at_us: int) -> Entry:
    node = _not_closed(tree, order.account)
    if node.parent is None:
        raise errors.NotAllowedError(
            f"{ROOT!r} cannot be closed.", hint="Freeze it, or set its limit.", account=node.name
        )
    of_zero = any(h.account == node.name and h.state is HoldPhase.HELD for h in tree.holds.values())
    if node.held or of_zero:
        raise errors.AccountInUseError(
            f"Account {node.name!r} still holds {format_usd(node.held)}.",
            hint="Settle or release its holds first.",
            account=node.name,
            held_nusd=node.held,
        )
    for each in tree.nodes.values():
        if each.parent is node and each.state is not AccountState.CLOSED:
            raise errors.AccountInUseError(
                f"Account {each.name!r} below {node.name!r} is still open.",
                hint="Close the accounts below it first.",
                account=node.name,
                child=each.name,
            )
    node.state = AccountState.CLOSED
    return _entry(tree, order, at_us)


def _correct(tree: Tree, order: Order, at_us: int) -> Entry:
    """Adds to what was spent, or takes from it, at the account and everything above it.

    What comes back is taken from overruns first. What is added and does not fit under every limit is an
    overrun, and freezes the chain. A closed account can be corrected: the provider's bill comes late.
    """
    node, amount = tree.node(order.account), order.amount_nusd
    if amount >= 0:
        fits = all(each.posted + each.held + each.overrun + amount <= each.limit for each in node.chain)
        posted, overrun = (amount, 0) if fits else (0, amount)
    else:
        overrun = -min(-amount, *(each.overrun for each in node.chain))
        posted = amount - overrun
        spent = min(each.posted for each in node.chain)
        if spent + posted < 0:
            raise errors.InvalidAmountError(
                f"A correction of {format_usd(amount)} is more than account {node.name!r} and those above"
                f" it have spent ({format_usd(spent - overrun)}).",
                hint="Correct the account in which the charge was made.",
                account=node.name,
                amount_nusd=amount,
            )
    tree.move(node, posted=posted, held=0, overrun=overrun)
    return _entry(tree, order, at_us, posted=posted, overrun=overrun)


def _request(tree: Tree, order: Order, at_us: int) -> Entry:
    _not_closed(tree, order.account)
    pending = sum(request.state is RequestState.PENDING for request in tree.requests.values())
    if pending >= REQUESTS_PENDING_MAX:
        raise errors.TooManyRequestsError(
            f"{pending} budget requests already wait for the owner.",
            hint="Wait until the owner has decided some of them.",
            pending=pending,
            most=REQUESTS_PENDING_MAX,
        )
    entry = _entry(tree, order, at_us)
    tree.requests[order.operation_id] = BudgetRequest(
        seq=entry.seq,
        request_id=order.operation_id,
        account=order.account,
        amount_nusd=order.amount_nusd,
        reason=order.detail,
        state=RequestState.PENDING,
        granted_nusd=0,
        asked_by=order.by,
        asked_at=when(at_us),
        decided_at=None,
    )
    return entry


def _grant(tree: Tree, order: Order, at_us: int) -> Entry:
    node = _not_closed(tree, order.account)
    if node.limit + order.amount_nusd > AMOUNT_NUSD_MAX:
        raise errors.AmountOverflowError(
            f"The limit would become {format_usd(node.limit + order.amount_nusd)}; the largest one is"
            f" {format_usd(AMOUNT_NUSD_MAX)}.",
            hint="Grant less.",
            account=order.account,
        )
    node.limit += order.amount_nusd
    return _decided(tree, order, RequestState.GRANTED, at_us)


def _deny(tree: Tree, order: Order, at_us: int) -> Entry:
    return _decided(tree, order, RequestState.DENIED, at_us)


def _decided(tree: Tree, order: Order, state: RequestState, at_us: int) -> Entry:
    request = tree.requests[order.operation_id.removesuffix(DECIDE_SUFFIX)]
    tree.requests[request.request_id] = replace(
        request, state=state, granted_nusd=order.amount_nusd, decided_at=when(at_us)
    )
    return _entry(tree, order, at_us, resolves=request.seq)


def _not_closed(tree: Tree, account: str) -> Node:
    node = tree.node(account)
    if node.state is AccountState.CLOSED:
        raise not_open(node)
    return node


def _entry(
    tree: Tree, order: Order, at_us: int, *, posted: int = 0, overrun: int = 0, resolves: int | None = None
) -> Entry:
    return tree.entry(
        at_us,
        order.kind,
        order.operation_id,
        order.account,
        order.amount_nusd,
        posted=posted,
        overrun=overrun,
        resolves=resolves,
        detail=order.detail,
        role=order.by,
        parent=order.parent,
    )


_BY_KIND: dict[Kind, Callable[[Tree, Order, int], Entry]] = {
    Kind.OPEN_ACCOUNT: _open_account,
    Kind.SET_LIMIT: _set_limit,
    Kind.FREEZE: _freeze,
    Kind.UNFREEZE: _unfreeze,
    Kind.CLOSE: _close,
    Kind.CORRECT: _correct,
    Kind.REQUEST: _request,
    Kind.GRANT: _grant,
    Kind.DENY: _deny,
}
