"""The user's price file: `prices.toml` in the home folder, for models that no public price list has.

```toml
[[price]]
model = "demo-1"
from = 2026-01-01              # optional; the newest entry in force wins
input_usd_per_mtok = "0.15"    # dollars for a million tokens
cached_usd_per_mtok = "0.015"  # optional; the input price when left out
output_usd_per_mtok = "0.60"
```

A price change is a new dated entry, never an edit: what was charged stays explained.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evalpurse.budget.errors import InvalidPriceFileError

_Usd = Annotated[Decimal, Field(ge=0, le=1_000_000, max_digits=30, allow_inf_nan=False)]
_Name = Annotated[str, Field(min_length=1, max_length=200)]
_ALWAYS = datetime(1970, 1, 1, tzinfo=UTC)


class _Price(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False, frozen=True)

    model: _Name
    provider: _Name = "custom"
    starts: datetime | date | None = Field(default=None, alias="from")
    input_usd_per_mtok: _Usd
    output_usd_per_mtok: _Usd
    cached_usd_per_mtok: _Usd | None = None
    cache_write_usd_per_mtok: _Usd | None = None
    request_usd: _Usd = Decimal(0)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    schema_version: Annotated[int, Field(ge=1, le=1)] = 1
    price: list[_Price] = []


@dataclass(frozen=True)
class UserPrice:
    """One dated price; rates are dollars for a million tokens, `request_usd` dollars for one request."""

    model: str
    provider: str
    starts: datetime
    input: Decimal
    cached: Decimal
    cache_write: Decimal
    output: Decimal
    request_usd: Decimal


def read(path: Path) -> list[UserPrice]:
    """The entries of a price file, in no special order.

    Raises InvalidPriceFileError with the file, the entry and the field.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
        entries = [_user_price(entry) for entry in _File.model_validate(content).price]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _invalid(path, str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _invalid(path, f"{where}: {first['msg']}") from error
    seen: set[tuple[str, str, datetime]] = set()
    for entry in entries:
        key = (entry.model, entry.provider, entry.starts)
        if key in seen:
            raise _invalid(path, f"two prices for {entry.model!r} start at {entry.starts:%Y-%m-%d %H:%M}")
        seen.add(key)
    return entries


def _user_price(entry: _Price) -> UserPrice:
    # An unknown cache price is the input price: right or too high for reading, as it is without a cache.
    return UserPrice(
        model=entry.model.lower(),
        provider=entry.provider,
        starts=_instant(entry.starts),
        input=entry.input_usd_per_mtok,
        cached=entry.input_usd_per_mtok if entry.cached_usd_per_mtok is None else entry.cached_usd_per_mtok,
        cache_write=entry.input_usd_per_mtok
        if entry.cache_write_usd_per_mtok is None
        else entry.cache_write_usd_per_mtok,
        output=entry.output_usd_per_mtok,
        request_usd=entry.request_usd,
    )


def _instant(starts: datetime | date | None) -> datetime:
    if starts is None:
        return _ALWAYS
    if not isinstance(starts, datetime):
        return datetime(starts.year, starts.month, starts.day, tzinfo=UTC)
    return starts.astimezone(UTC) if starts.tzinfo else starts.replace(tzinfo=UTC)


def _invalid(path: Path, what: str) -> InvalidPriceFileError:
    return InvalidPriceFileError(
        f"The price file {path} cannot be used: {what}.",
        hint="An entry is [[price]] with model, input_usd_per_mtok and output_usd_per_mtok; optional are"
        " provider, from, cached_usd_per_mtok, cache_write_usd_per_mtok and request_usd.",
        path=str(path),
    )
