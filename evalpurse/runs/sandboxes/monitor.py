"""Watches the limits of all live sandboxes with one look at the machine's processes a second.

It looks sooner when the number of the machine's tasks jumps (a fork bomb doubles within milliseconds) or
when a sandbox nears a limit, and later when looking itself gets expensive. It ends a sandbox that is over a
limit without the event loop, so that a busy one cannot delay that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import anyio.to_thread

from evalpurse.runs.errors import SandboxError
from evalpurse.runs.sandboxes.materialise import tree_bytes
from evalpurse.runs.sandboxes.processes import Owners, Process, ProcessTable, task_count
from evalpurse.runs.sandboxes.protocol import EndReason, Limits

log = logging.getLogger(__name__)

TICK_S = 0.05
LOOK_EVERY_S = 1.0
LOOK_OFTEN_S = 0.1
COST_FACTOR = 10
"""A look is not repeated before ten times its own duration has passed."""
DISK_COST_FACTOR = 20
TASKS_JUMP = 64
THREADS_PER_PROCESS = 16
"""Threads allowed for each allowed process."""
_NEAR = 0.5


@dataclass(eq=False)
class Watch:
    """One process tree under limits. `on_breach` is called at most once, on a thread of its own."""

    name: str
    pid: int
    limits: Limits
    folders: Sequence[str]
    """What counts as its disk use; the first one's disappearance means that the sandbox is lost."""
    free_bytes: int
    """Disk use that was there before it started, and does not count."""
    on_breach: Callable[[EndReason, str], None]
    members: Sequence[Process] = ()
    cpu_s: float = 0.0
    peak_bytes: int = 0
    done: bool = False
    near: bool = False
    ender: threading.Thread | None = None
    _last_bytes: int = field(default=0, repr=False)

    def look(self, members: Sequence[Process], table: ProcessTable) -> tuple[EndReason, str] | None:
        """Takes notice of the tree's present processes; the limit that they break, if any."""
        self.members = members
        limits = self.limits
        self.cpu_s = max(self.cpu_s, sum(process.cpu_s for process in members))
        if self.cpu_s > limits.cpu_s:
            return (
                EndReason.CPU,
                f"It used {self.cpu_s:.1f} s of processor time; {limits.cpu_s:g} s are allowed.",
            )
        if len(members) > limits.processes:
            return EndReason.PROCESSES, f"It had {len(members)} processes; {limits.processes} are allowed."
        threads = sum(process.threads for process in members)
        if threads > limits.processes * THREADS_PER_PROCESS:
            allowed = limits.processes * THREADS_PER_PROCESS
            return EndReason.PROCESSES, f"It had {threads} threads; {allowed} are allowed."
        used = _memory_bytes(members, limits.memory_bytes, table)
        self.peak_bytes = max(self.peak_bytes, used)
        if used > limits.memory_bytes:
            return EndReason.MEMORY, f"It used {used} bytes of memory; {limits.memory_bytes} are allowed."
        grown, self._last_bytes = used - self._last_bytes, used
        self.near = (
            used > _NEAR * limits.memory_bytes
            or grown > 0.1 * limits.memory_bytes
            or len(members) > _NEAR * limits.processes
        )
        return None

    def look_at_disk(self) -> tuple[EndReason, str] | None:
        """Measures the tree's folders; the limit that they break, if any."""
        try:
            used = sum(tree_bytes(folder) for folder in self.folders) - self.free_bytes
        except FileNotFoundError:
            return None if self.done else (EndReason.LOST, "Its folder disappeared.")
        except OSError as error:
            return EndReason.DISK, f"Its disk use cannot be measured: {error.strerror}."
        if used > self.limits.disk_bytes:
            return EndReason.DISK, f"It used {used} bytes of disk; {self.limits.disk_bytes} are allowed."
        return None


def _memory_bytes(members: Sequence[Process], limit: int, table: ProcessTable) -> int:
    """Memory of its own of each process, and the largest shared part once.

    Without the exact shares of shared pages (which cost too much to ask for) this is close: forks of one
    program share the same parts.
    """
    resident = sum(process.resident_bytes for process in members)
    if len(members) < 2 or resident < _NEAR * limit:
        return resident
    shared = [min(table.shared_bytes(process.pid), process.resident_bytes) for process in members]
    return resident - sum(shared) + max(shared)


class Monitor:
    """One thread for all sandboxes of a backend; it sleeps while there are none."""

    def __init__(self, table: ProcessTable, disk: str) -> None:
        """`disk` is a path on the file system that sandboxes live on."""
        self._table = table
        self._disk = disk
        self._owners = Owners(table)
        self._watches: dict[str, Watch] = {}
        self._requests: list[Future[Mapping[str, list[Process]]]] = []
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._tasks_seen = 0
        self._look_at = 0.0
        self._disk_at = 0.0
        self._disk_seen_bytes = 0

    def watch(self, watch: Watch) -> None:
        """Keeps a tree within its limits from now on."""
        with self._wake:
            self._watches[watch.name] = watch
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="sandbox-monitor", daemon=True)
                self._thread.start()
            if len(self._watches) == 1:
                self._wake.notify_all()

    async def forget(self, watch: Watch) -> None:
        """Stops watching; returns when nothing of it is being ended any more. Safe to call twice."""
        with self._wake:
            watch.done = True
            if self._watches.get(watch.name) is watch:
                del self._watches[watch.name]
        if watch.ender is not None:
            # A sandbox of the same name may come next: it must not meet the one that ends this one.
            await anyio.to_thread.run_sync(watch.ender.join)

    def sessions(self) -> set[int]:
        """Sessions of everything that is watched."""
        with self._wake:
            return {watch.pid for watch in self._watches.values()}

    async def look(self, name: str) -> Sequence[Process]:
        """The live processes of one sandbox, from a look that began after this call.

        Calls that come while a look is under way share the next one.
        """
        request: Future[Mapping[str, list[Process]]] = Future()
        with self._wake:
            if self._closing:
                raise SandboxError("The backend is closed.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sandbox-monitor", daemon=True)
                self._thread.start()
            self._requests.append(request)
            self._wake.notify_all()
        owned = await asyncio.wrap_future(request)
        return [process for process in owned.get(name, ()) if not process.zombie]

    def close(self) -> None:
        """Ends the thread. What is watched stays as it is."""
        with self._wake:
            self._closing = True
            thread, self._thread = self._thread, None
            self._wake.notify_all()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                if not self._requests and not self._closing:
                    self._wake.wait(TICK_S if self._watches else None)
                if self._closing:
                    requests, self._requests = self._requests, []
                    for request in requests:
                        request.cancel()
                    return
                requests, self._requests = self._requests, []
                watches = list(self._watches.values())
            try:
                self._turn(watches, requests)
            except Exception as error:
                # The thread must live on: without it no limit holds.
                log.exception("a look at the sandboxes' processes failed")
                for request in requests:
                    if not request.done():
                        request.set_exception(SandboxError(f"Processes cannot be looked at: {error}."))

    def _turn(
        self, watches: Sequence[Watch], requests: Sequence[Future[Mapping[str, list[Process]]]]
    ) -> None:
        now = time.monotonic()
        tasks = task_count()
        jumped = tasks is not None and tasks > self._tasks_seen + TASKS_JUMP
        if requests or (watches and (jumped or now >= self._look_at)):
            self._tasks_seen = tasks or 0
            owned = self._look(watches)
            for request in requests:
                if request.set_running_or_notify_cancel():
                    request.set_result(owned)
        elif tasks is not None:
            self._tasks_seen = min(self._tasks_seen, tasks)
        self._look_at_disks(watches, now)

    def _look(self, watches: Sequence[Watch]) -> Mapping[str, list[Process]]:
        began = time.monotonic()
        roots = {watch.pid: watch.name for watch in watches if not watch.done}
        owned = self._owners.sort(self._table.snapshot(), roots)
        near = False
        for watch in watches:
            if not watch.done:
                self._act(watch, watch.look(owned.get(watch.name, ()), self._table))
                near = near or watch.near
        now = time.monotonic()
        self._look_at = now + max(LOOK_OFTEN_S if near else LOOK_EVERY_S, COST_FACTOR * (now - began))
        return owned

    def _look_at_disks(self, watches: Sequence[Watch], now: float) -> None:
        if not watches:
            return
        used = self._used_bytes()
        smallest = min(watch.limits.disk_bytes for watch in watches)
        if now < self._disk_at and used < self._disk_seen_bytes + smallest // 4:
            return
        self._disk_seen_bytes = used
        for watch in watches:
            if not watch.done:
                self._act(watch, watch.look_at_disk())
        ended = time.monotonic()
        self._disk_at = ended + max(LOOK_EVERY_S, DISK_COST_FACTOR * (ended - now))

    def _used_bytes(self) -> int:
        facts = os.statvfs(self._disk)
        return (facts.f_blocks - facts.f_bfree) * facts.f_frsize

    def _act(self, watch: Watch, breach: tuple[EndReason, str] | None) -> None:
        if breach is None:
            return
        with self._wake:
            if watch.done:
                return
            watch.done = True
            # A thread of its own: ending a tree waits for its processes, and others must not go unwatched.
            watch.ender = threading.Thread(
                target=_end, args=(watch, *breach), name="sandbox-end", daemon=True
            )
            watch.ender.start()


def _end(watch: Watch, reason: EndReason, why: str) -> None:
    try:
        watch.on_breach(reason, why)
    except SandboxError:
        log.exception("sandbox %s is over a limit and could not be ended", watch.name)
