"""What no argument of any tool may be, whatever its own rules say.

Checked before anything else looks at a call, at every depth: what comes after may then rely on it that text
is Unicode, that nothing is deep enough to overflow a stack, and that true is not one dollar.
"""

from __future__ import annotations

from typing import Any

DEPTH_MAX = 120
"""Levels of lists and objects; contents of cases and variants allow 100 below their own place."""
INTEGER_BITS_MAX = 4_096


def check_arguments(schema: dict[str, Any], given: dict[str, Any]) -> None:
    """Walks through the arguments of one call beside the flat JSON schema of its tool.

    Raises:
        ValueError: names the place and says what is wrong with it.
    """
    level: list[tuple[str, dict[str, Any], Any]] = [("", schema, given)]
    for _ in range(DEPTH_MAX):
        level = [inner for place, node, value in level for inner in _inside(place, node, value)]
        if not level:
            return
    raise ValueError(f"the arguments are more than {DEPTH_MAX} levels deep")


def _inside(place: str, node: dict[str, Any], value: Any) -> list[tuple[str, dict[str, Any], Any]]:
    """Checks one value; returns what it is made of."""
    if isinstance(value, dict):
        for key in value:
            _check_text(f"a key of {place or 'the arguments'}", key)
        named, others = node.get("properties", {}), node.get("additionalProperties")
        rest = others if isinstance(others, dict) else {}
        return [
            (f"{place}.{key}" if place else str(key), named.get(key, rest), child)
            for key, child in value.items()
        ]
    if isinstance(value, list):
        return [(f"{place}[{number}]", node.get("items", {}), child) for number, child in enumerate(value)]
    if isinstance(value, str):
        _check_text(f"parameter '{place}'", value)
    elif isinstance(value, bool):
        if node.get("type") in ("number", "integer"):
            raise ValueError(f"parameter '{place}' is {str(value).lower()}; it must be a number")
    elif isinstance(value, int) and value.bit_length() > INTEGER_BITS_MAX:
        raise ValueError(f"parameter '{place}' is an integer of more than {INTEGER_BITS_MAX // 4} digits")
    return []


def _check_text(what: str, text: Any) -> None:
    if not isinstance(text, str) or text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has a lone surrogate at character {error.start}, which is not valid Unicode text"
        ) from error
