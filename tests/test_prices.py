"""Reported usage costs what the price lists say, and what they do not say is never free."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from evalpurse.budget.errors import (
    InvalidPriceFileError,
    InvalidUsageError,
    UnknownModelError,
    UnpricedUnitError,
)
from evalpurse.budget.money import NUSD_PER_USD
from evalpurse.budget.prices import TOKENS_MAX, ModelUsage, Prices

AT = datetime(2026, 6, 1, tzinfo=UTC)
DEMO = """
[[price]]
model = "Demo-1"
input_usd_per_mtok = "0.15"
output_usd_per_mtok = 0.60

[[price]]
model = "demo-1"
from = 2026-07-01
input_usd_per_mtok = 0.30
cached_usd_per_mtok = 0.03
cache_write_usd_per_mtok = "0.375"
output_usd_per_mtok = 1.2
request_usd = "0.000001"
"""


@pytest.fixture
def prices(tmp_path: Path) -> Prices:
    return Prices.load_now(tmp_path / "prices.toml")


@pytest.fixture
def with_file(tmp_path: Path) -> Callable[[str], Prices]:
    def load(text: str) -> Prices:
        (tmp_path / "prices.toml").write_text(text, encoding="utf-8")
        return Prices.load_now(tmp_path / "prices.toml")

    return load


def test_a_known_model_costs_what_the_package_computes(prices: Prices) -> None:
    from genai_prices import Usage, calc_price

    for model, provider in [("gpt-4o-mini", "openai"), ("claude-sonnet-4-5", "anthropic")]:
        usage = ModelUsage(model, 12_345, 678, provider=provider, cached_tokens=2_000)
        theirs = calc_price(
            Usage(input_tokens=12_345, cache_read_tokens=2_000, output_tokens=678),
            model,
            provider_id=provider,
            genai_request_timestamp=AT,
        )
        ours = prices.cost(usage, AT)
        assert ours.cost_nusd == math.ceil(theirs.total_price * NUSD_PER_USD)
        assert (ours.provider, ours.model, ours.exact) == (provider, theirs.model.id, True)


def test_cache_writes_cost_their_own_price(prices: Prices) -> None:
    plain = prices.cost(ModelUsage("claude-sonnet-4-5", 1_000_000, 0, requests=100), AT)
    written = prices.cost(
        ModelUsage("claude-sonnet-4-5", 1_000_000, 0, cache_write_tokens=1_000_000, requests=100), AT
    )
    assert written.cost_nusd * 4 == plain.cost_nusd * 5


def test_the_long_context_price_counts_for_all_tokens_of_a_long_request(prices: Prices) -> None:
    short = prices.cost(ModelUsage("claude-sonnet-4-5", 200_000, 0), AT)
    long = prices.cost(ModelUsage("claude-sonnet-4-5", 200_001, 0), AT)
    assert long.cost_nusd > 1.9 * short.cost_nusd
    assert short.exact
    assert long.exact


def test_a_sum_of_requests_is_priced_by_their_average_and_says_that_it_is_not_exact(prices: Prices) -> None:
    one = prices.cost(ModelUsage("claude-sonnet-4-5", 30_000, 10), AT)
    ten = prices.cost(ModelUsage("claude-sonnet-4-5", 300_000, 100, requests=10), AT)
    assert ten.cost_nusd == 10 * one.cost_nusd
    assert not ten.exact


def test_a_fraction_of_a_nano_dollar_is_rounded_up_once(with_file: Callable[[str], Prices]) -> None:
    prices = with_file(
        '[[price]]\nmodel = "m"\ninput_usd_per_mtok = "0.0003"\noutput_usd_per_mtok = "0.0003"'
    )
    assert prices.cost(ModelUsage("m", 1, 0), AT).cost_nusd == 1
    assert prices.cost(ModelUsage("m", 1, 1), AT).cost_nusd == 1
    assert prices.cost(ModelUsage("m", 0, 0), AT).cost_nusd == 0


def test_an_unknown_model_is_an_error_that_says_how_to_add_it(prices: Prices, tmp_path: Path) -> None:
    for model, provider in [("demo-1", ""), ("gpt-99-super", ""), ("gpt-4o", "no-such"), ("x" * 999, "")]:
        with pytest.raises(UnknownModelError) as caught:
            prices.cost(ModelUsage(model, 10, 10, provider=provider), AT)
        assert str(tmp_path / "prices.toml") in str(caught.value)
        assert "input_usd_per_mtok" in str(caught.value)


def test_a_unit_without_a_price_is_an_error_not_a_gift(prices: Prices) -> None:
    from genai_prices.data_snapshot import get_snapshot
    from genai_prices.types import ModelPrice

    without_output = next(
        (provider.id, model.id)
        for provider in get_snapshot().providers
        for model in provider.models
        if isinstance(model.prices, ModelPrice)
        and model.prices.input_mtok is not None
        and model.prices.output_mtok is None
        and provider.find_model(model.id) is model
    )
    usage = ModelUsage(without_output[1], 1000, 0, provider=without_output[0])
    prices.cost(usage, AT)
    with pytest.raises(UnpricedUnitError, match="output"):
        prices.cost(replace(usage, output_tokens=1), AT)


COUNTS = ("input_tokens", "cached_tokens", "cache_write_tokens", "output_tokens", "requests")
UNTRUE: list[Any] = [-1, True, 1.0, float("nan"), "5", None, TOKENS_MAX + 1, 10**30, 2**20_000]


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("count", UNTRUE, ids=range(len(UNTRUE)))
def test_counts_that_cannot_be_true_are_refused(prices: Prices, field: str, count: Any) -> None:
    with pytest.raises(InvalidUsageError, match=field):
        prices.cost(replace(ModelUsage("gpt-4o", TOKENS_MAX, 1), **{field: count}), AT)


def test_parts_larger_than_the_whole_are_refused(prices: Prices) -> None:
    for cached, written in [(101, 0), (0, 101), (60, 60)]:
        with pytest.raises(InvalidUsageError, match="include them"):
            prices.cost(ModelUsage("gpt-4o", 100, 1, cached_tokens=cached, cache_write_tokens=written), AT)
    with pytest.raises(InvalidUsageError, match="0 requests"):
        prices.cost(ModelUsage("gpt-4o", 100, 1, requests=0), AT)
    with pytest.raises(InvalidUsageError, match="no model"):
        prices.cost(ModelUsage(" ", 100, 1), AT)
    with pytest.raises(InvalidUsageError, match="timezone"):
        prices.cost(ModelUsage("gpt-4o", 100, 1), AT.replace(tzinfo=None))


def test_the_largest_believable_usage_has_a_cost(prices: Prices) -> None:
    most = prices.cost(ModelUsage("gpt-4o", TOKENS_MAX, TOKENS_MAX), AT)
    assert most.cost_nusd == (Decimal("2.5") + 10) * TOKENS_MAX * 1000


def test_the_newest_price_in_force_wins_and_names_ignore_case(with_file: Callable[[str], Prices]) -> None:
    prices = with_file(DEMO)
    usage = ModelUsage("DEMO-1", 1_000_000, 1_000_000, cached_tokens=400_000, cache_write_tokens=100_000)
    change = datetime(2026, 7, 1, tzinfo=UTC)
    before = prices.cost(usage, change - timedelta(seconds=1))
    after = prices.cost(usage, change)
    assert before.cost_nusd == 750_000_000
    assert after.cost_nusd == 150_000_000 + 12_000_000 + 37_500_000 + 1_200_000_000 + 1_000
    assert (after.provider, after.model, after.source) == ("custom", "demo-1", "prices.toml")


def test_a_price_of_the_user_comes_before_the_packages(with_file: Callable[[str], Prices]) -> None:
    own = '[[price]]\nmodel = "gpt-4o"\nprovider = "openai"\nfrom = 2026-07-01T00:00:00Z\n'
    prices = with_file(own + "input_usd_per_mtok = 1\noutput_usd_per_mtok = 1")
    usage, later = ModelUsage("gpt-4o", 1_000_000, 0), AT + timedelta(days=60)
    assert prices.cost(usage, later).cost_nusd == NUSD_PER_USD
    assert prices.cost(usage, AT).source == "genai-prices"
    assert prices.cost(replace(usage, provider="azure"), later).source == "genai-prices"
    assert prices.cost(replace(usage, provider="OpenAI"), later).source == "prices.toml"


def test_a_price_that_starts_later_does_not_price_what_comes_before(
    with_file: Callable[[str], Prices],
) -> None:
    prices = with_file(
        DEMO.partition('[[price]]\nmodel = "demo-1"')[1] + DEMO.partition('[[price]]\nmodel = "demo-1"')[2]
    )
    with pytest.raises(UnknownModelError):
        prices.cost(ModelUsage("demo-1", 1, 1), AT)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[price]\n", "at line 1"),
        ("[[price]]\nmodel = 'm'", "input_usd_per_mtok"),
        ("[[price]]\nmodel = 'm'\ninput_usd_per_mtok = -1\noutput_usd_per_mtok = 1", "greater than or equal"),
        ("[[price]]\nmodel = 'm'\ninput_usd_per_mtok = nan\noutput_usd_per_mtok = 1", "finite"),
        ("[[price]]\nmodel = 'm'\ninput_usd_per_mtok = inf\noutput_usd_per_mtok = 1", "finite"),
        ("[[price]]\nmodel = 'm'\ninput_usd_per_mtok = true\noutput_usd_per_mtok = 1", "input_usd_per_mtok"),
        ("[[price]]\nmodel = 'm'\nwrong = 1\ninput_usd_per_mtok = 1\noutput_usd_per_mtok = 1", "wrong"),
        ("[[price]]\nmodel = ''\ninput_usd_per_mtok = 1\noutput_usd_per_mtok = 1", "model"),
        ("[[price]]\nmodel = 'm'\ninput_usd_per_mtok = 1\noutput_usd_per_mtok = 1\n" * 2, "two prices"),
        ("schema_version = 2", "schema_version"),
        ("price = 3", "price"),
    ],
)
def test_a_price_file_that_cannot_be_used_is_refused_by_name(
    with_file: Callable[[str], Prices], tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(InvalidPriceFileError) as caught:
        with_file(text)
    assert says in str(caught.value)
    assert str(tmp_path / "prices.toml") in str(caught.value)


def test_the_digest_pins_the_file_and_not_its_layout(
    with_file: Callable[[str], Prices], tmp_path: Path
) -> None:
    none = Prices.load_now(tmp_path / "missing.toml").digest
    first = with_file(DEMO).digest
    assert with_file("# a comment\n" + DEMO).digest == first
    assert with_file(DEMO.replace("0.15", "0.16")).digest not in (first, none)
    assert first != none
    assert len(first) == 64


@pytest.mark.anyio
async def test_prices_load_from_their_folder_too(tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(DEMO, encoding="utf-8")
    prices = await Prices.load(tmp_path)
    assert prices.cost(ModelUsage("demo-1", 1_000_000, 0), AT).cost_nusd == 150_000_000


def test_loading_prices_does_not_import_what_is_slow() -> None:
    code = (
        "import sys, pathlib; from evalpurse.budget.prices import Prices;"
        "Prices.load_now(pathlib.Path('missing.toml'));"
        "print([name for name in ('genai_prices', 'pydantic', 'duckdb', 'numpy') if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.strip() == "[]"
