"""Cases: created all or none, never edited, found again by suite, split and tags."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from pydantic import ValidationError

from evalpurse.home import Home
from evalpurse.runs.cases import Cases, CaseSpec
from evalpurse.runs.errors import (
    BadCasesError,
    CaseExistsError,
    EmptySuiteError,
    UnknownCaseError,
    UnknownSuiteError,
)
from evalpurse.store.database import Store

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(home: Home) -> AsyncIterator[Store]:
    opened = await Store.open(home)
    yield opened
    await opened.close()


@pytest.fixture
def cases(store: Store) -> Cases:
    return Cases(store)


def case(case_id: str = "c1", **fields: Any) -> CaseSpec:
    given = {"input": "What is 6 x 7?", "graders": [{"type": "exact", "expected": "42"}]} | fields
    return CaseSpec.model_validate({"id": case_id, **given})


async def test_a_case_comes_back_as_it_was_given(cases: Cases, store: Store) -> None:
    given = case(
        "add.1",
        input={"question": "sum", "of": [1, 2]},
        files={"data/a.txt": "é\n", "b.bin": "base64:AAH/"},
        graders=[
            {"type": "numeric", "expected": 3, "weight": 2},
            {
                "type": "command",
                "name": "tests",
                "command": "sh t.sh",
                "files": {"t.sh": "exit 0"},
                "timeout_s": 30,
            },
            {"type": "regex", "pattern": "3"},
        ],
        tags=["easy", "sum", "easy"],
        timeout_s=60,
        metadata={"source": "by hand"},
    )
    result = await cases.create("math", [given, case("c2")])
    assert (result.created, result.unchanged, result.new_versions) == (["add.1", "c2"], [], [])
    [found, plain] = await Cases(store).select("math", "dev")
    assert (found.case_id, found.version, found.suite, found.split) == ("add.1", 1, "math", "dev")
    assert (found.timeout_s, found.tags, found.graders) == (
        60.0,
        ["easy", "sum"],
        ["numeric", "tests", "regex"],
    )
    assert found.grade_timeout_s == 40.0, "30 s of the command and 10 s of the expression"
    content = await cases.content(found)
    assert content.files == {
        "input.json": b'{"of":[1,2],"question":"sum"}',
        "files/data/a.txt": "é\n".encode(),
        "files/b.bin": b"\x00\x01\xff",
    }
    assert [grader.content() for grader in content.graders] == [grader.content() for grader in given.graders]
    assert content.metadata == {"source": "by hand"}
    assert (await cases.content(plain)).files == {"input.txt": b"What is 6 x 7?"}


async def test_sql_cannot_see_the_content_of_a_case(cases: Cases, store: Store) -> None:
    await cases.create(
        "s", [case(input="SECRET-TASK", graders=[{"type": "exact", "expected": "SECRET-ANSWER"}])]
    )
    rows = await store.fetch("cases_of_suite", suite="s", split="")
    assert "SECRET" not in repr(rows)


async def test_creating_the_same_cases_again_changes_nothing(cases: Cases, store: Store) -> None:
    await cases.create("s", [case("a"), case("b")])
    # Fields at their defaults, in another order, are the same content.
    again = CaseSpec.model_validate(
        {
            "tags": [],
            "graders": [{"weight": 1, "expected": "42", "name": "exact", "pattern": "", "type": "exact"}],
            "input": "What is 6 x 7?",
            "id": "a",
        }
    )
    result = await cases.create("s", [again, case("b"), case("c")])
    assert (result.created, result.unchanged, result.new_versions) == (["c"], ["a", "b"], [])
    assert len(await store.fetch("case_versions_of_suite", suite="s")) == 3
    assert [row["cases"] for row in await store.fetch("suites")] == [3]


async def test_other_content_under_an_id_needs_replace_and_makes_a_version(cases: Cases) -> None:
    await cases.create("s", [case("a"), case("b")])
    [first, _] = await cases.select("s", "dev")
    with pytest.raises(CaseExistsError, match="'a'") as caught:
        await cases.create("s", [case("new"), case("a", input="other")])
    assert "replace=true" in caught.value.hint
    assert (await cases.list("s")).total == 2, "nothing may be created when one of them clashes"
    result = await cases.create("s", [case("new"), case("a", input="other"), case("b")], replace=True)
    assert (result.created, result.unchanged, result.new_versions) == (["new"], ["b"], ["a"])
    [second, *_] = await cases.select("s", "dev")
    assert (second.version, (await cases.content(second)).files) == (2, {"input.txt": b"other"})
    assert second.case_digest != first.case_digest
    [old] = await cases.versions("s", {("a", 1)})
    assert old == first
    assert (await cases.content(old)).files == {"input.txt": b"What is 6 x 7?"}


async def test_any_change_of_a_case_is_a_change_of_its_digest(cases: Cases) -> None:
    await cases.create("s", [case()])
    changes: list[dict[str, Any]] = [
        {"input": "x"},
        {"files": {"a": "b"}},
        {"graders": [{"type": "exact", "expected": "43"}]},
        {"graders": [{"type": "exact", "expected": "42", "weight": 2}]},
        {"tags": ["t"]},
        {"split": "holdout"},
        {"timeout_s": 5},
        {"metadata": {"k": "v"}},
    ]
    for change in changes:
        with pytest.raises(CaseExistsError):
            await cases.create("s", [case(**change)])


async def test_ids_given_twice_are_named(cases: Cases) -> None:
    with pytest.raises(BadCasesError, match="'a'") as caught:
        await cases.create("s", [case("a"), case("b"), case("a", input="other")])
    assert caught.value.facts["cases"] == ["a"]
    with pytest.raises(UnknownSuiteError):
        await cases.list("s")


async def test_two_clients_that_create_the_same_id_do_not_both_win(cases: Cases) -> None:
    outcomes: list[str] = []

    async def create(text: str) -> None:
        try:
            await cases.create("s", [case("a", input=text)])
            outcomes.append("created")
        except CaseExistsError:
            outcomes.append("refused")

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(create, f"text {number}")
    assert sorted(outcomes) == ["created"] + ["refused"] * 4


async def test_no_cases_too_many_and_bad_suite_names_are_refused(cases: Cases) -> None:
    for suite, given, words in (
        ("s", [], "0 cases were given"),
        ("s", [case()] * 2_001, "2001 cases were given; one call takes 1 to 2000"),
        ("a/b", [case()], "not usable"),
        ("", [case()], "not usable"),
        ("-x", [case()], "not usable"),
        ("ok\n", [case()], "not usable"),
    ):
        with pytest.raises(BadCasesError, match=words):
            await cases.create(suite, given)


async def test_pages_follow_each_other_and_filters_narrow_them(cases: Cases) -> None:
    await cases.create(
        "s",
        [
            case(
                f"c{n:02d}",
                tags=["even" if n % 2 == 0 else "odd", "all"],
                split="dev" if n < 8 else "holdout",
            )
            for n in range(10)
        ],
    )
    seen: list[str] = []
    cursor = ""
    for _ in range(5):
        page = await cases.list("s", cursor=cursor, limit=3)
        assert page.total == 10
        seen += [row.case_id for row in page.cases]
        cursor = page.next_cursor
        if not cursor:
            break
    assert seen == [f"c{n:02d}" for n in range(10)]
    assert (await cases.list("s", split="holdout")).total == 2
    assert [row.case_id for row in (await cases.list("s", tags=["odd", "all"], split="dev")).cases] == [
        "c01",
        "c03",
        "c05",
        "c07",
    ]
    assert (await cases.list("s", tags=["missing"])).cases == []
    with pytest.raises(BadCasesError, match="limit is 0"):
        await cases.list("s", limit=0)


async def test_unknown_suites_and_cases_are_answered_with_the_nearest(cases: Cases) -> None:
    with pytest.raises(UnknownSuiteError, match="no suites yet"):
        await cases.select("library-qa", "dev")
    await cases.create("library-qa", [case("heapq-doc"), case("hidden", split="holdout")])
    with pytest.raises(UnknownSuiteError, match="Did you mean library-qa"):
        await cases.list("librry-qa")
    with pytest.raises(UnknownCaseError, match="Did you mean heapq-doc"):
        await cases.select("library-qa", "dev", ["heapq-docs"])
    with pytest.raises(UnknownCaseError) as caught:
        await cases.select("library-qa", "dev", ["hidde"])
    assert "hidden" not in caught.value.hint, "ids of the holdout must not be told"


async def test_a_selection_without_cases_is_refused(cases: Cases) -> None:
    await cases.create("s", [case("a")])
    with pytest.raises(EmptySuiteError, match="no holdout cases to run in suite 's', of 1"):
        await cases.select("s", "holdout")
    with pytest.raises(EmptySuiteError):
        await cases.select("s", "dev", [])
    assert [found.case_id for found in await cases.select("s", "dev", ["a"])] == ["a"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"id": "a b"}, "pattern"),
        ({"id": "x" * 101}, "pattern"),
        ({"id": ".."}, "pattern"),
        ({"id": "ok\n"}, "pattern"),
        ({"input": ""}, "input is empty"),
        ({"input": " \n"}, "input is empty"),
        ({"input": {}}, "input is empty"),
        ({"input": None}, "input is empty"),
        ({"input": {"x": float("inf")}}, "`input`"),
        ({"input": "\ud800"}, "`input`.*Unicode"),
        ({"files": {"../x": "1"}}, "path"),
        ({"files": {"/etc/passwd": "1"}}, "path"),
        ({"files": {"a/./b": "1"}}, "path"),
        ({"files": {"a": "base64:???"}}, "not base64"),
        ({"files": {"a": "x" * 20_000_000}}, "case 'c1' has 20,0.* bytes; at most 20,000,000"),
        ({"graders": []}, "at least 1"),
        ({"graders": [{"type": "exact", "expected": "1"}] * 2}, "exact is used more than once"),
        ({"graders": [{"type": "command", "command": "x", "files": {"../x": ""}}]}, "path"),
        ({"split": "train"}, "holdout"),
        ({"timeout_s": 0.5}, "greater than or equal to 1"),
        ({"timeout_s": 86_401}, "less than or equal to 86400"),
        ({"timeout_s": float("nan")}, "finite"),
        ({"tags": ["a\nb"]}, "printable"),
        ({"metadata": {"deep": json.loads("[" * 150 + "]" * 150)}}, "levels deep"),
        ({"expected": "42"}, "Extra inputs"),
    ],
)
def test_bad_fields_are_refused_when_the_case_is_written(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        case(**fields)
