"""Same id, same answer: compares what is asked now with what the id did before.

Silent when all fields are the same; otherwise raises the error that names the first field that differs.
"""

from __future__ import annotations

from evalpurse.budget import errors
from evalpurse.budget.accounts import Entry, Hold, HoldPhase, HoldState, Kind
from evalpurse.budget.money import format_usd
from evalpurse.budget.orders import Order

_HINT = "Use a new id for a new operation; ask with the same fields to get the first answer again."


def check_hold(entry: Entry, hold: Hold) -> None:
    """Raises IdAlreadyFailedError for an id that was refused, ExistsWithDifferent... for other fields."""
    if entry.kind == Kind.HOLD_REFUSED:
        raise errors.IdAlreadyFailedError(
            f"Hold {hold.hold_id!r} was refused before ({entry.code}); its id is used up.",
            hint="Try again under a new id.",
            hold_id=hold.hold_id,
            first_code=entry.code,
        )
    _same_kind(entry, Kind.HOLD)
    _same(errors.ExistsWithDifferentAccountError, entry, "account", entry.account, hold.account)
    _same_amount(entry, hold.amount_nusd)
    _same(
        errors.ExistsWithDifferentPricesError, entry, "prices", entry.prices_digest or "", hold.prices_digest
    )
    _same(errors.ExistsWithDifferentPurposeError, entry, "purpose", entry.detail, hold.purpose)


def check_still_held(hold: HoldState) -> None:
    """Raises when the hold was resolved: nothing may be started under it any more."""
    if hold.state is HoldPhase.SETTLED:
        raise errors.HoldAlreadyPostedError(
            f"Hold {hold.hold_id!r} was settled with {format_usd(hold.charged_nusd)}.",
            hint="Whatever starts now needs a hold under a new id.",
            hold_id=hold.hold_id,
            charged_nusd=hold.charged_nusd,
        )
    if hold.state is HoldPhase.RELEASED:
        raise errors.HoldAlreadyReleasedError(
            f"Hold {hold.hold_id!r} was given back.",
            hint="Whatever starts now needs a hold under a new id.",
            hold_id=hold.hold_id,
        )


def check_resolution(entry: Entry, actual_nusd: int, *, release: bool) -> None:
    """Raises unless the hold was resolved with the same amount; a release counts as 0."""
    if entry.amount_nusd == actual_nusd:
        return
    facts = {"hold_id": entry.hold_id, "posted_nusd": entry.amount_nusd, "asked_nusd": actual_nusd}
    if release:
        raise errors.HoldAlreadyPostedError(
            f"Hold {entry.hold_id!r} was settled with {format_usd(entry.amount_nusd)}; it is not given back.",
            hint="An owner can correct the account.",
            **facts,
        )
    if entry.kind == Kind.RELEASE:
        raise errors.HoldAlreadyReleasedError(
            f"Hold {entry.hold_id!r} was given back: it cannot be charged with {format_usd(actual_nusd)}.",
            hint="If the money was spent all the same, an owner must correct the account.",
            **facts,
        )
    _same_amount(entry, actual_nusd)


def check_order(entry: Entry, order: Order) -> None:
    _same_kind(entry, order.kind)
    _same(errors.ExistsWithDifferentAccountError, entry, "account", entry.account, order.account)
    _same(errors.ExistsWithDifferentParentError, entry, "parent", entry.parent, order.parent)
    _same_amount(entry, order.amount_nusd)
    _same(errors.ExistsWithDifferentPurposeError, entry, "reason", entry.detail, order.detail)


def _same_kind(entry: Entry, kind: Kind) -> None:
    _same(errors.ExistsWithDifferentKindError, entry, "kind", entry.kind, kind.value)


def _same_amount(entry: Entry, amount_nusd: int) -> None:
    if entry.amount_nusd != amount_nusd:
        raise errors.ExistsWithDifferentAmountError(
            f"Operation {entry.operation_id!r} exists with the amount {format_usd(entry.amount_nusd)}, not"
            f" {format_usd(amount_nusd)}.",
            hint=_HINT,
            operation_id=entry.operation_id,
            first_nusd=entry.amount_nusd,
            asked_nusd=amount_nusd,
        )


def _same(
    error: type[errors.ExistsWithDifferentError],
    entry: Entry,
    field: str,
    first: str | None,
    asked: str | None,
) -> None:
    if first != asked:
        raise error(
            f"Operation {entry.operation_id!r} exists with the {field} {first!r}, not {asked!r}.",
            hint=_HINT,
            operation_id=entry.operation_id,
            first=first,
            asked=asked,
        )
