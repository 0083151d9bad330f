"""What the bridge and the daemon cost a host, against one MCP server process on stdio without either.

The baseline serves the same tools over the same data from one process that the host starts itself. Both
sides are measured in the same run, with the SDK's own client, and every figure includes that client.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import mcp

from evalpurse.home import Home
from evalpurse.server.life import stop

COLD_STARTS = 3
CONNECTS = 15
CALLS = 300
PARALLEL = 32
PARALLEL_CALLS = 960
TOOL = "budget_status"
TIME_LIMIT_S = 120


def bridge(home: Home) -> mcp.StdioServerParameters:
    """How a host starts evalpurse."""
    return _python(["-m", "evalpurse.server.cli", "mcp", "--home", str(home.path)])


def direct(home: Home) -> mcp.StdioServerParameters:
    """The baseline: this file, as a server."""
    return _python([__file__, "--serve", str(home.path)])


def _python(arguments: list[str]) -> mcp.StdioServerParameters:
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "PYTHONPATH", "TMPDIR") if name in os.environ}
    return mcp.StdioServerParameters(command=sys.executable, args=arguments, env=kept)


async def serve(home: Home) -> None:
    """The same server over the same services on stdin and stdout, in one process."""
    from evalpurse.config import Settings
    from evalpurse.server.keeper import Keeper
    from evalpurse.tools.app import build_server

    keeper = Keeper(home.create(), Settings())
    server = build_server(keeper.ready)

    async def keep() -> None:
        await server.wait_for_first_list(1)
        await keeper.run()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep)
        await server.run_stdio_async()
        keeper.close()


async def connect_and_list(parameters: mcp.StdioServerParameters) -> float:
    """Seconds from starting the host's process to having the tools; the way down is not counted."""
    began = time.perf_counter()
    async with mcp.Client(parameters) as client:
        tools = await client.list_tools()
        seconds = time.perf_counter() - began
    if not any(tool.name == TOOL for tool in tools.tools):
        raise SystemExit(f"{TOOL} is not among the tools that the server lists.")
    return seconds


async def calls(parameters: mcp.StdioServerParameters) -> tuple[float, float]:
    """The median seconds of one call after another, and calls a second with 32 at once."""
    async with mcp.Client(parameters) as client:
        await client.list_tools()

        async def call() -> float:
            began = time.perf_counter()
            result = await client.call_tool(TOOL, {})
            if result.is_error:
                raise SystemExit(f"{TOOL} failed: {result.content}")
            return time.perf_counter() - began

        for _ in range(20):
            await call()
        one_by_one = [await call() for _ in range(CALLS)]
        return statistics.median(one_by_one), await _at_once(call)


async def _at_once(call: Callable[[], Awaitable[float]]) -> float:
    async def worker() -> None:
        for _ in range(PARALLEL_CALLS // PARALLEL):
            await call()

    began = time.perf_counter()
    async with anyio.create_task_group() as workers:
        for _ in range(PARALLEL):
            workers.start_soon(worker)
    return PARALLEL_CALLS / (time.perf_counter() - began)


async def measure(folder: Path) -> dict[str, Any]:
    """All figures, bridge and baseline in turn."""
    cold, cold_direct = [], []
    for number in range(COLD_STARTS):
        home = Home(folder / f"cold{number}")
        cold.append(await connect_and_list(bridge(home)))
        stop(home, 5)
        cold_direct.append(await connect_and_list(direct(Home(folder / f"direct{number}"))))
    home, alone = Home(folder / "warm"), Home(folder / "alone")
    try:
        await connect_and_list(bridge(home))
        warm = [await connect_and_list(bridge(home)) for _ in range(CONNECTS)]
        p50, rate = await calls(bridge(home))
    finally:
        stop(home, 5)
    p50_direct, rate_direct = await calls(direct(alone))
    return {
        "warm_connect_list_ms": round(1000 * statistics.median(warm), 1),
        "call_p50_ms": round(1000 * p50, 3),
        "cold_start_s": round(statistics.median(cold), 3),
        "calls_per_s_at_32": round(rate, 1),
        "direct_connect_list_ms": round(1000 * statistics.median(cold_direct), 1),
        "direct_call_p50_ms": round(1000 * p50_direct, 3),
        "direct_calls_per_s_at_32": round(rate_direct, 1),
        "warm_connect_ratio": round(statistics.median(warm) / statistics.median(cold_direct), 4),
        "cold_start_ratio": round(statistics.median(cold) / statistics.median(cold_direct), 3),
        "call_p50_ratio": round(p50 / p50_direct, 3),
        "calls_per_s_ratio": round(rate / rate_direct, 3),
        "processors": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
    }


async def _measure_within_limit() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="evalpurse-bench-") as folder, anyio.fail_after(TIME_LIMIT_S):
        return await measure(Path(folder))


def main() -> int:
    """Prints one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    parser.add_argument("--serve", type=Path, metavar="HOME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        anyio.run(serve, Home(options.serve))
        return 0
    figures = anyio.run(_measure_within_limit)
    if not options.json:
        for name, value in figures.items():
            print(f"{name:26} {value}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
