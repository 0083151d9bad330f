"""Money at the tools' edge: dollars for the caller, nano-dollars inside."""

from __future__ import annotations

from evalpurse.budget.errors import AmountOverflowError, InvalidAmountError
from evalpurse.budget.money import NUSD_PER_USD, parse_usd


def usd(nusd: int) -> float:
    """Nano-dollars as dollars, for showing; never computed with again."""
    return nusd / NUSD_PER_USD


def usd_or_none(nusd: int | None) -> float | None:
    """As `usd`, passing on that there is no number."""
    return None if nusd is None else usd(nusd)


def nusd(parameter: str, amount_usd: float) -> int:
    """Dollars of a parameter as nano-dollars, rounded up.

    Raises:
        InvalidAmountError, AmountOverflowError: as `parse_usd`; names the parameter.
    """
    try:
        return parse_usd(amount_usd)
    except (InvalidAmountError, AmountOverflowError) as error:
        said = error.message[:1].lower() + error.message[1:]
        raise type(error)(f"{parameter}: {said}", hint=error.hint, **error.facts) from None
