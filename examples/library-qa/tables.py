"""Plain tables and one live line on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

WIDTH = 24


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; numbers to the right, words to the left."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    numeric = [all(row[column][:1] in "$-.0123456789+" for row in rows) for column in range(len(headers))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def interval(facts: dict[str, Any], name: str) -> str:
    """`0.907 [0.83, 0.98]`; a dash when there is no number."""
    if facts.get(name) is None:
        return "-"
    low, high = facts.get(f"{name}_low"), facts.get(f"{name}_high")
    return f"{facts[name]:.3f}" + (
        f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else ""
    )


def cell_text(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def usd(value: float | None) -> str:
    return "-" if value is None else f"${value:.5f}"


def outcomes(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1]))


class LiveLine:
    """A line that is written over on a terminal; elsewhere it is printed at every tenth of the way."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._tenth = -1

    async def show(self, progress: float, total: float | None, message: str | None) -> None:
        """Shows progress; the signature is that of an MCP progress callback."""
        share = progress / total if total else 0.0
        bar = "#" * round(share * WIDTH)
        text = f"  [{bar:<{WIDTH}}] {share:4.0%}  {message or ''}"
        if self._live:
            print(f"\r{text:<100}", end="", flush=True)
        elif int(share * 10) > self._tenth:
            self._tenth = int(share * 10)
            print(text, flush=True)

    def end(self) -> None:
        if self._live:
            print()
