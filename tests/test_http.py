"""The HTTP door: the same tools for clients that bring a token, and nothing for pages that do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anyio
import httpx2
import mcp
import pytest
from mcp.client.streamable_http import streamable_http_client

from evalpurse.home import Home
from evalpurse.server.client import control
from evalpurse.server.link import Address
from evalpurse.server.tokens import read_token
from tests.daemons import META, kill, start_daemon

Era = Literal["legacy", "2026-07-28"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home whose daemon no test ends."""
    home = Home(tmp_path_factory.mktemp("shared") / "home").create()
    start_daemon(home)
    yield home
    kill(home)


def _port(home: Home) -> int:
    address = Address.read(home)
    assert address is not None
    assert address.http_port is not None
    return address.http_port


def _url(home: Home) -> str:
    return f"http://127.0.0.1:{_port(home)}/mcp"


def _headers(home: Home, role: str = "agent", **more: str) -> dict[str, str]:
    return {
        "authorization": f"Bearer {read_token(home, role)}",
        "accept": "application/json, text/event-stream",
        **more,
    }


_LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": META}}
_MODERN = {"mcp-protocol-version": "2026-07-28", "mcp-method": "tools/list"}
_INITIALIZE: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "t", "version": "1"},
    },
}


@pytest.mark.anyio
@pytest.mark.parametrize("era", ["legacy", "2026-07-28"])
@pytest.mark.parametrize("role", ["agent", "viewer"])
async def test_a_client_with_a_token_calls_tools_as_its_role(shared: Home, era: Era, role: str) -> None:
    told: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        told.append(progress)

    with anyio.fail_after(30):
        async with (
            httpx2.AsyncClient(headers={"authorization": _headers(shared, role)["authorization"]}) as http,
            mcp.Client(streamable_http_client(_url(shared), http_client=http), mode=era) as client,
        ):
            result = await client.call_tool("echo", {"text": "over HTTP"})
            assert result.structured_content == {
                "text": "over HTTP",
                "role": role,
                "client": "mcp",
                "door": "http",
            }
            await client.call_tool("count", {"to": 3}, progress_callback=on_progress)
            assert told == [1, 2, 3]
            touched = await client.call_tool("touch", {"name": f"{era}-{role}"})
            assert touched.is_error is (role == "viewer")
    assert (shared.path / f"{era}-{role}").exists() is (role == "agent")


@pytest.mark.parametrize("path", ["/mcp", "/", "/anything"])
@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"authorization": ""}, 401, "no_token"),
        ({"authorization": "Bearer wrong"}, 401, "bad_token"),
        ({"authorization": "Basic YTpi"}, 401, "bad_token"),
        ({"origin": "https://example.com"}, 403, "foreign_origin"),
        ({"origin": "http://localhost:1"}, 403, "foreign_origin"),
        ({"origin": "null"}, 403, "foreign_origin"),
        ({"host": "example.com"}, 421, "wrong_host"),
        ({"host": "localhost:1"}, 421, "wrong_host"),
        ({"host": "localhost"}, 421, "wrong_host"),
    ],
)
def test_every_route_refuses_strangers_and_says_why(
    shared: Home, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    answer = httpx2.post(
        f"http://127.0.0.1:{_port(shared)}{path}", json=_LIST, headers=_headers(shared, **_MODERN) | headers
    )
    error = json.loads(answer.text)["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert error["message"]
    assert error["hint"]
    assert ("www-authenticate" in answer.headers) is (status == 401)


def test_the_token_is_never_echoed(shared: Home) -> None:
    answer = httpx2.post(_url(shared), json=_LIST, headers={"authorization": "Bearer abc123wrong"})
    assert "abc123wrong" not in answer.text


def test_its_own_page_may_use_the_door(shared: Home) -> None:
    own = f"http://127.0.0.1:{_port(shared)}"
    answer = httpx2.post(_url(shared), json=_LIST, headers=_headers(shared, origin=own, **_MODERN))
    assert answer.status_code == 200
    assert len(_message(answer)["result"]["tools"]) == 7


def test_a_form_of_a_foreign_page_cannot_reach_a_tool(shared: Home) -> None:
    headers = _headers(shared, **_MODERN) | {"content-type": "text/plain"}
    answer = httpx2.post(_url(shared), content=json.dumps(_LIST), headers=headers)
    assert answer.status_code in (400, 415)


def test_a_session_belongs_to_the_token_that_opened_it(shared: Home) -> None:
    opened = httpx2.post(_url(shared), json=_INITIALIZE, headers=_headers(shared, "owner"))
    session = {"mcp-session-id": opened.headers["mcp-session-id"]}
    ask = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
    assert (
        httpx2.post(_url(shared), json=ask, headers=_headers(shared, "agent", **session)).status_code == 404
    )
    assert (
        httpx2.post(_url(shared), json=ask, headers=_headers(shared, "owner", **session)).status_code == 200
    )


def test_status_says_where_the_door_is(shared: Home) -> None:
    assert control(shared, "daemon.status")["http"] == {"open": True, "url": _url(shared)}


def _message(answer: httpx2.Response) -> dict[str, Any]:
    text = answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        text = next(line[6:] for line in text.splitlines() if line.startswith("data: {"))
    message: dict[str, Any] = json.loads(text)
    return message
