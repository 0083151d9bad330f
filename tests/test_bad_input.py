"""Bad input through the tools: every refusal says what happened and what to do, and changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from evalpurse import __version__
from evalpurse.home import Home
from evalpurse.server.client import Client
from evalpurse.server.link import open_link
from evalpurse.server.spawn import Launch, request, start
from evalpurse.store.records import RunRow
from evalpurse.tools.arguments import DEPTH_MAX
from evalpurse.tools.toolbox import PAGE_BYTES_MAX
from tests.daemons import MODULE, kill
from tests.fake_backend import Sandboxes, Script
from tests.lab_fixtures import furnish, make_repository, open_lab
from tests.query_home import run_rows
from tests.refused_calls import (
    CASE,
    CASES,
    LAUNCHES,
    OTHERS,
    VARIANTS,
    cases,
    launch,
    variant,
)
from tests.tool_client import ERROR_CHARS_MAX, Desk, open_desk

pytestmark = pytest.mark.anyio

MEGABYTE = "x" * 1_000_000


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {"main.py": "one\ntwo\nthree\n", "folder/inner.txt": "inner\n"}
    return make_repository(tmp_path_factory.mktemp("harness"), files)


@pytest.fixture(scope="module")
async def desk(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> AsyncIterator[Desk]:
    """One client of one home for all tests here: a refusal changes nothing, so they cannot meet."""
    home = Home(tmp_path_factory.mktemp("bad_input") / "home").create()
    (home.secrets / "SERVICE_KEY").write_text("correct-horse-battery", encoding="utf-8")
    async with open_lab(home, Sandboxes()) as services:
        await furnish(services, repository, purse_usd=10)
        async with open_desk(services) as desk:
            await desk.call("create_cases", suite="hidden", cases=[CASE | {"id": "h1", "split": "holdout"}])
            yield desk


@pytest.mark.parametrize("name", LAUNCHES)
async def test_a_launch_that_cannot_be_is_refused(desk: Desk, name: str) -> None:
    arguments, code, says = LAUNCHES[name]
    refused = await desk.refuse("launch_experiment", **arguments)
    assert refused.code == code, refused.text
    for part in says:
        assert part in refused.text


@pytest.mark.parametrize("name", CASES)
async def test_cases_that_cannot_be_are_refused_all_together(desk: Desk, name: str) -> None:
    arguments, code, says = CASES[name]
    refused = await desk.refuse("create_cases", **arguments)
    assert refused.code == code, refused.text
    for part in says:
        assert part in refused.text


@pytest.mark.parametrize("name", VARIANTS)
async def test_a_variant_that_cannot_be_is_refused(desk: Desk, repository: Path, name: str) -> None:
    arguments, code, says = VARIANTS[name]
    refused = await desk.refuse("create_variant", **{"repo": str(repository)} | arguments)
    assert refused.code == code, refused.text
    for part in says:
        assert part in refused.text


@pytest.mark.parametrize("name", OTHERS)
async def test_other_questions_without_an_answer_are_refused(desk: Desk, name: str) -> None:
    tool, arguments, code, says = OTHERS[name]
    refused = await desk.refuse(tool, **arguments)
    assert refused.code == code, refused.text
    for part in says:
        assert part in refused.text


async def test_a_batch_that_is_too_large_is_refused_with_the_number_allowed(desk: Desk) -> None:
    await desk.call("create_cases", suite="wide", cases=[CASE | {"id": f"w{n}"} for n in range(50)])
    refused = await desk.refuse("launch_experiment", **launch(suite="wide", repeats=1000))
    assert refused.code == "bad_launch"
    assert (
        "50 cases x 2 variants x 1000 repeats are 100000 runs; one experiment may have 20000" in refused.text
    )
    assert "repeats can be at most 200" in refused.text
    allowed = await desk.call("launch_experiment", **launch(suite="wide", repeats=200, dry_run=True))
    assert allowed["estimate"]["runs"] == 20_000


async def test_a_refusal_never_repeats_what_may_be_a_secret(desk: Desk, repository: Path) -> None:
    key = "sk-" + "a1B2" * 8
    for arguments, code in (
        (variant(env={"OPENAI_API_KEY": key}), "bad_arguments"),
        (variant(run="tool --key correct-horse-battery"), "secret_refused"),
        (variant(env={"SERVICE_KEY": "correct-horse-battery"}), "secret_refused"),
        (variant(params={"k": ["correct-horse-battery"]}), "secret_refused"),
    ):
        refused = await desk.refuse("create_variant", repo=str(repository), **arguments)
        assert refused.code == code
        assert "secrets" in refused.text
        assert key not in refused.text
        assert "correct-horse-battery" not in refused.text


async def test_names_that_are_no_text_are_told_as_valid_text(desk: Desk, tmp_path: Path) -> None:
    folder = make_repository(tmp_path / "odd")
    try:
        (folder / os.fsdecode(b"caf\xe9.txt")).write_text("new")
    except OSError:
        pytest.skip("this file system takes only valid names")
    refused = await desk.refuse("create_variant", **variant(repo=str(folder)))
    assert refused.code == "dirty_tree"
    assert "caf\ufffd.txt" in refused.text
    assert refused.facts["files"] == ["caf\ufffd.txt (new)"]


# Every parameter that a tool publishes, wherever it is, against values that nobody planned for.

_STRANGE = {
    "long": MEGABYTE,
    "nul": "a\0b",
    "surrogate": "a\ud800b",
    "unicode": "é🙂\u202e\u0301",
    "control": "\x1b[2J\r\n\t",
    "empty": "",
    "true": True,
    "huge": 10**400,
    "nan": "NaN",
    "list": [],
    "object": {"a": {"b": [1]}},
    "null": None,
    "deep": json.loads("[" * 150 + "]" * 150),
}


def _places(schema: dict[str, Any]) -> Iterator[tuple[str | int, ...]]:
    """The place of every published parameter; one item stands for a list, one key for an open object."""
    for name, child in schema.get("properties", {}).items():
        yield (name,)
        yield from ((name, *inner) for inner in _places(child))
    if isinstance(schema.get("items"), dict):
        yield (0,)
        yield from ((0, *inner) for inner in _places(schema["items"]))
    if isinstance(schema.get("additionalProperties"), dict):
        yield ("key",)


def _with(value: Any, place: tuple[str | int, ...], strange: Any) -> Any:
    """The arguments with one place replaced."""
    if not place:
        return strange
    first, rest = place[0], place[1:]
    if isinstance(first, int):
        items = list(value) if isinstance(value, list) else []
        return [_with(items[0] if items else {}, rest, strange), *items[1:]]
    return {
        **(value if isinstance(value, dict) else {}),
        first: _with((value or {}).get(first), rest, strange),
    }


@pytest.mark.parametrize("kind", _STRANGE)
async def test_no_parameter_of_any_tool_can_be_given_what_breaks_it(
    desk: Desk, repository: Path, kind: str
) -> None:
    usual = {
        "create_cases": cases({}, suite="strange") | {"replace": True},
        "list_cases": {"suite": "qa"},
        "create_variant": variant(name=f"strange-{kind}", repo=str(repository)),
        "launch_experiment": launch(dry_run=True),
        "wait_experiment": {"experiment_id": "exp_no"},
        "cancel_experiment": {"experiment_id": "exp_no"},
        "compare_variants": {"experiment_id": "exp_no"},
        "read_run": {"run_id": "exp_no.00000"},
        "query_results": {"sql": "SELECT 1"},
        "request_budget": {"amount_usd": 1, "reason": "x"},
    }
    money = desk.services.ledger.accounts()
    for tool in (await desk.client.list_tools()).tools:
        for place in _places(tool.input_schema):
            if place == ("dry_run",):
                continue
            given = _with(usual.get(tool.name, {}), place, _STRANGE[kind])
            result = await desk.send(tool.name, given)
            text: str = result.content[0].text
            assert len(text.encode()) <= PAGE_BYTES_MAX
            if result.is_error:
                assert "[code: internal]" not in text, (tool.name, place)
                assert "[code: statement_failed]" not in text, (tool.name, place)
                assert len(text) <= ERROR_CHARS_MAX, (tool.name, place)
    assert desk.services.ledger.accounts() == money


async def test_arguments_that_are_too_deep_are_refused_before_anything_looks_at_them(desk: Desk) -> None:
    refused = await desk.refuse("list_cases", tags=json.loads("[" * 130 + "]" * 130))
    assert f"more than {DEPTH_MAX} levels deep" in refused.text
    refused = await desk.refuse("create_cases", suite="qa", cases="[" * 100_000)
    assert refused.code == "bad_arguments"


async def test_answers_fit_a_page_whatever_is_in_them(desk: Desk, repository: Path) -> None:
    wide = [
        CASE | {"id": f"{n:03d}-" + "i" * 90, "input": "\x01" * 300, "tags": [f"{t}é" * 35 for t in range(9)]}
        for n in range(125)
    ]
    created: list[str] = []
    made = await desk.call("create_cases", suite="page", cases=wide)
    assert made["truncated"]
    assert "125 created" in made["hint"]
    page: dict[str, Any] = {"next_cursor": ""}
    while "next_cursor" in page:
        page = await desk.call("list_cases", suite="page", cursor=page["next_cursor"], limit=100)
        assert page["total"] == 125
        created += [case["case_id"] for case in page["cases"]]
    assert created == [case["id"] for case in wide]
    for number in range(12):
        params = {"p": "é" * 900 + str(number)}
        arguments = variant(name=f"page-{number}", run="x\x01" * 500, params=params, description="☃" * 2000)
        await desk.call("create_variant", repo=str(repository), **arguments)
    seen = 0
    cursor: int | None = 0
    while cursor is not None:
        listed = await desk.call("list_variants", cursor=cursor, limit=50)
        seen += len(listed["variants"])
        cursor = listed.get("next_cursor")
    assert seen == len(await desk.services.variants.list())


async def test_requests_that_pile_up_are_bounded_and_shown_page_wise(desk: Desk) -> None:
    waiting = len(desk.services.ledger.requests())
    for number in range(waiting, 100):
        await desk.call("request_budget", amount_usd=1 + number, reason="☃" * 1000)
    again = await desk.call("request_budget", amount_usd=100, reason="☃" * 1000)
    assert again["request"]["state"] == "pending"
    assert len(desk.services.ledger.requests()) == 100
    refused = await desk.refuse("request_budget", amount_usd=1000, reason="one more")
    assert "100 budget requests already wait" in refused.text
    shown = await desk.call("budget_status")
    assert shown["truncated"]
    assert shown["requests"][0]["amount_usd"] == 100
    assert shown["workspace"]["limit_usd"] == 10, "asking changes nothing"


async def test_nothing_of_the_holdout_can_be_had(desk: Desk) -> None:
    hidden = CASE | {"id": "deep", "input": "canary-input", "split": "holdout"}
    hidden["graders"] = [{"type": "exact", "expected": "canary-answer"}]
    hidden["files"] = {"canary-file.txt": "x"}
    await desk.call("create_cases", suite="hidden", cases=[hidden])
    listed = await desk.call("list_cases", suite="hidden")
    assert (listed["cases"], listed["total"]) == ([], 0)
    rows = run_rows("exp_hidden", 1, "deep", "base", 1, 1.0, "holdout")
    await desk.services.store.append(rows)
    run_id = next(row.run_id for row in rows if isinstance(row, RunRow))
    for part in ("log", "transcript", "answer"):
        refused = await desk.refuse("read_run", run_id=run_id, part=part)
        assert refused.code == "hidden"
    tables = [table["table"] for table in (await desk.call("query_results"))["tables"]]
    for table in tables:
        rows_seen = await desk.call("query_results", sql=f"SELECT * FROM {table}", limit=1000)  # noqa: S608
        assert "canary" not in json.dumps(rows_seen).casefold()
    by_case = await desk.call("query_results", sql="SELECT count(*) FROM runs WHERE case_id = 'deep'")
    assert by_case["rows"] == [[0]]


async def test_sql_that_does_more_than_look_is_refused(desk: Desk, tmp_path: Path) -> None:
    canary = tmp_path / "canary.csv"
    canary.write_text("a\n1\n", encoding="utf-8")
    out = tmp_path / "out.csv"
    for sql in (
        "INSERT INTO suites VALUES ('x', now())",
        "DELETE FROM runs",
        "DROP TABLE runs",
        "CREATE TABLE mine AS SELECT 1",
        "UPDATE runs SET score = 1",
        f"COPY runs TO '{out}'",
        f"FROM '{canary}'",
        f"FROM read_csv('{canary}')",
        "SELECT * FROM read_text('/etc/passwd')",
        "ATTACH 'other.db'",
        "INSTALL httpfs",
        "PRAGMA database_list",
        "SET memory_limit = '100GB'",
        "SELECT content_blob FROM cases",
        "SELECT 1; SELECT 2",
        "SELECT",
        "SELECT * FROM nowhere",
        "x" * 1_000_000,
    ):
        refused = await desk.refuse("query_results", sql=sql)
        assert refused.code in ("query_refused", "query_failed"), refused.text
        assert len(refused.text) < 1_500
    assert not out.exists()


async def test_sql_that_never_ends_or_grows_is_ended_and_the_next_question_answered(desk: Desk) -> None:
    bombs = {
        "SELECT sum(a.range * b.range % 7) FROM range(10000000) a, range(1000000) b": "5 s",
        "WITH RECURSIVE r(s) AS (SELECT 'x' UNION ALL SELECT s || s FROM r) SELECT len(s) FROM r": "emory",
    }

    async def explode(sql: str, says: str) -> None:
        refused = await desk.refuse("query_results", sql=sql)
        assert refused.code in ("query_failed", "query_timeout")
        assert says in refused.text

    async with anyio.create_task_group() as tasks:
        for sql, says in bombs.items():
            tasks.start_soon(explode, sql, says)
    assert (await desk.call("query_results", sql="SELECT 1 AS one"))["rows"] == [[1]]


async def test_sql_whose_answer_is_no_page_says_what_to_ask_instead(desk: Desk) -> None:
    refused = await desk.refuse("query_results", sql=f"SELECT '{'x' * 15_000}' AS a, a || a AS b")
    assert "45,0" in refused.text
    assert "left(column, 1000)" in refused.text
    columns = ", ".join(f"{n} AS a_column_with_a_name_{n}" for n in range(500))
    refused = await desk.refuse("query_results", sql=f"SELECT {columns}")
    assert "500 columns" in refused.text
    many = await desk.call(
        "query_results", sql="SELECT range, 'ééééééééééééééééééééé' FROM range(5000)", limit=1000
    )
    assert many["truncated"]
    assert many["rows"][0][0] == 0
    beyond = await desk.refuse("query_results", sql="SELECT 1", limit=10**6)
    assert "1000" in beyond.text


# Lines that no client's library would send.

UNREADABLE = {
    "lone surrogate": (b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"\\ud800"}}', 7),
    "too deep": (
        b'{"params":' + b"[" * 50_000 + b"]" * 50_000 + b',"jsonrpc":"2.0","method":"x","id":"a\\"b"}',
        'a"b',
    ),
    "endless number": (b'{"id":-3,"jsonrpc":"2.0","method":"x","params":{"n":' + b"9" * 9_000 + b"}}", -3),
    "other ids inside": (b'{"params":{"id":1,"a":["\\"id\\":2",{"id":3}],"b":nope},"id":4}', 4),
    "broken id": (b'{"id":"\\q","params":nope}', None),
    "no id": (b'{"jsonrpc":"2.0","method":"x","params":{"id":5},}', None),
    "JSON, but no message": (b'{"jsonrpc":"2.0","id":9,"methods":"x"}', 9),
    "bytes": (bytes(range(11, 256)), None),
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("daemon") / "home").create()
    start(home, Launch(MODULE))
    yield home
    kill(home)


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_line_that_cannot_be_read_is_answered_under_its_id_and_costs_no_connection(
    daemon: Home, name: str
) -> None:
    line, wanted = UNREADABLE[name]
    with open_link(daemon, door="mcp", role="agent") as link:
        link.socket.sendall(line + b"\n")
        answer = json.loads(link.reader.readline())
        assert answer["id"] == wanted
        assert answer["error"]["code"] in (-32700, -32600)
        assert len(answer["error"]["message"]) < 300
        assert Client(link).call("echo", {"text": "still here"}).facts["text"] == "still here"
    with open_link(daemon, door="control", role="agent") as link:
        link.socket.sendall(line + b"\n")
        assert "error" in json.loads(link.reader.readline())
        assert request(link, "daemon.status", {})["version"] == __version__


# What needs an experiment that ran.


@pytest.fixture
async def ran(tmp_path: Path, repository: Path) -> AsyncIterator[Desk]:
    """A desk whose sandboxes answer with characters of one to four bytes."""
    home = Home(tmp_path / "home").create()
    text = "aé☃🙂" * 8_000
    async with open_lab(home, Sandboxes(choose=lambda spec: Script(answer=text))) as services:
        await furnish(services, repository, cases=2, purse_usd=10)
        async with open_desk(services) as desk:
            yield desk


async def finished(desk: Desk, **changes: Any) -> str:
    arguments = launch(idempotency_key="once") | changes
    launched = await desk.call("launch_experiment", **arguments)
    experiment_id: str = launched["experiment"]["experiment_id"]
    waited = await desk.call("wait_experiment", experiment_id=experiment_id)
    assert waited["experiment"]["status"] == "finished"
    return experiment_id


async def test_a_key_with_other_arguments_starts_nothing_whichever_they_are(ran: Desk) -> None:
    experiment_id = await finished(ran)
    again = await ran.call("launch_experiment", **launch(idempotency_key="once"))
    assert again["existing"]
    for change in (
        {"cap_usd": 2},
        {"allowance_usd": 0.02},
        {"repeats": 2},
        {"variants": ["base"]},
        {"variants": ["new", "base"]},
        {"baseline": "new"},
        {"case_ids": ["case-00"]},
        {"max_parallel": 1},
        {"reuse": False},
        {"suite": "other"},
        {"account": "other"},
    ):
        refused = await ran.refuse("launch_experiment", **launch(idempotency_key="once") | change)
        assert refused.code == "idempotency_conflict", change
        assert experiment_id in refused.text
        assert "another key" in refused.text
    ran.assert_nothing_held()


async def test_a_long_text_is_read_page_by_page_without_a_broken_character(ran: Desk) -> None:
    run_id = f"{await finished(ran)}.00000"
    text, offset, pages = "", 0, 0
    while offset or not pages:
        page = await ran.call("read_run", run_id=run_id, part="answer", offset=offset)
        assert page["offset"] == offset
        text, pages, offset = text + page["text"], pages + 1, page.get("next_offset", 0)
    assert text == "aé☃🙂" * 8_000
    assert pages < 8
    for offset in (80_000, 80_001, 10**30):
        beyond = await ran.call("read_run", run_id=run_id, part="answer", offset=offset)
        assert (beyond["text"], beyond["total_bytes"], beyond.get("next_offset")) == ("", 80_000, None)
        assert ("beyond its end" in beyond.get("hint", "")) == (offset > 80_000)


async def test_what_is_over_stays_over_however_often_it_is_cancelled(ran: Desk) -> None:
    experiment_id = await finished(ran)
    for reason in ("why not", ""):
        status = await ran.call("cancel_experiment", experiment_id=experiment_id, reason=reason)
        assert status["experiment"]["status"] == "finished"
        assert status["experiment"]["note"] == ""


@pytest.mark.parametrize("reason", ["", "changed my mind", "é" * 500])
async def test_a_cancel_ends_everything_whatever_its_reason(
    home: Home, repository: Path, reason: str
) -> None:
    gate = anyio.Event()
    async with open_lab(home, Sandboxes(choose=lambda spec: Script(gate=gate))) as services:
        await furnish(services, repository, purse_usd=10)
        async with open_desk(services) as desk:
            launched = await desk.call("launch_experiment", **launch())
            experiment_id = launched["experiment"]["experiment_id"]
            found: list[dict[str, Any]] = []

            async def cancel(why: str) -> None:
                answer = await desk.call("cancel_experiment", experiment_id=experiment_id, reason=why)
                found.append(answer["experiment"])

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cancel, reason)
                tasks.start_soon(cancel, "second")
            assert found[0] == found[1]
            assert found[0]["status"] == "cancelled"
            assert found[0]["note"] in (reason, "second")
            assert found[0]["outcomes"] == {"cancelled": 6}
            desk.assert_nothing_held()
            refused = await desk.refuse("cancel_experiment", experiment_id=experiment_id, reason="x" * 501)
            assert "500" in refused.text
