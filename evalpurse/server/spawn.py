"""Finding the daemon of a home, and starting it when there is none.

Clients that come at once start one daemon: they take turns under a lock and look again before they start.
The daemon belongs to nobody: its parent is the init process, its terminal none, its environment the same
whichever client came first. A newer client replaces an older daemon; an older client never does, so two
versions cannot take turns ending each other. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evalpurse import __version__
from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.server.errors import AbsentError, LostError, RefusedError, UnreachableError
from evalpurse.server.handshake import is_older
from evalpurse.server.link import Address, Link, open_link
from evalpurse.server.locks import is_locked, locked

DAEMON_MODULE = "evalpurse.server.daemon"
START_TIMEOUT_S = 30.0
TURN_TIMEOUT_S = 150.0  # as long as one client may take to drain an old daemon and start a new one
DRAIN_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 90.0
LOG_BYTES_MAX = 20 << 20
LOG_TAIL_LINES = 8
_POLL_S = 0.02

# What a program needs to run as this user. Everything else would make the daemon depend on the client that
# happened to start it; credentials and settings come from files.
_ENVIRONMENT = (
    *("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "SHELL"),
    *("SYSTEMROOT", "TMPDIR", "TZ", "USER", "XDG_RUNTIME_DIR"),
)

# Runs in a process of its own that ends at once, so that the daemon becomes a child of the init process: a
# client that kills its whole process tree leaves the daemon alone.
_DETACH = "import os, sys\nif os.fork(): os._exit(0)\nos.execv(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class Launch:
    """How to start a daemon; tests name a module of their own that adds tools."""

    module: str = DAEMON_MODULE
    options: Sequence[str] = ()


def ensure(
    home: Home,
    *,
    door: str,
    role: str,
    launch: Launch | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Link:
    """A link to the daemon of a home, which is started, or replaced when older, if need be.

    Args:
        say: told in a sentence what takes time, and what a person should know.

    Raises:
        UnreachableError: it could not be started or does not answer; the text says why.
        RefusedError: it does not let this client in.
        TokenError: the token file is missing, damaged or not private.
    """
    link = _open_current(home, door, role)
    if link is None:
        try:
            home.create()
            with locked(home.daemon_lock, TURN_TIMEOUT_S):
                link = _open_current(home, door, role)
                if link is None:
                    leave(home, say)
                    start(home, launch or Launch())
                    link = open_link(home, door=door, role=role)
        except TimeoutError as error:
            raise UnreachableError(
                f"Another client has been starting the daemon for {TURN_TIMEOUT_S:.0f} s.",
                hint=f"See {home.log_file}.",
            ) from error
        except OSError as error:
            raise UnreachableError(
                f"Starting the daemon failed: {error}.", hint="`evalpurse doctor` checks this machine."
            ) from error
    if is_older(__version__, link.version):
        say(f"The daemon is version {link.version}, this client is {__version__}: update and restart it.")
    return link


def _open_current(home: Home, door: str, role: str) -> Link | None:
    """A link to a daemon that is not older than this client; nothing when there is none."""
    try:
        link = open_link(home, door=door, role=role)
    except AbsentError:
        return None
    except RefusedError as error:
        if error.answered == "draining":
            return None
        raise
    if is_older(link.version, __version__):
        link.close()
        return None
    return link


def leave(home: Home, say: Callable[[str], None]) -> None:
    """Asks a daemon that still lives to drain, and waits until it is gone.

    Raises:
        UnreachableError: it stays.
    """
    if not is_locked(home.daemon_alive_lock):
        return
    address = Address.read(home)
    with contextlib.suppress(EvalpurseError):  # it may be on its way out, with its doors shut
        link = open_link(home, door="control", role="agent")
        say(f"The daemon is version {link.version}, older than this client ({__version__}): replacing it.")
        request(link, "daemon.drain", {"timeout_s": DRAIN_TIMEOUT_S})
        link.close()
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    while is_locked(home.daemon_alive_lock):
        if time.monotonic() > deadline:
            pid = address.pid if address else _pid_in(home.daemon_alive_lock)
            raise UnreachableError(
                f"A daemon (pid {pid}) still holds {home.path} after {LEAVE_TIMEOUT_S:.0f} s.",
                hint=f"See {home.log_file}; end it with: kill {pid}",
            )
        time.sleep(_POLL_S)


def start(home: Home, launch: Launch) -> None:
    """Starts a daemon and returns when its doors are open; the caller holds `home.daemon_lock`.

    Raises:
        UnreachableError: it ended, or did not open its doors in time; carries what it said.
    """
    _rotate(home.log_file)
    ready, tell = os.pipe()
    try:
        command = [
            sys.executable,
            "-P",
            "-m",
            launch.module,
            "--home",
            str(home.path),
            "--ready-fd",
            str(tell),
        ]
        with open(home.log_file, "ab", opener=_private) as log:
            log_from = log.tell()
            starter = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DETACH, *command, *launch.options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home.path,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                pass_fds=(tell,),
                start_new_session=True,
            )
        os.close(tell)
        tell = -1
        starter.wait(timeout=START_TIMEOUT_S)
        said = _read_all(ready, START_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise UnreachableError("Starting the daemon hangs.", hint=f"See {home.log_file}.") from error
    finally:
        os.close(ready)
        if tell >= 0:
            os.close(tell)
    _judge(home, said, log_from)


def _judge(home: Home, said: bytes | None, log_from: int) -> None:
    """Raises unless the new daemon said that its doors are open."""
    if said is None:
        raise UnreachableError(
            f"The daemon did not open its doors within {START_TIMEOUT_S:.0f} s.", hint=f"See {home.log_file}."
        )
    if not said:
        raise UnreachableError(
            f"The daemon ended before it opened its doors. Its last words: {_tail(home.log_file, log_from)}",
            hint=f"See {home.log_file}; `evalpurse doctor` checks this machine.",
        )
    outcome = json.loads(said)
    if "error" in outcome:
        raise UnreachableError(outcome["error"]["message"], hint=outcome["error"]["hint"])


def _read_all(descriptor: int, timeout_s: float) -> bytes | None:
    """What the other end writes until it closes; nothing when the time is over first."""
    deadline = time.monotonic() + timeout_s
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            chunk = os.read(descriptor, 65_536)
            if not chunk:
                return said
            said += chunk
    return None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _rotate(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_suffix(".log.1"))


def _tail(path: Path, start_byte: int) -> str:
    with path.open("rb") as log:
        log.seek(start_byte)
        lines = log.read().decode(errors="replace").strip().splitlines()
    return " / ".join(lines[-LOG_TAIL_LINES:]) or "none."


def _pid_in(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace").strip() or "unknown"


def request(link: Link, method: str, params: dict[str, object]) -> dict[str, object]:
    """Asks the control door one thing.

    Raises:
        RefusedError: the daemon says no, and why.
        LostError: it went away before it answered.
    """
    try:
        link.send({"id": 1, "method": method, "params": params})
        line = link.reader.readline()
    except OSError as error:
        raise LostError(f"The daemon went away while asked for {method}: {error}.") from error
    if not line:
        raise LostError(
            f"The daemon went away while asked for {method}.", hint="See `evalpurse daemon logs`."
        )
    answer = json.loads(line)
    if "error" in answer:
        no = answer["error"]
        raise RefusedError(no["code"], no["message"], no["hint"], **no.get("facts", {}))
    result: dict[str, object] = answer["result"]
    return result
