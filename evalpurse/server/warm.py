"""Control methods about warm images. Building one uses the account, so it needs the owner's token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from evalpurse.server.control import Registry
from evalpurse.server.errors import BadParametersError
from evalpurse.tools.toolbox import Session

if TYPE_CHECKING:
    from evalpurse.runs.services import Services

Ready = Callable[[], Awaitable["Services"]]


def register(control: Registry, ready: Ready) -> None:
    """Adds the methods to a control door."""

    async def add(params: dict[str, Any], _session: Session) -> dict[str, Any]:
        services = await ready()
        variant = await services.variants.get(_text(params, "variant"))
        return {"warm": [(await services.warmer.add(variant)).facts()], "starts": []}

    async def refresh(_params: dict[str, Any], _session: Session) -> dict[str, Any]:
        services = await ready()
        return {"warm": [each.facts() for each in await services.warmer.refresh()], "starts": []}

    async def listed(_params: dict[str, Any], _session: Session) -> dict[str, Any]:
        services = await ready()
        starts = await services.store.fetch("start_latency_by_kind")
        return {"warm": [each.facts() for each in services.warmer.bases.all()], "starts": starts}

    async def remove(params: dict[str, Any], _session: Session) -> dict[str, Any]:
        services = await ready()
        key = _text(params, "key")
        found = [each.recipe.key for each in services.warmer.bases.all() if each.recipe.key.startswith(key)]
        if len(found) != 1:
            raise BadParametersError(f"{len(found)} warm images have a key that begins with {key!r}.")
        services.warmer.bases.remove(found[0])
        return {"removed": found[0][:12]}

    control.register("warm.add", "owner", add)
    control.register("warm.refresh", "owner", refresh)
    control.register("warm.list", "viewer", listed)
    control.register("warm.remove", "owner", remove)


def _text(params: dict[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not value:
        raise BadParametersError(f"{name} is missing.")
    return value
