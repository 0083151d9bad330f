"""Clients that others wrote, against a real daemon: whatever a host embeds, the loop works through it.

Each TypeScript client checks on its own what it is told, against the schemas we publish: a passing test says
that this client took every answer.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from evalpurse.home import Home
from evalpurse.server.tokens import read_token
from tests.daemons import wait_until
from tests.lab_fixtures import make_repository
from tests.outside.clients import (
    LEGACY,
    MODERN,
    Driven,
    Outcome,
    Way,
    connect,
    environment,
    http_url,
    run_cli,
    words,
)
from tests.outside.node import PACKAGES, needs_node, node

TOOLS = [
    *("create_cases", "list_cases", "create_variant", "list_variants"),
    *("launch_experiment", "wait_experiment", "cancel_experiment"),
    *("compare_variants", "read_run", "query_results", "budget_status", "request_budget"),
]
HINTS = {"readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint"}
PURSE_USD = 10.0
COPY = 'cp "$EVALPURSE_CASE/input.txt" "$EVALPURSE_OUT/answer.txt"'


def ways(*wanted: Way) -> pytest.MarkDecorator:
    """Puts a test to each way in; those that need node are skipped where it is not installed."""
    return pytest.mark.parametrize(
        "way",
        [
            pytest.param(way, id=str(way), marks=() if way.client == "python" else needs_node)
            for way in wanted
        ],
    )


SOME = (
    Way("python", LEGACY, "stdio"),
    Way("python", MODERN, "http"),
    Way("sdk_v1", LEGACY, "stdio"),
    Way("sdk_v1", LEGACY, "http"),
    Way("sdk_v2", LEGACY, "stdio"),
    Way("sdk_v2", MODERN, "stdio"),
)
ALL = (
    Way("python", LEGACY, "stdio"),
    Way("python", MODERN, "stdio"),
    Way("python", MODERN, "http"),
    Way("sdk_v1", LEGACY, "stdio"),
    Way("sdk_v1", LEGACY, "http"),
    Way("sdk_v2", LEGACY, "stdio"),
    Way("sdk_v2", MODERN, "stdio"),
    Way("sdk_v2", MODERN, "http"),
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home with a purse, beside it a repository `harness`; its daemon ends with nothing to complain of."""
    folder = tmp_path_factory.mktemp("outside")
    home = Home(folder / "home")
    run_cli(home, "budget", "grant", "workspace", str(PURSE_USD), "--yes")
    make_repository(folder / "harness")
    yield home
    run_cli(home, "daemon", "stop")
    complaints = [line for line in home.log_file.read_text().splitlines() if " INFO " not in line]
    assert complaints == []


@pytest.fixture
def repository(lab: Home) -> Path:
    return lab.path.parent / "harness"


def facts(outcome: Outcome) -> dict[str, Any]:
    """What a call answered, which is the same in the structure and in the text."""
    assert outcome.result is not None, outcome.failure
    assert not outcome.result.get("isError"), outcome.result["content"]
    found: dict[str, Any] = outcome.result["structuredContent"]
    assert json.loads(outcome.result["content"][0]["text"]) == found
    return found


def refusal(outcome: Outcome) -> str:
    """What a refused call says, which reached the caller as a result and not as a client's own complaint."""
    assert outcome.result is not None, outcome.failure
    assert outcome.result["isError"] is True
    (block,) = outcome.result["content"]
    text: str = block["text"]
    return text


async def furnish(client: Driven, repository: Path, suite: str, runs: dict[str, str]) -> None:
    """Two cases whose answer is their input, and a variant for each command."""
    cases = [
        {"id": name, "input": name, "graders": [{"type": "exact", "expected": name}]}
        for name in ("one", "two")
    ]
    made = facts(await client.call("create_cases", {"suite": suite, "cases": cases}))
    assert made["created"] == ["one", "two"]
    for name, run in runs.items():
        arguments = {"name": f"{suite}-{name}", "repo": str(repository), "run": run, "params": {"of": suite}}
        assert len(facts(await client.call("create_variant", arguments))["commit"]) == 40


@pytest.mark.anyio
@ways(*ALL, Way("sdk_v2", "auto", "stdio"))
async def test_a_client_agrees_on_its_era_and_takes_every_tool(lab: Home, way: Way) -> None:
    with anyio.fail_after(60):
        async with connect(way, lab) as client:
            tools = await client.tools()
            assert client.greeting.name == "evalpurse"
            assert client.greeting.version == (MODERN if way.era == "auto" else way.era)
            assert client.greeting.instructions.startswith("evalpurse runs eval experiments")
    assert [tool["name"] for tool in tools] == TOOLS
    for tool in tools:
        assert tool["title"]
        assert tool["description"]
        assert {name for name in HINTS if isinstance(tool["annotations"][name], bool)} == HINTS
        assert tool["inputSchema"]["additionalProperties"] is False
        assert tool["outputSchema"]["type"] == "object"


@pytest.mark.anyio
@ways(*ALL)
async def test_the_whole_loop_works(lab: Home, repository: Path, way: Way) -> None:
    suite = f"loop-{way}"
    copy, wrong = f"{suite}-copy", f"{suite}-wrong"
    with anyio.fail_after(60):
        async with connect(way, lab) as client:
            await client.tools()  # from here on it holds answers against the published schemas
            await furnish(client, repository, suite, {"copy": f"sleep 0.7; {COPY}", "wrong": "true"})
            launch = {
                "suite": suite,
                "variants": [wrong, copy],
                "cap_usd": 1,
                "allowance_usd": 0.01,
                "idempotency_key": suite,
            }
            dry = facts(await client.call("launch_experiment", {**launch, "dry_run": True}))
            assert (dry["estimate"]["runs"], dry["estimate"]["worst_case_usd"]) == (4, 0.04)
            assert "experiment" not in dry
            launched = facts(await client.call("launch_experiment", launch))["experiment"]
            again = facts(await client.call("launch_experiment", launch))
            assert (again["existing"], again["experiment"]["experiment_id"]) == (
                True,
                launched["experiment_id"],
            )
            told = await finish(client, launched["experiment_id"])
            await look_at_results(client, launched["experiment_id"], wrong, copy)
    assert [total for _, total, _ in told] == [4] * len(told)
    assert [done for done, _, _ in told] == sorted({done for done, _, _ in told})


async def finish(client: Driven, experiment_id: str) -> list[tuple[float, float | None, str | None]]:
    """Waits until an experiment is over; returns the progress that was told."""
    waited = await client.call("wait_experiment", {"experiment_id": experiment_id})
    status = facts(waited)["experiment"]
    assert (status["status"], status["outcomes"]) == ("finished", {"scored": 4})
    assert (status["spent_usd"], status["held_usd"]) == (0.04, 0)
    assert waited.progress, "no progress notification came"
    return waited.progress


async def look_at_results(client: Driven, experiment_id: str, baseline: str, better: str) -> None:
    """Compares, queries and reads what the loop left behind."""
    compared = facts(await client.call("compare_variants", {"experiment_id": experiment_id}))
    assert compared["baseline"] == baseline
    (comparison,) = compared["comparisons"]
    assert (comparison["candidate"], comparison["delta"], comparison["fixed"]) == (better, 1, ["one", "two"])
    where = f"experiment_id = '{experiment_id}'"
    sql = f"SELECT run_id, score FROM runs WHERE {where} ORDER BY score DESC"  # noqa: S608 - the tool's point
    rows = facts(await client.call("query_results", {"sql": sql}))["rows"]
    assert [score for _, score in rows] == [1, 1, 0, 0]
    read = facts(await client.call("read_run", {"run_id": rows[0][0], "part": "answer"}))
    assert (read["variant"], read["text"]) == (better, read["case_id"])
    purse = facts(await client.call("budget_status", {}))["workspace"]
    assert purse["limit_usd"] == PURSE_USD
    assert purse["held_usd"] == 0


@pytest.mark.anyio
@ways(*SOME)
async def test_what_is_refused_is_told_in_full(lab: Home, way: Way) -> None:
    launch = {"suite": "ehco", "variants": ["x"], "allowance_usd": 0, "idempotency_key": f"refused-{way}"}
    with anyio.fail_after(60):
        async with connect(way, lab) as client:
            await client.tools()
            unknown = await client.call("list_cases", {"suit": "x"})
            assert refusal(unknown) == (
                "list_cases has no parameter 'suit'. Did you mean 'suite'? [code: bad_arguments]"
            )
            no_suite = refusal(await client.call("launch_experiment", {**launch, "cap_usd": 1}))
            assert no_suite.startswith("There is no suite 'ehco'.")
            assert no_suite.endswith("[code: unknown_suite]")
            no_cap = refusal(await client.call("launch_experiment", {**launch, "cap_usd": 0}))
            assert no_cap == (
                "cap_usd is $0.00; it must be above zero. The cap is the most that this experiment may ever "
                "cost; dry_run shows the worst case. [code: bad_launch]"
            )
            no_tool = refusal(await client.call("list_case", {}))
            assert no_tool == "There is no tool 'list_case'. Did you mean 'list_cases'? [code: unknown_tool]"


@pytest.mark.anyio
@ways(*ALL)
async def test_cancelling_a_wait_ends_the_wait_and_not_the_experiment(
    lab: Home, repository: Path, way: Way
) -> None:
    suite = f"cancel-{way}"
    with anyio.fail_after(60):
        async with connect(way, lab) as client:
            await client.tools()
            await furnish(client, repository, suite, {"endless": "sleep 600"})
            launch = {
                "suite": suite,
                "variants": [f"{suite}-endless"],
                "cap_usd": 1,
                "allowance_usd": 0,
                "idempotency_key": suite,
            }
            launched = facts(await client.call("launch_experiment", launch))["experiment"]
            which = {"experiment_id": launched["experiment_id"]}
            waited = await client.call("wait_experiment", which, cancel=True)
            assert waited.result is None
            assert waited.failure
            assert waited.progress
            await calls_end(lab)
            status = facts(await client.call("wait_experiment", {**which, "wait_s": 0}))["experiment"]
            assert (status["status"], status["done"]) == ("running", 0)
            ended = facts(await client.call("cancel_experiment", {**which, "reason": "the test is over"}))
            assert ended["experiment"]["status"] == "cancelled"
            assert ended["experiment"]["outcomes"] == {"cancelled": 2}
            assert ended["experiment"]["held_usd"] == 0


async def calls_end(home: Home) -> None:
    """Returns when the daemon carries out no call any more: only it knows that a wait has ended."""

    def none_open() -> bool:
        return not run_cli(home, "daemon", "status")["calls_open"]

    await anyio.to_thread.run_sync(wait_until, none_open)


@pytest.mark.anyio
@ways(Way("sdk_v1", LEGACY, "stdio"))
async def test_a_client_that_comes_first_starts_the_daemon(tmp_path: Path, way: Way) -> None:
    home = Home(tmp_path / "fresh")
    with anyio.fail_after(60):
        async with connect(way, home) as client:
            assert facts(await client.call("list_cases", {}))["suites"] == []
    assert run_cli(home, "daemon", "stop")["stopped"]


class TestInspector:
    """The inspector's command line: one process a call, exit codes, its own reading of schemas."""

    pytestmark = needs_node

    @pytest.mark.parametrize("era", ["legacy", "modern"])
    def test_it_finds_no_schema_that_some_host_cannot_take(self, lab: Home, era: str) -> None:
        done = inspect(lab, "tools/list", "--strict", "--protocol-era", era)
        assert done.returncode == 0, done.stderr
        assert "0 errors" in done.stderr
        assert [tool["name"] for tool in json.loads(done.stdout)["result"]["tools"]] == TOOLS

    @pytest.mark.parametrize("era", ["legacy", "modern"])
    def test_it_calls_tools(self, lab: Home, repository: Path, era: str) -> None:
        name = f"inspector-{era}"
        arguments = {"name": name, "repo": str(repository), "run": COPY, "params": {"of": name}}
        done = call(lab, "create_variant", arguments, "--protocol-era", era)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["result"]["structuredContent"]["variant"] == name

    def test_it_comes_in_by_http_with_a_token(self, lab: Home) -> None:
        token = f"Authorization: Bearer {read_token(lab, 'agent')}"
        more = ("--tool-name", "budget_status", "--header", token)
        done = inspect(lab, "tools/call", *more, server=(http_url(lab),))
        assert done.returncode == 0, done.stderr
        workspace = json.loads(done.stdout)["result"]["structuredContent"]["workspace"]
        assert workspace["limit_usd"] == PURSE_USD

    def test_it_ends_with_its_code_for_a_failed_tool_and_shows_the_text(self, lab: Home) -> None:
        done = call(lab, "read_run", {"run_id": "exp_none.00001"})
        assert done.returncode == 5, done.stdout + done.stderr
        assert "exp_none.00001" in done.stdout
        assert "[code: unknown_run]" in done.stdout


def call(home: Home, tool: str, arguments: dict[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
    """One tool call by the inspector over stdio."""
    given = ("--tool-name", tool, "--tool-args-json", json.dumps(arguments))
    return inspect(home, "tools/call", *given, *more)


def inspect(
    home: Home, method: str, *more: str, server: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """One run of the inspector; what it remembers goes next to the home."""
    launcher = str(PACKAGES / "inspector" / "clients" / "launcher" / "build" / "index.js")
    env = environment()
    where = server or (*words(home, "mcp"), "-e", f"PYTHONPATH={env['PYTHONPATH']}")
    return subprocess.run(
        [node(), launcher, "--cli", *where, "--method", method, "--format", "json", *more],
        capture_output=True,
        text=True,
        env={**env, "HOME": str(home.path.parent)},
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
