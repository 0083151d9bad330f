"""One whole run on a real account, by the same backend that experiments use.

It shows what no single step does: that an image with setup builds, that the scripts we bring work in its
sandboxes, and that output, exit code and grader come back.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.sandboxes.modal_backend import ModalBackend
from evalpurse.runs.sandboxes.protocol import (
    EndReason,
    Limits,
    Machine,
    Output,
    Prepared,
    Sandbox,
    SandboxSpec,
)

COMMAND = 'cat made; cat "$EVALPURSE_CASE/input.txt"; printf 42 > "$EVALPURSE_OUT/answer.txt"; exit 3'
LOG = b"made by setup\na question\n"
GRADER = 'grep -q 42 "$EVALPURSE_OUT/answer.txt" && cat expected'
LIMITS = Limits(timeout_s=60.0, grade_timeout_s=30.0)


class WholeRun:
    """A run in an App of its own, named after the tour. `name` has no dot: it stands for an experiment."""

    def __init__(self, home: Home, settings: Settings, name: str, machine: Machine) -> None:
        self._home_id = home.identity()
        self._name = name
        self._machine = machine
        self._backend = ModalBackend(home, settings)

    async def prepare(self, folder: Path) -> Prepared:
        """Builds an image whose setup reads the source in `folder` and leaves something."""
        (folder / "source.txt").write_text("made by setup\n", encoding="ascii")
        digest = hashlib.sha256(self._name.encode()).hexdigest()
        prepared = Prepared(digest, folder)
        await self._backend.prepare(prepared, ["cp source.txt made"], {}, self._machine, done=False)
        return prepared

    @asynccontextmanager
    async def sandbox(self, prepared: Prepared) -> AsyncIterator[Sandbox]:
        """The sandbox of the run, terminated afterwards."""
        run = f"{self._name}.00000"
        sandbox = await self._backend.create(
            SandboxSpec(
                name=f"{run}.1",
                tags={"home": self._home_id, "experiment": self._name, "run": run, "attempt": "1"},
                prepared=prepared,
                command=["sh", "-c", COMMAND],
                case_files={"input.txt": b"a question\n"},
                params={"smoke": True},
                env={},
                secrets={},
                network="blocked",
                limits=LIMITS,
                allowance_usd="0",
                machine=self._machine,
            )
        )
        try:
            yield sandbox
        finally:
            await sandbox.terminate()

    async def end(self) -> list[str]:
        """Ends the App and whatever is in it; returns what is left all the same."""
        await self._backend.stop_app(self._name)
        return list(await self._backend.list({"experiment": self._name}))

    async def close(self) -> None:
        """Lets go of the connection."""
        await self._backend.close()


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Where the source is while the image is built."""
    return tempfile.TemporaryDirectory(prefix="evalpurse-smoke-")


async def problem_of(sandbox: Sandbox) -> str:
    """Takes a run through its steps; what was not as it should be, or nothing."""
    await sandbox.start()
    ended = await sandbox.wait()
    if (ended.reason, ended.exit_code) != (EndReason.EXITED, 3):
        how = f"{ended.reason.value}, exit code {ended.exit_code}. {ended.detail}"
        return f"the harness ended with {how}".strip()
    output: Output = await sandbox.get()
    if (output.log, output.answer) != (LOG, b"42"):
        return f"its log is {output.log[-200:]!r} and its answer {output.answer!r}"
    graded = await sandbox.exec(["sh", "-c", GRADER], files={"expected": b"as expected\n"}, timeout_s=20)
    if (graded.exit_code, graded.log) != (0, b"as expected\n"):
        return f"its grader ended with exit code {graded.exit_code} and printed {graded.log[-200:]!r}"
    return ""
