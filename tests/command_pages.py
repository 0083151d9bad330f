"""Writes docs/cli.md from what the program says of itself: `python -m tests.command_pages`."""

from __future__ import annotations

import argparse
from pathlib import Path

from evalpurse.server.cli import parser
from evalpurse.server.verbs import VERBS

SHARED = ("help", "home", "json")

HEAD = """\
# Commands

Made from the program's own `--help` by `python -m tests.command_pages`; a test holds the two together.
Every command takes `--home DIR` (default `$EVALPURSE_HOME` or `~/.evalpurse`) and `--json`.
Exit codes: 0 done, 1 failed, 2 not understood, 3 no daemon reached, 4 the purse refused.
"""


def commands_of(root: argparse.ArgumentParser) -> dict[tuple[str, ...], argparse.ArgumentParser]:
    """Every command and group below a parser, by its words."""
    found: dict[tuple[str, ...], argparse.ArgumentParser] = {}
    for action in root._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                found[(name,)] = command
                found |= {(name, *words): deeper for words, deeper in commands_of(command).items()}
    return found


def page() -> str:
    """The whole page; in a form of our own, because `--help` looks different in each Python version."""
    parts = [HEAD]
    for words, command in commands_of(parser(VERBS)).items():
        if any(isinstance(action, argparse._SubParsersAction) for action in command._actions):
            continue
        rows = [_row(action) for action in command._actions if action.dest not in SHARED]
        rows = [row for row in rows if row]
        table = "\n".join(["", "| argument | |", "|---|---|", *rows, ""]) if rows else ""
        parts.append(f"## evalpurse {' '.join(words)}\n\n{command.description}.\n{table}")
    return "\n".join(parts)


def _row(action: argparse.Action) -> str:
    if action.help == argparse.SUPPRESS:
        return ""
    if action.option_strings:
        takes_value = action.nargs != 0
        value = f" {action.metavar or (action.dest.upper())}" if takes_value else ""
        name = ", ".join(action.option_strings) + value
    else:
        name = action.dest.upper() + (" ..." if action.nargs in ("+", "*") else "")
    choices = f" One of {', '.join(map(str, action.choices))}." if action.choices else ""
    required = " Required." if action.required and action.option_strings else ""
    return f"| `{name}` | {action.help}{'.' if choices or required else ''}{choices}{required} |"


if __name__ == "__main__":
    (Path(__file__).parent.parent / "docs" / "cli.md").write_text(page(), encoding="utf-8")
