"""The tour of a Modal account: finds what does not work, costs what it says, leaves nothing behind."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

modal: Any = pytest.importorskip("modal")

from evalpurse.budget.accounts import Hold, Role  # noqa: E402 - needs the client that is asked for above
from evalpurse.budget.errors import ExceedsLimitError  # noqa: E402
from evalpurse.budget.ledger import Ledger  # noqa: E402
from evalpurse.budget.money import NUSD_PER_USD  # noqa: E402
from evalpurse.config import Settings  # noqa: E402
from evalpurse.home import Home  # noqa: E402
from evalpurse.runs.errors import BadLaunchError  # noqa: E402
from evalpurse.runs.sandboxes import modal_client  # noqa: E402
from evalpurse.runs.smoke import Report, Smoke, SmokeError  # noqa: E402
from tests.fake_modal import FakeModal, client_environment  # noqa: E402

pytestmark = pytest.mark.anyio
MOST = NUSD_PER_USD // 2


@dataclass
class Bed:
    """A fake account, a purse, and an address that open sandboxes reach."""

    fake: FakeModal
    home: Home
    ledger: Ledger
    reach: tuple[str, int]

    def smoke(self, **settings: Any) -> Smoke:
        return Smoke(
            self.home,
            Settings(**settings),
            self.ledger,
            lambda: modal_client.connect(self.home),
            reach=self.reach,
        )

    async def tour(self, **settings: Any) -> Report:
        with anyio.fail_after(60):
            return await self.smoke(**settings).run(MOST, by=Role.OWNER)

    def left(self) -> list[Any]:
        """What a tour must not leave behind; the App that images are built in is for all experiments."""
        return [
            *self.fake.sandboxes(running=True),
            *self.fake.volumes()["names"],
            *self.fake.secrets(),
            *(app for app in self.fake.apps() if not app["stopped"] and not app["name"].endswith("-images")),
        ]


@asynccontextmanager
async def laid(home: Home, **settings: Any) -> AsyncIterator[Bed]:
    ledger = await Ledger.open(home.ledger_file)
    await ledger.set_limit("grant", "workspace", NUSD_PER_USD, by=Role.OWNER)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        async with FakeModal(**settings) as fake:
            with client_environment(fake):
                try:
                    yield Bed(fake, home, ledger, ("127.0.0.1", server.getsockname()[1]))
                finally:
                    await ledger.close_ledger()


@pytest.fixture
async def bed(home: Home) -> AsyncIterator[Bed]:
    async with laid(home) as made:
        yield made


def states(report: Report) -> dict[str, str]:
    return {check.name: check.state for check in report.checks}


async def test_an_account_where_everything_works(bed: Bed) -> None:
    if bed.fake.mode != "bwrap":
        pytest.skip("plain sandboxes share network and files")
    report = await bed.tour()
    assert {check.name: check.found for check in report.checks if check.state != "pass"} == {}
    assert report.ok
    assert len(report.checks) == 17
    assert report.latency["create_s"][2] == 5
    assert 0 < report.latency["exec_s"][0] <= report.latency["exec_s"][1]
    assert bed.left() == []
    assert json.loads(json.dumps(report.facts()))["checks"][0]["name"] == "connect"


async def test_it_costs_its_lifetimes_at_limits_and_the_purse_knows(bed: Bed) -> None:
    report = await bed.tour()
    account = bed.ledger.account("smoke")
    assert (account.held_nusd, account.parent) == (0, "workspace")
    assert report.price["charged_usd"] == pytest.approx(account.posted_nusd / NUSD_PER_USD)
    books = float(bed.fake.bill()["ceiling_usd"])
    assert books <= report.price["charged_usd"] <= books + 2 * 6 * report.price["usd_per_sandbox_hour"] / 3600
    assert report.price["rates"] == "rates of the account"
    again = await bed.tour()
    assert bed.ledger.account("smoke").posted_nusd > account.posted_nusd
    assert again.price["worst_case_usd"] < 0.05


async def test_nothing_is_made_when_it_may_not_cost_enough(bed: Bed) -> None:
    with pytest.raises(SmokeError, match="above --max-usd") as caught:
        await bed.smoke().run(1_000_000, by=Role.OWNER)
    assert caught.value.facts["worst_nusd"] > 1_000_000
    await bed.ledger.set_limit("less", "workspace", 1_000_000, by=Role.OWNER)
    with pytest.raises(ExceedsLimitError):
        await bed.smoke().run(MOST, by=Role.OWNER)
    assert bed.fake.sandboxes() == bed.fake.apps() == []
    assert bed.ledger.open_holds() == []


async def test_no_way_in_is_told_before_anything_is_held(bed: Bed) -> None:
    bed.fake.expire_token()
    with pytest.raises(BadLaunchError, match="does not accept"):
        await bed.smoke().run(MOST, by=Role.OWNER)
    assert bed.ledger.open_holds() == []


@pytest.mark.parametrize(
    ("rpc", "name"),
    [
        ("AppGetOrCreate", "app"),
        ("ImageGetOrCreate", "image"),
        ("SecretGetOrCreate", "secret"),
        ("VolumePutFiles2", "volume"),
        ("SandboxCreateV2", "create"),
        ("TaskSnapshotFilesystem", "snapshot"),
    ],
)
async def test_what_does_not_work_is_named_with_the_reason_and_all_is_ended(
    bed: Bed, rpc: str, name: str
) -> None:
    bed.fake.fail(rpc, "PERMISSION_DENIED", message="not on this plan", times=1)
    report = await bed.tour()
    check = next(check for check in report.checks if check.name == name)
    assert (report.ok, check.state) == (False, "fail")
    assert "not on this plan" in check.found
    assert bed.left() == []
    assert bed.ledger.open_holds() == []
    assert {"ended", "nothing left"} <= set(states(report))


async def test_a_whole_run_that_fails_is_a_check_that_fails_and_is_ended(bed: Bed) -> None:
    if bed.fake.mode != "bwrap":
        pytest.skip("plain sandboxes have no place of their own")
    bed.fake.fail("MountPutFile", "PERMISSION_DENIED", message="no uploads", times=None)
    report = await bed.tour()
    assert {name for name, state in states(report).items() if state != "pass"} == {"whole run"}
    assert bed.left() == []


async def test_a_wrong_environment_is_found_and_what_stands_on_it_is_skipped(bed: Bed) -> None:
    report = await bed.tour(modal_environment="nowhere")
    assert "Environment 'nowhere' not found" in next(c for c in report.checks if c.name == "app").found
    assert states(report)["create"] == "skip"
    assert report.price["charged_usd"] == 0


async def test_a_network_that_is_not_blocked_fails_and_an_unreachable_one_is_unclear(home: Home) -> None:
    async with laid(home, mode="plain") as bed:
        report = await bed.tour()
        assert states(report)["network"] == "fail"
        bed.reach = ("127.0.0.1", 1)
        assert states(await bed.tour())["network"] == "unclear"
        assert bed.left() == []


async def test_a_sandbox_that_cannot_be_ended_is_charged_its_whole_life(bed: Bed) -> None:
    bed.fake.fail("SandboxTerminateV2", "PERMISSION_DENIED", times=1, skip=1)
    report = await bed.tour()
    assert states(report)["ended"] == "fail"
    assert states(report)["nothing left"] == "pass", "the App's end took it"
    assert report.price["charged_usd"] > report.price["worst_case_usd"] / 6


async def test_a_cancelled_tour_ends_and_settles_all(bed: Bed) -> None:
    bed.fake.hang("TaskSnapshotFilesystem", times=1)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bed.tour)
            await bed.fake.calls_came("TaskSnapshotFilesystem", in_flight=True)
            tasks.cancel_scope.cancel()
    bed.fake.release("TaskSnapshotFilesystem")
    assert bed.left() == []
    assert bed.ledger.open_holds() == []
    assert bed.ledger.account("smoke").posted_nusd > 0


async def test_what_a_dead_daemon_left_is_ended_and_charged_in_full(bed: Bed) -> None:
    await bed.ledger.open_account("open", "smoke", parent=None, limit_nusd=MOST, by=Role.OWNER)
    await bed.ledger.hold(Hold("smoke.dead", "smoke", 1_000_000))
    client = await modal_client.connect(bed.home)
    name = f"evalpurse-{bed.home.identity()}-smoke.dead"
    app = await modal.App.lookup.aio(name, client=client, create_if_missing=True)
    image = modal.Image.from_registry("python:3.12-slim")
    await image.build.aio(app)
    await modal.Sandbox.create.aio("sleep", "infinity", app=app, image=image, client=client, timeout=300)
    await client.close.aio()
    await bed.tour()
    assert bed.left() == []
    state = bed.ledger.hold_state("smoke.dead")
    assert state is not None
    assert state.posted_nusd == 1_000_000
