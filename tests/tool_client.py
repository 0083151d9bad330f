"""An MCP client in the same process, and the eyes of a sceptic: what a refused call has left behind."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import mcp

from evalpurse.errors import ERROR_META
from evalpurse.runs.services import Services
from evalpurse.tools.app import ToolServer, build_server

ERROR_CHARS_MAX = 5_100
CALL_TIMEOUT_S = 60.0
TABLES = (
    "suites",
    "cases",
    "variants",
    "experiments",
    "experiment_statuses",
    "planned_runs",
    "runs",
    "attempts",
    "scores",
    "usage",
)
"""All tables but events, accounts and journal, which are written behind the calls."""


@dataclass(frozen=True)
class Refusal:
    """What a refused call was told."""

    code: str
    text: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class State:
    """All that a call could have changed: rows by table, accounts, holds, requests, journal, blobs."""

    rows: dict[str, int]
    money: str
    blobs: tuple[tuple[str, int], ...]
    sandboxes: tuple[str, ...]


@dataclass(frozen=True)
class Desk:
    """One client of one set of services."""

    services: Services
    client: mcp.Client

    async def send(self, tool: str, arguments: dict[str, Any]) -> Any:
        """The raw result of one call."""
        with anyio.fail_after(CALL_TIMEOUT_S):
            return await self.client.call_tool(tool, arguments)

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The facts of a call that succeeds."""
        result = await self.send(tool, arguments)
        text: str = result.content[0].text
        assert not result.is_error, text
        facts: dict[str, Any] = json.loads(text)
        assert facts == result.structured_content
        return facts

    async def refuse(self, tool: str, **arguments: Any) -> Refusal:
        """The refusal of a call that must fail by the caller's fault, and must change nothing."""
        before = await self.state()
        result = await self.send(tool, arguments)
        text: str = result.content[0].text
        assert result.is_error, f"{tool} took {str(arguments)[:500]}: {text[:500]}"
        error = result.meta[ERROR_META]
        assert error["code"] not in ("internal", "failed", "statement_failed"), text
        assert error["message"] in text
        assert text.endswith(f"[code: {error['code']}]")
        assert len(text) <= ERROR_CHARS_MAX, f"{tool} answers with {len(text):,} characters"
        assert await self.state() == before, f"{tool} changed something and then refused: {text[:500]}"
        return Refusal(error["code"], text, error["facts"])

    async def state(self) -> State:
        """A look at everything, past all tools."""
        store, ledger, home = self.services.store, self.services.ledger, self.services.home
        counts = await store.snapshot({name: f"SELECT count(*) AS n FROM {name}" for name in TABLES})  # noqa: S608
        journal = await ledger.journal(0, 1_000_000)
        return State(
            rows={name: table.column("n")[0].as_py() for name, table in counts.items()},
            money=repr((ledger.accounts(), ledger.open_holds(), ledger.requests(), len(journal))),
            blobs=_files(home.blobs),
            sandboxes=tuple(sorted(path.name for path in home.work.iterdir())),
        )

    def assert_nothing_held(self) -> None:
        """No money is reserved any more, and no account is above its limit."""
        ledger = self.services.ledger
        assert ledger.open_holds() == []
        for account in ledger.accounts():
            assert account.held_nusd == 0
            assert account.posted_nusd <= account.limit_nusd


def _files(folder: Path) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((path.name, path.stat().st_size) for path in folder.rglob("*") if path.is_file()))


def server_of(services: Services) -> ToolServer:
    """The tool server over open services, strict about the size of answers."""

    async def ready() -> Services:
        return services

    return build_server(ready, strict_size=True)


@asynccontextmanager
async def open_desk(services: Services) -> AsyncIterator[Desk]:
    """A client of its own session."""
    async with mcp.Client(server_of(services)) as client:
        yield Desk(services, client)
