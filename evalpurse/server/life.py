"""What the command line does to the life of the daemon: stop it, ask how it is, read its log.

None of these starts a daemon that is not there. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from typing import Any, TextIO

from evalpurse import __version__
from evalpurse.home import Home
from evalpurse.server.errors import AbsentError, RefusedError, UnreachableError
from evalpurse.server.link import open_link
from evalpurse.server.locks import is_locked
from evalpurse.server.spawn import request

_POLL_S = 0.05
CLOSE_TIMEOUT_S = 30.0


def stop(home: Home, timeout_s: float) -> int | None:
    """Stops the daemon of a home and waits until it is gone; its pid, or nothing when none runs.

    Raises:
        UnreachableError: it stays for longer than the time to drain and `CLOSE_TIMEOUT_S`.
    """
    if not is_locked(home.daemon_alive_lock):
        return None
    pid = _pid(home)
    try:
        link = open_link(home, door="control", role="agent")
        try:
            request(link, "daemon.stop", {"timeout_s": timeout_s})
        finally:
            link.close()
    except (UnreachableError, RefusedError):
        # Its doors are shut: it is on its way out, or hangs; a signal asks in another way.
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s + CLOSE_TIMEOUT_S
    while is_locked(home.daemon_alive_lock):
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"The daemon (pid {pid}) is still there after {timeout_s + CLOSE_TIMEOUT_S:.0f} s.",
                hint=f"See {home.log_file}; end it with: kill -9 {pid}",
            )
        time.sleep(_POLL_S)
    return pid


def status(home: Home) -> dict[str, Any]:
    """What the daemon says about itself; `running` is false when there is none.

    Raises:
        UnreachableError: one is there and does not answer, or may not be reached.
    """
    try:
        link = open_link(home, door="control", role="viewer")
    except AbsentError:
        leaving = is_locked(home.daemon_alive_lock)
        return {"running": False, "leaving": leaving, "home": str(home.path), "client": __version__}
    try:
        return {"running": True, "client": __version__, **request(link, "daemon.status", {})}
    finally:
        link.close()


def status_text(said: dict[str, Any]) -> str:
    """The same for a person."""
    if not said["running"]:
        way = "A daemon is on its way out" if said["leaving"] else "No daemon runs"
        return f"{way} for {said['home']}. The next client starts one."
    services, http = said["services"], said["http"]
    lines = [
        f"running   pid {said['pid']}, version {said['version']}, up {said['uptime_s']:.0f} s",
        f"home      {said['home']}",
        f"data      {services['state']}",
        f"http      {http['url'] if http['open'] else 'closed: ' + http['reason']}",
        f"clients   {len(said['connections'])}, calls open {said['calls_open']}",
        f"log       {said['log']}",
    ]
    if "error" in services:
        lines.insert(3, f"          {services['error']['message']} {services['error']['hint']}")
    if said["draining"]:
        lines.insert(1, "draining  it leaves when what runs has ended")
    return "\n".join(lines)


def logs(home: Home, lines: int, *, follow: bool, as_json: bool) -> None:
    """Prints the end of the log, and goes on as it grows.

    Raises:
        UnreachableError: there is no log yet.
    """
    try:
        log: TextIO = home.log_file.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise UnreachableError(
            f"There is no log at {home.log_file}.", hint="No daemon has run here yet."
        ) from None
    with log:
        for line in deque(log, maxlen=max(0, lines)):
            _print(line, as_json=as_json)
        while follow:
            line = log.readline()
            if line:
                _print(line, as_json=as_json)
                continue
            log = _reopened(home, log)
            time.sleep(_POLL_S)


def _reopened(home: Home, log: TextIO) -> TextIO:
    """The new file when the log was put away for a new one."""
    with contextlib.suppress(FileNotFoundError):
        if home.log_file.stat().st_ino != os.fstat(log.fileno()).st_ino:
            log.close()
            return home.log_file.open(encoding="utf-8", errors="replace")
    return log


def _print(line: str, *, as_json: bool) -> None:
    text = line.rstrip("\n")
    print(json.dumps({"line": text}) if as_json else text, flush=True, file=sys.stdout)


def _pid(home: Home) -> int | None:
    text = home.daemon_alive_lock.read_text(encoding="ascii", errors="replace").strip()
    return int(text) if text.isdigit() else None
