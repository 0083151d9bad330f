"""Worker processes for agent SQL: at most two, started when first needed, ended when in doubt.

A worker answers one request at a time. One that is late, dies, or says that it is leaving is ended and
replaced at once, so that the next query finds a process that is already starting. Ending is always SIGKILL:
a worker holds nothing worth saving.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from evalpurse.store.errors import QueryFailedError, QueryTimeoutError
from evalpurse.store.query_worker import FRAME_BYTES_MAX, HEADER, frame

WORKERS_MAX: Final = 2
START_TIMEOUT_S: Final = 30.0
GRACE_S: Final = 1.0  # past its own deadline a worker gets this long to say so
_ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/nonexistent",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
}


class WorkerDiedError(Exception):
    """The process ended, or broke the protocol, instead of answering."""


@dataclass(eq=False)
class Worker:
    """One process and its frames. `isolation` says what it could leave behind; empty until it is ready."""

    process: Process
    answers: BufferedByteReceiveStream
    isolation: dict[str, bool] = field(default_factory=dict)
    healthy: bool = True
    used: bool = False

    async def wait_ready(self) -> None:
        """Waits until a new process can take a request.

        Raises:
            WorkerDiedError: it did not come up; carries what it wrote to stderr.
        """
        if not self.isolation:
            with anyio.move_on_after(START_TIMEOUT_S):
                self.isolation = (await self._receive())["ready"]
                return
            self.healthy = False
            raise WorkerDiedError(f"it was not ready after {START_TIMEOUT_S:g} s")

    async def ask(self, request: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Sends one request and waits for its answer until a moment on the monotonic clock.

        Raises:
            TimeoutError: no answer; the process must be ended.
            WorkerDiedError: the process ended.
        """
        # Unhealthy while it works: whatever interrupts the wait, the process is not used again.
        self.healthy, self.used = False, True
        with anyio.fail_after(max(0.0, deadline - time.monotonic())):
            await self._send(request)
            answer = await self._receive()
        self.healthy = not answer.get("leaving", False)
        return answer

    async def _send(self, request: Mapping[str, Any]) -> None:
        if self.process.stdin is None:
            raise WorkerDiedError("it has no stdin")
        try:
            await self.process.stdin.send(frame(request))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
            raise WorkerDiedError(await self._last_words()) from error

    async def _receive(self) -> dict[str, Any]:
        try:
            (length,) = HEADER.unpack(await self.answers.receive_exactly(HEADER.size))
            if length > FRAME_BYTES_MAX:
                raise WorkerDiedError(f"its answer has {length:,} bytes; {FRAME_BYTES_MAX:,} are allowed")
            answer = json.loads(await self.answers.receive_exactly(length))
        except (
            anyio.EndOfStream,
            anyio.IncompleteRead,
            anyio.BrokenResourceError,
            anyio.ClosedResourceError,
            OSError,
        ) as error:
            self.healthy = False
            raise WorkerDiedError(await self._last_words()) from error
        if not isinstance(answer, dict):
            raise WorkerDiedError("its answer is not an object")
        return answer

    async def _last_words(self) -> str:
        """How it ended: its signal or exit code, and the end of what it wrote to stderr."""
        said = b""
        with anyio.move_on_after(1):
            await self.process.wait()
            while self.process.stderr is not None:
                try:
                    said = (said + await self.process.stderr.receive())[-2_000:]
                except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                    break
        code = self.process.returncode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        lines = said.decode(errors="replace").strip().splitlines()
        return f"{how}{': ' + lines[-1][:300] if lines else ''}"

    async def end(self) -> None:
        """Kills the process and waits until it is gone, even when the caller is being cancelled."""
        self.healthy = False
        with anyio.CancelScope(shield=True):
            if self.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self.process.kill()
            await self.process.wait()
            await self.process.aclose()


class WorkerPool:
    """Lends workers. `drop_root` tells a root process to become nobody; the files must be readable then."""

    def __init__(self, *, mapped_bytes_max: int, drop_root: bool) -> None:
        self._arguments = [str(mapped_bytes_max), "drop-root" if drop_root else "stay"]
        self._free = anyio.Semaphore(WORKERS_MAX)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Processes alive now."""
        return sorted(worker.process.pid for worker in self._all)

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[Worker]:
        """A worker that is ready. Given back, it is kept if healthy, else ended and replaced.

        Raises:
            QueryFailedError: none could be started.
        """
        async with self._free:
            worker = await self._ready()
            try:
                yield worker
            finally:
                if worker.healthy and not self._closed:
                    self._idle.append(worker)
                else:
                    await self._discard(worker)
                    if not self._closed:
                        await self._start_ahead()

    async def _start_ahead(self) -> None:
        """So that the next query does not pay for the start. Where it fails, the next query says why."""
        with anyio.CancelScope(shield=True), contextlib.suppress(OSError):
            self._idle.append(await self._start())

    async def _ready(self) -> Worker:
        for last_try in (False, True):
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                await worker.wait_ready()
            except WorkerDiedError as error:
                await self._discard(worker)
                if last_try:
                    raise QueryFailedError(
                        f"The process that runs queries could not be started: {error}.",
                        hint="Run `evalpurse doctor`; the daemon's log may say more.",
                    ) from error
            except BaseException:
                await self._discard(worker)
                raise
            else:
                return worker
        raise AssertionError("unreachable")

    async def _start(self) -> Worker:
        if self._closed:
            raise QueryFailedError("The query service is closed.", hint="Start the daemon again.")
        process = await anyio.open_process(
            [sys.executable, "-I", "-B", "-m", "evalpurse.store.query_worker", *self._arguments],
            cwd="/",
            env=_ENVIRONMENT,
            start_new_session=True,
        )
        if process.stdout is None:
            raise AssertionError("a process with pipes")
        worker = Worker(process, BufferedByteReceiveStream(process.stdout))
        self._all.add(worker)
        return worker

    async def _discard(self, worker: Worker) -> None:
        await worker.end()
        self._all.discard(worker)

    async def close(self) -> None:
        """Ends every worker."""
        self._closed = True
        self._idle.clear()
        for worker in list(self._all):
            await self._discard(worker)


def late(timeout_s: float) -> QueryTimeoutError:
    """The error for a query that was ended."""
    return QueryTimeoutError(
        f"The query did not answer within {timeout_s:g} s and was ended.",
        hint="Aggregate or filter earlier, and join on ids.",
        timeout_s=timeout_s,
    )
