"""The whole loop in one sitting: an agent measures five variants of a real harness inside a purse.

    make demo        or: python examples/library-qa/demo.py [--home FOLDER] [--repeats N] [--cases N]

The second act launches a batch that its purse cannot cover, and shows that it stops inside the purse.

With `--model NAME --base-url URL --prices INPUT OUTPUT` (US dollars a million tokens) and the key in
OPENAI_API_KEY, the same harness talks to a real provider instead of the stand-in. That costs real money.
"""

from __future__ import annotations

import argparse
import os
import textwrap
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from harness_history import make_history
from make_cases import SUITE, build_cases
from stage import Agent, Owner, RefusedError, connected, stand_in_model, write_prices
from tables import LiveLine, cell_text, interval, outcomes, table, usd
from variants import BASELINE, KEY_NAME, Model, build_variants

PURSE_USD = 20
WIDTH = 110
STAND_IN_KEY = "the stand-in takes any key"
OVER = ("finished", "cancelled", "failed")


@dataclass(frozen=True)
class Options:
    """How large the demo is, and what answers; `cases` 0 means all, `model` None the stand-in."""

    folder: Path
    repeats: int
    cases: int
    model: Model | None

    @property
    def home(self) -> Path:
        return self.folder / "home"


def main() -> int:
    parser = argparse.ArgumentParser(description="Drive evalpurse through a real MCP client.")
    parser.add_argument("--home", type=Path, help="new folder to keep (default: a temporary one)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each variant on each case (2)")
    parser.add_argument("--cases", type=int, default=0, help="only so many cases (0: all)")
    parser.add_argument("--model", help="a real model's name; its key is read from OPENAI_API_KEY")
    parser.add_argument("--base-url", default="https://api.openai.com/v1", help="where the real model is")
    parser.add_argument("--prices", type=float, nargs=2, metavar=("IN", "OUT"), help="$ a million tokens")
    given = parser.parse_args()
    if given.model and not (given.prices and os.environ.get(KEY_NAME)):
        parser.error(f"--model needs --prices, and the key in {KEY_NAME}")
    if given.home and given.home.exists():
        parser.error(f"{given.home} exists; name a new folder")
    model = Model(given.base_url, given.model, *given.prices) if given.model else None
    started = time.monotonic()
    with nullcontext(given.home) if given.home else TemporaryDirectory(prefix="evalpurse-demo-") as folder:
        anyio.run(play, Options(Path(folder).resolve(), given.repeats, given.cases, model))
    print(f"\nDone in {time.monotonic() - started:.0f} s.")
    return 0


async def play(options: Options) -> None:
    """Both acts."""
    owner = Owner(options.home)
    with nullcontext(options.model) if options.model else stand_in_model() as model:
        write_prices(options.home, model)
        owner.run("secrets", "set", KEY_NAME, sent=os.environ[KEY_NAME] if options.model else STAND_IN_KEY)
        started = time.monotonic()
        async with connected(options.home) as agent:
            tools = await agent.tools()
            say(f"Connected over stdio in {time.monotonic() - started:.1f} s, {len(tools)} tools.")
            names = await prepare(agent, owner, options, model)
            batch = {"suite": SUITE, "repeats": options.repeats, "allowance_usd": model.allowance_usd}
            await first_act(agent, owner, batch | {"variants": names})
            await second_act(agent, owner, batch | {"variants": [BASELINE, "burner"], "reuse": False})


async def prepare(agent: Agent, owner: Owner, options: Options, model: Model) -> list[str]:
    """Purse, cases and variants; returns the variants' names."""
    account = owner.run("budget", "grant", "workspace", str(PURSE_USD), "--yes")
    say(f"The owner grants a purse: limit ${account['limit_usd']:.2f}.")
    cases = build_cases()[: options.cases or None]
    made = await agent.call("create_cases", {"suite": SUITE, "cases": cases})
    say(f"{len(made['created'])} cases, their answers computed from this interpreter's standard library.")
    history = make_history(options.folder / "harness")
    names = []
    for variant in build_variants(history, model):
        created = await agent.call("create_variant", variant)
        names.append(created["variant"])
        print(f"  {created['variant']:<9} {created['commit'][:10]}  {variant['description']}")
    return names


async def first_act(agent: Agent, owner: Owner, batch: dict[str, Any]) -> None:
    """Five variants, all cases, a purse that covers them."""
    heading("Act one: which variant is best, and what does it cost?")
    batch |= {"baseline": BASELINE, "cap_usd": PURSE_USD, "idempotency_key": "act-one"}
    await dry_run(agent, batch)
    launched = await agent.call("launch_experiment", batch)
    again = await agent.call("launch_experiment", batch)
    experiment_id = launched["experiment"]["experiment_id"]
    say(f"Launched {experiment_id}; the same key again starts nothing new: existing={again['existing']}.")
    say(f"Isolation: {launched['isolation']}")
    await wait(agent, experiment_id)
    compared = await agent.call("compare_variants", {"experiment_id": experiment_id})
    await look_closer(agent, experiment_id)
    asked = await agent.call(
        "request_budget", {"amount_usd": 5, "reason": "more repeats, to tell windows from baseline"}
    )
    request = asked["request"]
    say(f"The agent asks for $5 more: {request['request_id']} is {request['state']}. {asked['hint']}")
    decided = owner.run("budget", "decide", request["request_id"], "--deny", "--yes")["request"]
    say(f"The owner decides: {decided['state']}.")
    show_result(compared)
    await show_ledger(agent, owner)


async def second_act(agent: Agent, owner: Owner, batch: dict[str, Any]) -> None:
    """A batch that its purse cannot cover."""
    heading("Act two: a purse that is too small")
    spent_usd = (await agent.call("budget_status"))["workspace"]["spent_usd"]
    batch |= {"cap_usd": PURSE_USD, "idempotency_key": "act-two"}
    estimate = (await agent.call("launch_experiment", batch | {"dry_run": True}))["estimate"]
    # A twelfth of the worst case, but enough to start two blocks of two runs.
    purse_usd = max(estimate["worst_case_usd"] / 12, 4 * batch["allowance_usd"])
    owner.run("budget", "limit", "workspace", f"{spent_usd + purse_usd:.9f}", "--yes")
    say(f"The owner lowers the limit: {usd(purse_usd)} is left.")
    await dry_run(agent, batch)
    try:
        await agent.call("launch_experiment", batch)
    except RefusedError as refusal:
        say(f"Launching with a cap above the purse is refused: {refusal}")
    free_usd = (await agent.call("budget_status"))["workspace"]["free_usd"]
    launched = await agent.call("launch_experiment", batch | {"cap_usd": free_usd})
    say(f"Launching with a cap of what is free, {usd(free_usd)}, is not.")
    experiment_id = launched["experiment"]["experiment_id"]
    status = await wait(agent, experiment_id)
    say(f"{experiment_id} {status['status']}: {outcomes(status['outcomes'])}. {status['note']}")
    say(
        f"It spent {usd(status['spent_usd'])} of its cap of {usd(status['cap_usd'])}, "
        f"holds {usd(status['held_usd'])}."
    )
    await show_ledger(agent, owner)


async def dry_run(agent: Agent, batch: dict[str, Any]) -> None:
    """Says what a launch would take, before it does."""
    estimate = (await agent.call("launch_experiment", batch | {"dry_run": True}))["estimate"]
    likely = f", likely {usd(estimate['likely_usd'])}" if "likely_usd" in estimate else ""
    say(
        f"Dry run: {estimate['runs']} runs, worst case {usd(estimate['worst_case_usd'])}{likely}, of "
        f"{usd(estimate['free_usd'])} free; {estimate['funded_runs']} runs can be held at once."
    )


async def wait(agent: Agent, experiment_id: str) -> dict[str, Any]:
    """Waits, with a live line, until the experiment is over."""
    line = LiveLine()
    while True:
        answer = await agent.call("wait_experiment", {"experiment_id": experiment_id}, progress=line.show)
        status: dict[str, Any] = answer["experiment"]
        if status["status"] in OVER:
            line.end()
            return status


async def look_closer(agent: Agent, experiment_id: str) -> None:
    """What an agent would do next: find failures with SQL, then read one."""
    # The experiment's id is ours, and query_results takes one read-only SELECT anyway.
    sql = f"""
        SELECT split_part(case_id, '-', 1) AS kind, avg(coalesce(score, 0)) AS score, count(*) AS runs
        FROM runs WHERE experiment_id = '{experiment_id}' AND variant = 'compact'
        GROUP BY kind ORDER BY score, kind"""  # noqa: S608
    found = await agent.call("query_results", {"sql": sql})
    say("Where does 'compact' lose? (query_results)")
    print(indented(table(found["columns"], [[cell_text(cell) for cell in row] for row in found["rows"]])))
    sql = f"""
        SELECT run_id FROM runs WHERE experiment_id = '{experiment_id}'
        AND variant = 'crashy' AND outcome = 'agent_error' ORDER BY run_id LIMIT 1"""  # noqa: S608
    failing = await agent.call("query_results", {"sql": sql})
    if not failing["rows"]:
        say("No run of 'crashy' crashed: these cases have no package in them.")
        return
    run = await agent.call("read_run", {"run_id": failing["rows"][0][0]})
    say(f"Why does 'crashy' crash? (read_run {run['run_id']}, case {run['case_id']})")
    print(indented("\n".join(run["text"].rstrip().splitlines()[-3:])))


def show_result(compared: dict[str, Any]) -> None:
    """The table that the demo is about."""
    verdicts = {found["candidate"]: found for found in compared["comparisons"]}
    rows = []
    for facts in compared["variants"]:
        found = verdicts.get(facts["variant"])
        rows.append(
            [
                facts["variant"],
                interval(facts, "score"),
                usd(facts["cost_per_run_usd"]),
                f"{facts['duration_p50_s']:.2f} s" if facts.get("duration_p50_s") else "-",
                outcomes(facts["outcomes"]),
                f"{found['verdict']}{', cheaper' if found['cheaper'] else ''}" if found else "(baseline)",
            ]
        )
    headers = ["variant", "score [95 %]", "cost/run", "p50", "outcomes", f"against {compared['baseline']}"]
    print(f"\n{table(headers, rows)}")
    print(f"\nModel costs are {' and '.join(compared['cost_sources'])}; scores are means of case means.")
    for found in compared["comparisons"]:
        print(textwrap.fill(found["sentence"], WIDTH, initial_indent="  ", subsequent_indent="    "))


async def show_ledger(agent: Agent, owner: Owner) -> None:
    """The purse, and whether its journal agrees with it."""
    purse = (await agent.call("budget_status"))["workspace"]
    verified = owner.run("budget", "verify")
    row = [purse["account"], usd(purse["limit_usd"]), usd(purse["spent_usd"]), usd(purse["held_usd"])]
    print(f"\n{table(['ledger', 'limit', 'spent', 'held'], [row])}")
    agrees = "agrees" if verified["clean"] else f"DISAGREES: {verified['problems']}"
    print(
        f"The journal ({verified['entries']} entries, {verified['holds']} holds) {agrees} with the balances."
    )


def heading(text: str) -> None:
    print(f"\n== {text}\n", flush=True)


def say(text: str) -> None:
    """Prints a sentence, wrapped."""
    print(textwrap.fill(text, WIDTH, subsequent_indent="  "), flush=True)


def indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


if __name__ == "__main__":
    raise SystemExit(main())
