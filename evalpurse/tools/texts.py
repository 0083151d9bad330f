"""Texts on their way to a client: always valid Unicode, never longer than a reader can use.

What a message quotes may come from anyone: an argument of a megabyte, a file name that is no text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

MESSAGE_CHARS_MAX = 4_000
HINT_CHARS_MAX = 1_000
FACT_CHARS_MAX = 1_000
FACT_ITEMS_MAX = 50

Item = TypeVar("Item", bound=BaseModel)


def valid(text: str) -> str:
    """The text with halves of surrogate pairs (as in file names that are not UTF-8) replaced."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def clipped(text: str, chars_max: int = MESSAGE_CHARS_MAX) -> str:
    """The text, or its beginning and end with the number of characters between them."""
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return f"{text[:half]}[... {len(text) - 2 * half:,} characters left out ...]{text[-half:]}"


def plain(value: Any) -> Any:
    """A fact of an error as bounded JSON."""
    if isinstance(value, dict):
        kept = list(value.items())[:FACT_ITEMS_MAX]
        return {clipped(valid(str(key)), FACT_CHARS_MAX): plain(child) for key, child in kept}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(child) for child in list(value)[:FACT_ITEMS_MAX]]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return clipped(valid(str(value)), FACT_CHARS_MAX)


def quoted(value: Any, chars_max: int) -> str:
    """A value as JSON for a sentence; cut, and said in words where it cannot be shown."""
    try:
        text = json.dumps(value, default=repr, ensure_ascii=False)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that cannot be shown"
    return valid(text if len(text) <= chars_max else text[:chars_max] + "...")


def size_bytes(value: Any) -> int:
    """What a JSON value takes in an answer."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def fitting(items: Iterable[Item], bytes_max: int) -> list[Item]:
    """As many of the first models as fit into so many bytes of an answer, at least one."""
    kept: list[Item] = []
    used = 0
    for item in items:
        used += size_bytes(item.model_dump(mode="json", exclude_none=True)) + 1
        if kept and used > bytes_max:
            break
        kept.append(item)
    return kept


def fitting_names(names: Sequence[str], bytes_max: int) -> list[str]:
    """As many of the first names as fit into so many bytes of an answer."""
    kept: list[str] = []
    used = 0
    for name in names:
        used += size_bytes(name) + 1
        if used > bytes_max:
            break
        kept.append(name)
    return kept
