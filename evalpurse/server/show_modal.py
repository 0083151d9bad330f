"""Answers about Modal, secrets and sandboxes as text for a person. Standard library only."""

from __future__ import annotations

from typing import Any

from evalpurse.server.show import table, usd

_MARKS = {"pass": "ok", "fail": "FAIL", "unclear": "?", "skip": "-"}


def smoke(facts: dict[str, Any]) -> str:
    """Every check with its reason, latencies and price, and one last line that says it all."""
    width = max(len(check["name"]) for check in facts["checks"])
    lines = []
    for check in facts["checks"]:
        mark = _MARKS[check["state"]]
        lines.append(f"{mark:4}  {check['name']:{width}}  {check['seconds']:6.2f} s  {check['found']}")
        if check["mend"]:
            lines.append(f"{'':4}  {'':{width}}            -> {check['mend']}")
    for name, (p50, p95, count) in facts["latency"].items():
        what = name.removesuffix("_s").replace("_", " ")
        lines.append(f"{what}: p50 {p50:.3f} s, p95 {p95:.3f} s of {count:g}")
    price = facts["price"]
    size = f"{price['cpu']:g} cores and {price['memory_mb']} MiB"
    lines.append(
        f"price: {usd(price['charged_usd'])} charged of {usd(price['worst_case_usd'])} held; "
        f"{usd(price['usd_per_sandbox_hour'])} an hour for {size} ({price['rates']})"
    )
    failed = [check["name"] for check in facts["checks"] if check["state"] in ("fail", "skip")]
    unclear = [check["name"] for check in facts["checks"] if check["state"] == "unclear"]
    if failed:
        lines.append(f"Not working after {facts['seconds']:.0f} s: {', '.join(failed)}.")
    else:
        told = f" Could not be told here: {', '.join(unclear)}." if unclear else ""
        lines.append(f"Everything works ({facts['seconds']:.0f} s).{told}")
    return "\n".join(lines)


def synced(facts: dict[str, Any]) -> str:
    """Which names were copied, and where to."""
    changed = f"; changed: {', '.join(facts['changed'])}" if facts["changed"] else "; nothing had changed"
    where = "the home folder and Modal" if facts["in_modal"] else "the home folder"
    left_out = f"\nNot in Modal: {facts['skipped']}" if facts["skipped"] else ""
    return f"{', '.join(facts['names'])} copied to {where}{changed}.{left_out}"


def syncs(facts: dict[str, Any]) -> str:
    """The newest first."""
    if not facts["syncs"]:
        return "Nothing has been synced yet."
    return table(["when", "what", "names"], [[s["at"], s["step"], s["detail"]] for s in facts["syncs"]])


def sandboxes(facts: dict[str, Any]) -> str:
    """One a line; a sandbox without a hold belongs to nothing that is under way."""
    if not facts["sandboxes"]:
        return "There are none."
    rows = [[s["sandbox"], s["backend"], "yes" if s["held"] else "no"] for s in facts["sandboxes"]]
    return table(["sandbox", "backend", "held"], rows)


def swept(facts: dict[str, Any]) -> str:
    """What was ended, and what was left alone."""
    ended = facts["ended"]
    kept = f"{facts['kept']} belong to attempts under way."
    return "\n".join([f"{len(ended)} sandboxes of no attempt were ended; {kept}", *ended])
