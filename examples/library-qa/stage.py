"""What the demo stands on: a fresh home, a stand-in model, the owner's command line, the agent's client.

The owner and the agent are two parties with two doors: limits and secrets go through the command line,
everything else through MCP over stdio, just as a coding agent's host would connect.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.shared.dispatcher import ProgressFnT
from mcp.types import TextContent
from variants import Model

HERE = Path(__file__).parent
CLI = [sys.executable, "-m", "evalpurse.server.cli"]


class RefusedError(Exception):
    """A tool or a command said no; the text is what it said."""


class Owner:
    """The person: the command line with the owner's token of one home folder."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def run(self, *words: str, sent: str = "") -> dict[str, Any]:
        """One command's JSON answer.

        Raises:
            RefusedError: it failed; with what it said.
        """
        done = subprocess.run(
            [*CLI, *words, "--json", "--home", str(self._home)],
            input=sent,
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RefusedError(f"evalpurse {' '.join(words)}: {(done.stdout + done.stderr).strip()}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


class Agent:
    """The coding agent's side: tools by name, answers as they are structured."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def tools(self) -> list[str]:
        return [tool.name for tool in (await self._client.list_tools()).tools]

    async def call(
        self, tool: str, arguments: dict[str, Any] | None = None, *, progress: ProgressFnT | None = None
    ) -> dict[str, Any]:
        """One tool call.

        Raises:
            RefusedError: the tool answered with an error; its text says what to do.
        """
        result = await self._client.call_tool(tool, arguments or {}, progress_callback=progress)
        if result.is_error:
            said = " ".join(part.text for part in result.content if isinstance(part, TextContent))
            raise RefusedError(said)
        return dict(result.structured_content or {})


@asynccontextmanager
async def connected(home: Path) -> AsyncIterator[Agent]:
    """An MCP client over stdio; connecting starts the daemon of the home, and leaving stops it."""
    command = StdioServerParameters(command=CLI[0], args=[*CLI[1:], "mcp", "--home", str(home)])
    try:
        async with Client(command) as client:
            yield Agent(client)
    finally:
        Owner(home).run("daemon", "stop")


@contextmanager
def stand_in_model() -> Iterator[Model]:
    """The model server in a process of its own; yields where it is."""
    with subprocess.Popen(
        [sys.executable, str(HERE / "model_server.py")], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None  # noqa: S101 - Popen was told to make a pipe
            yield Model(server.stdout.readline().split()[-1])
        finally:
            server.terminate()


def write_prices(home: Path, model: Model) -> None:
    """Prices of a model that no public list has; the daemon reads them when it starts."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / "prices.toml").write_text(
        f'[[price]]\nmodel = "{model.name}"\n'
        f'input_usd_per_mtok = "{model.usd_per_million_input}"\n'
        f'output_usd_per_mtok = "{model.usd_per_million_output}"\n',
        encoding="utf-8",
    )
