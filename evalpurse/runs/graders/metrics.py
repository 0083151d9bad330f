"""`metrics.json` of a harness: free numbers, and the model usage that it reports.

Usage is money: what is unclear about it is told in `problem` and never guessed. Free numbers are not: one
that cannot be kept is left out and told in `ignored`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evalpurse.budget.prices import TOKENS_MAX, ModelUsage
from evalpurse.runs.sandboxes.protocol import Output

METRICS_BYTES_MAX = 1 << 20
NUMBERS_MAX = 200
NAME_CHARS_MAX = 80
USAGE_MAX = 100
_RESERVED = ("usage", "over_allowance")
_COUNTS = {
    "input_tokens": None,
    "output_tokens": None,
    "cached_tokens": 0,
    "cache_write_tokens": 0,
    "requests": 1,
}
"""The counts of a usage entry and what they are when they are left out; None: they must be there."""

_USAGE_KEYS = ("model", "provider", *_COUNTS)


@dataclass(frozen=True)
class HarnessMetrics:
    """What a harness said about its run. `usage` is None when it said nothing about its model calls."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    usage: Sequence[ModelUsage] | None = None
    over_allowance: bool = False
    problem: str = ""
    ignored: str = ""


def metrics_of(output: Output) -> HarnessMetrics:
    """Reads the metrics file of an output; never raises, whatever is in it."""
    if "metrics" in output.truncated:
        return HarnessMetrics(
            problem=f"metrics.json has more than the {METRICS_BYTES_MAX:,} bytes that are read"
        )
    return parse_metrics(output.metrics)


def parse_metrics(metrics: bytes | None) -> HarnessMetrics:
    """Reads a metrics file; never raises, whatever is in it.

    Every finite number at the top level is a metric, up to 200, with names of up to 80 characters. `usage`
    is a list of `{"model", "provider"?, "input_tokens", "output_tokens", "cached_tokens"?,
    "cache_write_tokens"?, "requests"?}`; the tokens read from and written to a cache are part of the input
    tokens. `over_allowance: true` says that the harness stopped because its allowance was used up.
    """
    if metrics is None:
        return HarnessMetrics()
    if len(metrics) > METRICS_BYTES_MAX:
        return HarnessMetrics(
            problem=f"metrics.json has {len(metrics):,} bytes; at most {METRICS_BYTES_MAX:,} are read"
        )
    try:
        content = json.loads(metrics)
    except (ValueError, RecursionError) as error:
        return HarnessMetrics(problem=f"metrics.json is not JSON: {str(error)[:200]}")
    if not isinstance(content, dict):
        return HarnessMetrics(problem="metrics.json is not a JSON object")
    numbers, ignored = _numbers(content)
    try:
        over_allowance = _flag(content, "over_allowance")
        usage = _usage(content["usage"]) if "usage" in content else None
    except _UsageError as error:
        over_allowance = content.get("over_allowance") is True
        return HarnessMetrics(
            numbers, None, over_allowance, problem=f"metrics.json: {error}", ignored=ignored
        )
    return HarnessMetrics(numbers, usage, over_allowance, ignored=ignored)


def _numbers(content: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    numbers: dict[str, float] = {}
    ignored: list[str] = []
    for name, value in content.items():
        if name in _RESERVED:
            continue
        number = _finite(value)
        usable = 0 < len(name) <= NAME_CHARS_MAX and name.isprintable() and len(numbers) < NUMBERS_MAX
        if number is None or not usable:
            ignored.append(_shown(name))
        else:
            numbers[name] = number
    if not ignored:
        return numbers, ""
    more = f" and {len(ignored) - 5} more" if len(ignored) > 5 else ""
    return numbers, (
        f"left out of metrics.json (not a finite number, a name over {NAME_CHARS_MAX} characters, or more "
        f"than {NUMBERS_MAX}): {', '.join(ignored[:5])}{more}"
    )


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


class _UsageError(ValueError):
    """What a harness says about its model usage cannot be taken as a bill."""


def _flag(content: Mapping[str, Any], key: str) -> bool:
    value = content.get(key, False)
    if not isinstance(value, bool):
        raise _UsageError(f"{key} is {_shown(value)}; it can be true or false")
    return value


def _usage(given: Any) -> list[ModelUsage]:
    if not isinstance(given, list) or len(given) > USAGE_MAX:
        raise _UsageError(f"usage must be a list of at most {USAGE_MAX} objects")
    return [_one_usage(entry, f"usage[{place}]") for place, entry in enumerate(given)]


def _one_usage(entry: Any, where: str) -> ModelUsage:
    if not isinstance(entry, dict):
        raise _UsageError(f"{where} is not an object")
    unknown = sorted(set(entry) - set(_USAGE_KEYS))
    if unknown:
        raise _UsageError(f"{where} has {_shown(unknown[0])}; known: {', '.join(_USAGE_KEYS)}")
    texts = {}
    for key in ("model", "provider"):
        text = entry.get(key) or ""
        if not isinstance(text, str) or len(text) > 200 or (key == "model" and not text.strip()):
            raise _UsageError(f"{where}.{key} must be a text of 1 to 200 characters")
        texts[key] = text.strip()
    counts = {key: _count(entry, key, where, default) for key, default in _COUNTS.items()}
    cache_tokens = counts["cached_tokens"] + counts["cache_write_tokens"]
    if cache_tokens > counts["input_tokens"]:
        raise _UsageError(
            f"{where} has {cache_tokens} tokens of a cache and {counts['input_tokens']} input tokens; the "
            "former are part of the latter"
        )
    return ModelUsage(model=texts["model"], provider=texts["provider"], **counts)


def _count(entry: Mapping[str, Any], key: str, where: str, default: int | None) -> int:
    value = entry.get(key, default)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not 0 <= value <= TOKENS_MAX:
        raise _UsageError(f"{where}.{key} is {_shown(value)}; it must be a whole number from 0")
    return int(value)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number that is too long to show"
    return text if len(text) <= 80 else text[:80] + "..."
