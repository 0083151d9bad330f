"""Experiments on Modal, through the services, the real client and the fake control plane."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

pytest.importorskip("modal")

from evalpurse.home import Home
from tests.fake_modal import FakeApi
from tests.lab_fixtures import make_repository
from tests.modal_lab import fake_modal, furnish, modal_services, rows_of, run_all

pytestmark = pytest.mark.anyio


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    with anyio.fail_after(60):
        async with fake_modal() as running:
            yield running


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(
        tmp_path / "harness", {"README": "a harness\n", "sub/data.txt": "from the source\n"}
    )


async def test_runs_are_scored_settled_and_leave_nothing(fake: FakeApi, home: Home, repository: Path) -> None:
    run = (
        'cat sub/data.txt; cat "$EVALPURSE_CASE/input.txt"; grep -q which "$EVALPURSE_PARAMS"; '
        'test -n "$EVALPURSE_DEADLINE"; printf 42 > "$EVALPURSE_OUT/answer.txt"; mkdir "$EVALPURSE_OUT/artifacts"; '
        'echo kept > "$EVALPURSE_OUT/artifacts/note.txt"; '
        'printf \'{"usage": [], "steps": 1}\' > "$EVALPURSE_OUT/metrics.json"'
    )
    async with modal_services(home) as services:
        await furnish(services, repository, run=run)
        status = await run_all(services)
        rows = await rows_of(services, status.experiment_id)
        assert [row["outcome"] for row in rows] == ["scored"] * 4, [row["error"] for row in rows]
        assert all(row["score"] == 1.0 for row in rows)
        log = services.store.blobs.get(rows[0]["log_blob"])
        assert b"from the source" in log and b"What is it" in log
        assert (status.held_nusd, services.ledger.open_holds()) == (0, [])
        assert status.spent_nusd > 0
    assert fake.live == 0
    bill = fake.bill()
    assert status.spent_nusd >= float(bill["ceiling_usd"]) * 1e9
