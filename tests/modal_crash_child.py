"""A daemon's services on the fake Modal, in a process that dies without warning at a named point.

`python -m tests.modal_crash_child HOME REPOSITORY POINT RUN` launches an experiment whose harness is RUN.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import anyio

from evalpurse.home import Home
from evalpurse.runs.sandboxes.modal_backend import ModalBackend
from evalpurse.runs.sandboxes.modal_sandbox import ModalSandbox
from evalpurse.store.database import Store
from evalpurse.store.records import AttemptRow
from tests.modal_lab import furnish, modal_services, run_all

CASES = 4

POINTS: dict[str, tuple[type[Any], str, str, int]] = {
    "before the first sandbox is asked for": (ModalBackend, "_create", "before", 1),
    "after sandboxes are made": (ModalBackend, "_create", "after", 4),
    "after harnesses are started": (ModalSandbox, "start", "after", 6),
    "after harnesses have ended": (ModalSandbox, "wait", "after", 3),
    "before a result is recorded": (Store, "append", "before", 2),
    "after a result is recorded": (Store, "append", "after", 2),
    "after sandboxes are ended": (ModalSandbox, "terminate", "after", 3),
}


def arm(point: str) -> None:
    owner, name, when, passage = POINTS[point]
    original = getattr(owner, name)
    passed = 0

    async def deadly(*arguments: Any, **named: Any) -> Any:
        nonlocal passed
        counted = owner is not Store or any(isinstance(row, AttemptRow) for row in arguments[1])
        passed += counted
        if counted and passed == passage and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = await original(*arguments, **named)
        if counted and passed >= passage and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


async def main(home: Home, repository: Path, point: str, run: str) -> None:
    arm(point)
    async with modal_services(home) as services:
        await furnish(services, repository, cases=CASES, run=run)
        await run_all(services, max_parallel=12)


if __name__ == "__main__":
    anyio.run(main, Home(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
