"""kill -9 at every point of an experiment: one outcome a run, every hold resolved, nothing run twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from evalpurse.budget.accounts import Role
from evalpurse.home import Home
from evalpurse.runs.services import Services
from tests.crash_child import POINTS, SETTINGS
from tests.lab_fixtures import USD, make_repository, request

pytestmark = pytest.mark.anyio


def harness(diary: Path) -> str:
    """A harness that notes its own start, answers, and reports what it used."""
    return (
        f'echo "$EVALPURSE_RUN" >> "{diary}"; printf 42 > "$EVALPURSE_OUT/answer.txt"; '
        'printf \'{"usage": [], "steps": 1}\' > "$EVALPURSE_OUT/metrics.json"'
    )


def die_at(point: str, home: Home, repository: Path, diary: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.crash_child", str(home.path), str(repository), point],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"HARNESS": harness(diary)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, f"it did not come to the point\n{done.stdout}\n{done.stderr}"


def still_running(home: Home) -> list[str]:
    """Processes that belong to a sandbox of this home."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if b"EVALPURSE_RUN=" in environment and os.fsencode(home.path) in environment:
                found.append(entry.name)
    return found


async def assert_whole(services: Services, home: Home, diary: Path) -> None:
    """What must hold after the experiment that was cut has been taken up and ended."""
    experiment_id = request().experiment_id
    rows = await services.store.fetch("runs_of", experiment_id=experiment_id)
    assert [row["outcome"] for row in rows] == ["scored"] * 12
    assert len({row["run_id"] for row in rows}) == 12
    attempts = await services.store.fetch("attempts_of_experiment", experiment_id=experiment_id)
    # An attempt that was cut between its claim and its process is lost, and tried again.
    ended = [row for row in attempts if row["outcome"] != "infra_error"]
    assert sorted(row["run_id"] for row in ended) == sorted(row["run_id"] for row in rows)
    starts = (await anyio.Path(diary).read_text(encoding="utf-8")).split()
    assert len(starts) == len(set(starts)), "a harness ran twice"
    assert {row["attempt_id"] for row in ended} <= set(starts) <= {row["attempt_id"] for row in attempts}
    account = services.ledger.account(experiment_id)
    assert (account.held_nusd, account.posted_nusd) == (0, sum(row["cost_nusd"] for row in rows))
    assert services.ledger.open_holds() == []
    assert (await services.ledger.verify()).clean
    assert await services.backend.list({}) == []
    if sys.platform == "linux":
        assert still_running(home) == []


@pytest.mark.parametrize("point", POINTS)
async def test_a_daemon_killed_at_any_point_is_taken_up_without_loss_or_repetition(
    home: Home, tmp_path: Path, point: str
) -> None:
    repository, diary = make_repository(tmp_path / "harness"), tmp_path / "diary"
    await anyio.to_thread.run_sync(die_at, point, home, repository, diary)
    async with Services.open(home, SETTINGS) as services:
        with anyio.fail_after(60):
            # An agent whose call was cut sends it again with the same key, whatever had become of it.
            launched = await services.experiments.launch(request(max_parallel=3), by=Role.AGENT)
            status = await services.experiments.wait(launched.status.experiment_id, 60)
        assert status.status == "finished"
        await assert_whole(services, home, diary)


async def test_a_daemon_killed_again_and_again_still_ends_every_run_once(home: Home, tmp_path: Path) -> None:
    repository, diary = make_repository(tmp_path / "harness"), tmp_path / "diary"
    await anyio.to_thread.run_sync(die_at, "after a harness is started", home, repository, diary)
    for point in ("after the result is recorded", "after the sandbox is removed", "after a hold is settled"):
        await anyio.to_thread.run_sync(die_at, point, home, repository, diary)
    async with Services.open(home, SETTINGS) as services:
        with anyio.fail_after(60):
            status = await services.experiments.wait(request().experiment_id, 60)
        assert (status.status, status.spent_nusd <= 10 * USD) == ("finished", True)
        await assert_whole(services, home, diary)
