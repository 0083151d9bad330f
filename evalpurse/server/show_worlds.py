"""Answers about worlds as text for a person. Standard library only."""

from __future__ import annotations

from typing import Any

from evalpurse.server.show import table


def added(facts: dict[str, Any]) -> str:
    """A world that was added, and what was new of it."""
    world = facts["world"]
    if facts["existing"]:
        return f"{_named(world)} was added before; nothing has changed."
    return (
        f"{_named(world)} is kept: {world['files']} files, {world['bytes']:,} bytes. "
        f"New in this home: {facts['stored_files']} contents, {facts['stored_bytes']:,} bytes.\n"
        f"Use it in a variant: world='{world['name']}'."
    )


def listed(facts: dict[str, Any]) -> str:
    """All worlds as a table."""
    rows = [
        (world["name"], world["digest"][:12], world["files"], world["bytes"], world["created_at"][:19])
        for world in facts["worlds"]
    ]
    return table(("world", "digest", "files", "bytes", "added"), rows) if rows else "There are none."


def shown(facts: dict[str, Any]) -> str:
    """One world and what is in it."""
    world = facts["world"]
    rows = [
        (
            f"{entry['mode']:04o}" if "mode" in entry else "",
            f"{entry['uid']}:{entry['gid']}" if "uid" in entry else "",
            entry.get("size", ""),
            entry["path"] + (f" -> {entry['target']}" if "target" in entry else ""),
        )
        for entry in facts["entries"]
    ]
    more = f"\nand {facts['more']} more" if facts["more"] else ""
    lines = table(("mode", "owner", "bytes", "path"), rows)
    return f"{_named(world)}: {world['files']} files, {world['bytes']:,} bytes.\n{lines}{more}"


def verified(facts: dict[str, Any]) -> str:
    """What a verification found."""
    world = facts["world"]
    if facts["intact"]:
        return f"{_named(world)} is intact: {world['files']} files, {world['bytes']:,} bytes."
    more = [f"and {facts['more']} more"] if facts["more"] else []
    return "\n".join(
        [
            f"{_named(world)} is NOT intact and will not be mounted:",
            *facts["problems"],
            *more,
            f"Add it again from its source: evalpurse world add DIR --name {world['name']}",
        ]
    )


def _named(world: dict[str, Any]) -> str:
    return f"World {world['name']} ({world['digest'][:12]})"
