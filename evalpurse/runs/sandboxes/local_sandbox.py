"""One sandbox on this machine, from its start to its removal.

Its end is read from evidence, in this order: the verdict of whoever ended it, the supervisor's last line,
what the kernel counted. No evidence means that it is lost.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType

import anyio
import anyio.to_thread

from evalpurse.runs.errors import SandboxError
from evalpurse.runs.sandboxes.capture import Leavings, open_regular, read_ends, read_head
from evalpurse.runs.sandboxes.environment import base_environment, utc_text
from evalpurse.runs.sandboxes.isolation import Jail
from evalpurse.runs.sandboxes.layout import Layout, Record, Verdict
from evalpurse.runs.sandboxes.materialise import remove_tree, tree_bytes, write_files
from evalpurse.runs.sandboxes.monitor import Watch
from evalpurse.runs.sandboxes.processes import end_all, escaped, younger_pids
from evalpurse.runs.sandboxes.protocol import Ended, EndReason, ExecResult, Output
from evalpurse.runs.sandboxes.redaction import Redactor
from evalpurse.runs.sandboxes.supervisor import Launch, RunRecord, Supervised
from evalpurse.runs.sandboxes.tasks import Engine

GRACE_S = 2.0
"""Between SIGTERM at the deadline and SIGKILL."""
FETCH_BYTES_MAX = 1 << 20
READ_AT_ONCE_BYTES = 256 << 10
_BRIEF_S = 1.0  # process ids cannot have gone round since
_SIGXCPU, _SIGXFSZ = -24, -25
_LOST_TAIL_BYTES = 500


class LocalSandbox:
    """See the protocol; made by `LocalBackend`."""

    def __init__(
        self,
        record: Record,
        layout: Layout,
        engine: Engine,
        values: Mapping[str, str | None],
        *,
        fresh: bool,
        on_removed: Callable[[LocalSandbox], None],
        former: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """`values` are its secrets, None for one that is no longer known. `fresh`: made by this process.

        `former` are values that its harness may have been given instead.
        """
        self.name = record.name
        self.tags = record.tags
        self.created_at = record.created_at
        self._record = record
        self._layout = layout
        self._engine = engine
        self._secrets = {name: value for name, value in values.items() if value is not None}
        self._unknown_secrets = sorted(name for name, value in values.items() if value is None)
        given = {name: [value, *former.get(name, ())] for name, value in self._secrets.items()}
        self._redactor = Redactor(given)
        self._on_removed = on_removed
        self._process: Supervised | None = None
        self._watch: Watch | None = None
        self._deadline = 0.0
        self._verdict: Verdict | None = None
        self._ended: Ended | None = None
        self._alone = fresh
        """Whether it is certain that no process of this sandbox is running."""
        self._removing = anyio.Lock()
        self._removed = False

    async def start(self) -> None:
        if self._process is not None or self._ended is not None:
            return
        self._require_secrets()
        limits, started_s = self._record.limits, time.time()
        times = (started_s, started_s + limits.timeout_s)
        engine = self._engine
        self._alone = False
        # Shielded, so that the process that was started is known here, and reaped.
        with anyio.CancelScope(shield=True):
            process = await anyio.to_thread.run_sync(
                Supervised.start, self._launch(times[1]), engine.isolator, engine.table, times
            )
            if process is not None:
                self._deadline = anyio.current_time() + limits.timeout_s
                self._attend(process)

    async def wait(self) -> Ended:
        if self._ended is None:
            started = self._process is not None or self._take_up() is not None
            there = os.path.exists(self._layout.record)
            if there and not started:
                raise SandboxError(f"Sandbox {self.name} was not started.")
            if not there:  # with all evidence
                await self._kill()
            elif self._process is not None:
                await self._until_gone(self._process)
            return await self._conclude()
        return self._ended

    async def stop(self) -> Ended | None:
        if self._ended is None:
            record = self._take_up()
            if record is None and os.path.exists(self._layout.record):
                return None
            with anyio.CancelScope(shield=True):
                if record is not None and record.exit_code is None:
                    self._decide(EndReason.STOPPED, "It was stopped.")
                await self._kill()
                await self._conclude()
        return self._ended

    async def get(self) -> Output:
        self._require_end("read")
        self._require_secrets()
        layout, limits = self._layout, self._record.limits
        try:
            leavings = Leavings.open(layout.out, layout.log)
            try:
                if leavings.artifacts is None and leavings.size_bytes <= READ_AT_ONCE_BYTES:
                    return leavings.read(limits, self._redactor)
                return await anyio.to_thread.run_sync(leavings.read, limits, self._redactor)
            finally:
                leavings.close()
        except OSError as error:
            raise SandboxError(f"The output of sandbox {self.name} cannot be read: {error}.") from error

    async def exec(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes],
        timeout_s: float,
        fetch: Sequence[str] = (),
    ) -> ExecResult:
        self._require_end("graded")
        self._require_secrets()
        # No name that a harness could have guessed and prepared.
        root = f"{self._layout.root}/grader-{secrets.token_hex(8)}"
        launch = self._grader_launch(root, command)
        self._alone = False
        try:
            await anyio.to_thread.run_sync(_make_grader_folder, root, files)
            limits = replace(self._record.limits, timeout_s=timeout_s)
            ended = await self._engine.carry_out(launch, limits, timeout_s, (root,), 0)
            self._alone = True
            return await anyio.to_thread.run_sync(
                self._grader_result, root, launch, ended.exit_code, ended.why, fetch
            )
        except OSError as error:
            raise SandboxError(f"A grader of sandbox {self.name} cannot run: {error}.") from error
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(remove_tree, root)

    async def terminate(self) -> None:
        # Without a pause there is nothing to shield.
        if self._removed or (self._alone and self._take_back()):
            return
        with anyio.CancelScope(shield=True):
            async with self._removing:
                if not self._removed and not self._alone:
                    self._take_up()
                    await self._kill()
                    await self._release()
                if not self._removed and not self._take_back():
                    await anyio.to_thread.run_sync(remove_tree, self._layout.root)
                    self._gone()

    def _take_back(self) -> bool:
        taken = self._engine.folders.take_back(self._layout)
        if taken:
            self._gone()
        return taken

    def _gone(self) -> None:
        self._removed = True
        self._on_removed(self)

    # The way to the end

    def _take_up(self) -> RunRecord | None:
        """The run's record; takes up the harness that an earlier daemon started, if it is running."""
        record = RunRecord.read(self._layout.run)
        if record is None or self._process is not None or record.exit_code is not None:
            return record
        process = Supervised.adopt(self.name, self._layout.run, record, self._engine.table)
        if process is not None:
            self._deadline = anyio.current_time() + record.deadline_s - time.time()
            self._attend(process)
        return record

    def _attend(self, process: Supervised) -> None:
        self._process = process
        record = self._record
        watch = Watch(
            self.name, process.pid, record.limits, (self._layout.root,), record.free_bytes, self._on_breach
        )
        self._watch = watch
        self._engine.monitor.watch(watch)

    def _on_breach(self, reason: EndReason, detail: str) -> None:
        """Called by the monitor, on another thread."""
        self._decide(reason, detail)
        if self._process is not None and self._watch is not None:
            self._process.end(self._watch.members)

    def _decide(self, reason: EndReason, detail: str) -> None:
        """Notes why the harness is about to be ended. The first verdict counts."""
        if self._verdict is not None:
            return
        verdict = Verdict(reason, detail)
        try:
            self._verdict = verdict.write(self._layout)
        except OSError:  # the folder is gone or the disk is full: this process still knows
            self._verdict = verdict

    async def _until_gone(self, process: Supervised) -> None:
        with anyio.move_on_at(self._deadline) as scope:
            await process.exited()
        if not scope.cancelled_caught:
            return
        timeout_s = self._record.limits.timeout_s
        self._decide(EndReason.TIMEOUT, f"It was ended at its deadline, {timeout_s:g} s after its start.")
        process.ask_to_end(await self._engine.monitor.look(self.name))
        with anyio.move_on_after(GRACE_S):
            await process.exited()
        await self._kill()

    async def _kill(self) -> None:
        known = self._watch.members if self._watch is not None else ()
        if self._process is not None:
            await anyio.to_thread.run_sync(self._process.end, known)
            await self._process.exited()
        else:
            await anyio.to_thread.run_sync(end_all, self.name, self._engine.table)

    async def _conclude(self) -> Ended:
        """Makes sure that nothing is left running, and says how it ended."""
        if not self._alone and not self._left_nothing():
            left = await self._engine.monitor.look(self.name)
            if left or (self._process is not None and not self._process.reap()):
                await self._kill()
        await self._release()
        self._alone = True
        if self._ended is None:
            self._ended = await self._judge()
        return self._ended

    async def _release(self) -> None:
        if self._watch is not None:
            await self._engine.monitor.forget(self._watch)
        if self._process is not None:
            self._process.kill_group()
            self._process.reap()

    def _left_nothing(self) -> bool:
        """Whether it is certain, without a look at all processes, that the harness left none behind."""
        process = self._process
        if process is None:
            return False
        if self._engine.isolator.active:
            process.reap()
            return process.ended_cleanly
        process.kill_group()
        brief = anyio.current_time() < self._deadline - self._record.limits.timeout_s + _BRIEF_S
        started_since = younger_pids(process.pid) if process.own and brief else None
        if started_since is None:
            return False
        others = self._engine.monitor.sessions() - {process.pid} | {os.getsid(0)}
        return not escaped(started_since, self.name, others, self._engine.table)

    async def _judge(self) -> Ended:
        run = RunRecord.read(self._layout.run)
        verdict = self._verdict or Verdict.read(self._layout)
        now = datetime.now(UTC)
        if run is None:
            detail = (
                verdict.detail if verdict is not None else f"The folder of sandbox {self.name} disappeared."
            )
            return Ended(EndReason.LOST, None, self.created_at, now, detail)
        begun_s = run.restored_s or run.started_s  # what a restore takes belongs to the start, not to the run
        started_at = datetime.fromtimestamp(begun_s, UTC)
        ended_at = datetime.fromtimestamp(run.ended_s, UTC) if run.ended_s is not None else now
        ended_at = max(started_at, ended_at)
        stopped = verdict is not None and verdict.reason is EndReason.STOPPED
        if self._record.restore and run.restored_s is None and not stopped:
            return Ended(
                EndReason.LOST, run.exit_code, started_at, ended_at, self._unrestored_detail(run, verdict)
            )
        if verdict is not None:
            return Ended(verdict.reason, run.exit_code, started_at, ended_at, verdict.detail)
        if run.exit_code is None:
            return Ended(EndReason.LOST, None, started_at, ended_at, self._lost_detail())
        reason, detail = await self._broken_limit(run.exit_code)
        return Ended(reason, run.exit_code, started_at, ended_at, detail)

    async def _broken_limit(self, exit_code: int) -> tuple[EndReason, str]:
        """The limit that a harness that ended by itself has broken, by what the kernel did and counted."""
        limits = self._record.limits
        usage = self._process.usage if self._process is not None else None
        if exit_code == _SIGXCPU or (usage is not None and usage.cpu_s > limits.cpu_s):
            return EndReason.CPU, f"It used up its {limits.cpu_s:g} s of processor time."
        if exit_code == _SIGXFSZ:
            return (
                EndReason.DISK,
                f"It wrote a file larger than the {limits.disk_bytes} bytes that are allowed.",
            )
        if usage is None:
            return EndReason.EXITED, ""
        if usage.peak_over(limits.memory_bytes):
            peak, allowed = usage.peak_bytes, limits.memory_bytes
            return (
                EndReason.MEMORY,
                f"One of its processes used {peak} bytes of memory; {allowed} are allowed.",
            )
        if usage.written_bytes > limits.disk_bytes // 2:
            used = await anyio.to_thread.run_sync(tree_bytes, self._layout.root) - self._record.free_bytes
            if used > limits.disk_bytes:
                return EndReason.DISK, f"It used {used} bytes of disk; {limits.disk_bytes} are allowed."
        return EndReason.EXITED, ""

    def _unrestored_detail(self, run: RunRecord, verdict: Verdict | None) -> str:
        """Why the harness never started. What is at fault is the world or the machine, not the harness."""
        commands = self._record.restore
        if verdict is not None:
            how = f"The restore did not come to its end. {verdict.detail}"
        elif run.unrestored is not None:
            code = run.exit_code
            how = (
                f"Restore command {run.unrestored} of {len(commands)}, {commands[run.unrestored - 1]!r}, "
                + ("failed." if code is None else f"ended with {_code_text(code)}.")
            )
        else:
            return f"The restore left no evidence of its end. {self._lost_detail()}"
        return self._with_tail(how)

    def _lost_detail(self) -> str:
        status = self._process.status if self._process is not None else None
        if status is not None and os.WIFSIGNALED(status):
            how = f"Its supervisor was killed by signal {os.WTERMSIG(status)}"
        elif status is not None:
            how = f"Its supervisor ended with exit code {os.waitstatus_to_exitcode(status)}"
        else:
            how = "Its supervisor is gone"
        return self._with_tail(f"{how} and left no exit status.")

    def _with_tail(self, detail: str) -> str:
        """A sentence with the end of the log behind it, where that can be shown without secrets."""
        fd = open_regular(self._layout.log)
        if fd is None or self._unknown_secrets:
            return detail
        try:
            tail, _ = read_ends(fd, 2 * _LOST_TAIL_BYTES, self._redactor)
        finally:
            os.close(fd)
        return f"{detail} {tail[-_LOST_TAIL_BYTES:].decode(errors='replace').strip()}".strip()

    # What runs, and where

    def _launch(self, deadline_s: float) -> Launch:
        record, layout = self._record, self._layout
        environment = {
            **base_environment(self.name, layout.root, layout.source),
            **record.env,
            **self._secrets,
            "EVALPURSE_CASE": layout.case,
            "EVALPURSE_OUT": layout.out,
            "EVALPURSE_PARAMS": layout.params,
            "EVALPURSE_DEADLINE": utc_text(deadline_s),
            "EVALPURSE_ALLOWANCE_USD": record.allowance_usd,
            **self._world_environment,
        }
        return Launch(
            name=self.name,
            command=record.command,
            environment=environment,
            jail=Jail(
                workdir=layout.source,
                writable=layout.writable,
                readable=(record.prepared, layout.root, *self._world_paths),
                network=record.network,
                memory_bytes=record.limits.memory_bytes,
            ),
            run_file=layout.run,
            log_file=layout.log,
            cpu_s=record.limits.cpu_s,
            file_bytes=record.limits.disk_bytes,
            restore=record.restore,
        )

    @property
    def _world_paths(self) -> tuple[str, ...]:
        """The world's folder and its manifest: read-only mounts in a jail, by permission elsewhere."""
        digest, worlds = self._record.world, self._engine.worlds
        return (str(worlds.tree(digest)), str(worlds.manifest_file(digest))) if digest else ()

    @property
    def _world_environment(self) -> dict[str, str]:
        return dict(zip(("EVALPURSE_WORLD", "EVALPURSE_WORLD_MANIFEST"), self._world_paths, strict=False))

    def _grader_launch(self, root: str, command: Sequence[str]) -> Launch:
        layout, limits = self._layout, self._record.limits
        workdir = f"{root}/work"
        environment = {
            # A home of its own: the harness may have left settings for the grader's programs in the other.
            **base_environment(self.name, root, workdir),
            "EVALPURSE_GRADER": workdir,
            "EVALPURSE_SOURCE": layout.source,
            "EVALPURSE_OUT": layout.out,
            "EVALPURSE_CASE": layout.case,
            **self._world_environment,
        }
        return Launch(
            name=self.name,
            command=command,
            environment=environment,
            jail=Jail(
                workdir=workdir,
                writable=(workdir, f"{root}/tmp"),
                readable=(self._record.prepared, layout.root, *self._world_paths),
                network="blocked",
                memory_bytes=limits.memory_bytes,
            ),
            run_file=f"{root}/run",
            log_file=f"{root}/log",
            cpu_s=limits.cpu_s,
            file_bytes=limits.disk_bytes,
        )

    def _grader_result(
        self, root: str, launch: Launch, exit_code: int | None, why: str, fetch: Sequence[str]
    ) -> ExecResult:
        log = b""
        fd = open_regular(launch.log_file)
        if fd is not None:
            try:
                log, _ = read_ends(fd, self._record.limits.log_bytes, self._redactor)
            finally:
                os.close(fd)
        if why:
            log = log.rstrip(b"\n") + b"\n" * bool(log) + why.encode() + b"\n"
        fetched = {
            name: content for name in fetch if (content := self._fetch(f"{root}/work", name)) is not None
        }
        return ExecResult(exit_code, log, fetched)

    def _fetch(self, workdir: str, name: str) -> bytes | None:
        """A file of the grader's folder, reached through real folders only."""
        *folders, last = name.split("/")
        if ".." in folders or last in ("", "..", "."):
            return None
        for depth in range(len(folders)):
            if os.path.islink(os.path.join(workdir, *folders[: depth + 1])):
                return None
        fd = open_regular(os.path.join(workdir, *folders, last))
        if fd is None:
            return None
        try:
            return read_head(fd, FETCH_BYTES_MAX, self._redactor)[0]
        finally:
            os.close(fd)

    def _require_end(self, what: str) -> None:
        if self._ended is None:
            raise SandboxError(
                f"Sandbox {self.name} cannot be {what} before its harness is gone.", hint="Wait for it first."
            )

    def _require_secrets(self) -> None:
        if self._unknown_secrets:
            raise SandboxError(
                f"Sandbox {self.name} was made with secrets that this home folder no longer has: "
                f"{', '.join(self._unknown_secrets)}. What it wrote cannot be read without showing them.",
                hint="Set them again, or make a new attempt.",
            )


def _code_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _make_grader_folder(root: str, files: Mapping[str, bytes]) -> None:
    for folder in (root, f"{root}/work", f"{root}/tmp"):
        os.mkdir(folder, 0o700)
    write_files(f"{root}/work", files)
