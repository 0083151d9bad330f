"""Answers about warm images as text for a person. Standard library only."""

from __future__ import annotations

from typing import Any

from evalpurse.server.show import table


def warm(facts: dict[str, Any]) -> str:
    """One a line with what went wrong, then how long runs took to start, warm against cold."""
    if not facts["warm"]:
        lines = ["Nothing is kept warm. Begin with: evalpurse warm add VARIANT"]
    else:
        rows = [
            [each["key"], each["repo"], each["commit"][:12] or "-", each["built_at"] or "-", each["error"]]
            for each in facts["warm"]
        ]
        lines = [table(["key", "repository", "commit", "built", "error"], rows)]
    for start in facts["starts"]:
        lines.append(
            f"{start['kind']} starts: p50 {start['p50_s']:.2f} s, p95 {start['p95_s']:.2f} s "
            f"of {start['runs']} runs"
        )
    return "\n".join(lines)
