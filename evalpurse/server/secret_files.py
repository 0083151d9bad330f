"""Secrets of a home folder: one private file each, written and listed without a daemon.

Standard library only.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from evalpurse.home import Home
from evalpurse.runs.sandboxes.secret_values import put_in_place
from evalpurse.server.given import GivenError

SECRET_BYTES_MAX = 65_536
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def home_of(options: argparse.Namespace) -> Home:
    """The home folder that a command is about."""
    return Home(options.home.expanduser().resolve()) if options.home else Home.find()


def set_secret(options: argparse.Namespace) -> dict[str, Any]:
    """Writes a secret's file, mode 0600, all or nothing; the value never is an argument.

    Raises:
        GivenError: not a variable name, or an empty, too long or non-text value.
    """
    if not _NAME.fullmatch(options.name) or options.name.startswith("EVALPURSE_"):
        raise GivenError(
            f"{options.name!r} is not a name for a variable.", hint="For example: OPENAI_API_KEY."
        )
    value = sys.stdin.buffer.read(SECRET_BYTES_MAX + 1).rstrip(b"\n")
    if not value or len(value) > SECRET_BYTES_MAX or b"\0" in value:
        raise GivenError(
            f"Standard input has {len(value)} bytes; a secret has 1 to {SECRET_BYTES_MAX} and no NUL.",
            hint=f'For example: printf %s "$KEY" | evalpurse secrets set {options.name}',
        )
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        raise GivenError("Standard input is not UTF-8; an environment variable has to be.") from None
    put_in_place(home_of(options).create(), options.name, text)
    return {"name": options.name, "bytes": len(value)}


def list_secrets(options: argparse.Namespace) -> dict[str, Any]:
    """Names only."""
    folder = home_of(options).secrets
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    return {"names": [name for name in names if not name.startswith(".")]}
