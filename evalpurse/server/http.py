"""The HTTP door: streamable MCP on loopback for browsers and clients that are not started by a host.

A browser can be made to send requests to loopback by any page, so every request must name this door exactly
(Host), come from no page or from our own (Origin), and carry a token. The guard stands before every route:
a route added later is guarded too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import anyio
import uvicorn
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from evalpurse.server.tokens import Tokens
from evalpurse.tools.app import ToolServer

log = logging.getLogger(__name__)

PATH = "/mcp"
GRACE_S = 1


class Guard:
    """Lets a request through when its Host, Origin and token are right, and notes the token's role."""

    def __init__(self, app: ASGIApp, tokens: Tokens, port: int) -> None:
        self._app = app
        self._tokens = tokens
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self._hosts:
            names = ", ".join(sorted(self._hosts))
            await _refuse(send, 421, "wrong_host", f"This door is not {host!r}.", f"Its names: {names}.")
            return
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            await _refuse(
                send,
                403,
                "foreign_origin",
                f"Pages of {origin!r} may not use this door.",
                "Use its own page.",
            )
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        role = self._tokens.role_of(token.strip()) if scheme.lower() == "bearer" else None
        if role is None:
            given = "The bearer token is not one of this home's." if scheme else "A bearer token is missing."
            hint = "Send 'Authorization: Bearer TOKEN' with the text of tokens/agent in the home folder."
            await _refuse(send, 401, "bad_token" if scheme else "no_token", given, hint)
            return
        access = AccessToken(token=role, client_id=role, scopes=[role])
        # The SDK ties a session to the user that opened it: another token cannot take it over.
        guarded = {**scope, "evalpurse_role": role, "user": AuthenticatedUser(access)}
        await self._app(guarded, receive, send)


async def _refuse(send: Send, status: int, code: str, message: str, hint: str) -> None:
    body = json.dumps({"error": {"code": code, "message": message, "hint": hint}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="evalpurse"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Quiet(uvicorn.Server):
    """The daemon owns the signals of its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpDoor:
    """Serves MCP over HTTP on a socket that is bound before anything heavy is loaded."""

    def __init__(self, server: ToolServer, tokens: Tokens, sock: socket.socket) -> None:
        port = sock.getsockname()[1]
        app = server.streamable_http_app(
            streamable_http_path=PATH,
            # The guard is stricter: the SDK would let any page of any port on localhost in.
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )
        config = uvicorn.Config(
            Guard(app, tokens, port),
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=GRACE_S,
        )
        self._socket = sock
        self._server = _Quiet(config)

    async def serve(self) -> None:
        """Serves until cancelled; open requests have a second to end then."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._serve_to_the_end)
                try:
                    await anyio.sleep_forever()
                finally:
                    self._server.should_exit = True
        finally:
            self._socket.close()

    async def _serve_to_the_end(self) -> None:
        with anyio.CancelScope(shield=True):  # it has its own way to end, which tells its clients
            await self._server.serve([self._socket])


def bind(port: int) -> socket.socket:
    """Loopback, on a port of its own; 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen(128)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def describe(port: int | None, error: str) -> dict[str, Any]:
    """The door as `daemon.status` shows it."""
    if port is None:
        return {"open": False, "reason": error}
    return {"open": True, "url": f"http://127.0.0.1:{port}{PATH}"}
