"""Make a file small by keeping only the lines that name things: definitions and top-level assignments."""

from __future__ import annotations

import re

NAMING_LINE = re.compile(r"(?:    )?(?:async def|def|class) |[A-Za-z_]\w* *(?::[^=]+)?=[^=]")


def outline(text: str, *, line_chars_max: int) -> list[str]:
    """The naming lines of a file, each cut to `line_chars_max` characters with a mark where it was cut."""
    kept = (line for line in text.split("\n") if NAMING_LINE.match(line))
    return [line if len(line) <= line_chars_max else f"{line[:line_chars_max]}..." for line in kept]
