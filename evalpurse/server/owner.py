"""Control methods about money: what a person does to the purse, with the role that each needs.

A limit is raised here and nowhere else; no tool that an agent can call leads here.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from evalpurse.server.control import Registry
from evalpurse.server.errors import BadParametersError
from evalpurse.tools.toolbox import Session

if TYPE_CHECKING:
    from evalpurse.budget.accounts import Account
    from evalpurse.runs.services import Services

Ready = Callable[[], Awaitable["Services"]]


def register(control: Registry, ready: Ready) -> None:
    """Adds the budget methods to a control door."""

    async def grant(params: dict[str, Any], session: Session) -> dict[str, Any]:
        from evalpurse.budget.accounts import Role
        from evalpurse.budget.money import parse_usd

        ledger = (await ready()).ledger
        name, added = _text(params, "account"), parse_usd(params.get("amount_usd", ""))
        limit = ledger.account(name).limit_nusd + added
        return _shown(await ledger.set_limit(_once("grant"), name, limit, by=Role(session.role)))

    async def limit(params: dict[str, Any], session: Session) -> dict[str, Any]:
        from evalpurse.budget.accounts import Role
        from evalpurse.budget.money import parse_usd

        ledger = (await ready()).ledger
        name, wanted = _text(params, "account"), parse_usd(params.get("limit_usd", ""))
        return _shown(await ledger.set_limit(_once("limit"), name, wanted, by=Role(session.role)))

    async def decide(params: dict[str, Any], session: Session) -> dict[str, Any]:
        from evalpurse.budget.accounts import Role
        from evalpurse.budget.money import parse_usd
        from evalpurse.tools.budget import request_model

        given, denied = params.get("grant_usd"), bool(params.get("deny"))
        if (given is None) != denied:
            raise BadParametersError("Say either how much to grant, or that the request is denied.")
        ledger = (await ready()).ledger
        amount = None if given is None else parse_usd(given)
        decided = await ledger.decide(_text(params, "request_id"), amount, by=Role(session.role))
        return {"request": request_model(decided).model_dump(exclude_none=True)}

    async def freeze(params: dict[str, Any], session: Session) -> dict[str, Any]:
        from evalpurse.budget.accounts import Role

        name, reason = _text(params, "account"), _text(params, "reason")
        ledger = (await ready()).ledger
        return _shown(await ledger.freeze(_once("freeze"), name, reason=reason, by=Role(session.role)))

    async def unfreeze(params: dict[str, Any], session: Session) -> dict[str, Any]:
        from evalpurse.budget.accounts import Role

        name, reason = _text(params, "account"), _text(params, "reason")
        ledger = (await ready()).ledger
        return _shown(await ledger.unfreeze(_once("unfreeze"), name, reason=reason, by=Role(session.role)))

    async def verify(_params: dict[str, Any], _session: Session) -> dict[str, Any]:
        ledger = (await ready()).ledger
        found = await ledger.verify()
        return {
            "overruns": [one.account for one in ledger.accounts() if one.overrun_nusd],
            "clean": found.clean,
            "entries": found.entries,
            "accounts": found.accounts,
            "holds": found.holds,
            "problems": list(found.problems),
        }

    control.register("budget.grant", "owner", grant)
    control.register("budget.limit", "owner", limit)
    control.register("budget.decide", "owner", decide)
    control.register("budget.freeze", "agent", freeze)
    control.register("budget.unfreeze", "owner", unfreeze)
    control.register("budget.verify", "viewer", verify)


def _once(what: str) -> str:
    """An operation id of its own: a person's command is carried out each time it is given."""
    return f"{what}:{secrets.token_hex(8)}"


def _text(params: dict[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadParametersError(f"{name} is {value!r}; it must be a text.")
    return value


def _shown(account: Account) -> dict[str, Any]:
    from evalpurse.tools.money import usd

    return {
        "account": account.account,
        "state": account.state.value,
        "limit_usd": usd(account.limit_nusd),
        "spent_usd": usd(account.spent_nusd),
        "held_usd": usd(account.held_nusd),
    }
