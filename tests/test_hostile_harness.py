"""Harnesses and graders that mean harm, through the tools and real sandboxes.

Each is bounded by its own program too, so that a limit that does not hold fails a test and not the machine.
"""

from __future__ import annotations

import base64
import json
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from evalpurse.store.database import Store
from tests.hostile_lab import ALLOWANCE_USD, ANSWER_42, Lab, open_lab
from tests.sandbox_kit import ISOLATIONS, MIB

pytestmark = pytest.mark.anyio

ANSWER = 'printf 42 > "$EVALPURSE_OUT/answer.txt"'
SECRET = "correct horse/battery+staple"  # noqa: S105 (nobody's)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=ISOLATIONS)
async def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """Everything that depends on what keeps sandboxes apart, with and without bubblewrap."""
    async with open_lab(tmp_path_factory.mktemp("hostile"), request.param) as lab:
        yield lab


@pytest.fixture(scope="module")
async def auto(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """Everything else, once."""
    async with open_lab(tmp_path_factory.mktemp("hostile"), "auto") as lab:
        yield lab


@pytest.fixture
def tighten(lab: Lab) -> Iterator[dict[str, int]]:
    """Limits of the sandboxes made during one test."""
    lab.backend.tighter.clear()
    yield lab.backend.tighter
    lab.backend.tighter.clear()


# Processes, time, memory, disk.


async def test_children_that_a_harness_leaves_behind_are_ended_and_its_answer_counts(lab: Lab) -> None:
    leave = "for n in 1 2 3 4 5; do sleep 60 & done; (setsid sleep 60 &); (trap '' TERM HUP; sleep 60 &)"
    [run] = await lab.attack(f"{leave}; {ANSWER}")
    assert (run["outcome"], run["score"]) == ("scored", 1.0)


async def test_a_harness_with_too_many_processes_is_ended(lab: Lab, tighten: dict[str, int]) -> None:
    tighten["processes"] = 10
    [run] = await lab.attack(f"{ANSWER}; for n in $(seq 40); do sleep 30 & done; sleep 30")
    assert (run["outcome"], run["score"]) == ("agent_error", 0.0)
    assert "processes; 10 are allowed" in run["error"]


async def test_a_harness_that_ignores_sigterm_is_ended_at_its_deadline(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalpurse.runs.sandboxes.local_sandbox.GRACE_S", 0.1)
    stubborn = f"trap '' TERM INT HUP; {ANSWER}; for n in $(seq 300); do sleep 0.1; done"
    [run] = await lab.attack(stubborn, timeout_s=1)
    assert (run["outcome"], run["score"]) == ("timeout", 0.0)
    assert "deadline, 1 s" in run["error"]


async def test_a_harness_that_fills_its_disk_is_ended(lab: Lab, tighten: dict[str, int]) -> None:
    tighten["disk_bytes"] = 4 * MIB
    large = f"{ANSWER}; head -c 40000000 /dev/zero > big"
    many = f"{ANSWER}; for n in $(seq 200); do head -c 100000 /dev/zero > file$n; done; sleep 30"
    for run in await lab.attack(large, many):
        assert (run["outcome"], run["score"]) == ("agent_error", 0.0)
        assert "4194304" in run["error"]


async def test_a_harness_that_takes_too_much_memory_is_ended(lab: Lab, tighten: dict[str, int]) -> None:
    tighten["memory_bytes"] = 64 * MIB
    [run] = await lab.attack(f"{ANSWER}; x=$(head -c 150000000 /dev/zero | tr '\\0' 'x'); sleep 5")
    assert (run["outcome"], run["score"]) == ("agent_error", 0.0)
    assert "67108864" in run["error"]


# Other runs, the machine, itself.


async def test_a_harness_cannot_change_another_run_or_the_home_where_it_is_jailed(lab: Lab) -> None:
    statement = lab.backend.isolation_statement
    if statement.startswith("No isolation"):
        assert "can read and write whatever this user can" in statement
        return
    home = lab.desk.services.home
    vandal = (
        f'for d in ../.. "{home.path}"; do for f in $(find "$d" -name answer.txt -o -name "*.sqlite" '
        '-o -name "*.duckdb" -o -name SERVICE_KEY 2>&1); do echo 42 > "$f"; cat "$f"; done; done; '
        f'touch ../../evil "{home.path}/evil" "{home.work}/evil"; rm -rf ../../*/out; '
        f'ls -a "{home.path}" "{home.work}"; printf 41 > "$EVALPURSE_OUT/answer.txt"'
    )
    victim = 'printf 40 > "$EVALPURSE_OUT/answer.txt"; sleep 0.7; cat "$EVALPURSE_OUT/answer.txt"'
    before = sorted(path.name for path in home.path.iterdir())
    attacker, spared = await lab.attack(vandal, victim)
    assert (spared["outcome"], spared["text"], spared["score"]) == ("scored", "40", 0.0)
    assert (attacker["outcome"], attacker["score"]) == ("scored", 0.0)
    assert SECRET not in attacker["text"]
    assert "ledger.sqlite" not in attacker["text"]
    assert sorted(path.name for path in home.path.iterdir()) == before
    assert (await lab.desk.services.ledger.verify()).clean


async def test_a_harness_that_destroys_its_own_sandbox_ends_as_one_run_all_the_same(lab: Lab) -> None:
    destroy = f'{ANSWER}; rm -rf "$EVALPURSE_OUT" "$EVALPURSE_CASE" "$PWD" .. 2>/dev/null; true'
    [run] = await lab.attack(destroy)
    # Jailed it cannot reach its own folder's end, and has only thrown its answer away.
    assert (run["outcome"], run["score"]) in (("scored", 0.0), ("infra_error", None))
    assert run["outcome"] == "scored" or "disappeared" in run["error"]


async def test_what_a_harness_puts_in_place_of_its_output_is_never_followed_or_waited_for(lab: Lab) -> None:
    secrets = lab.desk.services.home.secrets
    (secrets / "SERVICE_KEY").write_text(SECRET, encoding="utf-8")
    attempts = (
        f'ln -s "{secrets}/SERVICE_KEY" "$EVALPURSE_OUT/answer.txt"',
        'mkfifo "$EVALPURSE_OUT/answer.txt" "$EVALPURSE_OUT/metrics.json" "$EVALPURSE_OUT/transcript.jsonl"',
        'mkdir "$EVALPURSE_OUT/answer.txt"; ln -s /etc "$EVALPURSE_OUT/artifacts"',
        f'rm -rf "$EVALPURSE_OUT"; ln -s "{secrets}" "$EVALPURSE_OUT"; true',
    )
    for run in await lab.attack(*attempts):
        assert (run["outcome"], run["score"]) == ("scored", 0.0)
        assert await lab.read(run, "answer") == ""


# What a harness says.


async def test_outputs_of_200_megabytes_are_cut_and_read_page_by_page(auto: Lab) -> None:
    flood = (
        'head -c 200000000 /dev/zero | tee "$EVALPURSE_OUT/answer.txt"; echo the end; '
        'cd "$EVALPURSE_OUT"; mkdir artifacts; echo small > artifacts/small; '
        "for f in transcript.jsonl artifacts/large; do "
        "dd if=/dev/zero of=$f bs=1 count=0 seek=200000000 2> dd.log; done"
    )
    [run] = await auto.attack(flood)
    assert (run["outcome"], run["score"]) == ("scored", 0.0)
    assert 8 * MIB - 4096 < run["total_bytes"] <= 8 * MIB
    last = await auto.desk.call("read_run", run_id=run["run_id"], offset=run["total_bytes"] - 100)
    assert last["text"].endswith("the end\n")
    for part, size in (("answer", 4 * MIB), ("transcript", 32 * MIB)):
        page = await auto.desk.call("read_run", run_id=run["run_id"], part=part)
        assert (page["total_bytes"], page["truncated"]) == (size, True)


async def test_binary_output_is_kept_and_shown_without_breaking_a_page(auto: Lab) -> None:
    noise = "head -c 40000 /dev/urandom"
    binary = (
        f'{noise}; {noise} > "$EVALPURSE_OUT/answer.txt"; {noise} > "$EVALPURSE_OUT/transcript.jsonl"; '
        f'{noise} > "$EVALPURSE_OUT/metrics.json"'
    )
    [run] = await auto.attack(binary, allowance_usd=ALLOWANCE_USD)
    assert (run["outcome"], run["score"]) == ("scored", 0.0)
    assert run["total_bytes"] == 40_000
    assert (run["cost_usd"], run["cost_source"]) == (ALLOWANCE_USD, "assumed")
    for part in ("log", "answer", "transcript"):
        assert len(await auto.read(run, part)) > 20_000


async def test_a_secret_is_taken_out_of_everything_that_a_harness_or_a_grader_says(lab: Lab) -> None:
    home = lab.desk.services.home
    (home.secrets / "SERVICE_KEY").write_text(SECRET + "\n", encoding="utf-8")
    encoded = base64.b64encode(SECRET.encode()).decode()
    quoted = urllib.parse.quote(SECRET, safe="")
    leak = (
        "import base64, json, os, urllib.parse\n"
        "key, out = os.environ['SERVICE_KEY'], os.environ['EVALPURSE_OUT'] + '/'\n"
        "forms = [key, base64.b64encode(key.encode()).decode(), urllib.parse.quote(key, safe='')]\n"
        "text = '\\n'.join([*forms, *(f'prefix{form}suffix' for form in forms), json.dumps(key)])\n"
        "print(text)\n"
        "open(out + 'answer.txt', 'w').write(text)\n"
        "open(out + 'transcript.jsonl', 'w').write(json.dumps(forms))\n"
        "open(out + 'metrics.json', 'w').write(json.dumps({form: 1 for form in forms}))\n"
        "os.mkdir(out + 'artifacts')\n"
        "open(out + 'artifacts/' + forms[2], 'w').write(text)\n"
    )
    grader = {"type": "command", "command": 'cat "$EVALPURSE_OUT"/answer.txt; kill -9 $$'}
    cases: list[dict[str, Any]] = [
        {"id": "harness", "input": leak, "graders": [ANSWER_42]},
        {"id": "witness", "input": leak, "graders": [grader]},
    ]
    command = 'python3 "$EVALPURSE_CASE/input.txt"'
    for run in await lab.attack(command, cases=cases, secrets=["SERVICE_KEY"]):
        texts = [run["error"], json.dumps(run["scores"])]
        texts += [await lab.read(run, part) for part in ("log", "answer", "transcript")]
        rows = await lab.desk.services.store.fetch("run_by_id", run_id=run["run_id"])
        artifacts = lab.desk.services.store.blobs.get(rows[0]["artifacts_blob"])
        for text in (*texts, artifacts.decode(errors="replace")):
            for form in (SECRET, encoded, quoted):
                assert form not in text
        assert texts[2].count("[secret SERVICE_KEY]") == 7
        assert run["outcome"] == ("scored" if run["case_id"] == "harness" else "grader_error")
        assert ("[secret SERVICE_KEY]" in run["error"]) == (run["outcome"] == "grader_error")
    for path in home.path.rglob("*"):
        if path.is_file() and path.parent != home.secrets:
            content = path.read_bytes()
            assert not any(form.encode() in content for form in (SECRET, encoded, quoted)), path.name


METRICS = {
    "empty": ("", "not JSON"),
    "garbage": ("{'steps': 3", "not JSON"),
    "list": ("[1, 2]", "not a JSON object"),
    "deep": ("[" * 100_000, "not JSON"),
    "huge": ('{"a": "' + "x" * 1_100_000 + '"}', "more than the 1,048,576 bytes"),
    "no-usage": ('{"steps": 3}', "no usage was reported"),
    "usage-of-nothing": ('{"usage": null}', "must be a list"),
    "negative": ('{"usage": [{"model": "toy-model", "input_tokens": -5, "output_tokens": 1}]}', "is -5"),
    "nan": ('{"usage": [{"model": "toy-model", "input_tokens": NaN, "output_tokens": 1}]}', "is nan"),
    "true": ('{"usage": [{"model": "toy-model", "input_tokens": true, "output_tokens": 1}]}', "is True"),
    "too-many": ('{"usage": [{"model": "toy-model", "input_tokens": 1e40, "output_tokens": 1}]}', "1e+40"),
    "unknown-model": ('{"usage": [{"model": "gpt-99", "input_tokens": 5, "output_tokens": 1}]}', "gpt-99"),
    "strange-field": ('{"usage": [{"model": "toy-model", "cost": 0}]}', "'cost'"),
    "surrogate": ('{"usage": [{"model": "\\ud800", "input_tokens": 5, "output_tokens": 1}]}', "price"),
    "free-lunch": ('{"usage": [], "over_allowance": "no"}', "over_allowance is 'no'"),
}


async def test_a_usage_report_that_is_no_bill_costs_the_whole_allowance_and_says_why(auto: Lab) -> None:
    cases = [
        {"id": name, "input": text or "EMPTY", "graders": [ANSWER_42]} for name, (text, _) in METRICS.items()
    ]
    copy = f'cd "$EVALPURSE_OUT"; grep -v EMPTY "$EVALPURSE_CASE/input.txt" > metrics.json; {ANSWER}'
    runs = await auto.attack(copy, cases=cases, allowance_usd=ALLOWANCE_USD)
    assert len(runs) == len(METRICS)
    for run in runs:
        assert (run["outcome"], run["score"]) == ("scored", 1.0)
        assert (run["cost_usd"], run["cost_source"]) == (ALLOWANCE_USD, "assumed")
        [attempt] = run["attempts"]
        assert METRICS[run["case_id"]][1] in attempt["detail"], attempt["detail"]
        assert "$0.01" in attempt["detail"]


async def test_numbers_that_are_none_are_left_out_of_the_scores(auto: Lab) -> None:
    metrics = (
        '{"fine": 2.5, "nan": NaN, "infinite": Infinity, "huge": 1e999, "long": '
        + "9" * 400
        + ', "text": "3", "yes": true, "": 1, "\\ud800": 1, "\\u0000": 1, "'
        + "n" * 100
        + '": 1, "usage": []}'
    )
    [run] = await auto.attack(
        f'cp "$EVALPURSE_CASE/input.txt" "$EVALPURSE_OUT/metrics.json"; {ANSWER}',
        cases=[{"id": "case", "input": metrics, "graders": [ANSWER_42]}],
        allowance_usd=ALLOWANCE_USD,
    )
    assert {score["name"]: score["value"] for score in run["scores"]} == {"score": 1.0, "fine": 2.5}
    assert (run["cost_usd"], run["cost_source"]) == (0, "reported")


async def test_usage_above_the_allowance_is_charged_in_full_and_stops_everything(tmp_path: Path) -> None:
    usage = '{"usage": [{"model": "toy-model", "input_tokens": 20000, "output_tokens": 0}]}'
    async with open_lab(tmp_path, "auto") as lab:
        [run] = await lab.attack(
            f'cp "$EVALPURSE_CASE/input.txt" "$EVALPURSE_OUT/metrics.json"; {ANSWER}',
            cases=[{"id": "case", "input": usage, "graders": [ANSWER_42]}],
            allowance_usd=ALLOWANCE_USD,
        )
        assert (run["outcome"], run["score"], run["cost_usd"]) == ("over_allowance", 0.0, 0.02)
        assert "model calls for $0.02; its allowance was $0.01" in run["attempts"][0]["detail"]
        shown = await lab.desk.call("budget_status")
        assert shown["workspace"]["state"] == "frozen"
        assert shown["workspace"]["overrun_usd"] == 0.01
        refused = await lab.desk.refuse(
            "launch_experiment",
            suite="s0",
            variants=["v0-0"],
            cap_usd=1,
            allowance_usd=0.01,
            idempotency_key="after",
            reuse=False,
        )
        assert "frozen" in refused.text


async def test_a_model_without_price_is_never_free(auto: Lab) -> None:
    usage = '{"usage": [{"model": "gpt-99", "input_tokens": 5, "output_tokens": 1}]}'
    cases = [{"id": f"case-{n}", "input": usage, "graders": [ANSWER_42]} for n in range(8)]
    copy = f'cp "$EVALPURSE_CASE/input.txt" "$EVALPURSE_OUT/metrics.json"; {ANSWER}'
    runs = await auto.attack(copy, cases=cases, allowance_usd=0)
    outcomes = {run["outcome"] for run in runs}
    assert outcomes == {"over_allowance", "unfunded"}, "nobody allowed it to call any model"
    for run in runs:
        if run["attempts"]:
            assert "gpt-99" in run["attempts"][0]["detail"], run
    shown = await auto.desk.call("budget_status")
    assert shown["workspace"]["state"] == "open", "only the experiment is stopped"


# Graders.

REWARDS = {
    "nothing-in-it": (": > reward.json", "not JSON"),
    "garbage": ("echo '{' > reward.json", "not JSON"),
    "binary": ("head -c 500 /dev/urandom > reward.json", "reward.json"),
    "deep": ("head -c 200000 /dev/zero | tr '\\0' '[' > reward.json", "not JSON"),
    "huge": ("echo '{\"reward\":' > reward.json; head -c 5000000 /dev/zero >> reward.json", "reward.json"),
    "nan": ("echo NaN > reward.json", "nan, not a finite number"),
    "infinite": ("echo '{\"reward\": 1e999}' > reward.json", "inf, not a finite number"),
    "above": ("echo '{\"reward\": 1.5}' > reward.json", "1.5; a score must be from 0 to 1"),
    "below": ("echo -0.1 > reward.txt", "-0.1; a score must be from 0 to 1"),
    "words": ("echo 'very good' > reward.txt", "'very good'"),
    "two-numbers": ('echo \'{"a": 1, "b": 0}\' > reward.json', "name the one that is the score"),
    "truth": ("echo true > reward.json", "'True', not a number"),
    "killed": ("kill -9 $$", "signal 9"),
    "missing-program": ("no-such-program-here", "not installed"),
}


async def test_a_grader_that_gives_no_score_is_its_own_failure_and_says_which(auto: Lab) -> None:
    cases = [
        {"id": name, "input": "x", "graders": [ANSWER_42, {"type": "command", "command": command}]}
        for name, (command, _) in REWARDS.items()
    ]
    runs = await auto.attack(ANSWER, cases=cases)
    assert len(runs) == len(REWARDS)
    for run in runs:
        assert (run["outcome"], run["counted"], run.get("score")) == ("grader_error", False, None)
        assert REWARDS[run["case_id"]][1] in run["error"], run["error"]
        assert f"'command' (command) of case '{run['case_id']}'" in run["error"]
        assert "create_cases(replace=true)" in run["error"]


async def test_graders_that_never_end_are_ended_with_all_they_started(lab: Lab) -> None:
    hanging = "trap '' TERM; sleep 60 & (setsid sleep 60 &) ; echo still thinking; while :; do sleep 1; done"
    cases: list[dict[str, Any]] = [
        {"id": "hang", "input": "x", "graders": [{"type": "command", "command": hanging, "timeout_s": 0.5}]},
        {"id": "regex", "input": "x", "graders": [{"type": "regex", "pattern": "(a+)+$"}]},
    ]
    slow = (
        "yes a | head -n 40 | tr -d '\\n' > answer; echo b >> answer; mv answer \"$EVALPURSE_OUT/answer.txt\""
    )
    hang, regex = await lab.attack(slow, cases=cases)
    assert hang["outcome"] == regex["outcome"] == "grader_error"
    assert "did not end within 0.5 s" in hang["error"]
    assert "still thinking" in hang["error"]
    assert "processor time" in regex["error"]


async def test_a_grader_cannot_be_fed_by_what_a_harness_left_for_it(lab: Lab) -> None:
    plant = (
        f"{ANSWER}; for name in reward.json reward.txt; do echo 1 > $name; "
        'echo 1 > "$EVALPURSE_OUT/$name"; echo 1 > "$HOME/$name"; done; '
        'for f in .profile .bashrc; do echo "echo 1 > reward.txt" > "$HOME/$f"; done'
    )
    strict = {
        "type": "command",
        "command": "test -e truth && ! ls reward* && exit 1",
        "files": {"truth": "x"},
    }
    [run] = await lab.attack(plant, cases=[{"id": "case", "input": "x", "graders": [strict]}])
    assert (run["outcome"], run["score"]) == ("scored", 0.0)


async def test_answers_made_to_break_a_grader_are_wrong_and_no_more(auto: Lab) -> None:
    answers: dict[str, tuple[str, dict[str, Any]]] = {
        "deep": ("[" * 200_000, {"type": "json", "expected": {"a": 1}}),
        "deep-schema": ('{"a":' * 90 + "1" + "}" * 90, {"type": "json", "json_schema": {"type": "array"}}),
        "digits": ("9" * 3_000_000, {"type": "numeric", "expected": 9}),
        "commas": ("1" + ",111" * 500_000 + "1", {"type": "numeric", "expected": 9}),
        "exponent": ("1e999999999999", {"type": "numeric", "expected": 9}),
        "nan": ("NaN", {"type": "numeric", "expected": 9}),
        "constant": ('{"a": NaN}', {"type": "json", "expected": {"a": 1}}),
        "long-integer": ("1" * 100_000, {"type": "json", "expected": 1}),
        "nul": ("42\0", {"type": "exact", "expected": "42"}),
        "wide": ("\u0130" * 1_000_000, {"type": "contains", "expected": "x", "ignore_case": True}),
    }
    cases = [{"id": name, "input": text, "graders": [spec]} for name, (text, spec) in answers.items()]
    runs = await auto.attack('cp "$EVALPURSE_CASE/input.txt" "$EVALPURSE_OUT/answer.txt"', cases=cases)
    assert [(run["case_id"], run["outcome"], run["score"]) for run in runs] == [
        (name, "scored", 0.0) for name in sorted(answers)
    ]


# What does not even start.


async def test_a_harness_that_cannot_be_set_up_or_started_costs_nothing_and_says_why(auto: Lab) -> None:
    [broken] = await auto.attack(ANSWER, setup=["echo no compiler here; exit 3"])
    assert (broken["outcome"], broken["cost_usd"], broken["attempts"]) == ("infra_error", 0, [])
    assert "no compiler here" in broken["error"]
    missing, silent = await auto.attack("no-such-program", "exit 0")
    assert (missing["outcome"], missing["exit_code"]) == ("agent_error", 127)
    assert "not found" in missing["text"]
    assert (silent["outcome"], silent["score"]) == ("scored", 0.0)


async def test_what_hostile_harnesses_left_opens_again(tmp_path: Path) -> None:
    async with open_lab(tmp_path, "auto") as lab:
        await lab.attack(f"head -c 100000 /dev/urandom; {ANSWER}; kill -9 $$")
        home = lab.desk.services.home
        rows = await lab.desk.state()
    with anyio.fail_after(20):
        store = await Store.open(home)
        assert len(await store.fetch("experiments")) == rows.rows["experiments"] == 1
        await store.close()
