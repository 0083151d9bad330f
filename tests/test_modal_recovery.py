"""The daemon dies with sandboxes alive on Modal: each is found, followed, graded and settled once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("modal")

from evalpurse.budget.accounts import Role
from evalpurse.home import Home
from evalpurse.runs.services import Services
from tests.fake_modal import FakeApi
from tests.lab_fixtures import make_repository, request
from tests.modal_crash_child import CASES, POINTS
from tests.modal_lab import ANSWER, fake_modal, furnish, modal_services, rows_of

pytestmark = pytest.mark.anyio

EXPERIMENT = request().experiment_id


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    with anyio.fail_after(90):
        async with fake_modal() as running:
            yield running


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "harness")


def die_at(point: str, home: Home, repository: Path, run: str, fake: FakeApi) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.modal_crash_child", str(home.path), str(repository), point, run],
        cwd=Path(__file__).parent.parent,
        env=os.environ | fake.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, f"it did not come to the point\n{done.stdout}\n{done.stderr}"


async def started(services: Services, count: int) -> None:
    """Returns when so many harnesses were started."""
    with anyio.fail_after(20):
        while sum(sandbox.started for sandbox in services.modal.live) < count:  # noqa: ASYNC110 (no event)
            await anyio.sleep(0.02)


async def assert_whole(services: Services, fake: FakeApi, runs: int) -> list[dict[str, Any]]:
    """One outcome a run, one settlement an attempt, nothing left on Modal, and no sandbox made twice."""
    rows = await rows_of(services, EXPERIMENT)
    assert len({row["run_id"] for row in rows}) == len(rows) == runs
    attempts = await services.store.fetch("attempts_of_experiment", experiment_id=EXPERIMENT)
    account = services.ledger.account(EXPERIMENT)
    assert services.ledger.open_holds() == []
    assert (account.held_nusd, account.posted_nusd) == (0, sum(row["cost_nusd"] for row in attempts))
    assert (await services.ledger.verify()).clean
    assert fake.live == 0
    made = Counter(facts["name"] for facts in fake.sandboxes())
    assert set(made.values()) <= {1}, "an attempt had two sandboxes"
    assert account.posted_nusd >= float(fake.bill()["ceiling_usd"]) * 1e9
    return rows


async def taken_up(home: Home, fake: FakeApi, runs: int) -> list[dict[str, Any]]:
    async with modal_services(home) as services:
        status = await services.experiments.wait(EXPERIMENT, 60)
        assert status.status == "finished", status
        return await assert_whole(services, fake, runs)


@pytest.mark.parametrize("point", POINTS)
async def test_a_daemon_killed_at_any_point_is_taken_up_without_loss_or_repetition(
    fake: FakeApi, home: Home, repository: Path, point: str
) -> None:
    run = f"sleep 1; echo once; {ANSWER}"
    await anyio.to_thread.run_sync(die_at, point, home, repository, run, fake)
    rows = await taken_up(home, fake, 2 * CASES)
    assert [row["outcome"] for row in rows] == ["scored"] * 2 * CASES, [row["error"] for row in rows]


def pass_over_closed_streams() -> None:
    """The client's wrapper closes a stream that is being read when its reader is cancelled, and complains."""
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler() or asyncio.AbstractEventLoop.default_exception_handler

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "asynchronous generator is already running" not in str(context.get("exception")):
            before(loop, context)

    loop.set_exception_handler(handle)


async def test_many_live_sandboxes_are_left_and_taken_up_by_the_next_daemon(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    pass_over_closed_streams()
    async with modal_services(home) as services:
        await furnish(services, repository, cases=20, run=f"sleep 8; {ANSWER}")
        launched = await services.experiments.launch(
            request(backend="modal", repeats=1, max_parallel=40), by=Role.AGENT
        )
        await started(services, 40)
        assert launched.status.run_count == 40
    assert fake.live == 40
    creates = fake.counts()["SandboxCreateV2"]
    rows = await taken_up(home, fake, 40)
    assert [row["outcome"] for row in rows] == ["scored"] * 40, [row["error"] for row in rows]
    assert fake.counts()["SandboxCreateV2"] == creates, "a sandbox was made again"


async def test_sandboxes_that_vanished_meanwhile_are_charged_in_full_and_tried_again(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    async with modal_services(home) as services:
        await furnish(services, repository, cases=2, run=f"sleep 3; {ANSWER}")
        await services.experiments.launch(request(backend="modal", repeats=1), by=Role.AGENT)
        await started(services, 4)
    lost = fake.sandboxes()[0]["name"]
    fake.vanish(lost)
    rows = await taken_up(home, fake, 4)
    assert [row["outcome"] for row in rows] == ["scored"] * 4
    assert Counter(row["attempts"] for row in rows) == {1: 3, 2: 1}


async def test_no_connection_after_a_restart_delays_and_loses_nothing(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    async with modal_services(home) as services:
        await furnish(services, repository, cases=2, run=f"sleep 1; {ANSWER}")
        await services.experiments.launch(request(backend="modal", repeats=1), by=Role.AGENT)
        await started(services, 4)
    fake.expire_token()
    async with modal_services(home) as services:
        status = await services.experiments.wait(EXPERIMENT, 2)
        assert status.status == "running"
        assert "Waits to be taken up" in status.note
        assert len(services.ledger.open_holds()) == 4
        fake.expire_token(expired=False)
        status = await services.experiments.wait(EXPERIMENT, 60)
        assert status.status == "finished"
        rows = await assert_whole(services, fake, 4)
    assert [row["outcome"] for row in rows] == ["scored"] * 4
