"""Graders: what scores what, what is the harness's failure, and what is the grader's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from pydantic import ValidationError

from evalpurse.runs.cases import CaseContent
from evalpurse.runs.errors import GraderError, SandboxError
from evalpurse.runs.graders import Graded, GraderSpec, bounded, grade_all
from evalpurse.runs.sandboxes.protocol import ExecResult, Output, Sandbox

pytestmark = pytest.mark.anyio


@dataclass
class ShellSandbox:
    """Runs grader commands in a folder of its own, as a sandbox does, without isolation."""

    folder: Path
    broken: bool = False
    timeouts_s: list[float] = field(default_factory=list)

    async def exec(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes],
        timeout_s: float,
        fetch: Sequence[str] = (),
    ) -> ExecResult:
        if self.broken:
            raise SandboxError("the sandbox is gone")
        self.timeouts_s.append(timeout_s)
        return await anyio.to_thread.run_sync(self._exec, command, files, timeout_s, fetch)

    def _exec(
        self, command: Sequence[str], files: Mapping[str, bytes], timeout_s: float, fetch: Sequence[str]
    ) -> ExecResult:
        for path, content in files.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_bytes(content)
        try:
            done = subprocess.run(
                list(command),
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ExecResult(None, b"", {})
        brought = {name: (self.folder / name).read_bytes() for name in fetch if (self.folder / name).exists()}
        return ExecResult(done.returncode, done.stdout, brought)


@pytest.fixture
def sandbox(tmp_path: Path) -> ShellSandbox:
    folder = tmp_path / "grader"
    folder.mkdir()
    return ShellSandbox(folder)


def output(answer: str | bytes | None, *, is_json: bool = False, cut: bool = False) -> Output:
    content = answer.encode() if isinstance(answer, str) else answer
    return Output(content, is_json, None, None, b"", None, frozenset({"answer"} if cut else ()))


def spec(kind: str, **fields: Any) -> GraderSpec:
    return GraderSpec.model_validate({"type": kind, **fields})


NO_SANDBOX = cast("Sandbox", None)


async def grade(
    graders: GraderSpec | Sequence[GraderSpec], given: Output, sandbox: ShellSandbox | None = None
) -> Graded:
    many = [graders] if isinstance(graders, GraderSpec) else graders
    place = cast("Sandbox", sandbox) if sandbox else NO_SANDBOX
    return await grade_all(many, given, CaseContent("c1", {}, many, {}), place)


async def value(grader: GraderSpec, answer: str, *, is_json: bool = False) -> float:
    return (await grade(grader, output(answer, is_json=is_json))).score


@pytest.mark.parametrize(
    ("fields", "answer", "score"),
    [
        ({"expected": "Paris"}, " Paris\n", 1),
        ({"expected": "Paris"}, "paris", 0),
        ({"expected": "Paris", "ignore_case": True}, "PARIS", 1),
        ({"expected": "straße", "ignore_case": True}, "STRASSE", 1),
        ({"expected": "Paris", "strip": False}, "Paris\n", 0),
        ({"expected": ""}, "", 1),
        ({"expected": {"a": [1, True]}}, '{"a": [1.0, true]}', 1),
        ({"expected": {"a": 1}}, '{"a": 1, "b": 2}', 0),
        ({"expected": [1]}, "[true]", 0),
        ({"expected": 0}, "false", 0),
        ({"expected": 7}, "seven", 0),
    ],
)
async def test_exact_compares_text_or_json(fields: dict[str, Any], answer: str, score: float) -> None:
    assert await value(spec("exact", **fields), answer) == score


async def test_a_json_string_answer_is_its_text() -> None:
    assert await value(spec("exact", expected="Paris"), '"Paris"', is_json=True) == 1
    assert await value(spec("exact", expected="Paris"), '"Paris"') == 0


@pytest.mark.parametrize(
    ("fields", "answer", "score"),
    [
        ({"expected": "heap"}, "use heapq", 1),
        ({"expected": ["heap", "queue"]}, "use heapq", 0),
        ({"expected": ["heap", "queue"], "match": "any"}, "use heapq", 1),
        ({"expected": ["x", "y"], "match": "any"}, "use heapq", 0),
        ({"expected": ["HEAP"], "ignore_case": True}, "use heapq", 1),
        ({"expected": ["HEAP"]}, "use heapq", 0),
    ],
)
async def test_contains_looks_for_all_or_any(fields: dict[str, Any], answer: str, score: float) -> None:
    assert await value(spec("contains", **fields), answer) == score


@pytest.mark.parametrize(
    ("fields", "answer", "score"),
    [
        ({"pattern": r"\d+ apples"}, "I have 12 apples.", 1),
        ({"pattern": r"\d+ apples", "full": True}, "I have 12 apples.", 0),
        ({"pattern": "APPLES", "flags": "i"}, "apples", 1),
        ({"pattern": "^b$", "flags": "m"}, "a\nb\nc", 1),
        ({"pattern": "a.c"}, "a\nc", 0),
        ({"pattern": "a.c", "flags": "s"}, "a\nc", 1),
        ({"pattern": "[[a]"}, "[", 1),  # Python warns of a future meaning; that must not be an error
    ],
)
async def test_regex_searches_or_matches_in_full(fields: dict[str, Any], answer: str, score: float) -> None:
    with anyio.fail_after(20):
        assert await value(spec("regex", **fields), answer) == score


async def test_a_catastrophic_expression_ends_in_time_and_others_go_on() -> None:
    bomb, harmless = spec("regex", pattern=r"(a+)+$"), spec("regex", pattern="b$")
    answer = output("a" * 40 + "b")
    with anyio.fail_after(30):
        started = time.monotonic()
        with pytest.raises(
            GraderError, match=r"'regex' \(regex\) of case 'c1' .* within 1 s of processor time"
        ):
            await grade(bomb, answer)
        assert time.monotonic() - started < 15
        assert (await grade(harmless, answer)).score == 1


async def test_expressions_share_few_workers_and_a_worker_is_used_again() -> None:
    grader = spec("regex", pattern="(.)")
    await grade(grader, output("x"))
    before = {worker._process.pid for worker in bounded._idle}
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(grade, grader, output("y"))
    after = {worker._process.pid for worker in bounded._idle}
    assert before <= after
    assert len(after) <= bounded.WORKERS_MAX


async def test_a_worker_that_was_killed_while_idle_is_replaced() -> None:
    grader = spec("regex", pattern="x")
    await grade(grader, output("x"))
    for worker in bounded._idle:
        os.kill(worker._process.pid, signal.SIGKILL)
        worker._process.wait()
    with anyio.fail_after(20):
        assert (await grade(grader, output("x"))).score == 1


async def test_ended_workers_are_gone() -> None:
    await grade(spec("regex", pattern="x"), output("x"))
    processes = [worker._process for worker in bounded._idle]
    bounded.end_workers()
    assert processes
    assert all(process.returncode is not None for process in processes)


@pytest.mark.parametrize(
    ("fields", "answer", "score"),
    [
        ({"expected": 42}, "The answer is 42.", 1),
        ({"expected": 42}, "First 42, then 43", 0),
        ({"expected": 3.14, "abs_tolerance": 0.01}, "about 3.145", 1),
        ({"expected": 3.14, "abs_tolerance": 0.001}, "about 3.145", 0),
        ({"expected": -200, "rel_tolerance": 0.01}, "\N{MINUS SIGN}198.5", 1),
        ({"expected": 1234567.5}, "it is $1,234,567.50", 1),
        ({"expected": 6.02e23, "rel_tolerance": 1e-6}, "6.02E+23 per mol", 1),
        ({"expected": 3}, "between 5-3", 1),
        ({"expected": 7}, "7 for utf8 and model v3", 1),
        ({"expected": 0.5}, ".5", 1),
        ({"expected": 1}, "no digits here", 0),
        ({"expected": 1}, "1e999", 0),
        ({"expected": 1}, "9" * 5_000, 0),
        ({"expected": 2, "path": "a.1.n"}, '{"a": [{}, {"n": 2}]}', 1),
        ({"expected": 2, "path": "/a.b/0"}, '{"a.b": ["2"]}', 1),
        ({"expected": 2, "path": "a.5"}, '{"a": [2]}', 0),
        ({"expected": 1, "path": "a"}, '{"a": true}', 0),
        ({"expected": 1, "path": "a"}, "not json 1", 0),
    ],
)
async def test_numeric_takes_the_last_number_within_tolerance(
    fields: dict[str, Any], answer: str, score: float
) -> None:
    assert await value(spec("numeric", **fields), answer) == score


@pytest.mark.parametrize(
    ("fields", "answer", "score"),
    [
        ({"expected": {"a": 1}}, '{"a": 1, "b": 2}', 1),
        ({"expected": {"a": 1}, "exact": True}, '{"a": 1, "b": 2}', 0),
        ({"expected": {"a": {"b": [{"c": 1}]}}}, '{"a": {"b": [{"c": 1, "d": 2}], "x": 0}}', 1),
        ({"expected": {"a": [1]}}, '{"a": [1, 2]}', 0),
        ({"expected": None}, "null", 1),
        ({"expected": {"a": None}}, "{}", 0),
        ({"expected": {"a": 1}}, '```json\n{"a": 1}\n```', 1),
        ({"expected": "x", "path": "r.0"}, '{"r": ["x"]}', 1),
        ({"expected": 1}, "NaN", 0),
        ({"expected": 1}, "[" * 100_000, 0),
        ({"expected": [1]}, "[" * 500 + "1" + "]" * 500, 0),
        ({"json_schema": {"type": "object", "required": ["a"]}}, '{"a": 1}', 1),
        ({"json_schema": {"type": "object", "required": ["a"]}}, '{"b": 1}', 0),
        ({"json_schema": {"type": "integer"}, "path": "n"}, '{"n": 4}', 1),
        ({"json_schema": {"type": "integer"}}, "not json", 0),
        ({"json_schema": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "string"}}}}, '"s"', 1),
    ],
)
async def test_json_matches_a_part_the_whole_or_a_schema(
    fields: dict[str, Any], answer: str, score: float
) -> None:
    with anyio.fail_after(30):
        assert await value(spec("json", **fields), answer) == score


async def test_a_schema_that_never_ends_is_the_failure_of_the_grader() -> None:
    bomb = spec("json", json_schema={"pattern": "^(a+)+$"})
    with anyio.fail_after(30):
        with pytest.raises(GraderError, match="processor time"):
            await grade(bomb, output(json.dumps("a" * 40 + "b")))
        with pytest.raises(GraderError, match="RecursionError"):
            await grade(spec("json", json_schema={"$ref": "#"}), output("1"))


async def test_a_difference_says_where_it_is() -> None:
    graded = await grade(spec("json", expected={"a": [{"b": 1}]}), output('{"a": [{"b": 2}]}'))
    assert graded.scores[0].detail == "a.0.b is 2, expected 1"


async def test_a_missing_answer_scores_zero_and_is_no_error(sandbox: ShellSandbox) -> None:
    graded = await grade(
        [
            spec("exact", expected="x"),
            spec("regex", pattern="x"),
            spec("json", json_schema={}),
            spec("command", command="true"),
        ],
        output(None),
        sandbox,
    )
    assert [(score.value, score.detail) for score in graded.scores[:3]] == [(0.0, "no answer")] * 3
    assert graded.scores[3].value == 1.0, "a command may look at more than the answer"
    assert graded.score == 0.25


async def test_a_binary_answer_is_graded_and_a_cut_one_says_so() -> None:
    assert (await grade(spec("contains", expected="ok"), output(b"\xff\x00ok\xfe"))).score == 1
    graded = await grade(spec("contains", expected="ok"), output("ok", cut=True))
    assert "the answer was cut" in graded.scores[0].detail


async def test_a_large_answer_is_graded() -> None:
    big = "x" * 4_000_000 + " 42"
    with anyio.fail_after(30):
        graded = await grade(
            [
                spec("numeric", expected=42),
                spec("contains", expected="x 42"),
                spec("regex", pattern=r" (\d+)\Z"),
            ],
            output(big),
        )
    assert graded.score == 1
    assert len(graded.scores[0].detail) < 200


async def test_the_score_is_the_weighted_mean() -> None:
    graded = await grade(
        [
            spec("exact", expected="x", weight=3),
            spec("contains", expected="y", weight=1),
            spec("contains", name="third", expected="x", weight=0.5),
        ],
        output("x"),
    )
    assert graded.score == pytest.approx(3.5 / 4.5)
    assert [(s.grader, s.name, s.value, s.weight) for s in graded.scores] == [
        ("exact", "score", 1.0, 3.0),
        ("contains", "score", 0.0, 1.0),
        ("third", "score", 1.0, 0.5),
    ]
    tiny = [spec("exact", name=f"g{n}", expected="x", weight=0.1) for n in range(9)]
    assert (await grade(tiny, output("x"))).score == 1.0


@pytest.mark.parametrize(
    ("command", "score"),
    [("exit 0", 1.0), ("exit 3", 0.0), ("test -f ./solution && ./solution", 0.0), ("./solution", 0.0)],
)
async def test_the_exit_code_of_a_command_decides(sandbox: ShellSandbox, command: str, score: float) -> None:
    graded = await grade(spec("command", command=command), output("x"), sandbox)
    assert graded.score == score


@pytest.mark.parametrize(
    ("command", "score", "others"),
    [
        ("echo 0.25 > reward.txt; exit 9", 0.25, {}),
        ("echo 0.75 > reward.json", 0.75, {}),
        ("""echo '{"reward": 0.5, "tests": 12}' > reward.json; echo 1 > reward.txt""", 0.5, {"tests": 12.0}),
        ("""echo '{"score": 1, "loss": -3.5}' > reward.json""", 1.0, {"loss": -3.5}),
        ("""echo '{"accuracy": 0.125}' > reward.json""", 0.125, {}),
    ],
)
async def test_a_reward_file_wins_over_the_exit_code(
    sandbox: ShellSandbox, command: str, score: float, others: dict[str, float]
) -> None:
    graded = await grade(spec("command", command=command, weight=2), output("x"), sandbox)
    assert graded.score == score
    assert {s.name: s.value for s in graded.scores if s.weight == 0} == others


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo 1.5 > reward.txt", r"reward is 1\.5; a score must be from 0 to 1"),
        ("echo -1 > reward.json", "reward is -1"),
        ("echo ok > reward.txt", "'ok', not a number"),
        ("echo nan > reward.txt", "not a finite number"),
        ("echo NaN > reward.json", "not a finite number"),
        ("echo '{' > reward.json; echo 1 > reward.txt", "is not JSON"),
        ("echo '{}' > reward.json", "has 0 numbers"),
        ("""echo '{"a": 1, "b": 0}' > reward.json""", "has a, b; name the one that is the score"),
        ("""echo '{"reward": 1, "score": 0}' > reward.json""", "has reward, score"),
        ("""echo '{"reward": true}' > reward.json""", "'True', not a number"),
        ("echo '[1]' > reward.json", "not a number"),
        ("no-such-program --version", "not installed in the sandbox"),
        ("kill -9 $$", "ended by signal 9"),
    ],
)
async def test_a_command_that_gives_no_score_is_the_failure_of_the_grader(
    sandbox: ShellSandbox, command: str, words: str
) -> None:
    grader = spec("command", name="tests", command=command)
    with pytest.raises(GraderError, match=words) as caught:
        await grade([spec("exact", expected="x"), grader], output("x"), sandbox)
    assert "'tests'" in caught.value.message
    assert caught.value.facts == {"grader": "tests", "case": "c1"}


async def test_a_command_gets_its_files_and_its_time_limit(sandbox: ShellSandbox) -> None:
    grader = spec(
        "command",
        command="sh t/run.sh; cmp t/b.bin t/b.bin",
        files={"t/run.sh": "echo running\n", "t/b.bin": "base64:AP8="},
        timeout_s=7,
    )
    graded = await grade(grader, output("x"), sandbox)
    assert graded.score == 1
    assert "running" in graded.scores[0].detail
    assert sandbox.timeouts_s == [7.0]
    assert (sandbox.folder / "t" / "b.bin").read_bytes() == b"\x00\xff"


async def test_a_command_that_does_not_end_or_cannot_run_names_the_grader(sandbox: ShellSandbox) -> None:
    with anyio.fail_after(20), pytest.raises(GraderError, match=r"'command' .* did not end within 0\.2 s"):
        await grade(spec("command", command="exec sleep 30", timeout_s=0.2), output("x"), sandbox)
    sandbox.broken = True
    with pytest.raises(GraderError, match="could not run: the sandbox is gone"):
        await grade(spec("command", command="true"), output("x"), sandbox)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"type": "magic"}, "exact"),
        ({"type": "exact"}, "needs `expected`"),
        ({"type": "exact", "expected": "x", "pattern": "y"}, "does not take pattern; it takes expected"),
        ({"type": "exact", "expected": 1, "ignore_case": True}, "that is text"),
        ({"type": "exact", "expected": "x", "surprise": 1}, "Extra inputs"),
        ({"type": "exact", "expected": "x", "weight": 0}, "greater than 0"),
        ({"type": "exact", "expected": "x", "weight": float("inf")}, "finite|less than"),
        ({"type": "exact", "expected": "x", "name": "a b"}, "pattern"),
        ({"type": "exact", "expected": {"x": float("nan")}}, "NaN"),
        ({"type": "contains", "expected": []}, "none of them empty"),
        ({"type": "contains", "expected": ["a", ""]}, "none of them empty"),
        ({"type": "contains", "expected": 5}, "must be a text"),
        ({"type": "contains", "expected": "a", "match": "some"}, "all"),
        ({"type": "regex"}, "needs `pattern`"),
        ({"type": "regex", "pattern": "(unclosed"}, "not a valid regular expression.*unclosed"),
        ({"type": "regex", "pattern": "a{99999999999999999999}"}, "not a valid regular expression"),
        ({"type": "regex", "pattern": "(" * 900 + ")" * 900}, "not a valid regular expression"),
        ({"type": "regex", "pattern": "x" * 2_001}, "at most 2000"),
        ({"type": "regex", "pattern": "x", "flags": "g"}, "pattern"),
        ({"type": "numeric", "expected": "42"}, "must be a number"),
        ({"type": "numeric", "expected": True}, "must be a number"),
        ({"type": "numeric", "expected": float("nan")}, "must be a number"),
        ({"type": "numeric", "expected": 10**400}, "too large"),
        ({"type": "numeric", "expected": 1, "abs_tolerance": -1}, "greater than or equal"),
        ({"type": "json"}, "needs `expected` or `json_schema`"),
        ({"type": "json", "expected": 1, "json_schema": {}}, "not both"),
        ({"type": "json", "json_schema": {"type": "objct"}}, r"not a valid JSON Schema at \$\.type"),
        ({"type": "json", "json_schema": [1]}, "must be a JSON object"),
        (
            {"type": "json", "json_schema": {"$ref": "https://example.org/s.json"}},
            "only references inside it",
        ),
        (
            {"type": "json", "json_schema": {"properties": {"a": {"pattern": "("}}}},
            r"a\.pattern: '\(' is not",
        ),
        ({"type": "command", "command": "  "}, "needs `command`"),
        ({"type": "command", "command": "x", "files": {"/abs": ""}}, "path"),
        ({"type": "command", "command": "x", "timeout_s": 0}, "greater than 0"),
        ({"type": "command", "command": "x", "timeout_s": 3_601}, "less than or equal to 3600"),
    ],
)
def test_a_bad_grader_is_refused_when_it_is_written(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        GraderSpec.model_validate(fields)


def test_the_schema_of_a_grader_is_flat() -> None:
    text = json.dumps(GraderSpec.model_json_schema())
    assert "$ref" not in text
    assert "anyOf" not in text


def test_the_content_of_a_grader_builds_the_same_grader() -> None:
    for grader in (
        spec("json", expected=None),
        spec("json", json_schema={"type": "null"}, path="a"),
        spec("command", command="x", files={"a": "b"}),
        spec("numeric", expected=1, rel_tolerance=0.1),
    ):
        again = GraderSpec.model_validate(json.loads(json.dumps(grader.content())))
        assert again.content() == grader.content()
