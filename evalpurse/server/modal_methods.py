"""Control methods about sandboxes and what they are given: secrets, the smoke tour, sweeping.

A tour spends outside of any experiment and secrets are the owner's, so both need the owner's token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from evalpurse.server.control import Registry
from evalpurse.server.errors import BadParametersError
from evalpurse.tools.toolbox import Session

if TYPE_CHECKING:
    from evalpurse.runs.services import Services

Ready = Callable[[], Awaitable["Services"]]
SYNCS_SHOWN = 10


def register(control: Registry, ready: Ready) -> None:
    """Adds the methods to a control door."""

    async def sync(_params: dict[str, Any], _session: Session) -> dict[str, Any]:
        done = await (await ready()).vault.sync()
        return {
            "at": done.at.isoformat(),
            "names": list(done.names),
            "changed": list(done.changed),
            "in_modal": list(done.in_modal),
            "skipped": done.skipped,
        }

    async def syncs(_params: dict[str, Any], _session: Session) -> dict[str, Any]:
        rows = await (await ready()).store.fetch("secret_syncs", count=SYNCS_SHOWN)
        return {"syncs": [{**row, "at": row["at"].isoformat()} for row in rows]}

    async def smoke(params: dict[str, Any], session: Session) -> dict[str, Any]:
        from evalpurse.budget.accounts import Role
        from evalpurse.budget.money import parse_usd
        from evalpurse.runs.sandboxes import modal_client
        from evalpurse.runs.smoke import Smoke

        services = await ready()
        home = services.home
        tour = Smoke(home, services.settings, services.ledger, lambda: modal_client.connect(home))
        report = await tour.run(parse_usd(params.get("max_usd", "")), by=Role(session.role))
        return report.facts()

    async def sandboxes(params: dict[str, Any], _session: Session) -> dict[str, Any]:
        backend = params.get("backend", "")
        if backend not in ("", "local", "modal"):
            raise BadParametersError(f"backend is {backend!r}; it can be 'local' or 'modal'.")
        return {"sandboxes": await _sandboxes(await ready(), backend)}

    async def sweep(_params: dict[str, Any], _session: Session) -> dict[str, Any]:
        swept = await (await ready()).sweep.sweep()
        return {"ended": list(swept.ended), "kept": swept.kept}

    control.register("secrets.sync", "owner", sync)
    control.register("secrets.syncs", "viewer", syncs)
    control.register("smoke.modal", "owner", smoke)
    control.register("sandboxes.list", "viewer", sandboxes)
    control.register("sandboxes.sweep", "agent", sweep)


async def _sandboxes(services: Services, backend: str) -> list[dict[str, Any]]:
    """Sandboxes of this home: those on this machine, and on Modal those of experiments under way."""
    found: list[dict[str, Any]] = []
    if backend in ("", "local"):
        names = await services.backend.list({"home": services.home.identity()})
        found += [{"sandbox": name, "backend": services.backend.name} for name in names]
    if backend in ("", "modal"):
        under_way = {hold.hold_id.partition(".")[0] for hold in services.ledger.open_holds("exp_")}
        for experiment_id in sorted(under_way):
            rows = await services.store.fetch("experiment_by_id", experiment_id=experiment_id)
            if rows and rows[0]["backend"] == services.modal.name:
                names = await services.modal.list({"experiment": experiment_id})
                found += [{"sandbox": name, "backend": services.modal.name} for name in names]
    held = {hold.hold_id for hold in services.ledger.open_holds("exp_")}
    return [{**each, "held": each["sandbox"] in held} for each in found]
