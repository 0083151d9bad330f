"""The example's harness against its stand-in model: real processes, a real socket, no runner in between."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "library-qa"
sys.path.insert(0, str(EXAMPLE))

import model_server  # noqa: E402 - the example is a folder of scripts, not a package
import reading  # noqa: E402
from harness_history import History, make_history  # noqa: E402
from make_cases import build_cases  # noqa: E402
from questions import Kind, Question  # noqa: E402
from variants import Model, build_variants  # noqa: E402

SEED = 7
NOWHERE = Model("http://127.0.0.1:1/v1")


@dataclass(frozen=True)
class Run:
    """What one harness process left behind."""

    case: Mapping[str, Any]
    exit_code: int
    answer: str | None
    metrics: Mapping[str, Any]
    log: str

    @property
    def cost_usd(self) -> float:
        usage = self.metrics["usage"]
        micro_usd: float = NOWHERE.usd_per_million_input * sum(use["input_tokens"] for use in usage)
        micro_usd += NOWHERE.usd_per_million_output * sum(use["output_tokens"] for use in usage)
        return micro_usd / 1e6

    @property
    def right(self) -> bool:
        grader = self.case["graders"][0]
        expected, answer = grader["expected"], self.answer or ""
        if grader["type"] == "contains":
            return expected in answer
        if grader["type"] == "exact":
            return bool(answer.strip() == expected)
        try:
            return bool(json.loads(answer) == expected)
        except ValueError:
            return False


@pytest.fixture(scope="module")
def server() -> Iterator[model_server.ModelServer]:
    with model_server.ModelServer() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return make_history(tmp_path_factory.mktemp("history") / "library-qa")


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    return build_cases()


@pytest.fixture(scope="module")
def sources(history: History, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source of each variant: its commit with its patch on top."""
    folder = tmp_path_factory.mktemp("sources")
    found = {}
    for variant in build_variants(history, NOWHERE):
        source = found[variant["name"]] = folder / variant["name"]
        git("clone", "--quiet", str(history.repo), str(source), cwd=folder)
        git("checkout", "--quiet", variant["commit"], cwd=source)
        if "patch" in variant:
            git("apply", "-", cwd=source, sent=variant["patch"])
    return found


@pytest.fixture(scope="module")
def runs(
    server: model_server.ModelServer,
    history: History,
    sources: dict[str, Path],
    cases: list[dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[Run]]:
    """Every variant on a package and a module of each kind of question."""
    chosen: dict[tuple[str, ...], dict[str, Any]] = {}
    for case in cases:
        chosen.setdefault(tuple(case["tags"]), case)
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    with ThreadPoolExecutor(2) as pool:
        for variant in build_variants(history, Model(server.base_url)):
            name = variant["name"]
            variant["params"]["seed"] = SEED

            def run_case(case: Mapping[str, Any], variant: Mapping[str, Any] = variant) -> Run:
                place = folder / variant["name"] / case["id"]
                return run(variant, sources[variant["name"]], case, place)

            few = 4 if name == "burner" else None  # each of them takes many calls
            found[name] = list(pool.map(run_case, list(chosen.values())[:few]))
    return found


def git(*arguments: str, cwd: Path, sent: str | None = None) -> None:
    subprocess.run(["git", *arguments], cwd=cwd, input=sent, check=True, text=True)


def environment(
    variant: Mapping[str, Any],
    case: Mapping[str, Any],
    place: Path,
    allowance_usd: float = NOWHERE.allowance_usd,
) -> dict[str, str]:
    """What a runner would set, with the files it points to."""
    (place / "case").mkdir(parents=True)
    (place / "out").mkdir()
    (place / "case" / "input.txt").write_text(case["input"], encoding="utf-8")
    (place / "params.json").write_text(json.dumps(variant["params"]), encoding="utf-8")
    return {
        "PATH": os.environ["PATH"],
        "EVALPURSE_CASE": str(place / "case"),
        "EVALPURSE_OUT": str(place / "out"),
        "EVALPURSE_PARAMS": str(place / "params.json"),
        "EVALPURSE_ALLOWANCE_USD": str(allowance_usd),
        "EVALPURSE_DEADLINE": (datetime.now(UTC) + timedelta(seconds=60)).isoformat(),
        "OPENAI_API_KEY": "a-key-for-tests",
        **variant["env"],
    }


def run(
    variant: Mapping[str, Any],
    source: Path,
    case: Mapping[str, Any],
    place: Path,
    allowance_usd: float = NOWHERE.allowance_usd,
) -> Run:
    done = subprocess.run(
        ["sh", "-c", variant["run"]],
        cwd=source,
        env=environment(variant, case, place, allowance_usd),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    answer = place / "out" / "answer.txt"
    return Run(
        case=case,
        exit_code=done.returncode,
        answer=answer.read_text(encoding="utf-8") if answer.exists() else None,
        metrics=json.loads((place / "out" / "metrics.json").read_text(encoding="utf-8")),
        log=done.stderr,
    )


def score(runs: list[Run]) -> float:
    return sum(run.right for run in runs) / len(runs)


def cost_usd(runs: list[Run]) -> float:
    return sum(run.cost_usd for run in runs) / len(runs)


def ask(question: str, context: str = "", **request: Any) -> dict[str, Any]:
    """The model's message, asked in process."""
    messages = [{"role": "user", "content": f"{context}\n\nQuestion: {question}"}]
    message = model_server.complete({"messages": messages, **request})["choices"][0]["message"]
    assert isinstance(message, dict)
    return message


# The cases


def test_at_least_forty_eight_cases_over_thirty_modules_in_every_kind(cases: list[dict[str, Any]]) -> None:
    assert len(cases) >= 48
    assert len({case["id"] for case in cases}) == len(cases)
    assert {case["tags"][0] for case in cases} == {kind.name.lower() for kind in Kind}
    modules = {question.module for case in cases if (question := Question.parse(case["input"]))}
    assert len(modules) >= 30
    assert sum("package" in case["tags"] for case in cases) >= 8


def test_cases_are_the_same_each_time_they_are_computed(cases: list[dict[str, Any]]) -> None:
    assert build_cases() == cases


def test_a_question_is_read_back_as_it_was_asked() -> None:
    for kind in Kind:
        detail = "indent" if kind is Kind.DEFAULT else ""
        question = Question(kind, "json.decoder", "scan", detail)
        assert Question.parse(f"=== a file ===\n\nQuestion: {question.text}") == question


# The history


def test_the_history_has_the_same_commit_ids_wherever_it_is_made(history: History, tmp_path: Path) -> None:
    again = make_history(tmp_path / "elsewhere")
    assert (again.whole_files, again.windows, again.outlines, again.recheck) == (
        history.whole_files,
        history.windows,
        history.outlines,
        history.recheck,
    )


def test_a_way_to_answer_appears_with_its_commit_and_not_before(sources: dict[str, Path]) -> None:
    strategies = {
        name: {file.stem for file in source.rglob("strategies/*.py")} for name, source in sources.items()
    }
    assert strategies["baseline"] == {"__init__", "whole_files"}
    assert strategies["windows"] == strategies["baseline"] | {"tool_windows"}
    assert strategies["burner"] == strategies["windows"] | {"outlines", "recheck"}


# The model


def test_the_model_answers_no_case_without_context(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        assert ask(case["input"])["content"] == model_server.DONT_KNOW


def test_the_model_answers_from_the_right_file_only() -> None:
    question = "How many parameters does the function 'f' in the module 'a.b' take? Answer as a number."
    lines = "lines 1-1 of 1 ===\ndef f(x, y): pass"
    assert ask(question, f"=== a/b.py {lines}")["content"] == "2"
    assert ask(question, f"=== a/b/__init__.py {lines}")["content"] == "2"
    assert ask(question, f"=== a/c.py {lines}")["content"] == model_server.DONT_KNOW


def test_the_model_is_wrong_when_a_signature_was_cut() -> None:
    question = "How many parameters does the function 'f' in the module 'm' take? Answer as a number."
    whole = "=== m.py lines 1-2 of 2 ===\ndef f(first, second,\n      third=3): pass"
    cut = "=== m.py lines 1-2 of 2 ===\ndef f(first, second,\ndef g(x):"
    assert ask(question, whole)["content"] == "3"
    assert ask(question, cut)["content"] == "2"


def test_the_model_asks_for_a_tool_when_one_is_offered_and_the_context_does_not_tell() -> None:
    question = "Which exception does the function 'f' in the module 'm' raise? Answer with its name."
    offered: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "search_files"}}]}
    message = ask(question, **offered)
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["name"] == "search_files"
    assert ask(question, **offered, tool_choice="none")["content"] == model_server.DONT_KNOW


def test_the_model_reads_on_when_a_window_ends_before_the_function() -> None:
    question = Question(Kind.RAISES, "m", "f")
    shown = reading.snippets("=== m.py lines 1-2 of 9 ===\ndef f():\n    x = 1")
    assert reading.read(question, shown) == reading.ReadOn("m.py", 3)


def test_neighbouring_windows_are_read_as_one() -> None:
    question = Question(Kind.RAISES, "m", "f")
    windows = [
        "=== m.py lines 3-4 of 9 ===\n    y = 2\n    raise KeyError(y)",
        "=== m.py lines 1-3 of 9 ===\ndef f():\n    x = 1\n    y = 2",
    ]
    found = reading.read(question, reading.snippets("\n\n".join(windows)))
    assert isinstance(found, reading.Found)
    assert found.answer == "KeyError"


def test_the_same_request_gets_the_same_reply_and_another_seed_may_not() -> None:
    question = "What is the value of the constant 'K' in the module 'm'? Answer as a Python literal."
    padding = ["# nothing to see here, at all"] * 2_000
    lines = [*padding, "K = 17", *padding]
    context = "\n".join([f"=== m.py lines 1-{len(lines)} of {len(lines)} ===", *lines])
    replies = [ask(question, context, seed=seed)["content"] for seed in range(60)]
    assert replies == [ask(question, context, seed=seed)["content"] for seed in range(60)]
    assert set(replies) == {"17", model_server.DONT_KNOW}
    assert {
        ask(question, "=== m.py lines 1-1 of 1 ===\nK = 17", seed=seed)["content"] for seed in range(60)
    } == {"17"}


def test_a_request_that_makes_no_sense_is_refused_with_the_reason() -> None:
    with pytest.raises(model_server.BadRequestError, match="messages"):
        model_server.complete({"messages": []})
    with pytest.raises(model_server.BadRequestError, match="content"):
        model_server.complete({"messages": [{"role": "user", "content": [1]}]})


# The variants


def test_the_baseline_answers_most_questions_from_whole_files(runs: dict[str, list[Run]]) -> None:
    assert {run.exit_code for run in runs["baseline"]} == {0}
    assert score(runs["baseline"]) >= 0.7


def test_windows_are_as_good_as_whole_files_and_cost_less_than_a_quarter(runs: dict[str, list[Run]]) -> None:
    assert score(runs["windows"]) >= score(runs["baseline"])
    assert cost_usd(runs["windows"]) < cost_usd(runs["baseline"]) / 4
    assert all(run.metrics["tool_calls"] >= 1 for run in runs["windows"])


def test_compacting_too_hard_is_cheaper_and_worse(runs: dict[str, list[Run]]) -> None:
    assert cost_usd(runs["compact"]) < cost_usd(runs["baseline"]) / 4
    assert score(runs["compact"]) <= score(runs["baseline"]) - 0.2


def test_the_crashy_variant_crashes_on_packages_and_only_there(runs: dict[str, list[Run]]) -> None:
    for run in runs["crashy"]:
        is_package = "package" in run.case["tags"]
        assert run.exit_code == (1 if is_package else 0)
        assert ("KeyError" in run.log) == is_package
        assert run.metrics["usage"], "what was spent before the crash is reported"


def test_the_burner_stops_inside_its_allowance_without_an_answer(runs: dict[str, list[Run]]) -> None:
    for run in runs["burner"]:
        assert run.exit_code == 0
        assert run.metrics["over_allowance"] is True
        assert run.answer is None
        assert NOWHERE.allowance_usd / 8 < run.cost_usd <= NOWHERE.allowance_usd


def test_no_run_spends_more_than_its_allowance(runs: dict[str, list[Run]]) -> None:
    assert all(run.cost_usd <= NOWHERE.allowance_usd for found in runs.values() for run in found)


# The harness at its limits


def test_a_run_without_allowance_calls_no_model(
    history: History, sources: dict[str, Path], cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    baseline = build_variants(history, NOWHERE)[0]
    done = run(baseline, sources["baseline"], cases[0], tmp_path, allowance_usd=0)
    assert done.exit_code == 0, done.log
    assert done.metrics["over_allowance"] is True
    assert done.metrics["usage"] == []


def test_a_run_that_is_killed_in_a_call_has_reported_all_that_the_call_may_cost(
    history: History, sources: dict[str, Path], cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        baseline = build_variants(history, Model(f"http://127.0.0.1:{silent.getsockname()[1]}/v1"))[0]
        with subprocess.Popen(
            ["sh", "-c", baseline["run"]],
            cwd=sources["baseline"],
            env=environment(baseline, cases[0], tmp_path),
        ) as harness:
            connection, _ = silent.accept()
            with connection, connection.makefile("rb") as sent:
                headers = dict(line.split(b": ", 1) for line in iter(sent.readline, b"\r\n") if b": " in line)
                harness.kill()
    usage = json.loads((tmp_path / "out" / "metrics.json").read_text(encoding="utf-8"))["usage"]
    assert usage[0]["requests"] == 1
    assert usage[0]["input_tokens"] >= int(headers[b"Content-Length"])


class FailsOnce(model_server.Handler):
    """Answers 503 to the first request."""

    failed = False

    def do_POST(self) -> None:  # noqa: N802 - the base class names it so
        if FailsOnce.failed:
            super().do_POST()
            return
        FailsOnce.failed = True
        self.rfile.read(int(self.headers["Content-Length"]))
        self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "overloaded")


def test_a_call_that_the_provider_could_not_take_is_tried_again_and_counted_once(
    history: History,
    sources: dict[str, Path],
    cases: list[dict[str, Any]],
    server: model_server.ModelServer,
    tmp_path: Path,
) -> None:
    server.RequestHandlerClass = FailsOnce
    baseline = build_variants(history, Model(server.base_url))[0]
    done = run(baseline, sources["baseline"], cases[0], tmp_path)
    assert FailsOnce.failed
    assert done.exit_code == 0, done.log
    assert done.metrics["usage"][0]["requests"] == 1


def test_a_missing_variable_is_named(
    history: History, sources: dict[str, Path], cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    baseline = build_variants(history, NOWHERE)[0]
    env = environment(baseline, cases[0], tmp_path)
    del env["EVALPURSE_ALLOWANCE_USD"]
    done = subprocess.run(
        ["sh", "-c", baseline["run"]],
        cwd=sources["baseline"],
        env=env,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "EVALPURSE_ALLOWANCE_USD" in done.stderr


def test_a_tool_call_cannot_leave_the_library_and_is_told_so(sources: dict[str, Path]) -> None:
    program = (
        "from library_qa.library import Library\n"
        "from library_qa.tools import ToolBox, ToolCall\n"
        "box = ToolBox(Library.of_this_interpreter(), '', hits_max=5, radius_max=5)\n"
        "def say(name, **arguments): print(box.carry_out(ToolCall('1', name, arguments)))\n"
        "say('read_window', path='../../../etc/passwd', line=1, radius=1)\n"
        "say('search_files', pattern='(')\n"
        "say('delete_everything')\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=sources["windows"],
        env={"PYTHONPATH": str(sources["windows"])},
        check=True,
        capture_output=True,
        text=True,
    )
    outside, malformed, unknown = done.stdout.splitlines()
    assert "no file" in outside
    assert "not a regular expression" in malformed
    assert "search_files, read_window" in unknown


# The demo


def test_the_demo_tells_the_variants_apart_and_stops_inside_a_purse_that_is_too_small() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "demo.py"), "--cases", "8", "--repeats", "1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    table = {line.split()[0]: line for line in said.splitlines() if line[:1].isalpha()}
    assert "8 scored" in table["baseline"]
    assert "8 over_allowance" in table["burner"]
    assert "agent_error" in table["crashy"]
    assert "Why does 'crashy' crash?" in said
    assert "KeyError" in said
    first, second = said.split("== Act two")
    assert "unfunded" not in first
    assert "unfunded" in second
    assert "exceeds_limit" in second
    for act in (first, second):
        limit, spent, held = (float(text.lstrip("$")) for text in ledger_line(act).split()[1:])
        assert held == 0
        assert 0 < spent <= limit
        assert ") agrees with the balances" in act


def ledger_line(said: str) -> str:
    return next(line for line in said.splitlines() if line.startswith("workspace "))
