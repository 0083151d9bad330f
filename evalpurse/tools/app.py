"""The MCP server: which tools there are, and what a model is told about them before it calls one.

It answers `tools/list` before any data is open, so nothing here imports the store. The same server object
serves every connection: state of a connection is in its `Session`, state of the daemon in its services.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.runner import serve_dual_era_loop
from mcp.types import CallToolResult, InputRequiredResult, Tool

from evalpurse import __version__
from evalpurse.tools.toolbox import ServicesReady, Toolbox

Register = Callable[[Toolbox], None]

INSTRUCTIONS = """\
evalpurse runs eval experiments for you inside a purse that a person set and nobody else can raise.

The loop: create_cases (what to measure), create_variant (your harness at a commit), launch_experiment with \
dry_run=true (what it costs and can detect), launch_experiment, wait_experiment until it ends, \
compare_variants, read_run for the failures, change the harness, again.

Money is held before anything runs, so a launch may be refused or cut short: budget_status says what is \
free, request_budget asks the owner for more. Launch with an idempotency key: the same key and arguments \
never pay twice. Cancelling a call ends your wait, not the experiment. A wait lasts at most 45 s: call again.

Every error says what happened and what to do. query_results takes SQL when no tool shows what you need.
"""


class ToolServer(MCPServer[dict[str, Any]]):
    """The SDK's server with our answer to unknown tools, and a way to serve a pair of streams."""

    def __init__(self, toolbox: Toolbox) -> None:
        super().__init__(
            "evalpurse",
            title="evalpurse",
            version=__version__,
            instructions=INSTRUCTIONS,
            tools=list(toolbox.tools.values()),
            log_level="WARNING",
        )
        self.toolbox = toolbox
        self._listed = anyio.Event()

    async def list_tools(self) -> list[Tool]:
        """The tools in the order they were registered."""
        self._listed.set()
        return await super().list_tools()

    async def wait_for_first_list(self, timeout_s: float) -> None:
        """Returns when a client has asked for the tools, or when the time is over."""
        with anyio.move_on_after(timeout_s):
            await self._listed.wait()

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[dict[str, Any], Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Carries out one call; an unknown name is answered with the nearest one."""
        if name not in self.toolbox.tools:
            return self.toolbox.unknown(name)
        return await super().call_tool(name, arguments, context)

    async def serve(self, read_stream: Any, write_stream: Any) -> None:
        """Serves one connection of either protocol era until its read side ends.

        The SDK enters a server's lifespan anew for each connection; ours has none, because the daemon owns
        the services.
        """
        await serve_dual_era_loop(self._lowlevel_server, read_stream, write_stream, lifespan_state={})


def all_tools() -> Sequence[Register]:
    """What registers each group of tools, in the order a model sees them."""
    from evalpurse.tools import budget, cases, experiments, results, variants

    return (
        cases.register,
        variants.register,
        experiments.register,
        results.register,
        budget.register,
    )


def build_server(
    services_ready: ServicesReady, *, registers: Sequence[Register] | None = None, strict_size: bool = False
) -> ToolServer:
    """The server with all its tools.

    Args:
        services_ready: returns the services; raises the reason when they cannot be had.
        registers: what registers the tools, if not `all_tools()`; tests pass their own.
        strict_size: an answer above 40 kB is an error instead of a line in the log.
    """
    toolbox = Toolbox(services_ready, strict_size=strict_size)
    for register in all_tools() if registers is None else registers:
        register(toolbox)
    return ToolServer(toolbox)
