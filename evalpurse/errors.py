"""The one base of every error that evalpurse raises on purpose.

An error says what happened, with the numbers, and what to do next: `message` for people, `hint` for the
next step, `code` and `facts` for machines. Each folder keeps its own kinds in its own `errors.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

ERROR_META = "evalpurse/error"
"""Key in the `_meta` of a failed tool call under which programs find code, message, hint and facts."""


class EvalpurseError(Exception):
    """Something a caller could have avoided, or can mend; its text is complete on its own."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()
