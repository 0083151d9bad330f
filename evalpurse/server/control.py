"""The control door: what a person or a program does to the daemon itself, one JSON line a request.

Apart from the tools on purpose: a model never sees these methods, and each names the role it needs. A role
may do what lower roles may.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from evalpurse.errors import EvalpurseError
from evalpurse.server.errors import BadParametersError, UnknownMethodError
from evalpurse.server.tokens import ROLES, allows
from evalpurse.tools.toolbox import ForbiddenError, Session, nearest

log = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any], Session], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class _Method:
    role: str
    handler: Handler


class Registry:
    """The methods of the control door."""

    def __init__(self) -> None:
        self._methods: dict[str, _Method] = {}

    def register(self, name: str, role: str, handler: Handler) -> None:
        """Adds `async handler(params, session) -> result`; errors it raises reach the caller as they are.

        Raises:
            ValueError: the role does not exist, or the name is taken.
        """
        if role not in ROLES:
            raise ValueError(f"{name}: there is no role {role!r}; there are {', '.join(ROLES)}.")
        if name in self._methods:
            raise ValueError(f"{name} is registered twice.")
        self._methods[name] = _Method(role, handler)

    async def answer(self, line: bytes, session: Session) -> bytes:
        """The answer line to a request line; never raises for what a client sent."""
        request_id: Any = None
        try:
            request = _parse(line)
            request_id = request.get("id")
            result = await self._carry_out(request, session)
            answer: dict[str, Any] = {"id": request_id, "result": result}
        except EvalpurseError as error:
            answer = {"id": request_id, "error": _described(error)}
        except Exception:
            reference = secrets.token_hex(4)
            log.exception("control request failed, ref %s", reference)
            answer = {
                "id": request_id,
                "error": {
                    "code": "internal",
                    "message": "evalpurse failed inside: a defect, not your input.",
                    "hint": f"Its trace is in the daemon's log under ref {reference} "
                    "(`evalpurse daemon logs`).",
                    "facts": {"ref": reference},
                },
            }
        return json.dumps(answer, default=str, separators=(",", ":")).encode() + b"\n"

    async def _carry_out(self, request: dict[str, Any], session: Session) -> dict[str, Any]:
        name = request.get("method")
        params = request.get("params", {})
        if not isinstance(name, str) or not isinstance(params, dict):
            raise BadParametersError("A request needs 'method', a text, and 'params', an object.")
        method = self._methods.get(name)
        if method is None:
            known = list(self._methods)
            hint = nearest(name, known) or f"There are: {', '.join(known)}."
            raise UnknownMethodError(f"There is no control method {name!r}.", hint=hint)
        if not allows(session.role, method.role):
            raise ForbiddenError(
                f"{name} needs the {method.role} token; this client came with the {session.role} token.",
                hint="Only a person who owns this home should use the owner token.",
                needed=method.role,
                role=session.role,
            )
        return await method.handler(params, session)

    async def serve(
        self, lines: AsyncIterator[bytes], send: Callable[[bytes], Awaitable[None]], session: Session
    ) -> None:
        """Answers one connection, in order, until it ends."""
        async for line in lines:
            if line.strip():
                await send(await self.answer(line, session))


def number(params: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    """A numeric parameter inside its range.

    Raises:
        BadParametersError: names the parameter and its range.
    """
    value = params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise BadParametersError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}.")
    return float(value)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadParametersError(f"The request is not JSON: {error}.") from error
    if not isinstance(request, dict):
        raise BadParametersError("The request is not a JSON object.")
    return request


def _described(error: EvalpurseError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "hint": error.hint, "facts": error.facts}
