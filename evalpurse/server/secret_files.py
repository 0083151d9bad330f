"""Secrets of a home folder: one private file each, written and listed without a daemon.

Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any

from evalpurse.home import Home
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
    folder = home_of(options).create().secrets
    fresh = folder / f".{options.name}.{os.getpid()}"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(value)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / options.name)
    return {"name": options.name, "bytes": len(value)}


def list_secrets(options: argparse.Namespace) -> dict[str, Any]:
    """Names only."""
    folder = home_of(options).secrets
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    return {"names": [name for name in names if not name.startswith(".")]}
