"""Two clients at once, each in a session of its own: one purse, one name, one key are had by one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import mcp
import pytest

from evalpurse.errors import ERROR_META
from evalpurse.home import Home
from evalpurse.runs.services import Services
from tests.fake_backend import Sandboxes, Script
from tests.lab_fixtures import USD, furnish, make_repository, open_lab
from tests.tool_client import Desk, server_of

pytestmark = pytest.mark.anyio

LAUNCH: dict[str, Any] = {
    "suite": "qa",
    "variants": ["base", "new"],
    "allowance_usd": 0.01,
    "reuse": False,
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "harness")


@dataclass
class Ends:
    """What calls made at the same moment were told: facts of those that succeeded, codes of the others."""

    taken: list[dict[str, Any]]
    refused: list[str]


@asynccontextmanager
async def two_desks(services: Services) -> AsyncIterator[tuple[Desk, Desk]]:
    """Two sessions of one server."""
    server = server_of(services)
    async with mcp.Client(server) as first, mcp.Client(server) as second:
        yield Desk(services, first), Desk(services, second)


async def at_once(calls: list[tuple[Desk, str, dict[str, Any]]]) -> Ends:
    """Makes all calls at the same moment; every one must have begun before the first ends."""
    ends, begun, all_begun = Ends([], []), 0, anyio.Event()

    async def one(desk: Desk, tool: str, arguments: dict[str, Any]) -> None:
        nonlocal begun
        begun += 1
        if begun == len(calls):
            all_begun.set()
        await all_begun.wait()
        result = await desk.send(tool, arguments)
        if result.is_error:
            ends.refused.append(result.meta[ERROR_META]["code"])
        else:
            ends.taken.append(result.structured_content)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for call in calls:
                tasks.start_soon(one, *call)
    return ends


def watched(services: Services) -> Callable[[], None]:
    """Checks the purse after every single commit of the ledger, not only at the end."""
    ledger = services.ledger
    real, seen = ledger.hold_many, 0

    async def hold_many(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        result = await real(*args, **kwargs)
        seen += 1
        for account in ledger.accounts():
            assert account.posted_nusd + account.held_nusd + account.overrun_nusd <= account.limit_nusd
        return result

    ledger.hold_many = hold_many  # type: ignore[method-assign]

    def check() -> None:
        assert seen > 0

    return check


async def over(desk: Desk, launched: dict[str, Any]) -> dict[str, Any]:
    experiment_id = launched["experiment"]["experiment_id"]
    waited = await desk.call("wait_experiment", experiment_id=experiment_id)
    status: dict[str, Any] = waited["experiment"]
    assert status["status"] == "finished"
    return status


@pytest.mark.parametrize(("caps", "winners"), [((0.05, 0.05), 1), ((0.05, 0.04), 1), ((0.02, 0.02), 2)])
async def test_two_clients_at_the_last_dollar_never_spend_more_than_it(
    home: Home, repository: Path, caps: tuple[float, float], winners: int
) -> None:
    sandboxes = Sandboxes(choose=lambda spec: Script(usage=None))  # each run costs its whole allowance
    async with open_lab(home, sandboxes) as services:
        await furnish(services, repository, cases=4, purse_usd=0.05)
        check = watched(services)
        async with two_desks(services) as desks:
            ends = await at_once(
                [
                    (
                        desk,
                        "launch_experiment",
                        LAUNCH | {"cap_usd": cap, "idempotency_key": f"client {cap} {n}"},
                    )
                    for n, (desk, cap) in enumerate(zip(desks, caps, strict=True))
                ]
            )
            statuses = [await over(desks[0], launched) for launched in ends.taken]
            # The loser saw what was left when its turn came: refused outright, or short of money later.
            assert len(ends.taken) + len(ends.refused) == 2
            assert len(ends.taken) >= winners
            assert set(ends.refused) <= {"exceeds_limit"}
            purse = (await desks[1].call("budget_status"))["workspace"]
            assert purse["spent_usd"] <= purse["limit_usd"] == 0.05
            assert purse["spent_usd"] == pytest.approx(sum(status["spent_usd"] for status in statuses))
            assert all(status["spent_usd"] <= status["cap_usd"] for status in statuses)
            assert len(sandboxes.created) * 0.01 == pytest.approx(purse["spent_usd"])
            desks[0].assert_nothing_held()
            check()
        assert (await services.ledger.verify()).clean


async def test_many_launches_of_two_clients_share_a_purse_to_the_last_cent(
    home: Home, repository: Path
) -> None:
    sandboxes = Sandboxes(choose=lambda spec: Script(usage=None))
    async with open_lab(home, sandboxes) as services:
        await furnish(services, repository, cases=3, purse_usd=0.17)
        check = watched(services)
        async with two_desks(services) as desks:
            calls = [
                (desks[n % 2], "launch_experiment", LAUNCH | {"cap_usd": 0.05, "idempotency_key": f"key {n}"})
                for n in range(10)
            ]
            ends = await at_once(calls)
            statuses = [await over(desks[0], launched) for launched in ends.taken]
            spent = services.ledger.account("workspace").posted_nusd
            # A cap of five cents pays for two whole blocks of two runs, and four caps fit under seventeen.
            assert spent == 16 * USD // 100
            assert [status["outcomes"] for status in statuses] == [{"scored": 4, "unfunded": 2}] * 4
            assert ends.refused == ["exceeds_limit"] * 6
            desks[0].assert_nothing_held()
            check()


async def test_one_key_of_two_clients_is_one_experiment(home: Home, repository: Path) -> None:
    sandboxes = Sandboxes()
    async with open_lab(home, sandboxes) as services:
        await furnish(services, repository)
        async with two_desks(services) as desks:
            same = LAUNCH | {"cap_usd": 1, "idempotency_key": "shared"}
            ends = await at_once([(desk, "launch_experiment", same) for desk in desks * 2])
            assert ends.refused == []
            assert sorted(launched["existing"] for launched in ends.taken) == [False, True, True, True]
            assert len({launched["experiment"]["experiment_id"] for launched in ends.taken}) == 1
            await over(desks[0], ends.taken[0])
            assert len(sandboxes.created) == 6
            other = [
                (desk, "launch_experiment", same | {"idempotency_key": "disputed", "cap_usd": 1 + n})
                for n, desk in enumerate(desks)
            ]
            ends = await at_once(other)
            assert (len(ends.taken), ends.refused) == (1, ["idempotency_conflict"])
            await over(desks[1], ends.taken[0])
            assert len(services.ledger.accounts()) == 3


async def test_a_name_that_two_clients_want_is_given_once(home: Home, repository: Path) -> None:
    async with open_lab(home, Sandboxes()) as services, two_desks(services) as desks:
        case: dict[str, Any] = {"id": "c", "graders": [{"type": "exact", "expected": "42"}]}
        ends = await at_once(
            [
                (desk, "create_cases", {"suite": "qa", "cases": [case | {"input": f"What, {n}?"}]})
                for n, desk in enumerate(desks)
            ]
        )
        assert (len(ends.taken), ends.refused) == (1, ["case_exists"])
        variant = {"name": "v", "repo": str(repository)}
        ends = await at_once(
            [(desk, "create_variant", variant | {"run": f"run {n}"}) for n, desk in enumerate(desks)]
        )
        assert (len(ends.taken), ends.refused) == (1, ["variant_exists"])
        ends = await at_once([(desk, "create_variant", variant | {"run": "run 0"}) for desk in desks])
        assert len(ends.taken) in (0, 2), "both see the same variant"
        asked = {"amount_usd": 5, "reason": "for the last mile"}
        ends = await at_once([(desk, "request_budget", asked) for desk in desks])
        assert len(ends.taken) == 2
        assert len(services.ledger.requests()) == 1
        rows = (await desks[0].state()).rows
        assert (rows["suites"], rows["cases"], rows["variants"]) == (1, 1, 1)


async def test_what_one_client_cancels_the_other_sees_cancelled(home: Home, repository: Path) -> None:
    gate = anyio.Event()
    sandboxes = Sandboxes(choose=lambda spec: Script(gate=gate))
    async with open_lab(home, sandboxes) as services:
        await furnish(services, repository)
        async with two_desks(services) as desks:
            launched = await desks[0].call(
                "launch_experiment", **LAUNCH | {"cap_usd": 1, "idempotency_key": "doomed"}
            )
            experiment_id = {"experiment_id": launched["experiment"]["experiment_id"]}
            with anyio.fail_after(20):
                await sandboxes.any_started.wait()
            ends = await at_once(
                [
                    (desks[0], "wait_experiment", experiment_id),
                    (desks[1], "cancel_experiment", experiment_id),
                    (desks[0], "cancel_experiment", experiment_id),
                ]
            )
            assert ends.refused == []
            assert [end["experiment"]["status"] for end in ends.taken] == ["cancelled"] * 3
            assert all(end["experiment"]["outcomes"] == {"cancelled": 6} for end in ends.taken)
            desks[0].assert_nothing_held()
            assert sandboxes.alive == {}


async def test_a_client_that_hangs_up_in_the_middle_of_a_launch_leaves_it_whole_or_undone(
    home: Home, repository: Path
) -> None:
    async with open_lab(home, Sandboxes()) as services:
        await furnish(services, repository)
        server = server_of(services)
        for number in range(6):
            arguments = LAUNCH | {"cap_usd": 1, "idempotency_key": f"cut {number}"}
            try:
                with anyio.move_on_after(0.002 * number * number):
                    async with mcp.Client(server) as client:
                        await client.call_tool("launch_experiment", arguments)
            except* mcp.MCPError:
                pass  # the call had begun, and is told that its connection is gone
            async with mcp.Client(server) as client:
                desk = Desk(services, client)
                again = await desk.call("launch_experiment", **arguments)
                assert (await over(desk, again))["outcomes"] == {"scored": 6}
                desk.assert_nothing_held()
        rows = (await desk.state()).rows
        assert (rows["experiments"], rows["planned_runs"], rows["runs"]) == (6, 36, 36)
        assert services.ledger.account("workspace").limit_nusd == 100 * USD
