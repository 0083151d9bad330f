"""MCP clients that others wrote, behind one small interface, so that one test can be put to all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import anyio
import httpx2
import mcp
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from evalpurse.home import Home
from evalpurse.server.link import Address
from evalpurse.server.tokens import read_token
from tests.outside.node import FOLDER, node

LEGACY, MODERN = "2025-11-25", "2026-07-28"
_LINE_BYTES_MAX = 10_000_000

Progress = tuple[float, float | None, str | None]


@dataclass(frozen=True)
class Way:
    """How a test comes in: whose client, in which protocol version ("auto": it finds out), by which door."""

    client: Literal["python", "sdk_v1", "sdk_v2"]
    era: str
    door: Literal["stdio", "http"]

    def __str__(self) -> str:
        return f"{self.client}-{self.era}-{self.door}"


class Outcome(NamedTuple):
    """How a call ended: with a result, or with what the client threw; and the progress it was told."""

    result: dict[str, Any] | None
    failure: str
    progress: list[Progress]


@dataclass(frozen=True)
class Greeting:
    """What client and server agreed on."""

    name: str
    version: str
    instructions: str


class Driven(Protocol):
    """A connected client."""

    greeting: Greeting

    async def tools(self) -> list[dict[str, Any]]:
        """The tools, as JSON."""
        ...

    async def call(self, tool: str, arguments: dict[str, Any], *, cancel: bool = False) -> Outcome:
        """One call; with `cancel` the client gives it up at its first progress notification."""
        ...


def words(home: Home, *more: str) -> list[str]:
    """A command of the real command line, about one home."""
    return [sys.executable, "-m", "evalpurse.server.cli", *more, "--home", str(home.path)]


def environment() -> dict[str, str]:
    """What a host passes on, and where this code is."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR") if name in os.environ}
    return {**kept, "PYTHONPATH": str(FOLDER.parent.parent)}


def run_cli(home: Home, *more: str) -> dict[str, Any]:
    """One command to its end; its JSON answer."""
    done = subprocess.run(
        words(home, *more, "--json"),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def http_url(home: Home) -> str:
    """The HTTP door of the daemon that serves a home."""
    address = Address.read(home)
    assert address is not None, "no daemon has opened its doors"
    return f"http://127.0.0.1:{address.http_port}/mcp"


@asynccontextmanager
async def connect(way: Way, home: Home) -> AsyncIterator[Driven]:
    """A client of the daemon of a home; on stdio it starts one if need be."""
    opened = _connect_python(way, home) if way.client == "python" else _connect_node(way, home)
    async with opened as driven:
        yield driven


@dataclass
class _Python:
    client: mcp.Client
    greeting: Greeting

    async def tools(self) -> list[dict[str, Any]]:
        return [_json(tool) for tool in (await self.client.list_tools()).tools]

    async def call(self, tool: str, arguments: dict[str, Any], *, cancel: bool = False) -> Outcome:
        told: list[Progress] = []
        result: dict[str, Any] | None = None
        failure = ""
        with anyio.CancelScope() as scope:

            async def on_progress(progress: float, total: float | None, message: str | None) -> None:
                told.append((progress, total, message))
                if cancel:
                    scope.cancel()

            try:
                result = _json(await self.client.call_tool(tool, arguments, progress_callback=on_progress))
            except MCPError as error:
                failure = f"MCPError: {error}"
        return Outcome(result, "cancelled" if scope.cancelled_caught else failure, told)


@asynccontextmanager
async def _connect_python(way: Way, home: Home) -> AsyncIterator[Driven]:
    mode: Any = "legacy" if way.era == LEGACY else "auto"  # pinned, it would not ask who serves
    program, *arguments = words(home, "mcp")
    here = StdioServerParameters(command=program, args=arguments, env=environment())
    headers = {"Authorization": f"Bearer {read_token(home, 'agent')}"} if way.door == "http" else {}
    async with httpx2.AsyncClient(headers=headers) as http:
        server: Any = streamable_http_client(http_url(home), http_client=http) if headers else here
        async with mcp.Client(server, mode=mode) as client:
            info = client.server_info
            assert info is not None
            yield _Python(client, Greeting(info.name, client.protocol_version, client.instructions or ""))


@dataclass
class _Node:
    """A script of this folder, which takes a line of JSON for each command (drive.mjs)."""

    process: Process
    greeting: Greeting = Greeting("", "", "")
    lines: BufferedByteReceiveStream = field(init=False)

    def __post_init__(self) -> None:
        assert self.process.stdout is not None
        self.lines = BufferedByteReceiveStream(self.process.stdout)

    async def tools(self) -> list[dict[str, Any]]:
        answer = await self.ask(list=True)
        tools: list[dict[str, Any]] = answer["tools"]
        return tools

    async def call(self, tool: str, arguments: dict[str, Any], *, cancel: bool = False) -> Outcome:
        answer = await self.ask(call=tool, arguments=arguments, cancel=cancel)
        told = [(done, total, message) for done, total, message in answer["progress"]]
        return Outcome(answer.get("result"), answer.get("failure", ""), told)

    async def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        await self.process.stdin.send(json.dumps(command).encode() + b"\n")
        return await self.read()

    async def read(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(await self.lines.receive_until(b"\n", _LINE_BYTES_MAX))
        return answer


@asynccontextmanager
async def _connect_node(way: Way, home: Home) -> AsyncIterator[Driven]:
    target: dict[str, Any] = {"era": way.era}
    if way.door == "http":
        target |= {"url": http_url(home), "token": read_token(home, "agent")}
    else:
        program, *arguments = words(home, "mcp")
        target |= {"command": program, "args": arguments, "env": environment()}
    command: Sequence[str | Path] = [node(), FOLDER / f"{way.client}.mjs", json.dumps(target)]
    async with await anyio.open_process(command, stderr=None) as process:
        driven = _Node(process)
        said = await driven.read()
        driven.greeting = Greeting(said["server"]["name"], said["version"], said["instructions"])
        yield driven
        assert process.stdin is not None
        await process.stdin.aclose()
        assert await process.wait() == 0


def _json(model: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped
