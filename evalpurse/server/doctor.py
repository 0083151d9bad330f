"""`evalpurse doctor`: what works on this machine, and how to mend what does not.

It tries things instead of looking for them (bubblewrap may be installed and forbidden), changes nothing and
starts nothing. `fail` means evalpurse cannot work, `warn` that something of it will not. Standard library
only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from evalpurse import __version__
from evalpurse.config import Settings
from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.server import life
from evalpurse.server.handshake import is_older
from evalpurse.server.tokens import ROLES, read_token

PYTHON_MIN = (3, 11)
DISK_FREE_FAIL_BYTES = 500 << 20
DISK_FREE_WARN_BYTES = 5 << 30
PROGRAM_TIMEOUT_S = 10.0
MODAL_TIMEOUT_S = 180.0
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# As the local sandboxes isolate: a read-only root, no network, no view of other processes.
_BUBBLEWRAP_TRIAL = (
    *("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),  # noqa: S108
    *("--unshare-all", "--die-with-parent", "--new-session", "true"),
)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: `found` says how it is, `mend` what to do about it."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    mend: str = ""


def examine(home: Home) -> list[Check]:
    """Looks at everything; a check that itself breaks is reported as failed, and the others go on."""
    looks: list[Callable[[Home], Check]] = [
        *(_python, _git, _bubblewrap, _folder, _disk, _config, _tokens, _socket, _daemon, _data),
        *(_modal, _node, _browser),
    ]
    return [_examine(look, home) for look in looks]


def examine_modal(home: Home) -> list[Check]:
    """What of a Modal account works from here; asked by a process of its own, which loads the client."""
    command = [sys.executable, "-m", "evalpurse.server.doctor_modal", str(home.path)]
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, timeout=MODAL_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
        return [Check(**facts) for facts in json.loads(done.stdout)]
    except subprocess.TimeoutExpired:
        return [Check("modal", "fail", f"no answer within {MODAL_TIMEOUT_S:g} s", "Look at the network.")]
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return [
            Check("modal", "fail", f"could not be examined: {' '.join(last)}", "Install evalpurse[modal].")
        ]


def _examine(look: Callable[[Home], Check], home: Home) -> Check:
    try:
        return look(home)
    except (EvalpurseError, OSError, sqlite3.Error, subprocess.SubprocessError) as error:
        mend = error.hint if isinstance(error, EvalpurseError) else ""
        message = error.message if isinstance(error, EvalpurseError) else str(error)
        return Check(look.__name__.lstrip("_"), "fail", message, mend)


def facts(checks: list[Check]) -> dict[str, Any]:
    """All checks as JSON values; `ok` when none failed."""
    return {
        "ok": all(check.state != "fail" for check in checks),
        "version": __version__,
        "checks": [asdict(check) for check in checks],
    }


def text(checks: list[Check]) -> str:
    """All checks for a person."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:4}  {check.name:{width}}  {check.found}")
        if check.mend:
            lines.append(f"{'':4}  {'':{width}}  -> {check.mend}")
    worst = [check.name for check in checks if check.state == "fail"]
    lines.append(f"Not working: {', '.join(worst)}." if worst else "evalpurse can work here.")
    return "\n".join(lines)


def _python(_home: Home) -> Check:
    found = f"{sys.version.split()[0]} at {sys.executable}, evalpurse {__version__}"
    if sys.version_info < PYTHON_MIN:
        return Check("python", "fail", found, "Install evalpurse with Python 3.11 or newer.")
    return Check("python", "ok", found)


def _git(_home: Home) -> Check:
    said = _run(["git", "--version"])
    if said is None:
        return Check("git", "fail", "not found", "Install git: harnesses are read from git repositories.")
    return Check("git", "ok", said)


def _bubblewrap(_home: Home) -> Check:
    name, consequence = "bubblewrap", "Without it a local run can read and write this user's files."
    if sys.platform != "linux":
        return Check(name, "warn", f"not available on {sys.platform}", f"{consequence} Use Modal sandboxes.")
    if shutil.which("bwrap") is None:
        return Check(
            name,
            "warn",
            "not found",
            f"Install it (apt install bubblewrap, dnf install bubblewrap). {consequence}",
        )
    tried = subprocess.run(
        _BUBBLEWRAP_TRIAL,
        capture_output=True,
        check=False,
        timeout=PROGRAM_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    if tried.returncode != 0:
        said = tried.stderr.decode(errors="replace").strip().splitlines()
        reason = said[-1] if said else f"exit code {tried.returncode}"
        return Check(
            name,
            "warn",
            f"installed, but does not work: {reason}",
            "Allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1; on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0; in Docker --security-opt seccomp=unconfined). "
            + consequence,
        )
    return Check(name, "ok", f"{_run(['bwrap', '--version']) or 'bwrap'}, works")


def _folder(home: Home) -> Check:
    if not home.path.exists():
        parent = next(folder for folder in home.path.parents if folder.exists())
        if not os.access(parent, os.W_OK):
            return Check(
                "home", "fail", f"{home.path} cannot be made", "Set EVALPURSE_HOME to a folder of yours."
            )
        return Check("home", "ok", f"{home.path} (made when the daemon first starts)")
    status = home.path.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return Check("home", "fail", f"{home.path} belongs to user {status.st_uid}", "Set EVALPURSE_HOME.")
    if not os.access(home.path, os.W_OK):
        return Check("home", "fail", f"{home.path} cannot be written", f"chmod u+rwx {home.path}")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        return Check("home", "warn", f"{home.path} is open to others ({mode})", f"chmod 700 {home.path}")
    return Check("home", "ok", str(home.path))


def _disk(home: Home) -> Check:
    folder = next(folder for folder in (home.path, *home.path.parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    found = f"{free / (1 << 30):.1f} GiB free"
    if free < DISK_FREE_FAIL_BYTES:
        return Check(
            "disk", "fail", found, f"Free at least {DISK_FREE_FAIL_BYTES >> 20} MiB where {folder} is."
        )
    if free < DISK_FREE_WARN_BYTES:
        return Check(
            "disk", "warn", found, "Large experiments keep transcripts and artifacts: free some space."
        )
    return Check("disk", "ok", found)


def _config(home: Home) -> Check:
    if not home.config_file.exists():
        return Check("config", "ok", "defaults (no config.toml)")
    Settings.load(home.config_file)
    return Check("config", "ok", str(home.config_file))


def _tokens(home: Home) -> Check:
    if not any((home.tokens / role).exists() for role in ROLES):
        return Check("tokens", "ok", "made when the daemon first starts")
    for role in ROLES:
        read_token(home, role)
    return Check("tokens", "ok", f"{', '.join(ROLES)}; private")


def _socket(home: Home) -> Check:
    if not hasattr(socket, "AF_UNIX"):
        return Check("socket", "warn", "no Unix sockets here", "The daemon uses loopback TCP with a token.")
    with tempfile.TemporaryDirectory(prefix="evalpurse-") as folder:
        place = str(Path(folder) / "try.sock")
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            try:
                server.bind(place)
                server.listen(1)
                client.connect(place)
            except PermissionError as error:
                mend = (
                    "Leave the sandbox of this shell; agents can use the MCP tools, which are outside of it."
                )
                return Check("socket", "fail", f"this process may not use sockets: {error.strerror}", mend)
    return Check("socket", "ok", str(home.socket_file))


def _daemon(home: Home) -> Check:
    said = life.status(home)
    if not said["running"]:
        return Check("daemon", "ok", "does not run; the first client starts it")
    found = f"pid {said['pid']}, version {said['version']}"
    if is_older(said["version"], __version__):
        return Check(
            "daemon", "warn", f"{found}, older than this client", "The next `evalpurse` command replaces it."
        )
    if is_older(__version__, said["version"]):
        return Check("daemon", "warn", f"{found}, newer than this client", "Update this client.")
    services, http = said["services"], said["http"]
    if services["state"] == "failed":
        error = services["error"]
        return Check("daemon", "fail", f"{found}: {error['message']}", error["hint"])
    if not http["open"]:
        return Check("daemon", "warn", f"{found}, without HTTP", http["reason"])
    return Check("daemon", "ok", f"{found}, {http['url']}")


def _data(home: Home) -> Check:
    present = [path for path in (home.results_file, home.ledger_file) if path.exists()]
    if not present:
        return Check("data", "ok", "none yet")
    if home.ledger_file.exists():
        # A second reader of SQLite's WAL is harmless; DuckDB's file must never be opened from here.
        with contextlib.closing(sqlite3.connect(f"file:{home.ledger_file}?mode=ro", uri=True)) as ledger:
            state = ledger.execute("pragma quick_check(1)").fetchone()[0]
        if state != "ok":
            return Check(
                "data", "fail", f"the ledger is damaged: {state}", f"See the backups in {home.backups}."
            )
    sizes = ", ".join(f"{path.name} {path.stat().st_size / (1 << 20):.1f} MiB" for path in present)
    return Check("data", "ok", sizes)


def _modal(home: Home) -> Check:
    for path in (home.path / "modal.toml", Path.home() / ".modal.toml"):
        if path.exists():
            return Check("modal", "ok", f"{path} is there; --modal asks Modal itself")
    return Check(
        "modal",
        "warn",
        "no credentials (~/.modal.toml)",
        "For Modal sandboxes: pip install 'evalpurse[modal]', then modal setup.",
    )


def _node(_home: Home) -> Check:
    said = _run(["node", "--version"])
    return Check("node", "ok", said or "not found (optional: only for checks with TypeScript clients)")


def _browser(_home: Home) -> Check:
    found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    return Check("browser", "ok", found or "no chromium found (optional: only for checks of the dashboard)")


def _run(command: list[str]) -> str | None:
    """The first line of a program's output; nothing when it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(
        command, capture_output=True, check=False, timeout=PROGRAM_TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None
