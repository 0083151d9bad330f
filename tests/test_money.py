"""Money is exact, rounded up, and refuses what is not money."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalpurse.budget.errors import AmountOverflowError, InvalidAmountError
from evalpurse.budget.money import AMOUNT_NUSD_MAX, NUSD_PER_USD, check_amount, format_usd, parse_usd


@pytest.mark.parametrize(
    ("given_amount", "nusd"),
    [
        ("0", 0),
        ("1.5", 1_500_000_000),
        ("$2", 2 * NUSD_PER_USD),
        (".5", 500_000_000),
        (" 3.00 ", 3 * NUSD_PER_USD),
        (0.1, 100_000_000),
        (1e-7, 100),
        (7, 7 * NUSD_PER_USD),
        (Decimal("0.000000001"), 1),
    ],
)
def test_dollars_become_the_exact_number_of_nano_dollars(given_amount: Any, nusd: int) -> None:
    assert parse_usd(given_amount) == nusd


@pytest.mark.parametrize(
    "tiny", ["0.0000000001", 1e-30, Decimal("1E-900"), Decimal("1." + "0" * 300 + "1"), "1.0000000000001"]
)
def test_what_does_not_fit_a_nano_dollar_is_rounded_up(tiny: Any) -> None:
    assert parse_usd(tiny) == int(Fraction(str(tiny)) * NUSD_PER_USD) + 1


NONSENSE_TEXT = ["", "abc", "-1", "1e5", "1_000", "1,5", "nan", "inf", "0x10", "\u0663", "1 2", "$", "--1"]
NONSENSE: list[Any] = [
    *NONSENSE_TEXT, None, True, False, [], b"1", -0.01, -1, float("nan"), float("inf"),
    Decimal("NaN"), Decimal("-Infinity"), Decimal("sNaN"),
]  # fmt: skip


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_what_is_not_an_amount_is_refused(nonsense: Any) -> None:
    with pytest.raises(InvalidAmountError):
        parse_usd(nonsense)


def test_whole_numbers_with_thousands_of_digits_are_refused_without_spelling_them_out() -> None:
    with pytest.raises(AmountOverflowError, match="2\\*\\*"):
        parse_usd(10**5000)
    with pytest.raises(InvalidAmountError, match="negative"):
        parse_usd(-(10**5000))


@pytest.mark.parametrize("huge", ["9" * 20, 1e300, Decimal("1E+999999"), "4611686018.427387905"])
def test_amounts_that_the_ledger_cannot_keep_are_refused(huge: Any) -> None:
    with pytest.raises(AmountOverflowError, match="largest"):
        parse_usd(huge)


@pytest.mark.parametrize("wrong", [1.0, "1", True, None, Decimal(1), -1])
def test_only_whole_non_negative_nano_dollars_pass_the_check(wrong: Any) -> None:
    with pytest.raises(InvalidAmountError):
        check_amount(wrong, what="The hold")
    with pytest.raises(AmountOverflowError):
        check_amount(AMOUNT_NUSD_MAX + 1, what="The hold")
    assert check_amount(AMOUNT_NUSD_MAX, what="The hold") == AMOUNT_NUSD_MAX


@pytest.mark.parametrize(
    ("nusd", "shown"),
    [
        (0, "$0.00"),
        (1_234_500_000, "$1.2345"),
        (1_000_000_000, "$1.00"),
        (123_456_789_000_000_000, "$123456789.00"),
        (1_000, "$0.000001"),
        (999_999_999, "$1.00"),
        (1, "<$0.000001"),
        (-1, "-<$0.000001"),
        (-2_500_000_000, "-$2.50"),
        (AMOUNT_NUSD_MAX, "$4611686018.427388"),
    ],
)
def test_amounts_are_shown_plainly(nusd: int, shown: str) -> None:
    assert format_usd(nusd) == shown


@given(st.integers(0, AMOUNT_NUSD_MAX // 1000))
def test_whole_micro_dollars_survive_being_shown_and_read(micros: int) -> None:
    assert parse_usd(format_usd(micros * 1000)) == micros * 1000


@given(st.floats(0, 4e9, allow_nan=False))
def test_a_charge_is_never_rounded_below_the_float_that_was_given(dollars: float) -> None:
    nusd = parse_usd(dollars)
    shown = Fraction(repr(dollars)) * NUSD_PER_USD
    assert shown <= nusd < shown + 1


def test_a_million_tiny_charges_add_up_exactly() -> None:
    assert sum(parse_usd("0.0000001") for _ in range(100_000)) == parse_usd("0.01")
