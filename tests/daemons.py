"""Starting, reaching and ending real daemons and bridges from tests."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self
from unittest import mock

from mcp import StdioServerParameters

from evalpurse.home import Home
from evalpurse.server.link import Address
from evalpurse.server.locks import is_locked
from evalpurse.server.spawn import Launch, start

MODULE = "tests.fixture_daemon"
WAIT_S = 20.0
META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


def environment(**more: str) -> dict[str, str]:
    """What a host passes on, and where this code is."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR") if name in os.environ}
    return {**kept, "PYTHONPATH": str(Path(__file__).parent.parent), **more}


def command(*words: str, home: Home) -> list[str]:
    """A command line that starts fixture daemons."""
    return [
        *(sys.executable, "-m", "evalpurse.server.cli", *words),
        *("--home", str(home.path), "--daemon-module", MODULE),
    ]


def host_parameters(home: Home, *more: str) -> StdioServerParameters:
    """How an MCP host starts the bridge."""
    program, *arguments = command("mcp", *more, home=home)
    return StdioServerParameters(command=program, args=arguments, env=environment())


def start_daemon(home: Home) -> None:
    """Starts a fixture daemon as a client does, from this process."""
    with mock.patch.dict(os.environ, PYTHONPATH=environment()["PYTHONPATH"]):
        start(home.create(), Launch(MODULE))


def run(*words: str, home: Home) -> subprocess.CompletedProcess[str]:
    """One command of the command line, to its end."""
    return subprocess.run(
        command(*words, home=home),
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def pid_of(home: Home) -> int:
    """The daemon that serves a home now."""
    address = Address.read(home)
    assert address is not None, "no daemon has opened its doors"
    return address.pid


def kill(home: Home) -> None:
    """Ends the daemon of a home the hard way, and waits until it is gone."""
    text = home.daemon_alive_lock.read_text().strip() if home.daemon_alive_lock.exists() else ""
    if text and is_locked(home.daemon_alive_lock):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(text), signal.SIGKILL)
        wait_until(lambda: not is_locked(home.daemon_alive_lock))


def wait_until(true: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Waits for what another process does, which has no event to wait on."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class Bridge:
    """A bridge spoken to line by line, as a host does that is not the SDK's client."""

    def __init__(self, home: Home, *more: str) -> None:
        self.process = subprocess.Popen(
            command("mcp", *more, home=home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            bufsize=0,
        )
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def send(self, **message: Any) -> None:
        self.send_raw(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    def send_raw(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    def request(self, request_id: Any, method: str, **params: Any) -> None:
        """A request of the stateless era."""
        self.send(id=request_id, method=method, params={**params, "_meta": META})

    def call(self, request_id: Any, tool: str, **arguments: Any) -> None:
        self.request(request_id, "tools/call", name=tool, arguments=arguments)

    def read(self) -> dict[str, Any]:
        """The next line, which must be JSON-RPC."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + WAIT_S
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                assert selector.select(max(0.0, deadline - time.monotonic())), "no answer came in time"
                chunk = os.read(descriptor, 1 << 20)
                assert chunk, "the bridge ended"
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        assert message["jsonrpc"] == "2.0"
        return message

    def answer(self, request_id: Any) -> dict[str, Any]:
        """The answer to one request; what comes before it is passed over."""
        while True:
            message = self.read()
            if message.get("id") == request_id and "method" not in message:
                return message

    def end(self) -> tuple[int, float, str]:
        """Closes stdin; returns the exit code, the seconds it took, and what stderr says."""
        assert self.process.stdin is not None
        began = time.monotonic()
        self.process.stdin.close()
        self.process.stdin = None
        _, errors = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, time.monotonic() - began, errors.decode()
