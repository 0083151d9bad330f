"""Checks that may never end, each given a bounded time in a child process that can be killed.

Workers are kept and used again; one that ran out of time is replaced. They are found by no one else: a
worker ends by itself when its input closes, and its running check ends with its processor time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from evalpurse.runs.graders.spec import BOUNDED_WALL_S

CPU_S = 1.0
WORKERS_MAX = 2
_SCRIPT = Path(__file__).with_name("worker.py")


class CheckTimeoutError(Exception):
    """The check used up its processor time, or the wall clock limit."""


class CheckFailedError(Exception):
    """The check raised an error, or its worker ended for another reason than time."""


class _Worker:
    """One child process; used by one thread at a time."""

    def __init__(self) -> None:
        # -I: neither the working folder nor PYTHON* variables can put another module in the way.
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
            start_new_session=True,  # a Ctrl-C for the daemon is not for a check under way
        )

    def check(self, request: bytes) -> dict[str, Any]:
        """Sends a request, returns its reply.

        Raises:
            CheckTimeoutError, CheckFailedError: the worker is gone then.
        """
        deadline = time.monotonic() + BOUNDED_WALL_S
        try:
            reply = self._exchange(request, deadline)
        except BrokenPipeError:
            reply = b""
        if reply.endswith(b"\n"):
            result: dict[str, Any] = json.loads(reply)
            return result
        late = time.monotonic() >= deadline
        code = self.end()
        if late or code == -signal.SIGPROF:
            raise CheckTimeoutError
        raise CheckFailedError(f"its worker ended with code {code}")

    def _exchange(self, request: bytes, deadline: float) -> bytes:
        sent, received = self._process.stdin, self._process.stdout
        if sent is None or received is None:
            raise RuntimeError("pipes of a running process are missing")
        sent.write(request)  # the worker reads a whole request before it works: this cannot block for long
        sent.flush()
        reply = b""
        with selectors.DefaultSelector() as selector:
            selector.register(received, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    break
                piece = os.read(received.fileno(), 65536)
                if not piece:
                    break
                reply += piece
        return reply

    def end(self) -> int:
        """Ends the process, by force when it does not end with its input; returns its exit code."""
        sent, received = self._process.stdin, self._process.stdout
        if sent is not None:
            with contextlib.suppress(BrokenPipeError):  # the unsent rest of a request to a dead process
                sent.close()
        try:
            # Its own end comes first: the code of the signal that ended it tells why.
            self._process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if received is not None:
            received.close()
        return self._process.wait()


_idle: list[_Worker] = []
_idle_lock = threading.Lock()
_limiter: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("evalpurse_check_workers")


async def check(request: dict[str, Any]) -> tuple[bool, str]:
    """Runs one check in a worker; returns whether it holds, and a detail.

    At most `WORKERS_MAX` run at a time, each with `CPU_S` seconds of processor time and `BOUNDED_WALL_S` of
    wall clock.

    Raises:
        CheckTimeoutError: it did not end within its limits.
        CheckFailedError: it raised an error.
    """
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(WORKERS_MAX)
        _limiter.set(limiter)
    line = json.dumps(request | {"cpu_s": CPU_S}).encode() + b"\n"
    reply = await anyio.to_thread.run_sync(_check_in_worker, line, limiter=limiter)
    if "error" in reply:
        raise CheckFailedError(reply["error"])
    return reply["ok"], reply["detail"]


def _check_in_worker(line: bytes) -> dict[str, Any]:
    with _idle_lock:
        kept = _idle.pop() if _idle else None
    worker = kept or _Worker()
    try:
        reply = worker.check(line)
    except CheckFailedError:
        if kept is None:
            raise
        worker = _Worker()  # the kept one may have been ended by someone else while it was idle
        reply = worker.check(line)
    with _idle_lock:
        _idle.append(worker)
    return reply


@atexit.register
def end_workers() -> None:
    """Ends all workers that are not in use."""
    with _idle_lock:
        workers = _idle[:]
        _idle.clear()
    for worker in workers:
        worker.end()
