"""Calls that must be refused: for each its arguments, the error's code, and what the text must say."""

from __future__ import annotations

import json
from typing import Any

Refused = tuple[dict[str, Any], str, list[str]]

BAD = "bad_arguments"
LAUNCH: dict[str, Any] = {
    "suite": "qa",
    "variants": ["base", "new"],
    "cap_usd": 1,
    "allowance_usd": 0.01,
    "idempotency_key": "never used by a launch that is taken",
}
CASE: dict[str, Any] = {
    "id": "fresh",
    "input": "What?",
    "graders": [{"type": "exact", "expected": "42"}],
}
PATCH = """\
--- a/main.py
+++ b/main.py
@@ -1,3 +1,3 @@
 one
-two
+deux
 three
"""


def launch(**changes: Any) -> dict[str, Any]:
    return LAUNCH | changes


def cases(*changes: dict[str, Any], suite: str = "qa") -> dict[str, Any]:
    return {"suite": suite, "cases": [CASE | change for change in changes]}


def grader(**fields: Any) -> dict[str, Any]:
    return cases({"graders": [fields]})


LAUNCHES: dict[str, Refused] = {
    "unknown suite": (launch(suite="qq"), "unknown_suite", ["'qq'", "Did you mean qa?"]),
    "unknown case": (launch(case_ids=["case-00", "case-99"]), "unknown_case", ["'case-99'", "case-0"]),
    "unknown variant": (launch(variants=["base", "old"]), "unknown_variant", ["'old'", "base, new"]),
    "unknown account": (launch(account="work"), "account_not_found", ["'work'", "budget_status"]),
    "no variants": (launch(variants=[]), "bad_launch", ["variants is empty", "list_variants"]),
    "variant named twice": (launch(variants=["base", "base"]), "bad_launch", ["base more than once"]),
    "too many variants": (launch(variants=[f"v{n}" for n in range(100_000)]), "bad_launch", ["100000"]),
    "baseline not among them": (launch(baseline="other"), "bad_launch", ["'other'", "base, new"]),
    "suite without dev cases": (launch(suite="hidden"), "empty_suite", ["of 1 in all", "create_cases"]),
    "cap of zero": (launch(cap_usd=0), "bad_launch", ["cap_usd is $0.00", "above zero"]),
    "negative cap": (launch(cap_usd=-1), "invalid_amount", ["cap_usd", "-1", "negative"]),
    "cap is not a number": (launch(cap_usd="NaN"), "invalid_amount", ["cap_usd", "nan", "finite"]),
    "infinite cap": (launch(cap_usd="Infinity"), "invalid_amount", ["cap_usd", "inf", "finite"]),
    "cap of 1e30": (launch(cap_usd=1e30), "overflow", ["cap_usd", "1e+30", "$4611686018.427388"]),
    "cap of true": (launch(cap_usd=True), BAD, ["'cap_usd' is true", "number"]),
    "cap above the free purse": (launch(cap_usd=10.5), "exceeds_limit", ["$10.50", "$10.00 free"]),
    "cap below one block": (launch(cap_usd=0.015), "bad_launch", ["$0.015", "one block", "$0.02"]),
    "negative allowance": (launch(allowance_usd=-0.5), "invalid_amount", ["allowance_usd", "-0.5"]),
    "allowance is not a number": (launch(allowance_usd="nan"), "invalid_amount", ["allowance_usd", "finite"]),
    "no repeats": (launch(repeats=0), "bad_launch", ["repeats is 0", "from 1 to 1000"]),
    "negative repeats": (launch(repeats=-3), "bad_launch", ["repeats is -3"]),
    "a billion repeats": (launch(repeats=10**9), "bad_launch", ["repeats is 1000000000", "from 1 to 1000"]),
    "half a repeat": (launch(repeats=1.5), BAD, ["'repeats'", "integer", "1.5"]),
    "negative parallel": (launch(max_parallel=-1), "bad_launch", ["max_parallel is -1", "10000"]),
    "unknown strategy": (launch(strategy="race"), BAD, ["'strategy'", "'grid'", "race"]),
    "unknown argument": (launch(repeat=2), BAD, ["'repeat'", "Did you mean 'repeats'?"]),
    "split of the holdout": (launch(split="holdout"), BAD, ["no parameter 'split'"]),
    "case of the holdout": (launch(suite="hidden", case_ids=["h1"]), "unknown_case", ["no dev case 'h1'"]),
    "missing argument": ({"suite": "qa"}, BAD, ["'variants' is missing", "'cap_usd' is missing"]),
    "text for a list": (launch(variants="base"), BAD, ["'variants'", "list", "base"]),
    "list for a text": (launch(suite=["qa"]), BAD, ["'suite'", "string"]),
    "empty key": (launch(idempotency_key=""), "bad_launch", ["idempotency_key has 0 characters", "200"]),
    "unprintable key": (launch(idempotency_key="a\nb"), "bad_launch", ["idempotency_key", "printable"]),
}  # fmt: skip

CASES: dict[str, Refused] = {
    "no cases": ({"suite": "qa", "cases": []}, BAD, ["'cases'", "at least 1"]),
    "id given twice": (cases({}, {}), "bad_cases", ["'fresh'", "Nothing was created"]),
    "existing id, other content": (cases({"id": "case-00"}, {}), "case_exists", ["case-00", "replace=true"]),
    "bad suite name": (cases({}, suite="a b/c"), "bad_cases", ["'a b/c'", "letters"]),
    "bad id": (cases({"id": "../up"}), BAD, ["'cases[0].id'", "../up"]),
    "empty input": (cases({"input": " \n"}), BAD, ["'cases[0].input'", "empty"]),
    "no graders": (cases({"graders": []}), BAD, ["'cases[0].graders'", "at least 1"]),
    "second case wrong": (cases({"id": "good"}, {"timeout_s": 0}), BAD, ["'cases[1].timeout_s'"]),
    "timeout is not a number": (cases({"timeout_s": "nan"}), BAD, ["'cases[0].timeout_s'", "finite"]),
    "timeout of true": (cases({"timeout_s": True}), BAD, ["'cases[0].timeout_s' is true"]),
    "unknown field": (cases({"spilt": "dev"}), BAD, ["'cases[0].spilt'", "'split'"]),
    "unknown split": (cases({"split": "test"}), BAD, ["'cases[0].split'", "'dev' or 'holdout'"]),
    "path out of the case": (cases({"files": {"../../x": "y"}}), BAD, ["'../../x'", "inside"]),
    "absolute path": (cases({"files": {"/etc/passwd": "y"}}), BAD, ["/etc/passwd", "relative"]),
    "path into git": (cases({"files": {".git/config": "y"}}), BAD, [".git/config"]),
    "path with a backslash": (cases({"files": {"..\\x": "y"}}), BAD, ["relative"]),
    "file and folder at once": (cases({"files": {"a": "1", "a/b": "2"}}), BAD, ["'a'", "'a/b'"]),
    "broken base64": (cases({"files": {"a": "base64:§"}}), BAD, ["'a'", "base64"]),
    "too much content": (cases({"input": "x" * 20_000_001}), BAD, ["20,000,0", "at most 20,000,000"]),
    "two graders of one name": (
        cases({"graders": [{"type": "exact", "expected": "a"}] * 2}),
        BAD,
        ["distinct names", "exact"],
    ),
    "unknown grader": (grader(type="vibes"), BAD, ["'cases[0].graders[0].type'", "vibes"]),
    "grader without what it needs": (grader(type="exact"), BAD, ["needs `expected`"]),
    "grader with a field of another": (
        grader(type="exact", expected="a", pattern="a"),
        BAD,
        ["does not take pattern"],
    ),
    "weight of zero": (grader(type="exact", expected="a", weight=0), BAD, ["weight", "greater"]),
    "malformed regex": (grader(type="regex", pattern="(a"), BAD, ["`pattern`", "position 0"]),
    "malformed schema": (
        grader(type="json", json_schema={"type": "strange"}),
        BAD,
        ["`json_schema`", "$.type", "strange"],
    ),
    "schema that leaves": (
        grader(type="json", json_schema={"$ref": "http://localhost/x"}),
        BAD,
        ["http://localhost/x", "'#...'"],
    ),
    "number that is none": (grader(type="numeric", expected="12"), BAD, ["number", "'12'"]),
    "grader file out of its folder": (
        grader(type="command", command="true", files={"../../out/answer.txt": "42"}),
        BAD,
        ["'../../out/answer.txt'", "inside"],
    ),
}  # fmt: skip


def variant(**changes: Any) -> dict[str, Any]:
    """Arguments of a variant; its repository is filled in by the test."""
    return {"name": "fresh", "run": "true"} | changes


VARIANTS: dict[str, Refused] = {
    "unknown commit": (variant(commit="f" * 40), "unknown_commit", ["f" * 40, "HEAD is "]),
    "unknown branch": (variant(commit="mian"), "unknown_commit", ["'mian'", "HEAD is "]),
    "option for a commit": (variant(commit="--output=x"), "unknown_commit", ["--output=x"]),
    "very long commit": (variant(commit="f" * 1000), BAD, ["'commit'", "300"]),
    "address for a repository": (variant(repo="https://x.org/y.git"), "not_a_repository", ["Clone it"]),
    "relative repository": (variant(repo="here"), "not_a_repository", ["'here'", "absolute"]),
    "missing repository": (variant(repo="/does/not/exist"), "not_a_repository", ["/does/not/exist"]),
    "name too long for a folder": (variant(repo="/" + "x" * 300), "not_a_repository", ["not a folder"]),
    "home of nobody": (variant(repo="~nobody-of-this-name/x"), "not_a_repository", ["no user", "absolute"]),
    "name taken": (variant(name="base"), "variant_exists", ["'base'", "another name"]),
    "unknown parent": (variant(parent="bsae"), "unknown_variant", ["'bsae'", "base"]),
    "malformed patch": (variant(patch="not a patch"), "bad_patch", ["No valid patches", "git diff"]),
    "patch that does not apply": (
        variant(patch=PATCH.replace("-two", "-zwei")),
        "bad_patch",
        ["main.py:1", "@@ -1,3 +1,3 @@", "-zwei"],
    ),
    "patch of a file that is not there": (
        variant(patch=PATCH.replace("main.py", "gone.py")),
        "bad_patch",
        ["gone.py", "No such file"],
    ),
    "patch out of the source": (
        variant(patch="--- /dev/null\n+++ b/../../evil\n@@ -0,0 +1 @@\n+x\n"),
        "bad_patch",
        ["../evil"],
    ),
    "overlay out of the source": (variant(files={"../x": "y"}), BAD, ["'../x'", "inside"]),
    "overlay into git": (variant(files={".git/hooks/x": "y"}), BAD, [".git"]),
    "overlay over a folder": (variant(files={"folder": "y"}), "bad_overlay", ["'folder'", "folder in the"]),
    "empty command": (variant(run="  "), BAD, ["'run'", "empty"]),
    "command too long to start": (variant(run="x" * 100_001), BAD, ["100,002", "100,000", "`files`"]),
    "environment too large": (variant(env={"A": "x" * 100_001}), BAD, ["env takes", "100,000"]),
    "bad variable": (variant(env={"A=B": "c"}), BAD, ["'A=B'", "variable name"]),
    "reserved variable": (variant(env={"EVALPURSE_OUT": "/"}), BAD, ["EVALPURSE_OUT", "reserved"]),
    "unknown secret": (variant(secrets=["NOPE_KEY"]), "unknown_secret", ["NOPE_KEY", "secrets set"]),
    "params too deep": (variant(params={"a": json.loads("[" * 105 + "]" * 105)}), BAD, ["100 levels"]),
    "timeout is not a number": (variant(timeout_s="nan"), BAD, ["'timeout_s'"]),
}  # fmt: skip

OTHERS: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "wait on nothing": ("wait_experiment", {"experiment_id": "exp_no"}, "unknown_experiment", ["'exp_no'"]),
    "cancel nothing": ("cancel_experiment", {"experiment_id": "exp_no"}, "unknown_experiment", ["'exp_no'"]),
    "compare nothing": ("compare_variants", {"experiment_id": "exp_no"}, "unknown_experiment", ["'exp_no'"]),
    "wait too long": ("wait_experiment", {"experiment_id": "x", "wait_s": 1e9}, BAD, ["45"]),
    "wait less than nothing": ("wait_experiment", {"experiment_id": "x", "wait_s": -1}, BAD, ["0"]),
    "wait for nan": ("wait_experiment", {"experiment_id": "x", "wait_s": "nan"}, BAD, ["wait_s"]),
    "margin is not a number": (
        "compare_variants",
        {"experiment_id": "x", "margin": "nan"},
        BAD,
        ["'margin'"],
    ),
    "run that does not exist": ("read_run", {"run_id": "exp_no.00000"}, "unknown_run", ["query_results"]),
    "negative offset": ("read_run", {"run_id": "x", "offset": -1}, BAD, ["'offset'"]),
    "part that does not exist": ("read_run", {"run_id": "x", "part": "secrets"}, BAD, ["'log'"]),
    "list of an unknown suite": ("list_cases", {"suite": "qaa"}, "unknown_suite", ["Did you mean qa?"]),
    "list of no cases": ("list_cases", {"suite": "qa", "limit": 0}, BAD, ["'limit'", "1"]),
    "list of too many": ("list_cases", {"suite": "qa", "limit": 10**6}, BAD, ["'limit'", "100"]),
    "status of nothing": ("budget_status", {"account": "no"}, "account_not_found", ["'no'"]),
    "request of nothing": ("request_budget", {"amount_usd": 0, "reason": "x"}, "invalid_amount", ["$0.00"]),
    "request to give": ("request_budget", {"amount_usd": -5, "reason": "x"}, "invalid_amount", ["-5"]),
    "request of nan": ("request_budget", {"amount_usd": "nan", "reason": "x"}, "invalid_amount", ["nan"]),
    "request of inf": ("request_budget", {"amount_usd": "inf", "reason": "x"}, "invalid_amount", ["inf"]),
    "request of 1e30": ("request_budget", {"amount_usd": 1e30, "reason": "x"}, "overflow", ["$4611686018"]),
    "request of true": ("request_budget", {"amount_usd": True, "reason": "x"}, BAD, ["is true"]),
    "request without reason": ("request_budget", {"amount_usd": 1, "reason": ""}, BAD, ["'reason'"]),
    "request that fools the eye": (
        "request_budget",
        {"amount_usd": 1, "reason": "\x1b[2Jgranted already"},
        BAD,
        ["control characters"],
    ),
    "request for nobody": (
        "request_budget",
        {"amount_usd": 1, "reason": "x", "account": "no"},
        "account_not_found",
        ["'no'"],
    ),
    "tool that does not exist": ("launch_experiments", {}, "unknown_tool", ["'launch_experiment'"]),
}  # fmt: skip
