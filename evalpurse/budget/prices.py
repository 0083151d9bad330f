"""What reported model usage costs: exact, in nano-dollars, rounded up once for each report.

Prices come from the user's price file first, then from the genai-prices package. A number that is missing
is an error, never a zero: an unknown model, a unit that has no price, and usage that cannot be true are
refused by name. `digest` pins both sources, and is stored with every hold.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread

from evalpurse.budget.errors import InvalidUsageError, UnknownModelError, UnpricedUnitError
from evalpurse.budget.money import NUSD_PER_USD

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, Provider, TieredPrices

    from evalpurse.budget.price_file import UserPrice

TOKENS_MAX = 10**12
"""More tokens in one report cannot be true; they would cost more than a ledger keeps."""

_MTOK = 1_000_000


@dataclass(frozen=True)
class ModelUsage:
    """Usage of one model, for one request or the sum of several.

    `input_tokens` includes `cached_tokens` (read from a cache) and `cache_write_tokens`; `output_tokens`
    includes reasoning.
    """

    model: str
    input_tokens: int
    output_tokens: int
    provider: str = ""
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    requests: int = 1


@dataclass(frozen=True)
class PricedUsage:
    """A cost and whose price it was.

    `exact` is False when the model has a higher price for long inputs and only the sizes of the single
    requests, which a sum does not tell, would decide: the average request is taken then.
    """

    cost_nusd: int
    provider: str
    model: str
    source: str
    exact: bool = True


class Prices:
    """Both price lists at one state. `load` is cheap; the package is imported at the first need of it."""

    def __init__(self, user: Sequence[UserPrice], path: Path) -> None:
        """Private: use `Prices.load`."""
        self._path = path
        self._user: dict[str, list[UserPrice]] = {}
        for price in sorted(user, key=lambda each: each.starts, reverse=True):
            self._user.setdefault(price.model, []).append(price)
        pinned = hashlib.sha256(f"genai-prices {version('genai-prices')}\n".encode())
        for line in sorted(repr(astuple(price)) for price in user):
            pinned.update(f"{line}\n".encode())
        self.digest = pinned.hexdigest()

    @classmethod
    async def load(cls, path: Path) -> Prices:
        """Reads the user's price file if there is one (`path` may be its folder).

        Raises InvalidPriceFileError.
        """
        return await anyio.to_thread.run_sync(cls.load_now, path)

    @classmethod
    def load_now(cls, path: Path) -> Prices:
        """`load` for callers without an event loop."""
        file = path / "prices.toml" if path.is_dir() else path
        if not file.exists():
            return cls([], file)
        from evalpurse.budget.price_file import read  # pydantic is only needed when there is a file

        return cls(read(file), file)

    def warm(self) -> None:
        """Imports the price package (up to a second); call it in a thread before the first `cost`."""
        from genai_prices.data_snapshot import get_snapshot

        get_snapshot()

    def cost(self, usage: ModelUsage, at: datetime) -> PricedUsage:
        """What the usage cost at the time `at` (aware), at standard rates.

        Raises InvalidUsageError, UnknownModelError (says how to add a price) or UnpricedUnitError.
        """
        _check(usage)
        if at.tzinfo is None:
            raise InvalidUsageError("The time of use has no timezone.", hint="Pass an aware UTC datetime.")
        for price in self._user.get(usage.model.strip().lower(), ()):
            if price.starts <= at and usage.provider.lower() in ("", price.provider.lower()):
                return _from_file(usage, price)
        return self._from_package(usage, at)

    def _from_package(self, usage: ModelUsage, at: datetime) -> PricedUsage:
        from genai_prices.data_snapshot import get_snapshot

        try:
            provider, model = get_snapshot().find_provider_model(
                usage.model.strip(), None, usage.provider or None, None
            )
        except LookupError as error:
            raise self._unknown(usage) from error
        rates = _Rates(provider, model, usage, at, self._path)
        plain = usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens
        dollars = (
            rates.cost(plain, "input_mtok")
            + rates.cost(usage.cached_tokens, "cache_read_mtok", "input_mtok")
            + rates.cost(usage.cache_write_tokens, "cache_write_mtok", "input_mtok")
            + rates.cost(usage.output_tokens, "output_mtok")
            + rates.for_requests()
        )
        return PricedUsage(_ceil_nusd(dollars), provider.id, model.id, "genai-prices", rates.exact)

    def _unknown(self, usage: ModelUsage) -> UnknownModelError:
        where = f" of provider {usage.provider!r}" if usage.provider else ""
        return UnknownModelError(
            f"No price is known for model {usage.model[:120]!r}{where}.",
            hint=f"Check the name (and give the provider), or add to {self._path}: [[price]] with"
            " model, input_usd_per_mtok and output_usd_per_mtok.",
            model=usage.model[:120],
            provider=usage.provider[:120],
            price_file=str(self._path),
        )


class _Rates:
    """The prices of one model at one time, for inputs of one size."""

    def __init__(
        self, provider: Provider, model: ModelInfo, usage: ModelUsage, at: datetime, price_file: Path
    ) -> None:
        self.exact = True
        self._name = f"{provider.id}/{model.id}"
        self._price_file = price_file
        self._prices = model.get_prices(at)
        self._usage = usage
        self._average_input = math.ceil(usage.input_tokens / max(1, usage.requests))

    def cost(self, tokens: int, *keys: str) -> Fraction:
        """Dollars for tokens at the first of the prices `keys` that the model has."""
        if not tokens:
            return Fraction(0)
        for key in keys:
            price = getattr(self._prices, key, None)
            if price is not None:
                return Fraction(self._rate(price)) * tokens / _MTOK
        raise self._unpriced(keys[0].removesuffix("_mtok"), tokens)

    def for_requests(self) -> Fraction:
        """Dollars for the requests as such, where a model charges for them."""
        price = getattr(self._prices, "requests_kcount", None)
        return Fraction(0) if price is None else Fraction(self._rate(price)) * self._usage.requests / 1000

    def _rate(self, price: Decimal | TieredPrices) -> Decimal:
        if isinstance(price, Decimal):
            return price
        rate = price.base
        for tier in price.tiers:  # ascending; the highest one that is passed counts for all tokens
            if self._average_input > tier.start:
                rate = tier.price
            elif self._usage.input_tokens > tier.start:
                self.exact = False
        return rate

    def _unpriced(self, unit: str, tokens: int) -> UnpricedUnitError:
        return UnpricedUnitError(
            f"{self._name} has no price for {unit} tokens, and {tokens} were used.",
            hint=f"Add a [[price]] for the model to {self._price_file}.",
            model=self._name,
            unit=unit,
            tokens=tokens,
        )


def _from_file(usage: ModelUsage, price: UserPrice) -> PricedUsage:
    plain = usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens
    dollars = (
        Fraction(price.input) * plain
        + Fraction(price.cached) * usage.cached_tokens
        + Fraction(price.cache_write) * usage.cache_write_tokens
        + Fraction(price.output) * usage.output_tokens
    ) / _MTOK + Fraction(price.request_usd) * usage.requests
    return PricedUsage(_ceil_nusd(dollars), price.provider, price.model, "prices.toml")


def _ceil_nusd(dollars: Fraction) -> int:
    return math.ceil(dollars * NUSD_PER_USD)


def _check(usage: ModelUsage) -> None:
    for name in ("input_tokens", "cached_tokens", "cache_write_tokens", "output_tokens", "requests"):
        count = getattr(usage, name)
        if type(count) is not int:
            raise _invalid(usage, f"{name} is {str(count)[:40]!r}, not a whole number")
        if not 0 <= count <= TOKENS_MAX:
            raise _invalid(usage, f"{name} is {_short(count)}; it can be 0 to {TOKENS_MAX}")
    if usage.cached_tokens + usage.cache_write_tokens > usage.input_tokens:
        raise _invalid(
            usage,
            f"{usage.cached_tokens} cached and {usage.cache_write_tokens} cache-write tokens are more than"
            f" {usage.input_tokens} input tokens, which include them",
        )
    if not usage.requests and (usage.input_tokens or usage.output_tokens):
        raise _invalid(usage, "tokens were used in 0 requests")
    if not isinstance(usage.model, str) or not usage.model.strip():
        raise _invalid(usage, "it names no model")


def _short(count: int) -> str:
    return str(count) if count.bit_length() <= 128 else f"about 2**{count.bit_length()}"


def _invalid(usage: ModelUsage, what: str) -> InvalidUsageError:
    return InvalidUsageError(
        f"The usage reported for model {str(usage.model)[:120]!r} cannot be true: {what}.",
        hint="Report the counts of the provider's reply; input_tokens includes cached tokens.",
        model=str(usage.model)[:120],
    )
