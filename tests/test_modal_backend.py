"""Experiments on Modal, through the services, the real client and the fake control plane."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("modal")

from evalpurse.budget.accounts import Role
from evalpurse.home import Home
from evalpurse.runs.errors import BadLaunchError
from evalpurse.runs.sandboxes import modal_client
from evalpurse.runs.sandboxes.secret_values import modal_secret_name
from tests.fake_modal import FakeApi
from tests.lab_fixtures import make_repository, request
from tests.modal_lab import ANSWER, fake_modal, furnish, modal_services, rows_of, run_all

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
        'test -n "$EVALPURSE_DEADLINE"; printf 42 > "$EVALPURSE_OUT/answer.txt"; '
        'mkdir "$EVALPURSE_OUT/artifacts"; '
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
        assert b"from the source" in log
        assert b"What is it" in log
        assert (status.held_nusd, services.ledger.open_holds()) == (0, [])
        assert status.spent_nusd > 0
    assert fake.live == 0
    bill = fake.bill()
    assert status.spent_nusd >= float(bill["ceiling_usd"]) * 1e9


async def test_a_failed_create_is_tried_again_as_a_new_attempt(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    fake.fail("SandboxCreateV2", "INTERNAL", times=4)  # the client itself repeats three times
    async with modal_services(home) as services:
        await furnish(services, repository, cases=1, variants=("base",))
        status = await run_all(services, variants=("base",))
        rows = await rows_of(services, status.experiment_id)
    assert [(row["outcome"], row["attempts"]) for row in rows] == [("scored", 2)]


async def test_a_create_whose_answer_is_lost_makes_one_sandbox(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    fake.fail("SandboxCreateV2", "UNAVAILABLE", when="after", times=1)
    async with modal_services(home) as services:
        await furnish(services, repository, cases=1, variants=("base",))
        status = await run_all(services, variants=("base",))
        rows = await rows_of(services, status.experiment_id)
    assert [(row["outcome"], row["attempts"]) for row in rows] == [("scored", 1)]
    assert len(fake.sandboxes()) == 1
    assert fake.live == 0


async def test_throttled_creates_slow_down_and_all_get_through(home: Home, repository: Path) -> None:
    with anyio.fail_after(60):
        async with (
            fake_modal(create_rate=10, create_burst=4) as fake,
            modal_services(home, modal_creates_per_s=20) as services,
        ):
            await furnish(services, repository, cases=8)
            status = await run_all(services, max_parallel=16)
            assert status.ended == {"scored": 16}
            assert "RESOURCE_EXHAUSTED" in fake.statuses("SandboxCreateV2")
            assert fake.counts()["SandboxCreateV2"] < 16 * 3, "creates were repeated without waiting"


async def test_a_spend_limit_stops_the_batch_and_says_what_to_do(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    fake.fail("SandboxCreateV2", "RESOURCE_EXHAUSTED", times=None, message="workspace spend limit reached")
    async with modal_services(home) as services:
        await furnish(services, repository, cases=6)
        status = await run_all(services, max_parallel=2)
        assert (status.status, sum(status.ended.values())) == ("failed", 12)
        assert status.ended["unfunded"] >= 8
        assert "spend limit" in status.note
        assert "Raise it" in status.note
        assert services.ledger.open_holds() == []
    assert fake.counts()["SandboxCreateV2"] <= 4


@pytest.mark.parametrize(
    ("rpc", "code"), [("SandboxCreateV2", "PERMISSION_DENIED"), ("SandboxCreateV2", "INVALID_ARGUMENT")]
)
async def test_a_refusal_is_never_retried(
    fake: FakeApi, home: Home, repository: Path, rpc: str, code: str
) -> None:
    fake.fail(rpc, code, times=None, message="not allowed")
    async with modal_services(home) as services:
        await furnish(services, repository, cases=4)
        status = await run_all(services, max_parallel=1)
        assert (status.status, status.ended, status.spent_nusd) == ("failed", {"infra_error": 8}, 0)
        assert "not allowed" in status.note
    assert fake.counts()[rpc] == 1


async def test_a_secret_that_modal_does_not_have_is_named(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    (home.secrets / "API_KEY").write_text("a-secret-value-of-ours", encoding="utf-8")
    async with modal_services(home) as services:
        await furnish(services, repository, cases=1, secrets=["API_KEY"])
        status = await run_all(services)
        assert status.status == "failed"
        assert "API_KEY" in status.note
        assert "secrets sync" in status.note


async def test_secrets_reach_the_harness_by_name_and_no_output(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    value = "a-secret-value-of-ours"
    (home.secrets / "API_KEY").write_text(value, encoding="utf-8")
    fake.put_secret(modal_secret_name(home.identity(), "API_KEY"), {"API_KEY": value})
    async with modal_services(home) as services:
        await furnish(
            services,
            repository,
            cases=1,
            variants=("base",),
            secrets=["API_KEY"],
            run=f'echo "key: $API_KEY"; {ANSWER}',
        )
        status = await run_all(services, variants=("base",))
        (row,) = await rows_of(services, status.experiment_id)
        assert row["outcome"] == "scored", row["error"]
        assert services.store.blobs.get(row["log_blob"]) == b"key: [secret API_KEY]\n"


@pytest.mark.parametrize(
    ("run", "outcome", "error"),
    [
        ("exit 3", "agent_error", "Exit code 3."),
        ("sleep 60 & trap '' TERM; sleep 50", "timeout", "deadline"),
        ("kill -9 $$", "agent_error", "out of memory"),
        ("kill -11 $$", "agent_error", "Signal 11."),
    ],
)
async def test_the_end_of_a_harness_is_told_apart(
    fake: FakeApi, home: Home, repository: Path, run: str, outcome: str, error: str
) -> None:
    async with modal_services(home) as services:
        await furnish(services, repository, cases=1, variants=("base",), run=run, timeout_s=1.5)
        status = await run_all(services, variants=("base",))
        (row,) = await rows_of(services, status.experiment_id)
    assert row["outcome"] == outcome
    assert error in row["error"]
    assert fake.live == 0


async def test_a_grader_command_runs_after_everything_of_the_harness_is_gone(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    run = f"setsid sh -c 'while :; do date > \"$EVALPURSE_OUT/alive\"; sleep 0.05; done' & {ANSWER}"
    grade = (
        'test -z "$API_KEY" && cat rubric.txt && ls "$EVALPURSE_SOURCE" && rm -f "$EVALPURSE_OUT/alive" '
        "&& sleep 0.3 "
        '&& test ! -e "$EVALPURSE_OUT/alive" && printf \'{"reward": 0.75}\' > reward.json'
    )
    grader = {"type": "command", "command": grade, "files": {"rubric.txt": "secret rubric"}}
    async with modal_services(home) as services:
        await furnish(
            services, repository, cases=1, variants=("base",), run=run, case_changes={"graders": [grader]}
        )
        status = await run_all(services, variants=("base",))
        (row,) = await rows_of(services, status.experiment_id)
    assert (row["outcome"], row["score"]) == ("scored", 0.75), row["error"]


async def test_a_sandbox_lost_under_a_harness_is_no_failure_of_the_harness(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    async with modal_services(home) as services:
        await furnish(services, repository, cases=1, variants=("base",), run=f"sleep 2; {ANSWER}")
        async with anyio.create_task_group() as tasks:

            async def lose() -> None:
                await fake.calls_came("TaskExecStart", 2)
                fake.end(fake.sandboxes()[0]["name"], "MEMORY_MANAGER_EVICTION")

            tasks.start_soon(lose)
            status = await run_all(services, variants=("base",))
        rows = await rows_of(services, status.experiment_id)
    assert [(row["outcome"], row["attempts"]) for row in rows] == [("scored", 2)]


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({"cpu": 2.0, "cpu_limit": 1.0}, "cpu_limit is 1"),
        ({"memory_mb": 1024, "memory_limit_mb": 512}, "memory_limit_mb is 512"),
        ({"runtime": "vm", "gpu": "T4"}, "no GPU"),
        ({"docker": True}, "VM"),
        ({"gpu": "Z9000"}, "price"),
        ({"network": "open", "allow_domains": ["a.example"]}, "allow_domains"),
    ],
)
async def test_what_modal_cannot_give_is_refused_before_money_moves(
    fake: FakeApi, home: Home, repository: Path, spec: dict[str, Any], error: str
) -> None:
    async with modal_services(home) as services:
        await furnish(services, repository, cases=1, **spec)
        with pytest.raises(BadLaunchError, match=error):
            await run_all(services)
        assert services.ledger.open_holds() == []


async def test_limits_lifetime_network_and_tags_are_set(fake: FakeApi, home: Home, repository: Path) -> None:
    async with modal_services(home) as services:
        await furnish(
            services, repository, cases=1, variants=("base",), timeout_s=100.0, cpu=0.5, cpu_limit=2.0,
            allow_domains=["a.example"], region="us-east",
        )  # fmt: skip
        status = await run_all(services, variants=("base",))
        assert services.modal.rates.source == "rates of the account"
    (facts,) = fake.sandboxes()
    assert facts["name"] == f"{status.experiment_id}.00000.1"
    assert facts["tags"]["home"] == home.identity()
    assert facts["network"]["domains"] == ["a.example"]
    assert (facts["cores"], facts["timeout_s"]) == ([0.5, 2.0], 100 + 30)


async def test_cancelling_ends_every_sandbox_and_settles(fake: FakeApi, home: Home, repository: Path) -> None:
    async with modal_services(home) as services:
        await furnish(services, repository, cases=4, run="sleep 60")
        launched = await services.experiments.launch(request(backend="modal", repeats=1), by=Role.AGENT)
        await fake.calls_came("TaskExecStart", 8)
        status = await services.experiments.cancel(launched.status.experiment_id, "enough")
        assert (status.status, status.ended, services.ledger.open_holds()) == (
            "cancelled",
            {"cancelled": 8},
            [],
        )
    assert fake.live == 0
    assert [app["stopped"] for app in fake.apps() if "exp_" in app["name"]] == [True]


async def test_no_credentials_and_no_package_say_what_to_do(
    home: Home, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.setenv(name, "")
    async with modal_services(home) as services:
        await furnish(services, repository, cases=1)
        with pytest.raises(BadLaunchError, match="modal token new"):
            await run_all(services)
        monkeypatch.setitem(sys.modules, "modal", None)
        with pytest.raises(BadLaunchError, match="pip install"):
            await run_all(services)


async def test_a_sweep_ends_orphans_of_this_home_and_nobody_elses(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    async with modal_services(home) as services:
        await furnish(services, repository, cases=1, variants=("base",), run=f"sleep 3; {ANSWER}")
        launched = await services.experiments.launch(
            request(backend="modal", repeats=1, variants=("base",)), by=Role.AGENT
        )
        experiment_id = launched.status.experiment_id
        await fake.calls_came("TaskExecStart", 2)
        backend, app = services.modal, await services.modal.app(experiment_id)
        orphan = f"{experiment_id}.00000.7"
        tags = {"home": home.identity(), "experiment": experiment_id, "run": f"{experiment_id}.00000"}
        modal = modal_client.load()
        image = modal.Image.from_registry("python:3.12-slim")
        await image.build.aio(app)
        for name, nonce, attempt in ((orphan, backend._nonce(orphan), "7"), ("other", "somebody-else", "8")):
            await modal.Sandbox.create.aio(
                "sleep", "infinity", app=app, name=name, image=image, client=backend.client,
                tags={**tags, "attempt": attempt, "nonce": nonce},
            )  # fmt: skip
        swept = await services.sweep.sweep()
        assert (swept.ended, swept.kept) == ([orphan], 1)
        assert {facts["name"] for facts in fake.sandboxes(running=True)} == {
            f"{experiment_id}.00000.1",
            "other",
        }
        status = await services.experiments.wait(experiment_id, 30)
        assert status.ended == {"scored": 1}


async def test_a_long_log_keeps_its_ends_and_tells_what_was_cut(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    run = f"echo first; head -c 9000000 /dev/zero | tr '\\0' x; echo; echo last; {ANSWER}"
    async with modal_services(home) as services:
        await furnish(services, repository, cases=1, variants=("base",), run=run)
        status = await run_all(services, variants=("base",))
        (row,) = await rows_of(services, status.experiment_id)
        log = services.store.blobs.get(row["log_blob"])
    assert (log[:6], log[-5:], len(log)) == (b"first\n", b"last\n", 8 << 20)
    assert b"bytes cut" in log
