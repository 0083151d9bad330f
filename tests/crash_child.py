"""A daemon's services in a process that dies, without warning, at a named point of an experiment.

`python -m tests.crash_child HOME REPOSITORY POINT` launches an experiment and kills itself when it comes to
the point; where a point is passed once a run, at the second passage, so that something has ended before.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anyio

from evalpurse.budget.accounts import Role
from evalpurse.budget.ledger import Ledger
from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.sandboxes.local import LocalBackend
from evalpurse.runs.sandboxes.local_sandbox import LocalSandbox
from evalpurse.runs.services import Services
from evalpurse.store.database import Store
from evalpurse.store.records import AttemptRow, ExperimentRow, Record
from tests.lab_fixtures import furnish, request

SETTINGS = Settings(local_isolation="off", local_max_parallel=3)


def with_rows(kind: type[Record]) -> Callable[..., bool]:
    """Whether an append carries rows of a kind."""

    def carries(_: Store, rows: Iterable[Record]) -> bool:
        return any(isinstance(row, kind) for row in rows)

    return carries


def always(*_: Any, **__: Any) -> bool:
    return True


POINTS: dict[str, tuple[type[Any], str, str, Callable[..., bool], int]] = {
    "before the account is opened": (Ledger, "open_account", "before", always, 1),
    "between account and rows": (Ledger, "open_account", "after", always, 1),
    "after the rows of the launch": (Store, "append", "after", with_rows(ExperimentRow), 1),
    "after the first holds": (Ledger, "hold_many", "after", always, 1),
    "before a sandbox is made": (LocalBackend, "create", "before", always, 2),
    "after a sandbox is made": (LocalBackend, "create", "after", always, 2),
    "after a harness is started": (LocalSandbox, "start", "after", always, 2),
    "after a harness has ended": (LocalSandbox, "wait", "after", always, 2),
    "after the output is read": (LocalSandbox, "get", "after", always, 2),
    "before the result is recorded": (Store, "append", "before", with_rows(AttemptRow), 2),
    "after the result is recorded": (Store, "append", "after", with_rows(AttemptRow), 2),
    "after the sandbox is removed": (LocalSandbox, "terminate", "after", always, 2),
    "after a hold is settled": (Ledger, "settle", "after", always, 2),
    "before the account is closed": (Ledger, "close", "before", always, 1),
}


def arm(point: str) -> None:
    """Makes this process die at a point."""
    owner, name, when, applies, passage = POINTS[point]
    original = getattr(owner, name)
    passed = 0

    async def deadly(*arguments: Any, **named: Any) -> Any:
        nonlocal passed
        counted = applies(*arguments, **named)
        passed += counted
        if counted and passed == passage and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = await original(*arguments, **named)
        if counted and passed >= passage and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


async def main(home: Home, repository: Path, point: str) -> None:
    arm(point)
    async with Services.open(home, SETTINGS) as services:
        await furnish(services, repository, run=os.environ["HARNESS"])
        launched = await services.experiments.launch(request(max_parallel=3), by=Role.AGENT)
        await services.experiments.wait(launched.status.experiment_id, 60)


if __name__ == "__main__":
    anyio.run(main, Home(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3])
