"""The environment of what runs in a sandbox: a table, not what the daemon happens to have."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from evalpurse.runs.errors import SandboxError

RUN_MARKER = "EVALPURSE_RUN"
"""Holds the sandbox's name: by it a process is known to belong to the sandbox."""

_SYSTEM_FOLDERS = (
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
    "/opt/homebrew/bin",
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def search_path() -> str:
    """The same on every start of the daemon; our own interpreter's folder comes last, as a fallback."""
    own = str(Path(sys.executable).resolve().parent)
    folders = [folder for folder in _SYSTEM_FOLDERS if Path(folder).is_dir()]
    return os.pathsep.join([*folders, *([] if own in folders else [own])])


PATH = search_path()


def base_environment(name: str, folder: str, workdir: str) -> dict[str, str]:
    """What everything in a sandbox sees. `folder` holds `tmp`, which is home folder and temporary folder."""
    return {
        "PATH": PATH,
        "HOME": f"{folder}/tmp",
        "TMPDIR": f"{folder}/tmp",
        "LANG": "C.UTF-8",
        "PWD": workdir,
        RUN_MARKER: name,
    }


def utc_text(epoch_s: float) -> str:
    """A moment as UTC in ISO 8601, to the millisecond."""
    return datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def check_names(names: Mapping[str, str]) -> None:
    """Refuses what a shell cannot carry, and what would hide a process from its own sandbox.

    Raises:
        SandboxError: names the variable.
    """
    for name, value in names.items():
        if not _NAME.fullmatch(name) or name == RUN_MARKER:
            raise SandboxError(
                f"{name!r} cannot be the name of an environment variable of a run.",
                hint=f"Names are letters, digits and underscores, and not {RUN_MARKER}.",
            )
        if "\0" in value:
            raise SandboxError(f"The value of environment variable {name} holds a NUL character.")
