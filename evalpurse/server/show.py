"""Answers of tools and control methods as text for a person: short, aligned, with the next step.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CELL_CHARS_MAX = 60


def plain(text: str) -> str:
    """Text that a terminal shows and does not obey: what a harness wrote may hold escape sequences."""
    return "".join(
        character if character in "\n\t" or character.isprintable() else repr(character)[1:-1]
        for character in text
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as their longest cell; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [
        max(len(name), *(len(row[i]) for row in cells)) if cells else len(name) for i, name in enumerate(head)
    ]
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(head))]
    lines = [[*head], *cells]
    return "\n".join(
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value).replace("\n", "\\n")
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"


def usd(value: float | None) -> str:
    """Dollars with enough digits to tell small costs apart."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 1:
        return f"${value:,.2f}"
    exact = f"{value:.9f}".rstrip("0")
    return f"${exact}" if len(exact.partition(".")[2]) >= 2 else f"${value:.2f}"


def _after(facts: dict[str, Any]) -> str:
    return f"\n{facts['hint']}" if facts.get("hint") else ""


def created_cases(facts: dict[str, Any]) -> str:
    """How many of each kind."""
    return (
        f"Suite {facts['suite']}: {len(facts['created'])} created, "
        f"{len(facts['new_versions'])} new versions, {len(facts['unchanged'])} unchanged.{_after(facts)}"
    )


def cases(facts: dict[str, Any]) -> str:
    """Suites, or the cases of one."""
    if "suites" in facts:
        head = ("suite", "cases", "dev", "holdout")
        return table(head, [[row[name] for name in head] for row in facts["suites"]]) + _after(facts)
    rows = [
        (row["case_id"], row["version"], ",".join(row["tags"]), ",".join(row["graders"]), row["input"])
        for row in facts["cases"]
    ]
    more = f"\nMore: --cursor {facts['next_cursor']}" if "next_cursor" in facts else ""
    return table(("case", "version", "tags", "graders", "input"), rows) + more


def created_variant(facts: dict[str, Any]) -> str:
    """Name, digest and commit."""
    word = "exists" if facts["existing"] else "registered"
    digest, commit = facts["digest"][:16], facts["commit"][:12]
    return f"{facts['variant']} {word}: digest {digest}, commit {commit}.{_after(facts)}"


def variants(facts: dict[str, Any]) -> str:
    """One line a variant."""
    rows = [
        (row["variant"], row["digest"][:12], row["commit"][:12], row["parent"], row["model"], row["params"])
        for row in facts["variants"]
    ]
    more = f"\nMore: --cursor {facts['next_cursor']}" if "next_cursor" in facts else ""
    return table(("variant", "digest", "commit", "parent", "model", "params"), rows) + more


def launched(facts: dict[str, Any]) -> str:
    """The estimate, and where the experiment stands."""
    lines = []
    found = facts.get("estimate")
    if found:
        lines.append(
            f"{found['runs']} runs, {found['reused_runs']} of them reused; worst case "
            f"{usd(found['worst_case_usd'])}, likely {usd(found.get('likely_usd'))}, "
            f"{usd(found['free_usd'])} free, "
            f"{found['funded_runs']} of {found['new_runs']} new runs funded at once."
        )
        if found.get("detectable") is not None:
            lines.append(
                f"Differences of {100 * found['detectable']:.1f} points or more are likely to be found."
            )
        lines += [f"Warning: {warning}" for warning in found["warnings"]]
    lines.append(f"Isolation: {facts['isolation']}")
    if "experiment" in facts:
        lines.append(experiment(facts))
    else:
        lines.append(f"Dry run: nothing was started.{_after(facts)}")
    return "\n".join(lines)


def experiment(facts: dict[str, Any]) -> str:
    """Status, counts and money of one experiment."""
    found = facts["experiment"]
    outcomes = ", ".join(f"{count} {name}" for name, count in found["outcomes"].items()) or "none ended"
    note = f" ({found['note']})" if found["note"] else ""
    return (
        f"{found['experiment_id']} is {found['status']}{note}: {found['done']} of {found['runs']} runs ended "
        f"({outcomes}), {found['running']} running, {found['queued']} queued.\n"
        f"Cap {usd(found['cap_usd'])}, spent {usd(found['spent_usd'])}, held {usd(found['held_usd'])}."
        f"{_after(facts)}"
    )


def compared(facts: dict[str, Any]) -> str:
    """The table of variants, then a sentence each."""
    against = {found["candidate"]: found for found in facts["comparisons"]}
    missing = facts.get("not_compared", {})
    rows = [
        _compared_row(variant, against.get(variant["variant"]), baseline=facts["baseline"])
        for variant in facts["variants"]
    ]
    head = ("variant", "score", "95 %", "delta", "cost/run", "p50 s", "outcomes", "verdict")
    lines = [table(head, rows)]
    lines += [f"- {found['sentence']}" for found in facts["comparisons"]]
    lines += [f"- {name}: not compared. {why}" for name, why in missing.items()]
    lines += [
        f"Warning ({found['candidate']}): {text}"
        for found in facts["comparisons"]
        for text in found["warnings"]
    ]
    lines.append(f"Model costs are {', '.join(facts['cost_sources']) or 'none'}.{_after(facts)}")
    return "\n".join(lines)


def _compared_row(variant: dict[str, Any], found: dict[str, Any] | None, *, baseline: str) -> tuple[str, ...]:
    score, delta, verdict = variant.get("score"), "", "not compared"
    if found is not None:
        delta = f"{found['delta']:+.3f} ({found['delta_low']:+.3f}..{found['delta_high']:+.3f})"
        verdict = found["verdict"] + (", cheaper" if found["cheaper"] else "")
    elif variant["variant"] == baseline:
        verdict = "baseline"
    return (
        variant["variant"],
        "-" if score is None else f"{score:.3f}",
        "-" if score is None else f"{variant['score_low']:.3f}..{variant['score_high']:.3f}",
        delta,
        usd(variant.get("cost_per_run_usd")),
        "-" if variant.get("duration_p50_s") is None else f"{variant['duration_p50_s']:.2f}",
        " ".join(f"{name}:{count}" for name, count in variant["outcomes"].items()),
        verdict,
    )


def run(facts: dict[str, Any]) -> str:
    """One run and a page of what it left."""
    score = facts.get("score")
    lines = [
        f"{facts['run_id']}: {facts['variant']} on {facts['case_id']}, repeat {facts['repeat']}: "
        + facts["outcome"]
        + ("" if score is None else f", score {score:.3f}"),
        f"{facts['duration_s']:.2f} s, {usd(facts['cost_usd'])} ({facts['cost_source']}), "
        f"exit code {facts.get('exit_code', '-')}. {facts['error']}".rstrip(),
    ]
    lines += [f"  {one['grader'] or 'metric'} {one['name']} = {one['value']:g}" for one in facts["scores"]]
    lines += [
        f"  attempt {one['attempt_id']}: {one['outcome']}, {usd(one['cost_usd'])}. {one['detail']}".rstrip()
        for one in facts["attempts"]
    ]
    shown = f"bytes {facts['offset']}.. of {facts['total_bytes']}"
    lines += [f"--- {facts['part']} ({shown})", facts["text"]]
    if "next_offset" in facts:
        lines.append(f"--- more: --offset {facts['next_offset']}")
    return "\n".join(lines)


def rows(facts: dict[str, Any]) -> str:
    """A result table, or the schema."""
    if "tables" in facts:
        return "\n".join(f"{one['table']}: {one['meaning']}\n  {one['columns']}" for one in facts["tables"])
    return table(facts["columns"], facts["rows"]) + _after(facts)


def budget(facts: dict[str, Any]) -> str:
    """The purse as a table, then requests."""
    found = [facts["workspace"], *facts["accounts"]]
    head = ("account", "state", "limit", "spent", "held", "free")
    lines = [
        (
            one["account"],
            one["state"] + (f", overrun {usd(one['overrun_usd'])}" if "overrun_usd" in one else ""),
            *(usd(one[f"{name}_usd"]) for name in head[2:]),
        )
        for one in found
    ]
    asked = "\n".join(requested({"request": one}) for one in facts["requests"])
    return table(head, lines) + (f"\n{asked}" if asked else "") + _after(facts)


def requested(facts: dict[str, Any]) -> str:
    """One request."""
    found = facts["request"]
    granted = f", granted {usd(found['granted_usd'])}" if "granted_usd" in found else ""
    return (
        f"{found['request_id']}: {usd(found['amount_usd'])} more for {found['account']} ({found['reason']}): "
        f"{found['state']}{granted}{_after(facts)}"
    )


def account(facts: dict[str, Any]) -> str:
    """One account after a change."""
    return (
        f"{facts['account']} ({facts['state']}): limit {usd(facts['limit_usd'])}, "
        f"spent {usd(facts['spent_usd'])}, held {usd(facts['held_usd'])}."
    )


def verified(facts: dict[str, Any]) -> str:
    """What the audit found."""
    counted = f"{facts['entries']} entries, {facts['accounts']} accounts, {facts['holds']} holds"
    if facts["clean"]:
        over = "".join(
            f"\n{name} has an overrun: more was charged than was held." for name in facts["overruns"]
        )
        return f"Clean: {counted}; journal, stored balances and memory agree.{over}"
    return f"NOT clean ({counted}):\n" + "\n".join(facts["problems"])
