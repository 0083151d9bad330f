"""The daemon: one process a home, which owns all state and serves every client.

Its life: take the home's lock, open the doors, say so, open the data behind them; on a signal or when asked,
shut the doors, drain, close the data, leave. The doors are gone before the data is closed and the lock is
let go last, so a client that finds no door and a free lock may start the next daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalpurse import __version__
from evalpurse.config import Settings
from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.server.errors import HomeInUseError
from evalpurse.server.link import Address
from evalpurse.server.locks import wait_for_lock

if TYPE_CHECKING:
    from anyio.abc import Listener, SocketStream

    from evalpurse.server.keeper import OpenServices
    from evalpurse.tools.app import Register
    from evalpurse.tools.toolbox import Session

log = logging.getLogger("evalpurse.server.daemon")  # also when it runs as __main__

DRAIN_TIMEOUT_S = 10.0
DRAIN_TIMEOUT_S_MAX = 3600.0
HANG_UP_TIMEOUT_S = 2.0
LOCK_TIMEOUT_S = 1.0  # a client that looks whether the lock is held takes it for an instant
FIRST_LIST_TIMEOUT_S = 0.3


class Daemon:
    """One run of the daemon, from open doors to closed data."""

    def __init__(
        self,
        home: Home,
        settings: Settings,
        *,
        open_services: OpenServices | None = None,
        registers: Sequence[Register] | None = None,
        tcp: bool = False,
    ) -> None:
        import anyio

        from evalpurse.server import modal_methods, owner, warm, worlds
        from evalpurse.server.control import Registry
        from evalpurse.server.doors import RawDoor
        from evalpurse.server.keeper import Keeper
        from evalpurse.server.tokens import Tokens
        from evalpurse.tools.app import build_server

        self.home = home
        self.settings = settings
        self.keeper = Keeper(home, settings, open_services)
        self.server = build_server(self.keeper.ready, registers=registers)
        self.control = Registry()
        self.tokens = Tokens.load(home)
        self.raw = RawDoor(self.tokens, self.server, self.control)
        self._tcp = tcp or not hasattr(socket, "AF_UNIX")
        self._started_at = time.time()
        self._leave = anyio.Event()
        self._raw_ended = anyio.Event()
        self._drain_timeout_s = DRAIN_TIMEOUT_S
        self._drain_scope = anyio.CancelScope()
        self._http_port: int | None = None
        self._http_error = ""
        self._register_control()
        owner.register(self.control, self.keeper.ready)
        modal_methods.register(self.control, self.keeper.ready)
        warm.register(self.control, self.keeper.ready)
        worlds.register(self.control, self.keeper.ready)

    async def run(self, tell_ready: Callable[[], None]) -> None:
        """Serves until told to leave.

        Args:
            tell_ready: called when the doors are open.
        """
        import anyio

        from evalpurse.server.doors import listen_tcp, listen_unix

        listener = await (listen_tcp() if self._tcp else listen_unix(self.home))
        http_socket = self._bind_http()
        self._address(listener).write(self.home)
        tell_ready()
        log.info("evalpurse %s serves %s", __version__, self.home.path)
        async with anyio.create_task_group() as data:
            data.start_soon(self._keep_services)
            try:
                await self._serve_doors(listener, http_socket)
            finally:
                self.keeper.close()
        log.info("evalpurse has left %s", self.home.path)

    async def _serve_doors(self, listener: Listener[SocketStream], http_socket: socket.socket | None) -> None:
        import anyio

        async with anyio.create_task_group() as doors:
            doors.start_soon(self._serve_raw, listener)
            doors.start_soon(self._watch_signals)
            if http_socket is not None:
                doors.start_soon(self._serve_http, http_socket)
            await self._leave.wait()
            await self._shut_doors(listener)
            with self._drain_scope:
                if not await self.keeper.drain(self._drain_timeout_s):
                    log.warning("not drained within %g s", self._drain_timeout_s)
            self.raw.hang_up()
            with anyio.move_on_after(HANG_UP_TIMEOUT_S):
                await self._raw_ended.wait()
            doors.cancel_scope.cancel()

    async def _serve_raw(self, listener: Listener[SocketStream]) -> None:
        await self.raw.serve(listener)
        self._raw_ended.set()

    def leave(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Starts the way out; asked a second time, it no longer waits for what runs."""
        if self._leave.is_set():
            self._drain_scope.cancel()
        self._drain_timeout_s = timeout_s
        self._leave.set()

    async def _keep_services(self) -> None:
        # A client that started this daemon waits for the list of tools, which needs no data; loading the
        # libraries of the data takes longer than answering it, and they would get in each other's way.
        import anyio

        await self.server.wait_for_first_list(FIRST_LIST_TIMEOUT_S)
        with anyio.CancelScope(shield=True):  # ends by `close()`, so that the data is closed in order
            await self.keeper.run()

    async def _serve_http(self, sock: socket.socket) -> None:
        from evalpurse.server.http import HttpDoor

        await HttpDoor(self.server, self.tokens, sock).serve()

    async def _watch_signals(self) -> None:
        import anyio

        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("signal %s", signal.Signals(number).name)
                self.leave()

    async def _shut_doors(self, listener: Listener[SocketStream]) -> None:
        self.raw.draining = True
        self.home.daemon_file.unlink(missing_ok=True)
        if not self._tcp:
            self.home.socket_file.unlink(missing_ok=True)
        await listener.aclose()

    def _bind_http(self) -> socket.socket | None:
        from evalpurse.server.http import bind

        try:
            sock = bind(self.settings.http_port)
        except OSError as error:
            self._http_error = (
                f"Port {self.settings.http_port} cannot be had: {error.strerror}. "
                f"Set another http_port in {self.home.config_file}, or 0 for a free one."
            )
            log.warning("no HTTP door: %s", self._http_error)
            return None
        self._http_port = sock.getsockname()[1]
        return sock

    def _address(self, listener: Listener[SocketStream]) -> Address:
        from evalpurse.server.doors import local_port

        return Address(
            pid=os.getpid(),
            version=__version__,
            socket=None if self._tcp else str(self.home.socket_file),
            tcp_port=local_port(listener) if self._tcp else None,
            http_port=self._http_port,
            home=str(self.home.path),
        )

    def _register_control(self) -> None:
        from evalpurse.server.control import number

        async def status(_params: dict[str, Any], _session: Session) -> dict[str, Any]:
            return self.describe()

        async def drain(params: dict[str, Any], _session: Session) -> dict[str, Any]:
            timeout_s = number(params, "timeout_s", DRAIN_TIMEOUT_S, 0, DRAIN_TIMEOUT_S_MAX)
            self.leave(timeout_s)
            return {"pid": os.getpid(), "draining": True, "timeout_s": timeout_s}

        self.control.register("daemon.status", "viewer", status)
        self.control.register("daemon.drain", "agent", drain)
        self.control.register("daemon.stop", "agent", drain)

    def describe(self) -> dict[str, Any]:
        """What `daemon.status` answers."""
        from evalpurse.server import doors, http

        return {
            "pid": os.getpid(),
            "version": __version__,
            "home": str(self.home.path),
            "uptime_s": round(time.time() - self._started_at, 1),
            "draining": self._leave.is_set(),
            "services": self.keeper.describe(),
            "http": http.describe(self._http_port, self._http_error),
            "connections": [doors.describe(guest) for guest in self.raw.guests],
            "calls_open": self.server.toolbox.calls_open,
            "tools": len(self.server.toolbox.tools),
            "log": str(self.home.log_file),
        }


def main(
    argv: Sequence[str] | None = None,
    *,
    open_services: OpenServices | None = None,
    registers: Sequence[Register] | None = None,
) -> int:
    """Runs the daemon in this process until it is told to leave; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m evalpurse.server.daemon")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, help="where to say that the doors are open, or why not")
    parser.add_argument(
        "--tcp", action="store_true", help="raw door on loopback TCP instead of a socket file"
    )
    options = parser.parse_args(argv)
    os.umask(0o077)  # what this user's evals hold is nobody else's
    _log_to_stderr()
    ready = _Ready(options.ready_fd)
    home = Home(options.home.resolve())
    lock = None
    try:
        home.create()
        lock = _own(home)
        settings = Settings.load(home.config_file)
        _run(
            functools.partial(
                Daemon, home, settings, open_services=open_services, registers=registers, tcp=options.tcp
            ),
            ready,
        )
    except EvalpurseError as error:
        log.error("%s", error)  # noqa: TRY400 - the sentence is complete
        ready.failed(error)
        return 1
    finally:
        if lock is not None:
            os.close(lock)
    return 0


def _run(make: Callable[[], Daemon], ready: _Ready) -> None:
    import anyio

    async def serve() -> None:
        await make().run(ready.opened)

    anyio.run(serve)


def _own(home: Home) -> int:
    """Takes the home for the life of this process.

    Raises:
        HomeInUseError: another daemon has it.
    """
    lock = wait_for_lock(home.daemon_alive_lock, LOCK_TIMEOUT_S)
    if lock is None:
        pid = home.daemon_alive_lock.read_text(encoding="ascii").strip() or "unknown"
        raise HomeInUseError(
            f"{home.path} is served by another daemon (pid {pid}).",
            hint="Use that one (`evalpurse daemon status`), or stop it first (`evalpurse daemon stop`).",
        )
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


class _Ready:
    """Tells the client that started this daemon how it went, once."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def opened(self) -> None:
        self._say({"pid": os.getpid()})

    def failed(self, error: EvalpurseError) -> None:
        self._say({"error": {"code": error.code, "message": error.message, "hint": error.hint}})

    def _say(self, outcome: dict[str, Any]) -> None:
        if self._descriptor is None:
            return
        with contextlib.suppress(BrokenPipeError):  # the client did not wait
            os.write(self._descriptor, json.dumps(outcome).encode())
        os.close(self._descriptor)
        self._descriptor = None


def _log_to_stderr() -> None:
    """The starter points stderr at the log file of the home."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for noisy in ("mcp", "uvicorn", "httpx2", "httpcore2"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
