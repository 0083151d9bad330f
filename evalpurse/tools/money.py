"""Money at the tools' edge: dollars for the caller, nano-dollars inside."""

from __future__ import annotations

from evalpurse.budget.money import NUSD_PER_USD


def usd(nusd: int) -> float:
    """Nano-dollars as dollars, for showing; never computed with again."""
    return nusd / NUSD_PER_USD


def usd_or_none(nusd: int | None) -> float | None:
    """As `usd`, passing on that there is no number."""
    return None if nusd is None else usd(nusd)
