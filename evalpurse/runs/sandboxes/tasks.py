"""Commands that the daemon waits for: setup of a source, graders.

They run under the same supervisor, jail and limits as a harness, but end with the wait: a timeout, a limit
or a cancellation kills all their processes before the answer is given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread

from evalpurse.runs.errors import SandboxError
from evalpurse.runs.sandboxes.folders import Folders
from evalpurse.runs.sandboxes.isolation import Isolator
from evalpurse.runs.sandboxes.monitor import Monitor, Watch
from evalpurse.runs.sandboxes.processes import ProcessTable
from evalpurse.runs.sandboxes.protocol import EndReason, Limits
from evalpurse.runs.sandboxes.supervisor import Launch, RunRecord, Supervised
from evalpurse.runs.sandboxes.world_files import WorldFiles


@dataclass(frozen=True)
class TaskEnd:
    """How a command ended: `exit_code` is None, and `why` says why, when it was ended here."""

    exit_code: int | None
    why: str


@dataclass(frozen=True)
class Engine:
    """What local sandboxes of one backend share."""

    isolator: Isolator
    table: ProcessTable
    monitor: Monitor
    folders: Folders
    worlds: WorldFiles

    async def carry_out(
        self, launch: Launch, limits: Limits, timeout_s: float, folders: Sequence[str], free_bytes: int
    ) -> TaskEnd:
        """Runs a command to its end; nothing of it is running when this returns or raises.

        Raises:
            SandboxError: it could not be started, or its end left no evidence.
        """
        started_s = time.time()
        times = (started_s, started_s + timeout_s)
        with anyio.CancelScope(shield=True):
            process = await anyio.to_thread.run_sync(
                Supervised.start, launch, self.isolator, self.table, times
            )
        if process is None:
            raise SandboxError(f"{launch.run_file} exists: the command was started before.")
        breaches: list[str] = []

        def end(_: EndReason, why: str) -> None:
            breaches.append(why)
            process.end(watch.members)

        watch = Watch(launch.name, process.pid, limits, folders, free_bytes, end)
        self.monitor.watch(watch)
        timed_out = True
        try:
            with anyio.move_on_after(timeout_s):
                await process.exited()
                timed_out = False
        finally:
            with anyio.CancelScope(shield=True):
                await self.monitor.forget(watch)
                if self.isolator.active:
                    process.reap()
                if not (self.isolator.active and process.ended_cleanly):
                    await anyio.to_thread.run_sync(process.end, watch.members)
                await process.exited()
                process.reap()
        if breaches:
            return TaskEnd(None, breaches[0])
        record = RunRecord.read(launch.run_file)
        if record is not None and record.exit_code is not None:
            return TaskEnd(record.exit_code, "")
        if timed_out:
            return TaskEnd(None, f"It was ended after {timeout_s:g} s.")
        raise SandboxError(f"The command {list(launch.command)!r} disappeared without an exit status.")
