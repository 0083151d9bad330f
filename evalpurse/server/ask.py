"""Carrying out one verb of the command line: asks the person, then the daemon, then shows the answer.

Standard library only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.server.client import Client, Progress, control
from evalpurse.server.spawn import Launch, ensure
from evalpurse.server.verbs import Verb

_BAR_CHARS = 24


class ToolFailedError(EvalpurseError):
    """A tool answered with an error, whose code is `answered`."""

    code: ClassVar[str] = "tool_failed"

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"], hint=error.get("hint", ""), **error.get("facts", {}))
        self.answered = str(error["code"])


class NotConfirmedError(EvalpurseError):
    """A person did not say yes."""

    code: ClassVar[str] = "not_confirmed"


def carry_out(
    verb: Verb, options: argparse.Namespace, home: Home, launch: Launch
) -> tuple[dict[str, Any], str]:
    """Does what a verb stands for; returns its answer for programs and for people.

    Raises:
        NotConfirmedError: the person said no, or there is nobody to ask.
        ToolFailedError: the tool answered with an error.
        UnreachableError, RefusedError: as `ensure`.
    """
    if verb.confirm is not None and not options.yes:
        _confirm(verb.confirm(options))
    if verb.local is not None:
        facts = verb.local(options)
        return facts, _shown(verb, facts, "")
    arguments = verb.arguments(options)
    if verb.method:
        facts = control(home, verb.method, arguments, role=verb.role, launch=launch)
        return facts, _shown(verb, facts, "")
    link = ensure(home, door="mcp", role=verb.role, launch=launch)
    try:
        return _call(verb, Client(link), arguments, show_progress=not options.json)
    finally:
        link.close()


def _call(
    verb: Verb, client: Client, arguments: dict[str, Any], *, show_progress: bool
) -> tuple[dict[str, Any], str]:
    with _progress_bar(shown=show_progress and verb.until is not None) as on_progress:
        while True:
            result = client.call(verb.tool, arguments, on_progress=on_progress)
            if result.error is not None:
                raise ToolFailedError(result.error)
            if verb.until is None or verb.until(result.facts):
                break
    return result.facts, _shown(verb, result.facts, result.text)


def _shown(verb: Verb, facts: dict[str, Any], text: str) -> str:
    if verb.show is not None:
        return verb.show(facts)
    return text or json.dumps(facts, indent=2)


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise NotConfirmedError(
            f"{question} Nobody is there to answer.",
            hint="A person answers in a terminal. An agent asks with request_budget.",
        )
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise NotConfirmedError("Nothing was changed.")


@contextmanager
def _progress_bar(*, shown: bool) -> Iterator[Progress | None]:
    """Draws what a tool reports on its way on stderr, on one line where that is a terminal."""
    if not shown:
        yield None
        return
    terminal = sys.stderr.isatty()
    width = 0

    def draw(done: float, total: float | None, message: str) -> None:
        nonlocal width
        line = f"{_bar(done, total)} {message}".rstrip()
        if terminal:
            print(f"\r{line.ljust(width)}", end="", file=sys.stderr, flush=True)
            width = len(line)
        else:
            print(line, file=sys.stderr, flush=True)

    try:
        yield draw
    finally:
        if width:
            print(file=sys.stderr)


def _bar(done: float, total: float | None) -> str:
    if not total:
        return f"{done:g}"
    filled = min(_BAR_CHARS, int(_BAR_CHARS * done / total))
    return f"[{'#' * filled}{'.' * (_BAR_CHARS - filled)}] {done:g}/{total:g}"
