"""Which processes of this machine belong to which sandbox, and how they are ended.

A process belongs to a sandbox when its ancestors lead to the sandbox's supervisor, when it is in the
supervisor's session, or when its environment carries the sandbox's name. What was once known to belong
stays known, whatever it does to its environment later. A process is named by id and start time together,
so that an id that was given to someone else is never signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from evalpurse.runs.errors import SandboxError
from evalpurse.runs.sandboxes.environment import RUN_MARKER

END_TIMEOUT_S = 20.0
_SETTLED_AGE_S = 1.0  # a younger process may still be about to exec, and so to show another environment
_DYING_WAIT_S = 0.02
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MARKER = f"{RUN_MARKER}=".encode()


@dataclass(frozen=True, slots=True)
class Process:
    """One process as it was seen. `started` only tells apart two that had the same id."""

    pid: int
    parent: int
    session: int
    started: str
    cpu_s: float
    resident_bytes: int
    threads: int
    zombie: bool


class ProcessTable(Protocol):
    """What the system tells about its processes."""

    def snapshot(self) -> dict[int, Process]:
        """All processes by id."""

    def one(self, pid: int) -> Process | None:
        """One process, None when it is gone."""

    def marker(self, pid: int) -> str | None:
        """The sandbox that a process's environment names, None when there is none or it may not be read."""

    def shared_bytes(self, pid: int) -> int:
        """The part of the resident memory that other processes may share."""


class ProcTable:
    """From /proc (Linux)."""

    def snapshot(self) -> dict[int, Process]:
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                process = self.one(int(name))
                if process is not None:
                    found[process.pid] = process
        return found

    def one(self, pid: int) -> Process | None:
        line = _read(f"/proc/{pid}/stat")
        if not line:
            return None
        # The name stands in parentheses and may hold anything, parentheses too.
        fields = line[line.rindex(b")") + 2 :].split()
        ticks = int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
        return Process(
            pid=pid,
            parent=int(fields[1]),
            session=int(fields[3]),
            started=fields[19].decode(),
            cpu_s=ticks / _CLOCK_TICKS,
            resident_bytes=int(fields[21]) * _PAGE_BYTES,
            threads=int(fields[17]),
            zombie=fields[0] in (b"Z", b"X"),
        )

    def marker(self, pid: int) -> str | None:
        return _marker_in(_read(f"/proc/{pid}/environ", whole=True).split(b"\0"))

    def shared_bytes(self, pid: int) -> int:
        fields = _read(f"/proc/{pid}/statm").split()
        return int(fields[2]) * _PAGE_BYTES if len(fields) > 2 else 0


class PsTable:
    """From `ps`, where there is no /proc. `ps` itself is one of the processes, for a moment."""

    def __init__(self, environment_option: str = "-E" if sys.platform == "darwin" else "e") -> None:
        self._environment_option = environment_option
        self._markers: dict[int, str | None] = {}

    def snapshot(self) -> dict[int, Process]:
        self._markers = self._ask_markers("-A")
        return self._ask("-A")

    def one(self, pid: int) -> Process | None:
        return self._ask("-p", str(pid)).get(pid)

    def marker(self, pid: int) -> str | None:
        known = self._markers
        if pid not in known:
            known[pid] = self._ask_markers("-p", str(pid)).get(pid)
        return known[pid]

    def shared_bytes(self, pid: int) -> int:  # noqa: ARG002 - ps does not tell
        return 0

    def _ask_markers(self, *which: str) -> dict[int, str | None]:
        lines = _run_ps(self._environment_option, "-ww", *which, "-opid=", "-ocommand=").splitlines()
        split = [line.split() for line in lines]
        return {int(words[0]): _marker_in(words[1:]) for words in split if words and words[0].isdigit()}

    def _ask(self, *which: str) -> dict[int, Process]:
        found = {}
        # The group stands for the session: not every ps tells sessions, and a supervisor leads both.
        columns = ("pid", "ppid", "pgid", "rss", "time", "stat", "lstart")
        for line in _run_ps(*which, *(f"-o{column}=" for column in columns)).splitlines():
            fields = line.split(None, 6)
            if len(fields) == 7:
                pid, parent, group, resident_kib, cpu, state, started = fields
                found[int(pid)] = Process(
                    pid=int(pid),
                    parent=int(parent),
                    session=int(group),
                    started=started.decode(errors="replace").strip(),
                    cpu_s=_seconds(cpu.decode()),
                    resident_bytes=int(resident_kib) * 1024,
                    threads=1,
                    zombie=state.startswith(b"Z"),
                )
        return found


def system_table() -> ProcessTable:
    """The better one of this system."""
    return ProcTable() if os.path.exists("/proc/self/stat") else PsTable()


def _run_ps(*arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["ps", *arguments], check=False, capture_output=True, stdin=subprocess.DEVNULL, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"Processes cannot be listed: {error}.", hint="Is `ps` installed?") from error
    return done.stdout


def _seconds(clock: str) -> float:
    """`[[days-]hours:]minutes:seconds[.hundredths]` of ps, in seconds."""
    days, _, rest = clock.rpartition("-")
    total = 0.0
    for part in rest.split(":"):
        total = total * 60 + float(part)
    return total + 86400 * int(days or 0)


def _marker_in(variables: Iterable[bytes]) -> str | None:
    for variable in variables:
        if variable.startswith(_MARKER):
            return variable[len(_MARKER) :].decode(errors="replace")
    return None


def _read(path: str, *, whole: bool = False) -> bytes:
    """A file of /proc; empty when its process is gone or belongs to someone else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        content = piece = os.read(fd, 65536)
        while whole and piece:
            piece = os.read(fd, 65536)
            content += piece
    except OSError:
        return b""
    else:
        return content
    finally:
        os.close(fd)


class Owners:
    """Who owns a process: remembers what it learned, so that an environment is read once a process.

    Not safe for use by two threads at once.
    """

    def __init__(self, table: ProcessTable) -> None:
        self._table = table
        self._known: dict[tuple[int, str], str | None] = {}
        self._first_seen: dict[tuple[int, str], float] = {}

    def sort(self, processes: Mapping[int, Process], roots: Mapping[int, str]) -> dict[str, list[Process]]:
        """All processes of sandboxes by sandbox name. `roots` are the ids of live supervisors."""
        now = time.monotonic()
        owned: dict[str, list[Process]] = {}
        settled: dict[tuple[int, str], str | None] = {}
        seen: dict[tuple[int, str], float] = {}
        answers: dict[int, str | None] = {}
        for process in processes.values():
            owner = self._owner(process, processes, roots, answers)
            key = (process.pid, process.started)
            if owner is not None:
                owned.setdefault(owner, []).append(process)
                settled[key] = owner
                continue
            seen[key] = self._first_seen.get(key, now)
            if now - seen[key] > _SETTLED_AGE_S:
                settled[key] = None
        self._known, self._first_seen = settled, seen
        return owned

    def remember(self, name: str, processes: Iterable[Process]) -> None:
        """Notes processes that are known to belong to a sandbox."""
        self._known.update({(process.pid, process.started): name for process in processes})

    def _owner(
        self,
        process: Process,
        processes: Mapping[int, Process],
        roots: Mapping[int, str],
        answers: dict[int, str | None],
    ) -> str | None:
        # Up the ancestors by loop: a harness may nest deeper than Python's stack.
        path = []
        found: str | None = None
        current: Process | None = process
        while current is not None and current.pid not in answers:
            path.append(current)
            answers[current.pid] = None  # ends a cycle, which a snapshot taken in motion can show
            found = self._by_itself(current, roots)
            if found is not None:
                break
            current = processes.get(current.parent)
        else:
            found = answers[current.pid] if current is not None else None
        for passed in path:
            answers[passed.pid] = found
        return found

    def _by_itself(self, process: Process, roots: Mapping[int, str]) -> str | None:
        owner = roots.get(process.pid) or roots.get(process.session)
        if owner is not None:
            return owner
        key = (process.pid, process.started)
        if key in self._known:
            return self._known[key]
        return None if process.zombie else self._table.marker(process.pid)


def send(process: Process, number: int, table: ProcessTable) -> None:
    """Signals exactly this process; nothing happens when it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not hasattr(os, "pidfd_open"):
            current = table.one(process.pid)
            if current is not None and current.started == process.started:
                os.kill(process.pid, number)
            return
        handle = os.pidfd_open(process.pid)
        try:
            current = table.one(process.pid)
            if current is not None and current.started == process.started:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def end_all(
    name: str,
    table: ProcessTable,
    kill_group: Callable[[], int | None] = lambda: None,
    known: Collection[Process] = (),
) -> None:
    """Kills every process of a sandbox, and returns when none is left.

    `kill_group` kills the supervisor's process group, which is one step of the kernel that no fork can
    escape, and returns the supervisor's id; None when that id is no longer certain. `known` are processes
    that are known to belong.

    Raises:
        SandboxError: some are still there after 20 s.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    owners = Owners(table)
    owners.remember(name, known)
    remaining = list(known)
    while True:
        root = kill_group()
        for process in remaining:
            send(process, signal.SIGKILL, table)
        owned = owners.sort(table.snapshot(), {} if root is None else {root: name})
        remaining = [process for process in owned.get(name, ()) if not process.zombie]
        if not remaining:
            return
        for process in remaining:
            send(process, signal.SIGKILL, table)
        if time.monotonic() > deadline:
            raise SandboxError(
                f"{len(remaining)} processes of sandbox {name} do not end, {remaining[0].pid} among them.",
                hint="A process in an uninterruptible wait ends when its disk or network share answers.",
            )
        time.sleep(_DYING_WAIT_S)


def newest_pid() -> int | None:
    """The id that was given out last, None where the system does not tell."""
    fields = _read("/proc/loadavg").split()
    return int(fields[4]) if len(fields) == 5 else None


def task_count() -> int | None:
    """How many processes and threads the machine has, None where the system does not tell cheaply."""
    fields = _read("/proc/loadavg").split()
    return int(fields[3].partition(b"/")[2]) if len(fields) == 5 else None


def younger_pids(pid: int, *, pids_max: int = 4096) -> range | None:
    """Ids given out since `pid` was, None when they are too many to try each.

    Ids are given out in rising order: what a process of a moment ago has started has an id in this range.
    """
    newest = newest_pid()
    if newest is None or not pid <= newest <= pid + pids_max:
        return None
    return range(pid + 1, newest + 1)


def escaped(pids: Iterable[int], name: str, sessions: Collection[int], table: ProcessTable) -> bool:
    """Whether one of these ids is a process of sandbox `name`. `sessions` are those known to be others'."""
    for pid in pids:
        try:
            session = os.getsid(pid)
        except (ProcessLookupError, PermissionError):
            continue
        if session not in sessions and table.marker(pid) == name:
            return True
    return False
