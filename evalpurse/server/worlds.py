"""Control methods about worlds. To add one the daemon reads a folder of its machine, so the owner asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalpurse.server.control import Registry
from evalpurse.server.errors import BadParametersError
from evalpurse.tools.toolbox import Session

if TYPE_CHECKING:
    from evalpurse.runs.services import Services
    from evalpurse.store.records import WorldRow

Ready = Callable[[], Awaitable["Services"]]
ENTRIES_SHOWN = 1_000
PROBLEMS_SHOWN = 100


def register(control: Registry, ready: Ready) -> None:
    """Adds the methods to a control door."""

    async def add(params: dict[str, Any], _session: Session) -> dict[str, Any]:
        folder = Path(_text(params, "folder"))
        if not folder.is_absolute():
            raise BadParametersError(f"folder is {str(folder)!r}; it must be an absolute path.")
        added = await (await ready()).worlds.add(folder, _text(params, "name"))
        return {
            "world": _facts(added.row),
            "existing": added.existing,
            "stored_files": added.stored_files,
            "stored_bytes": added.stored_bytes,
        }

    async def list_worlds(_params: dict[str, Any], _session: Session) -> dict[str, Any]:
        return {"worlds": [_facts(row) for row in await (await ready()).worlds.list()]}

    async def show(params: dict[str, Any], _session: Session) -> dict[str, Any]:
        row, manifest = await (await ready()).worlds.show(_text(params, "world"))
        shown = [entry.facts() for entry in manifest.entries[:ENTRIES_SHOWN]]
        return {"world": _facts(row), "entries": shown, "more": len(manifest.entries) - len(shown)}

    async def verify(params: dict[str, Any], _session: Session) -> dict[str, Any]:
        worlds = (await ready()).worlds
        row = await worlds.get(_text(params, "world"))
        problems = await worlds.verify(row.world_digest)
        return {
            "world": _facts(row),
            "intact": not problems,
            "problems": list(problems[:PROBLEMS_SHOWN]),
            "more": max(0, len(problems) - PROBLEMS_SHOWN),
        }

    control.register("world.add", "owner", add)
    control.register("world.list", "viewer", list_worlds)
    control.register("world.show", "viewer", show)
    control.register("world.verify", "agent", verify)


def _text(params: dict[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise BadParametersError(f"{name} is {value!r}; it must be a text.")
    return value


def _facts(row: WorldRow) -> dict[str, Any]:
    return {
        "name": row.world,
        "digest": row.world_digest,
        "files": row.files,
        "bytes": row.bytes,
        "created_at": row.created_at.isoformat(),
    }
