"""Starts a command detached from the daemon, so that any later daemon can learn how it ended.

The supervisor is a shell script. Its `run` file tells the whole story in lines, each written in one piece:
`claimed` by whoever starts it (the file can be made once, so a command starts at most once), bubblewrap's
own line with the id of the jail's first process, `begun` and `ended` by the supervisor. A line without its
newline was never written. The command never holds the file: its input is /dev/null.

Restore commands run first, under the same limits and into the same log. The supervisor writes `restored` when
all have ended with 0, else `unrestored` and the number of the one that did not, and starts nothing more.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import signal
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import anyio

from evalpurse.runs.errors import SandboxError
from evalpurse.runs.sandboxes.isolation import Isolator, Jail
from evalpurse.runs.sandboxes.processes import Process, ProcessTable, end_all, send
from evalpurse.runs.sandboxes.spawn import number_in_child, spawn

# Standard input is the run file. Signals to the whole group, or a log that is full, must not end the
# supervisor before its command; a trap, unlike an ignored signal, is not inherited. The kernel picks the
# command first when memory runs out. A soft CPU limit below the hard one ends with SIGXCPU, which tells why.
# `exec` in a subshell runs the program of that name, never a builtin.
_SCRIPT = """\
trap : HUP INT TERM XFSZ
echo "begun $$" >&0
{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null
{ ulimit -c 0; ulimit -S -t "$1"; ulimit -H -t "$2"; ulimit -f "$3"; } 2>/dev/null
evalpurse_count=$4 evalpurse_number=0
shift 4
unset OLDPWD SHLVL
while [ "$evalpurse_number" -lt "$evalpurse_count" ]; do
  evalpurse_number=$((evalpurse_number + 1))
  echo "evalpurse: restore command $evalpurse_number of $evalpurse_count: $1"
  if (exec /bin/sh -c "$1" </dev/null); then :; else
    evalpurse_status=$?
    echo "evalpurse: restore command $evalpurse_number ended with exit code $evalpurse_status"
    echo "unrestored $evalpurse_number" >&0
    echo "ended $evalpurse_status" >&0
    exit
  fi
  shift
done
[ "$evalpurse_count" -eq 0 ] || echo "restored $(date +%s.%N </dev/null)" >&0
(exec "$@" </dev/null)
echo "ended $?" >&0
"""
_ULIMIT_FILE_UNIT_BYTES = 512
_HIGHEST_SIGNAL = 64
_JAIL_PID = re.compile(r'\s*"child-pid": ([0-9]+)')
_POLL_S = (0.001, 0.05)
_NEW_FILE = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True)
class Launch:
    """One command to supervise. `name` is the sandbox's, which is in `environment` too."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    jail: Jail
    run_file: str
    log_file: str
    cpu_s: float
    file_bytes: int
    restore: Sequence[str] = ()


@dataclass(frozen=True)
class RunRecord:
    """What a run file tells. Times are seconds since the epoch; ids are the host's."""

    started_s: float
    deadline_s: float
    pid: int | None = None
    """The supervisor outside of any jail, once it began."""
    jail_pid: int | None = None
    """The first process of the jail, which is the supervisor in it."""
    exit_code: int | None = None
    ended_s: float | None = None
    restored_s: float | None = None
    """When the last restore command had ended with 0."""
    unrestored: int | None = None
    """The number of the restore command that failed."""

    @classmethod
    def read(cls, run_file: str) -> RunRecord | None:
        """None when the command was never started."""
        try:
            fd = os.open(run_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            text = os.read(fd, 65536).decode(errors="replace")
            modified_s = os.fstat(fd).st_mtime
        finally:
            os.close(fd)
        return _parse(text, modified_s)


def _parse(text: str, modified_s: float) -> RunRecord | None:
    started_s, deadline_s = math.nan, math.nan
    pid = jail_pid = exit_code = restored_s = unrestored = None
    for line in text.splitlines(keepends=True):
        words = line.split()
        if not line.endswith("\n") or not words:
            continue
        if words[0] == "claimed":
            started_s, deadline_s = float(words[1]), float(words[2])
        elif words[0] == "begun" and jail_pid is None:
            pid = int(words[1])
        elif words[0] == "restored":
            restored_s = _moment(words[1:], started_s)
        elif words[0] == "unrestored":
            unrestored = int(words[1])
        elif words[0] == "ended":
            exit_code = _exit_code(int(words[1]))
        elif (found := _JAIL_PID.match(line)) is not None:
            jail_pid = int(found[1])
    if math.isnan(started_s):
        return None
    return RunRecord(
        started_s,
        deadline_s,
        pid,
        jail_pid,
        exit_code,
        None if exit_code is None else modified_s,
        restored_s,
        unrestored,
    )


def _moment(words: Sequence[str], started_s: float) -> float:
    """What `date +%s.%N` printed; some print no fraction, some no number at all. Never before the start."""
    try:
        return max(started_s, float(words[0].removesuffix(".N").removesuffix("N")))
    except (IndexError, ValueError):
        return started_s


def _exit_code(status: int) -> int:
    """A shell tells the signal that ended a command as 128 + its number: here it is negative again."""
    return 128 - status if 128 < status <= 128 + _HIGHEST_SIGNAL else status


@dataclass(frozen=True)
class Usage:
    """What a process tree used, as the kernel counted it for those that were waited for."""

    cpu_s: float
    peak_bytes: int
    """Largest resident memory of one process."""
    written_bytes: int

    def peak_over(self, limit_bytes: int) -> bool:
        """Whether one process was certainly larger than this.

        A child starts with the peak of the process that spawned it: a number that may be the daemon's own
        proves nothing.
        """
        if self.peak_bytes <= limit_bytes:
            return False
        return self.peak_bytes > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES


class Supervised:
    """A supervised command, started by this process or by an earlier one."""

    def __init__(self, name: str, run_file: str, pid: int, table: ProcessTable, *, own: bool) -> None:
        self.name = name
        self.pid = pid
        """The process whose end is the end of the command: supervisor, or bubblewrap around it."""
        self.own = own
        self.usage: Usage | None = None
        self.status: int | None = None
        """Exit status of `pid`, once it was reaped by this process."""
        self._run_file = run_file
        self._table = table
        self._reaped = False
        self._lock = threading.Lock()  # the monitor kills while the event loop reaps

    @classmethod
    def start(
        cls, launch: Launch, isolator: Isolator, table: ProcessTable, times: tuple[float, float]
    ) -> Supervised | None:
        """Starts a command; None when it was started before. `times` are its start and its deadline.

        Raises:
            SandboxError: the system refuses another process, or the sandbox's folder is gone.
        """
        try:
            run_fd = os.open(launch.run_file, _NEW_FILE, 0o600)
        except FileExistsError:
            return None
        except OSError as error:
            raise SandboxError(f"Sandbox {launch.name} cannot be started: {error}.") from error
        log_fd = -1
        try:
            os.write(run_fd, b"claimed %r %r\n" % times)
            log_fd = os.open(launch.log_file, _NEW_FILE, 0o600)
            pid = _spawn(launch, isolator, run_fd, log_fd)
        except OSError as error:
            raise SandboxError(f"Sandbox {launch.name} cannot start a process: {error}.") from error
        finally:
            os.close(run_fd)
            if log_fd >= 0:
                os.close(log_fd)
        return cls(launch.name, launch.run_file, pid, table, own=True)

    @classmethod
    def adopt(cls, name: str, run_file: str, record: RunRecord, table: ProcessTable) -> Supervised | None:
        """A command that an earlier daemon started, if its supervisor is still running."""
        pid = record.jail_pid or record.pid
        if pid is None or table.marker(pid) != name:
            return None
        return cls(name, run_file, pid, table, own=False)

    @property
    def ended_cleanly(self) -> bool:
        """Whether bubblewrap itself came to its end, and so nothing of its process namespace is left."""
        return self.status is not None and os.WIFEXITED(self.status)

    async def exited(self) -> None:
        """Returns when the supervisor is gone. The command may have left other processes behind."""
        if self._reaped:
            return
        if not hasattr(os, "pidfd_open"):
            await self._poll()
            return
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.own or self._table.marker(self.pid) == self.name:
                await anyio.wait_readable(handle)
        finally:
            os.close(handle)

    async def _poll(self) -> None:
        pause_s, longest_s = _POLL_S
        while self._alive():
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _alive(self) -> bool:
        if self.own:
            return not self.reap()
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def reap(self) -> bool:
        """Takes the exit status of our own child; False while it is alive."""
        with self._lock:
            if self._reaped:
                return True
            try:
                pid, status, used = os.wait4(self.pid, os.WNOHANG)
            except ChildProcessError:  # adopted: its parent is init
                self._reaped = True
                return True
            if pid == 0:
                return False
            self._reaped = True
            self.status = status
            self.usage = _usage(used)
            return True

    def kill_group(self) -> int | None:
        """Kills what is left in the supervisor's process group, in one step of the kernel.

        Does nothing and returns None once the supervisor is reaped: its id may be someone else's.
        """
        with self._lock:
            if self._reaped or not self.own:
                return None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            return self.pid

    def ask_to_end(self, processes: Collection[Process]) -> None:
        """SIGTERM to all processes but the supervisor, which stays to tell how they ended."""
        record = RunRecord.read(self._run_file)
        spared = {self.pid, record.jail_pid if record is not None else None}
        for process in processes:
            if process.pid not in spared:
                send(process, signal.SIGTERM, self._table)

    def end(self, known: Collection[Process] = ()) -> None:
        """Kills supervisor, command and everything they started; returns when all are gone. Blocks.

        Raises:
            SandboxError: some processes do not end.
        """
        record = RunRecord.read(self._run_file)
        if record is not None and record.jail_pid is not None:
            first = self._table.one(record.jail_pid)
            if first is not None and self._table.marker(first.pid) == self.name:
                send(first, signal.SIGKILL, self._table)
        end_all(self.name, self._table, self.kill_group, known)


def _spawn(launch: Launch, isolator: Isolator, run_fd: int, log_fd: int) -> int:
    cpu_s = max(1, math.ceil(launch.cpu_s))
    blocks = max(1, launch.file_bytes // _ULIMIT_FILE_UNIT_BYTES)
    numbers = (str(cpu_s), str(cpu_s + 1), str(blocks), str(len(launch.restore)))
    supervised = ["/bin/sh", "-c", _SCRIPT, "sh", *numbers, *launch.restore, *launch.command]
    return spawn(
        isolator.wrap(launch.jail, number_in_child(run_fd), supervised),
        environment=launch.environment,
        folder=launch.jail.workdir,
        stdin=run_fd,
        output=log_fd,
        info=run_fd if isolator.active else None,
    )


def _usage(used: resource.struct_rusage) -> Usage:
    return Usage(
        cpu_s=used.ru_utime + used.ru_stime,
        peak_bytes=used.ru_maxrss * _MAXRSS_UNIT_BYTES,
        written_bytes=used.ru_oublock * 512,
    )


_MAXRSS_UNIT_BYTES = 1 if os.uname().sysname == "Darwin" else 1024
