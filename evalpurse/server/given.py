"""What a person gives the command line as files: JSON values, objects, texts. Standard library only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

from evalpurse.errors import EvalpurseError


class GivenError(EvalpurseError):
    """A file or value on the command line cannot be used."""

    code: ClassVar[str] = "bad_input"


def text_of(name: str) -> str:
    """The text of a file, or of standard input for `-`.

    Raises:
        GivenError: it cannot be read, or is not UTF-8.
    """
    try:
        if name == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GivenError(f"{name} cannot be read as UTF-8 text: {error}.") from error


def json_values(name: str) -> list[Any]:
    """A JSON list, or one JSON value a line.

    Raises:
        GivenError: names the line that is not JSON.
    """
    text = text_of(name)
    if text.lstrip().startswith("["):
        values = _parsed(text, name)
        return values if isinstance(values, list) else [values]
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [_parsed(line, f"{name} line {number}") for number, line in lines]


def json_object(given: str, option: str) -> dict[str, Any]:
    """A JSON object given inline, or in a file named after `@`.

    Raises:
        GivenError: it is not a JSON object.
    """
    value = _parsed(text_of(given[1:]) if given.startswith("@") else given, option)
    if not isinstance(value, dict):
        raise GivenError(f"{option} is not a JSON object.", hint="For example: '{\"window\": 40}'.")
    return value


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise GivenError(f"{where} is not JSON: {error}.") from error


def dollars(given: str) -> float:
    """An amount as a person writes it, `2.50` or `$2.50`; ValueError when it is neither."""
    return float(given.removeprefix("$").replace(",", ""))
