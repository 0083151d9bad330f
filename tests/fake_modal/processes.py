"""Child processes without a thread each, and their output, addressed by byte offset.

The output of a command is read as it comes and kept, in memory while small and on disk beyond that, so that
any number of readers can start at any offset, again and again, as the real router promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

CHUNK_BYTES = 256 << 10
IN_MEMORY_BYTES = 64 << 10
LAST_WORDS_S = 0.25
"""How long after a process's end its pipes may stay open: a child that was left behind holds them."""
POLL_S = 0.02


class Output:
    """One stream: bytes `start` to `end`, growing until closed. `keep` bounds it to the newest bytes."""

    def __init__(self, keep: int | None = None) -> None:
        self.start = 0
        self.end = 0
        self.closed = False
        self._keep = keep
        self._tail = bytearray()
        self._spool: IO[bytes] | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    def feed(self, data: bytes) -> None:
        if self._keep is not None:
            self._tail += data
            surplus = len(self._tail) - self._keep
            if surplus > 0:
                del self._tail[:surplus]
                self.start += surplus
        elif self._spool is None and len(self._tail) + len(data) <= IN_MEMORY_BYTES:
            self._tail += data
        else:
            self._spill(data)
        self.end += len(data)
        self._wake()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._wake()

    def read(self, offset: int, limit: int = CHUNK_BYTES) -> bytes:
        """Up to `limit` bytes at `offset`, empty when there are none (yet)."""
        if self._spool is not None:
            self._spool.seek(offset)
            return self._spool.read(limit)
        begin = max(offset - self.start, 0)
        return bytes(self._tail[begin : begin + limit])

    async def changed(self) -> None:
        """Returns when there is more, or nothing more will come."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def discard(self) -> None:
        """Lets go of the content: readers find the end."""
        self.close()
        if self._spool is not None:
            self._spool.close()
            self._spool = None
        self._tail = bytearray()

    def _spill(self, data: bytes) -> None:
        if self._spool is None:
            self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this output
            self._spool.write(self._tail)
            self._tail = bytearray()
        self._spool.seek(0, os.SEEK_END)
        self._spool.write(data)

    def _wake(self) -> None:
        for waiter in self._waiters:
            settle(waiter)


class FileOutput(Output):
    """The content of a file as a finished stream; nothing is held in memory."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        super().__init__()
        self._spool = file
        self.end = size
        self.closed = True


class Process:
    """A running command. `returncode` is as in subprocess: negative for a signal, None while it runs."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        capture: tuple[bool, bool] = (True, True),
        keep: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.stdout, self.stderr = Output(keep), Output(keep)
        self.returncode: int | None = None
        self.exited = asyncio.Event()
        self.stdin_offset = 0
        self.stdin_closed = False
        self._stdin_lock = asyncio.Lock()
        self._popen = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if capture[0] else subprocess.DEVNULL,
            stderr=subprocess.PIPE if capture[1] else subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=pass_fds,
            bufsize=0,
        )
        self.pid = self._popen.pid
        self._read_from(self._popen.stdout, self.stdout)
        self._read_from(self._popen.stderr, self.stderr)
        if self._popen.stdin is not None:
            os.set_blocking(self._popen.stdin.fileno(), False)
        watch_exit(self._loop, self._popen, self._reaped)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signals the command and everything in its process group."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def kill_leader(self) -> None:
        """Kills the one process, not its group."""
        if self.returncode is None:
            self._popen.kill()

    async def write_stdin(self, offset: int, data: bytes, *, eof: bool) -> None:
        """Takes bytes at `offset`, once however often they are sent.

        Raises:
            BrokenPipeError: the process no longer reads, or its stdin was closed before.
            ValueError: bytes before `offset` are missing.
        """
        async with self._stdin_lock:
            if offset > self.stdin_offset:
                raise ValueError(f"stdin is at byte {self.stdin_offset}, cannot write at {offset}")
            data = data[self.stdin_offset - offset :]
            pipe = self._popen.stdin
            if data and (self.stdin_closed or pipe is None):
                raise BrokenPipeError("stdin is closed")
            while data and pipe is not None:
                try:
                    written = os.write(pipe.fileno(), data)
                except BlockingIOError:
                    await self._writable(pipe.fileno())
                else:
                    self.stdin_offset += written
                    data = data[written:]
            if eof:
                self._close_stdin()

    def finish(self) -> None:
        """Takes what is left in its pipes and closes them; for a command that has ended."""
        if (
            self._stdin_lock.locked()
        ):  # a writer is about to find out that nobody reads: its descriptor must live
            self._loop.call_later(POLL_S, self.finish)
            return
        self._close_stdin()
        for pipe, output in ((self._popen.stdout, self.stdout), (self._popen.stderr, self.stderr)):
            if pipe is not None and not output.closed:
                self._readable(pipe, output)
                self._finish(pipe, output)

    def release(self) -> None:
        """Closes its pipes and lets go of its output, once it has ended."""
        self.finish()
        self.stdout.discard()
        self.stderr.discard()

    async def _writable(self, descriptor: int) -> None:
        ready = self._loop.create_future()
        self._loop.add_writer(descriptor, settle, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(descriptor)

    def _close_stdin(self) -> None:
        self.stdin_closed = True
        if self._popen.stdin is not None:
            self._popen.stdin.close()
            self._popen.stdin = None

    def _read_from(self, pipe: IO[bytes] | None, output: Output) -> None:
        if pipe is None:
            output.close()
            return
        descriptor = pipe.fileno()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._readable, pipe, output)

    def _readable(self, pipe: IO[bytes], output: Output) -> None:
        try:
            data = os.read(pipe.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            output.feed(data)
        else:
            self._finish(pipe, output)

    def _finish(self, pipe: IO[bytes], output: Output) -> None:
        if not pipe.closed:
            self._loop.remove_reader(pipe.fileno())
            pipe.close()
        output.close()

    def _reaped(self) -> None:
        self.returncode = self._popen.wait()
        self.exited.set()
        self._loop.call_later(0 if self.stdout.closed and self.stderr.closed else LAST_WORDS_S, self.finish)


def settle(waiter: asyncio.Future[None]) -> None:
    """Wakes a waiter that may have gone."""
    if not waiter.done():
        waiter.set_result(None)


def watch_exit(
    loop: asyncio.AbstractEventLoop, child: subprocess.Popen[bytes], callback: Callable[[], Any]
) -> None:
    """Calls back once the child has ended."""
    if not hasattr(os, "pidfd_open"):
        _poll_exit(loop, child, callback)
        return
    descriptor = os.pidfd_open(child.pid)

    def ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        callback()

    loop.add_reader(descriptor, ended)


def _poll_exit(
    loop: asyncio.AbstractEventLoop, child: subprocess.Popen[bytes], callback: Callable[[], Any]
) -> None:
    if child.poll() is None:
        loop.call_later(POLL_S, _poll_exit, loop, child, callback)
    else:
        callback()
