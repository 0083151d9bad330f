"""`evalpurse mcp` against real daemons: what a host sees whatever happens to the daemon."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anyio
import mcp
import pytest
from mcp.shared.exceptions import MCPError

from evalpurse import __version__
from evalpurse.home import Home
from evalpurse.server.client import Client
from evalpurse.server.errors import BlockedError
from evalpurse.server.link import Address, open_link
from tests import daemons
from tests.daemons import Bridge, host_parameters, kill, pid_of, start_daemon, wait_until

Era = Literal["legacy", "2026-07-28"]
ERAS: tuple[Era, ...] = ("legacy", "2026-07-28")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home whose daemon no test ends."""
    home = Home(tmp_path_factory.mktemp("shared") / "home")
    yield home
    kill(home)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Home]:
    """A home of one test, whose daemon it may end."""
    home = Home(tmp_path / "home")
    yield home
    kill(home)


@pytest.mark.anyio
@pytest.mark.parametrize("era", ERAS)
async def test_a_host_lists_and_calls_tools_in_both_protocol_eras(shared: Home, era: Era) -> None:
    with anyio.fail_after(30):
        async with mcp.Client(host_parameters(shared), mode=era) as client:
            tools = (await client.list_tools()).tools
            assert [tool.name for tool in tools][:2] == ["echo", "touch"]
            result = await client.call_tool("echo", {"text": "hello"})
            assert result.structured_content == {
                "text": "hello",
                "role": "agent",
                "client": "mcp",
                "door": "raw",
            }
            assert json.loads(result.content[0].text) == result.structured_content  # type: ignore[union-attr]


@pytest.mark.anyio
@pytest.mark.parametrize("era", ERAS)
async def test_progress_arrives_in_order_and_before_the_answer(shared: Home, era: Era) -> None:
    told: list[tuple[float, float | None, str | None]] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, total, message))

    with anyio.fail_after(30):
        async with mcp.Client(host_parameters(shared), mode=era) as client:
            await client.call_tool("count", {"to": 10}, progress_callback=on_progress)
    assert told == [(number, 10, f"step {number}") for number in range(1, 11)]


@pytest.mark.anyio
@pytest.mark.parametrize("era", ERAS)
async def test_a_cancelled_call_is_cancelled_where_it_runs(shared: Home, era: Era) -> None:
    began = anyio.Event()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        began.set()

    name = f"cancel-{era}"
    with anyio.fail_after(30):
        async with (
            mcp.Client(host_parameters(shared), mode=era) as client,
            anyio.create_task_group() as calls,
        ):

            async def call() -> None:
                await client.call_tool("hang", {"name": name}, progress_callback=on_progress)

            calls.start_soon(call)
            await began.wait()
            assert not (shared.path / f"{name}.cancelled").exists()
            calls.cancel_scope.cancel()
        wait_until((shared.path / f"{name}.cancelled").exists)


@pytest.mark.anyio
@pytest.mark.parametrize("size", [1_100_000, 5_000_000])
async def test_a_large_answer_passes_whole(shared: Home, size: int) -> None:
    with anyio.fail_after(30):
        async with mcp.Client(host_parameters(shared)) as client:
            result = await client.call_tool("fill", {"size": size})
            assert result.structured_content is not None
            assert result.structured_content["text"] == "x" * size


def test_a_large_argument_passes_whole(shared: Home) -> None:
    text = "é" * 1_000_000
    with Bridge(shared) as bridge:
        bridge.call(1, "echo", text=text)
        assert bridge.answer(1)["result"]["structuredContent"]["text"] == text


def test_an_argument_above_the_limit_is_refused_and_costs_nothing_else(shared: Home) -> None:
    with Bridge(shared) as bridge:
        bridge.call(1, "echo", text="x" * (65 << 20))
        error = bridge.answer(1)["error"]
        assert "above the limit of 67,108,864" in error["message"]
        bridge.call(2, "echo", text="still here")
        assert bridge.answer(2)["result"]["structuredContent"]["text"] == "still here"


def test_bridges_that_start_at_once_start_one_daemon(own: Home) -> None:
    with Bridge(own) as first, Bridge(own) as second, Bridge(own) as third:
        for bridge in (first, second, third):
            bridge.request(1, "tools/list")
        for bridge in (first, second, third):
            assert len(bridge.answer(1)["result"]["tools"]) == 7
        assert own.log_file.read_text().count(f"serves {own.path}") == 1
        assert len(_status(own)["connections"]) == 4


def test_the_daemon_belongs_to_no_client(shared: Home) -> None:
    with Bridge(shared) as bridge:
        bridge.request(1, "tools/list")
        bridge.answer(1)
        pid = pid_of(shared)
        assert os.getsid(pid) not in (os.getsid(bridge.process.pid), os.getsid(0))
        if sys.platform == "linux":
            parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            assert parent not in (bridge.process.pid, os.getpid())
    with open_link(shared, door="mcp", role="agent") as link:
        assert link.version == __version__


def test_the_daemon_does_not_take_on_the_environment_of_its_first_client(own: Home) -> None:
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    os.environ["A_VARIABLE_OF_A_CLIENT"] = "1234"
    try:
        own.create()
        start_daemon(own)
    finally:
        del os.environ["A_VARIABLE_OF_A_CLIENT"]
    assert b"A_VARIABLE_OF_A_CLIENT" not in Path(f"/proc/{pid_of(own)}/environ").read_bytes()


def test_the_bridge_ends_at_once_when_its_host_closes_stdin_and_the_daemon_stays(shared: Home) -> None:
    with Bridge(shared) as bridge:
        bridge.request(1, "tools/list")
        bridge.answer(1)
        code, seconds, errors = bridge.end()
    assert (code, errors) == (0, "")
    assert seconds < 1.0
    assert _status(shared)["running"]


def test_a_host_that_leaves_during_a_call_ends_the_call(shared: Home) -> None:
    with Bridge(shared) as bridge:
        bridge.call(1, "hang", name="left")
        wait_until((shared.path / "left.began").exists)
        code, seconds, errors = bridge.end()
    assert (code, errors) == (0, "")
    assert seconds < 2.0
    wait_until((shared.path / "left.cancelled").exists)


def test_answers_on_their_way_arrive_although_stdin_is_closed(shared: Home) -> None:
    with Bridge(shared) as bridge:
        bridge.call(1, "fill", size=300_000)
        assert bridge.process.stdin is not None
        bridge.process.stdin.close()
        bridge.process.stdin = None
        assert len(bridge.answer(1)["result"]["structuredContent"]["text"]) == 300_000


def test_lines_that_are_no_messages_are_answered_and_do_no_harm(shared: Home) -> None:
    with Bridge(shared) as bridge:
        bridge.request(1, "tools/list")
        bridge.answer(1)
        bridge.send_raw(b"this is not JSON\n\n[]\n")
        assert bridge.read()["error"]["code"] == -32700
        assert bridge.read()["error"]["code"] == -32600
        bridge.call("two", "echo", text="still here")
        assert bridge.answer("two")["result"]["structuredContent"]["text"] == "still here"


@pytest.mark.anyio
@pytest.mark.parametrize("era", ERAS)
async def test_a_killed_daemon_costs_the_calls_in_flight_and_nothing_else(own: Home, era: Era) -> None:
    began = anyio.Event()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        began.set()

    with anyio.fail_after(40):
        async with mcp.Client(host_parameters(own), mode=era) as client:
            lost: list[MCPError] = []

            async def call() -> None:
                try:
                    await client.call_tool("hang", {"name": "lost"}, progress_callback=on_progress)
                except MCPError as error:
                    lost.append(error)

            async with anyio.create_task_group() as calls:
                calls.start_soon(call)
                await began.wait()
                before = pid_of(own)
                kill(own)
            assert "went away while this call was in flight" in str(lost[0])
            assert lost[0].error.data == {"code": "daemon_lost"}
            result = await client.call_tool("echo", {"text": "again"})
            assert result.structured_content is not None
            assert result.structured_content["client"] == "mcp"  # the new daemon was shown the handshake
            assert pid_of(own) != before
            assert (own.path / "lost.began").read_text() == "."  # it was not sent a second time


def test_an_answer_to_a_question_of_a_dead_daemon_does_not_answer_the_next_ones(own: Home) -> None:
    def answer(question: dict[str, Any], word: str) -> None:
        bridge.send(id=question["id"], result={"action": "accept", "content": {"word": word}})

    with Bridge(own) as bridge:
        who = {"name": "host", "version": "1"}
        capabilities: dict[str, Any] = {"elicitation": {"form": {}}}
        bridge.send(
            id=0,
            method="initialize",
            params={"protocolVersion": "2025-11-25", "clientInfo": who, "capabilities": capabilities},
        )
        bridge.answer(0)
        bridge.send(method="notifications/initialized")
        bridge.send(id=1, method="tools/call", params={"name": "ask", "arguments": {}})
        first = bridge.read()
        assert first["method"] == "elicitation/create"
        kill(own)
        assert bridge.answer(1)["error"]["data"] == {"code": "daemon_lost"}
        answer(first, "stale")
        bridge.send(id=2, method="tools/call", params={"name": "ask", "arguments": {}})
        second = bridge.read()
        assert (second["method"], second["id"]) == ("elicitation/create", first["id"])
        answer(second, "fresh")
        assert bridge.answer(2)["result"]["structuredContent"]["text"] == "fresh"
        kill(own)
        bridge.send(id=3, method="tools/call", params={"name": "ask", "arguments": {}})
        answer(bridge.read(), "again")
        assert bridge.answer(3)["result"]["structuredContent"]["text"] == "again"


def test_an_idle_bridge_leaves_a_stopped_daemon_alone_and_its_next_call_starts_one(own: Home) -> None:
    with Bridge(own) as bridge:
        bridge.call(1, "echo", text="one")
        bridge.answer(1)
        before = pid_of(own)
        assert daemons.run("daemon", "stop", home=own).returncode == 0
        assert not _status(own)["running"]
        bridge.call(2, "echo", text="two")
        assert bridge.answer(2)["result"]["structuredContent"]["text"] == "two"
        assert pid_of(own) != before


def test_a_daemon_that_cannot_start_is_told_to_the_host_and_tried_again(own: Home) -> None:
    own.create()
    own.config_file.write_text("http_port = 99999\n")
    with Bridge(own) as bridge:
        bridge.request(1, "tools/list")
        error = bridge.answer(1)["error"]
        assert "http_port is 99999; it must be a whole number from 0 to 65535" in error["message"]
        bridge.request(2, "tools/list")
        assert "http_port" in bridge.answer(2)["error"]["message"]
        own.config_file.write_text("http_port = 0\n")
        bridge.request(3, "tools/list")
        assert len(bridge.answer(3)["result"]["tools"]) == 7


def test_a_daemon_that_dies_at_start_is_quoted(own: Home) -> None:
    own.create()
    own.socket_file.mkdir()
    (own.socket_file / "in the way").touch()
    with Bridge(own) as bridge:
        bridge.request(1, "tools/list")
        message = bridge.answer(1)["error"]["message"]
    assert "ended before it opened its doors" in message
    assert "Address already in use" in message


def test_what_a_dead_daemon_left_behind_is_no_obstacle(own: Home) -> None:
    own.create()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(own.socket_file))
    Address(pid=1, version=__version__, socket=str(own.socket_file)).write(own)
    own.daemon_alive_lock.write_text("1\n")
    with Bridge(own) as bridge:
        bridge.request(1, "tools/list")
        assert len(bridge.answer(1)["result"]["tools"]) == 7
    assert pid_of(own) != 1


def test_a_home_too_deep_for_a_socket_path_works() -> None:
    folder = Path(tempfile.mkdtemp())
    home = Home(folder / ("deep" * 30) / "home")
    try:
        with Bridge(home) as bridge:
            bridge.call(1, "echo", text="deep")
            assert bridge.answer(1)["result"]["structuredContent"]["text"] == "deep"
        assert len(str(home.path)) > 108
        address = Address.read(home)
        assert address is not None
        assert address.socket is not None
        assert not address.socket.startswith(str(home.path))
        assert Path(address.socket).parent.stat().st_mode & 0o077 == 0
    finally:
        kill(home)
        home.socket_file.unlink(missing_ok=True)
        shutil.rmtree(folder)


def test_where_there_are_no_unix_sockets_loopback_tcp_serves(own: Home) -> None:
    with Bridge(own, "--tcp") as bridge:
        bridge.call(1, "echo", text="over TCP")
        assert bridge.answer(1)["result"]["structuredContent"]["text"] == "over TCP"
        address = Address.read(own)
        assert address is not None
        assert address.socket is None
        assert address.tcp_port is not None
        assert not own.socket_file.exists()
        kill(own)
        bridge.call(2, "echo", text="healed")
        assert bridge.answer(2)["result"]["structuredContent"]["text"] == "healed"


def test_a_newer_client_drains_and_replaces_an_older_daemon(own: Home) -> None:
    own.create()
    (own.path / "pretend_version").write_text("0.0.9")
    start_daemon(own)
    before = pid_of(own)
    with open_link(own, door="mcp", role="agent") as link:
        assert Client(link).call("echo", {"text": "its data is open"}).error is None
    (own.path / "pretend_version").unlink()
    with Bridge(own) as bridge:
        bridge.call(1, "echo", text="new")
        assert bridge.answer(1)["result"]["structuredContent"]["text"] == "new"
        assert pid_of(own) != before
        assert (own.path / "drained").exists()
        assert (own.path / "closed").exists()
        code, _, errors = bridge.end()
    assert code == 0
    assert f"version 0.0.9, older than this client ({__version__})" in errors


def test_an_older_client_uses_a_newer_daemon_and_says_so_once(own: Home) -> None:
    own.create()
    (own.path / "pretend_version").write_text("9.0.0")
    start_daemon(own)
    before = pid_of(own)
    with Bridge(own) as bridge:
        bridge.call(1, "echo", text="old")
        assert bridge.answer(1)["result"]["structuredContent"]["text"] == "old"
        assert pid_of(own) == before
        _, _, errors = bridge.end()
    assert errors.count("\n") == 1
    assert f"The daemon is version 9.0.0, this client is {__version__}" in errors


@pytest.mark.parametrize(
    ("sandboxed", "says"), [("1", "Use evalpurse's MCP tools instead"), ("", "no sandbox forbids sockets")]
)
def test_a_sandbox_that_forbids_sockets_is_named_with_the_way_out(
    home: Home, monkeypatch: pytest.MonkeyPatch, sandboxed: str, says: str
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setenv("CODEX_SANDBOX_NETWORK_DISABLED", sandboxed)
    monkeypatch.setattr(socket.socket, "connect", forbidden)
    with pytest.raises(BlockedError, match=says):
        open_link(home, door="mcp", role="agent")


def _status(home: Home) -> dict[str, Any]:
    done = daemons.run("daemon", "status", "--json", home=home)
    status: dict[str, Any] = json.loads(done.stdout)
    return status
