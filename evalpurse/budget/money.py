"""Money: an integer of nano-dollars (`_nusd`), so that a sum of a million charges is exact.

Amounts that arrive as text or numbers are rounded up once, here: a charge may be a billionth of a dollar
too high, never too low.
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Context, Decimal

from evalpurse.budget.errors import AmountOverflowError, InvalidAmountError

NUSD_PER_USD = 10**9
AMOUNT_NUSD_MAX = 2**62
"""About 4.6 billion dollars; two of them still fit a 64-bit integer, so sums can be checked, not wrapped."""

_PLAIN_NUMBER = re.compile(r"\$?([0-9]{1,30}(?:\.[0-9]{1,40})?|\.[0-9]{1,40})")
_EXACT = Context(prec=120, rounding=ROUND_CEILING)
_SHOWN_DECIMALS = 6


def parse_usd(amount: str | float | Decimal) -> int:
    """Dollars as nano-dollars, rounded up; text is a plain number, with or without a leading `$`.

    Raises InvalidAmountError for NaN, infinity, negative numbers, booleans and anything that is not a plain
    number; AmountOverflowError above `AMOUNT_NUSD_MAX`.
    """
    exact = _decimal(amount)
    if exact.adjusted() > 20:  # before scaling: an exponent of a million would fill the memory with zeros
        raise _overflow(amount)
    nusd = int(_EXACT.multiply(exact, NUSD_PER_USD).to_integral_value(ROUND_CEILING))
    if nusd > AMOUNT_NUSD_MAX:
        raise _overflow(amount)
    return nusd


def check_amount(amount_nusd: int, *, what: str, least_nusd: int = 0) -> int:
    """Returns `amount_nusd` if it is an integer from `least_nusd` to `AMOUNT_NUSD_MAX`, else raises."""
    if type(amount_nusd) is not int:
        raise InvalidAmountError(
            f"{what} must be an integer of nano-dollars, not {_shown(amount_nusd)}.",
            hint="Convert dollars with parse_usd.",
            amount=_shown(amount_nusd),
        )
    if amount_nusd > AMOUNT_NUSD_MAX or amount_nusd < -AMOUNT_NUSD_MAX:
        raise _overflow(amount_nusd)
    if amount_nusd < least_nusd:
        raise InvalidAmountError(
            f"{what} is {format_usd(amount_nusd)}; it must be at least {format_usd(least_nusd)}.",
            amount_nusd=amount_nusd,
            least_nusd=least_nusd,
        )
    return amount_nusd


def format_usd(amount_nusd: int) -> str:
    """`$1.2345`: two to six decimals, as many as are needed; what is smaller is shown as such, never as 0."""
    sign = "-" if amount_nusd < 0 else ""
    size = abs(amount_nusd)
    step = 10 ** (9 - _SHOWN_DECIMALS)
    shown = (size + step // 2) // step
    if shown == 0 and size:
        return f"{sign}<$0.{'1':0>{_SHOWN_DECIMALS}}"
    dollars, rest = divmod(shown, 10**_SHOWN_DECIMALS)
    decimals = f"{rest:0{_SHOWN_DECIMALS}d}".rstrip("0").ljust(2, "0")
    return f"{sign}${dollars}.{decimals}"


def as_usd(amount_nusd: int) -> float:
    """Dollars as a float, for JSON and charts only; never computed with."""
    return amount_nusd / NUSD_PER_USD


def _decimal(amount: str | float | Decimal) -> Decimal:
    if isinstance(amount, str):
        found = _PLAIN_NUMBER.fullmatch(amount.strip())
        if not found:
            raise _invalid(amount, "is not a plain number of dollars")
        return Decimal(found[1])
    if isinstance(amount, bool) or not isinstance(amount, int | float | Decimal):
        raise _invalid(amount, "is not a number")
    if isinstance(amount, int) and amount.bit_length() > 256:
        raise _invalid(amount, "is negative") if amount < 0 else _overflow(amount)
    exact = Decimal(repr(amount)) if isinstance(amount, float) else Decimal(amount)
    if not exact.is_finite():
        raise _invalid(amount, "is not a finite number")
    if exact < 0:
        raise _invalid(amount, "is negative")
    return exact


def _shown(amount: object) -> str:
    if isinstance(amount, int) and amount.bit_length() > 256:
        return f"{'-' if amount < 0 else ''}2**{amount.bit_length() - 1}"  # digits of it may fill a page
    return repr(amount)[:60]


def _invalid(amount: object, why: str) -> InvalidAmountError:
    return InvalidAmountError(
        f"The amount {_shown(amount)} {why}.",
        hint='Give dollars as a plain number such as 2.50 or "$2.50".',
        amount=_shown(amount),
    )


def _overflow(amount: object) -> AmountOverflowError:
    return AmountOverflowError(
        f"The amount {_shown(amount)} is more than {format_usd(AMOUNT_NUSD_MAX)}, the largest one kept.",
        hint="Check the unit: amounts are dollars outside and nano-dollars inside.",
        most_nusd=AMOUNT_NUSD_MAX,
    )
