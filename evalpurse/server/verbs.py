"""The verbs of the command line, each standing for one tool or one control method.

A verb says how its arguments look and how its answer is shown to a person; what it does is done by the
daemon, so a verb and its tool cannot differ. Standard library only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalpurse.server import show, show_modal, show_warm, show_worlds, skill
from evalpurse.server.given import dollars, json_object, json_values, text_of
from evalpurse.server.secret_files import list_secrets, set_secret

Arguments = Callable[[argparse.Namespace], dict[str, Any]]
Show = Callable[[dict[str, Any]], str]


@dataclass(frozen=True)
class Option:
    """One argument, as `add_argument` takes it."""

    flags: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verb:
    """One verb: `words` are what a person types; `tool`, `method` or `local` what is done.

    `confirm` is the question that a person answers before anything is asked of the daemon. A tool with
    `until` is called again until it holds for the answer, and what it reports on its way is shown. An answer
    for which `failed` holds ends the command with exit code 1.
    """

    words: tuple[str, ...]
    help: str
    options: tuple[Option, ...] = ()
    tool: str = ""
    method: str = ""
    local: Callable[[argparse.Namespace], dict[str, Any]] | None = None
    extend: Callable[[argparse.ArgumentParser], None] | None = None
    role: str = "agent"
    arguments: Arguments = lambda _: {}
    show: Show | None = None
    until: Callable[[dict[str, Any]], bool] | None = None
    confirm: Callable[[argparse.Namespace], str] | None = None
    failed: Callable[[dict[str, Any]], bool] | None = None


def _option(*flags: str, **settings: Any) -> Option:
    return Option(flags, settings)


def _named(*names: str) -> Arguments:
    """Arguments that have the same name on both sides; those not given are left to the tool."""

    def pick(options: argparse.Namespace) -> dict[str, Any]:
        given = {name: getattr(options, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}

    return pick


_YES = _option("--yes", action="store_true", help="do not ask")


def _launch_arguments(options: argparse.Namespace) -> dict[str, Any]:
    names = (
        "suite",
        "variants",
        "repeats",
        "cap_usd",
        "allowance_usd",
        "idempotency_key",
        "baseline",
        "case_ids",
        "max_parallel",
        "account",
        "backend",
        "reuse",
        "dry_run",
    )
    return _named(*names)(options)


_MACHINE = (
    *("image", "dockerfile", "cpu", "cpu_limit", "memory_mb", "memory_limit_mb", "gpu", "region", "runtime"),
    *("docker", "allow_domains", "world", "restore"),
)


def _variant_arguments(options: argparse.Namespace) -> dict[str, Any]:
    given = _named(
        "name",
        "repo",
        "commit",
        "run_command",
        "setup",
        "secrets",
        "model",
        "network",
        "parent",
        "description",
        "timeout_s",
        *_MACHINE,
    )(options)
    given["run"] = given.pop("run_command")
    given["repo"] = str(Path(options.repo).expanduser().resolve())
    if options.params is not None:
        given["params"] = json_object(options.params, "--params")
    if options.env is not None:
        given["env"] = json_object(options.env, "--env")
    if options.patch is not None:
        given["patch"] = text_of(options.patch)
    return given


EXPERIMENTS = (
    "SELECT experiment_id, status, suite, variants, run_count, cap_usd, experiments.created_at "
    "FROM experiments JOIN experiment_status USING (experiment_id) ORDER BY created_at DESC"
)

VERBS: tuple[Verb, ...] = (
    Verb(
        ("cases", "create"),
        "create cases from a JSON, JSON Lines or standard input file",
        (
            _option("suite", help="suite that the cases belong to"),
            _option("file", help="a JSON list or one JSON object a line; - for standard input"),
            _option(
                "--replace", action="store_true", default=None, help="new versions of cases that changed"
            ),
        ),
        tool="create_cases",
        arguments=lambda options: _named("suite", "replace")(options) | {"cases": json_values(options.file)},
        show=show.created_cases,
    ),
    Verb(
        ("cases", "list"),
        "list suites, or the visible cases of one",
        (
            _option("suite", nargs="?", help="suite to list"),
            _option("--tags", nargs="*", help="only cases with all of these"),
            _option("--cursor", help="where the page before ended"),
            _option("--limit", type=int, help="cases a page (50)"),
        ),
        tool="list_cases",
        arguments=_named("suite", "tags", "cursor", "limit"),
        show=show.cases,
    ),
    Verb(
        ("variants", "create"),
        "register a variant: a harness at a commit plus an overlay",
        (
            _option("name", help="unique label"),
            _option("--repo", required=True, help="local git repository of the harness"),
            _option("--run", dest="run_command", required=True, help="shell command that runs it once"),
            _option("--commit", help="commit, branch or tag (HEAD)"),
            _option("--setup", action="append", help="command that prepares the source; may be repeated"),
            _option("--params", help="JSON object, or @file"),
            _option("--env", help="JSON object of variables, or @file; never secrets"),
            _option("--secrets", nargs="*", help="names of secrets to set"),
            _option("--patch", help="file with a unified diff"),
            _option("--model", help="model it uses, for reports"),
            _option("--network", choices=["blocked", "open"], help="network of its runs (blocked)"),
            _option("--parent", help="variant it was derived from"),
            _option("--description", help="what was changed and why"),
            _option("--timeout-s", type=float, help="overrides the timeout of the cases"),
            _option("--image", help="image in a registry to run in (Modal)"),
            _option("--dockerfile", help="file of the repository to build the image from (Modal)"),
            _option("--cpu", type=float, help="cores asked for (Modal)"),
            _option("--cpu-limit", type=float, help="cores it may ever use (those asked for)"),
            _option("--memory-mb", type=int, help="MiB asked for (Modal)"),
            _option("--memory-limit-mb", type=int, help="MiB it may ever use (those asked for)"),
            _option("--gpu", help="GPU of its sandboxes, such as T4 or H100:2 (Modal)"),
            _option("--region", help="where its sandboxes are (Modal; costs more)"),
            _option("--runtime", choices=["gvisor", "vm"], help="kind of sandbox (Modal chooses)"),
            _option("--docker", action="store_true", default=None, help="start dockerd; needs --runtime vm"),
            _option("--allow-domain", dest="allow_domains", action="append", help="may be reached; repeat"),
            _option("--world", help="name or digest of the world it runs in"),
            _option("--restore", action="append", help="command before the harness; may be repeated"),
        ),
        tool="create_variant",
        arguments=_variant_arguments,
        show=show.created_variant,
    ),
    Verb(
        ("variants", "list"),
        "list registered variants, newest first",
        (_option("--cursor", type=int, help="where the page before ended"),),
        tool="list_variants",
        arguments=_named("cursor"),
        show=show.variants,
    ),
    Verb(
        ("launch",),
        "launch an experiment under a cap",
        (
            _option("suite", help="suite whose dev cases are run"),
            _option("variants", nargs="+", help="variants, the baseline first"),
            _option("--cap", dest="cap_usd", type=dollars, required=True, help="dollars it may ever cost"),
            _option(
                "--allowance",
                dest="allowance_usd",
                type=dollars,
                required=True,
                help="dollars for models a run",
            ),
            _option("--key", dest="idempotency_key", required=True, help="the same key never pays twice"),
            _option("--repeats", type=int, help="runs of each variant on each case (1)"),
            _option("--baseline", help="variant to compare with (the first)"),
            _option("--case", dest="case_ids", action="append", help="only this case; may be repeated"),
            _option("--parallel", dest="max_parallel", type=int, help="runs at once"),
            _option("--account", help="purse to spend from (workspace)"),
            _option("--backend", choices=["local", "modal"], help="where the runs are (local)"),
            _option(
                "--no-reuse",
                dest="reuse",
                action="store_false",
                default=None,
                help="run again what was paid for",
            ),
            _option("--dry-run", action="store_true", default=None, help="only say what it would cost"),
        ),
        tool="launch_experiment",
        arguments=_launch_arguments,
        show=show.launched,
    ),
    Verb(
        ("experiments",),
        "list experiments, newest first",
        tool="query_results",
        arguments=lambda _: {"sql": EXPERIMENTS},
        show=show.rows,
    ),
    Verb(
        ("wait",),
        "wait until an experiment is over, with live progress",
        (_option("experiment_id", help="id that launch printed"),),
        tool="wait_experiment",
        arguments=lambda options: {"experiment_id": options.experiment_id, "wait_s": 20},
        show=show.experiment,
        until=lambda facts: facts["experiment"]["status"] in ("finished", "cancelled", "failed"),
    ),
    Verb(
        ("status",),
        "where an experiment stands",
        (_option("experiment_id", help="id that launch printed"),),
        tool="wait_experiment",
        arguments=lambda options: {"experiment_id": options.experiment_id, "wait_s": 0},
        show=show.experiment,
    ),
    Verb(
        ("cancel",),
        "end an experiment now",
        (
            _option("experiment_id", help="id that launch printed"),
            _option("--reason", help="why; kept with it"),
        ),
        tool="cancel_experiment",
        arguments=_named("experiment_id", "reason"),
        show=show.experiment,
    ),
    Verb(
        ("compare",),
        "compare the variants of an experiment with its baseline",
        (
            _option("experiment_id", help="id that launch printed"),
            _option("--baseline", help="compare with this variant instead"),
            _option("--margin", type=float, help="loss of score that still counts as not worse (0.05)"),
        ),
        tool="compare_variants",
        arguments=_named("experiment_id", "baseline", "margin"),
        show=show.compared,
    ),
    Verb(
        ("run",),
        "show one ended run with its log, transcript or answer",
        (
            _option("run_id", help="id of an ended run"),
            _option("--part", choices=["log", "transcript", "answer"], help="what to page through (log)"),
            _option("--offset", type=int, help="where the page before ended"),
        ),
        tool="read_run",
        arguments=_named("run_id", "part", "offset"),
        show=show.run,
    ),
    Verb(
        ("query",),
        "answer one SELECT over all results; without SQL, list the tables",
        (
            _option("sql", nargs="?", help="one SELECT in DuckDB's dialect"),
            _option("--limit", type=int, help="rows at most (200)"),
        ),
        tool="query_results",
        arguments=_named("sql", "limit"),
        show=show.rows,
    ),
    Verb(
        ("budget", "status"),
        "the purse: limits, spent, held, free, requests",
        (_option("--account", help="only this account and those below it"),),
        tool="budget_status",
        arguments=_named("account"),
        show=show.budget,
    ),
    Verb(
        ("budget", "request"),
        "ask the owner for more",
        (
            _option("amount_usd", type=dollars, help="dollars to add to the limit"),
            _option("--reason", required=True, help="what it is for"),
            _option("--account", help="account whose limit should grow (workspace)"),
        ),
        tool="request_budget",
        arguments=_named("amount_usd", "reason", "account"),
        show=show.requested,
    ),
    Verb(
        ("budget", "grant"),
        "owner: add to the limit of an account",
        (
            _option("account", help="workspace, or an account below it"),
            _option("amount", help="dollars to add"),
            _YES,
        ),
        method="budget.grant",
        role="owner",
        arguments=lambda options: {"account": options.account, "amount_usd": options.amount},
        show=show.account,
        confirm=lambda options: f"Add ${options.amount} to the limit of {options.account}?",
    ),
    Verb(
        ("budget", "limit"),
        "owner: set the limit of an account, never below what is spent and held",
        (
            _option("account", help="workspace, or an account below it"),
            _option("amount", help="dollars"),
            _YES,
        ),
        method="budget.limit",
        role="owner",
        arguments=lambda options: {"account": options.account, "limit_usd": options.amount},
        show=show.account,
        confirm=lambda options: f"Set the limit of {options.account} to ${options.amount}?",
    ),
    Verb(
        ("budget", "decide"),
        "owner: grant or deny a request",
        (
            _option("request_id", help="id from budget status"),
            _option("--grant", metavar="USD", help="dollars to add to the limit"),
            _option("--deny", action="store_true", help="say no"),
            _YES,
        ),
        method="budget.decide",
        role="owner",
        arguments=lambda options: {
            "request_id": options.request_id,
            "grant_usd": options.grant,
            "deny": options.deny,
        },
        show=show.requested,
        confirm=lambda options: (
            f"Deny {options.request_id}?"
            if options.deny
            else f"Grant ${options.grant} for {options.request_id}?"
        ),
    ),
    Verb(
        ("budget", "verify"),
        "rebuild every balance from the journal and compare",
        method="budget.verify",
        role="viewer",
        show=show.verified,
    ),
    Verb(
        ("budget", "freeze"),
        "stop all new spending under an account",
        (_option("account", help="account to freeze"), _option("--reason", required=True, help="why")),
        method="budget.freeze",
        role="agent",
        arguments=_named("account", "reason"),
        show=show.account,
    ),
    Verb(
        ("budget", "unfreeze"),
        "owner: let an account spend again",
        (
            _option("account", help="account to unfreeze"),
            _option("--reason", required=True, help="why"),
            _YES,
        ),
        method="budget.unfreeze",
        role="owner",
        arguments=_named("account", "reason"),
        show=show.account,
        confirm=lambda options: f"Let {options.account} spend again?",
    ),
    Verb(
        ("secrets", "set"),
        "owner: keep a secret for harnesses; its value is read from standard input",
        (_option("name", help="the environment variable that a harness sees"),),
        local=set_secret,
        show=lambda facts: f"{facts['name']} is kept ({facts['bytes']} bytes).",
    ),
    Verb(
        ("secrets", "list"),
        "names of the secrets that are kept",
        local=list_secrets,
        show=lambda facts: "\n".join(facts["names"]) or "There are none.",
    ),
    Verb(
        ("secrets", "sync"),
        "owner: copy the secrets named in config.toml from the vault into the home folder and Modal",
        method="secrets.sync",
        role="owner",
        show=show_modal.synced,
    ),
    Verb(
        ("secrets", "history"),
        "when secrets were synced, and which",
        method="secrets.syncs",
        role="viewer",
        show=show_modal.syncs,
    ),
    Verb(
        ("world", "add"),
        "owner: keep a folder as a world that runs start from",
        (
            _option("folder", metavar="DIR", help="the folder; it is read once and not needed afterwards"),
            _option("--name", required=True, help="the world's name; it stands for these files for ever"),
        ),
        method="world.add",
        role="owner",
        arguments=lambda options: {
            "folder": str(Path(options.folder).expanduser().absolute()),
            "name": options.name,
        },
        show=show_worlds.added,
    ),
    Verb(
        ("world", "list"),
        "worlds, oldest first",
        method="world.list",
        role="viewer",
        show=show_worlds.listed,
    ),
    Verb(
        ("world", "show"),
        "what is in a world",
        (_option("world", help="name or digest"),),
        method="world.show",
        role="viewer",
        arguments=_named("world"),
        show=show_worlds.shown,
    ),
    Verb(
        ("world", "verify"),
        "read every file of a world and compare it with its digest",
        (_option("world", help="name or digest"),),
        method="world.verify",
        role="agent",
        arguments=_named("world"),
        show=show_worlds.verified,
        failed=lambda facts: not facts["intact"],
    ),
    Verb(
        ("sandboxes", "list"),
        "sandboxes that are there now",
        (_option("--backend", choices=["local", "modal"], help="only these"),),
        method="sandboxes.list",
        role="viewer",
        arguments=_named("backend"),
        show=show_modal.sandboxes,
    ),
    Verb(
        ("sandboxes", "sweep"),
        "end sandboxes of this home folder on Modal that belong to no attempt any more",
        method="sandboxes.sweep",
        show=show_modal.swept,
    ),
    Verb(
        ("warm", "add"),
        "owner: build a variant's image now, and keep it at the newest commit of its repository",
        (_option("variant", help="the variant whose image, setup and env are to be kept warm"),),
        method="warm.add",
        role="owner",
        arguments=_named("variant"),
        show=show_warm.warm,
    ),
    Verb(
        ("warm", "refresh"),
        "owner: bring every warm image to the newest commit now, not at the next hour",
        method="warm.refresh",
        role="owner",
        show=show_warm.warm,
    ),
    Verb(
        ("warm", "list"),
        "warm images, and how long runs took to start, warm and cold",
        method="warm.list",
        role="viewer",
        show=show_warm.warm,
    ),
    Verb(
        ("warm", "remove"),
        "owner: keep an image warm no longer",
        (_option("key", help="the beginning of its key, as `evalpurse warm list` shows it"),),
        method="warm.remove",
        role="owner",
        arguments=_named("key"),
        show=lambda facts: f"{facts['removed']} is not kept warm any more.",
    ),
    Verb(
        ("smoke",),
        "owner: try everything that runs need on a real account, for cents, and leave nothing there",
        (
            _option("--modal", action="store_true", required=True, help="the account to try"),
            _option("--max-usd", default="0.50", help="dollars it may cost at most (0.50)"),
        ),
        method="smoke.modal",
        role="owner",
        arguments=lambda options: {"max_usd": options.max_usd},
        show=show_modal.smoke,
        failed=lambda facts: not facts["ok"],
    ),
    Verb(
        ("skill", "install"),
        "put the skill where agents find it",
        extend=skill.add_arguments,
        local=skill.carry_out,
        show=skill.shown,
    ),
)
