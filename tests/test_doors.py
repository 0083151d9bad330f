"""Who is let in by the raw door, as what, and what the files that decide it must be like."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from evalpurse import __version__
from evalpurse.home import Home
from evalpurse.server import doors
from evalpurse.server.client import Client
from evalpurse.server.control import Registry
from evalpurse.server.errors import AbsentError, HandshakeError, RefusedError, TokenError, UnreachableError
from evalpurse.server.handshake import Hello, is_older, read_hello, read_welcome
from evalpurse.server.link import Address, open_link
from evalpurse.server.tokens import ROLES, Tokens, allows, make_tokens, read_token
from evalpurse.tools.app import build_server
from tests.daemons import kill, start_daemon, wait_until


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home whose daemon no test ends."""
    home = Home(tmp_path_factory.mktemp("shared") / "home").create()
    start_daemon(home)
    yield home
    kill(home)


def _say(home: Home, line: bytes) -> dict[str, object]:
    """The daemon's answer to a first line, after which it must hang up if it is a refusal."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(home.socket_file))
        sock.sendall(line)
        with sock.makefile("rb") as reader:
            said: dict[str, object] = json.loads(reader.readline())
            if "error" in said:
                assert reader.readline() == b""
    return said


@pytest.mark.parametrize("role", ROLES)
def test_a_token_lets_in_as_its_role(shared: Home, role: str) -> None:
    with open_link(shared, door="mcp", role=role) as link:
        assert (link.role, link.version) == (role, __version__)
        assert Client(link).call("echo", {"text": "x"}).facts["role"] == role


def test_a_viewer_may_look_and_change_nothing(shared: Home) -> None:
    with open_link(shared, door="mcp", role="viewer") as link:
        client = Client(link)
        assert client.call("echo", {"text": "x"}).error is None
        refused = client.call("touch", {"name": "by-viewer"})
    assert refused.error is not None
    assert refused.error["code"] == "forbidden"
    assert not (shared.path / "by-viewer").exists()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"GET / HTTP/1.1\n", "bad_handshake"),
        (b'{"jsonrpc":"2.0","id":1,"method":"initialize"}\n', "bad_handshake"),
        (b'{"evalpurse":1,"version":"1","door":"mcp"}\n', "bad_handshake"),
        (b'{"evalpurse":1,"version":"1","token":"x","door":"back"}\n', "bad_handshake"),
        (b'{"evalpurse":2,"version":"1","token":"x","door":"mcp"}\n', "bad_handshake"),
        (Hello("0.1.0", "wrong", "mcp").line(), "bad_token"),
        (Hello("0.1.0", "", "control").line(), "bad_token"),
        (Hello("0.1.0", "ünwrong", "mcp").line(), "bad_token"),
    ],
)
def test_a_first_line_that_shows_no_right_is_refused_with_the_reason(
    shared: Home, line: bytes, code: str
) -> None:
    error = _say(shared, line)["error"]
    assert isinstance(error, dict)
    assert error["code"] == code
    assert error["message"]


def test_a_first_line_without_end_is_cut_off(shared: Home) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(str(shared.socket_file))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            sock.sendall(b"x" * (64 << 20))
    assert "evalpurse" in _say(shared, Hello("0.1.0", read_token(shared, "agent"), "mcp").line())


def test_a_client_is_told_when_the_token_is_not_of_this_home(shared: Home, home: Home) -> None:
    make_tokens(home)
    address = Address.read(shared)
    assert address is not None
    replace(address, home=str(home.path)).write(home)
    with pytest.raises(RefusedError, match="not one of this home's") as refused:
        open_link(home, door="mcp", role="agent")
    assert refused.value.answered == "bad_token"


def test_there_is_a_bound_on_connections(shared: Home) -> None:
    hello = Hello("0.1.0", read_token(shared, "agent"), "mcp").line()
    with contextlib.ExitStack() as stack:
        for _ in range(doors.CONNECTIONS_MAX):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(str(shared.socket_file))
            sock.sendall(hello)
            assert b'"role"' in sock.recv(4096)
        error = _say(shared, hello)["error"]
        assert isinstance(error, dict)
        assert error["code"] == "too_many_connections"
    wait_until(lambda: "error" not in _say(shared, hello))


@pytest.mark.anyio
async def test_another_user_is_refused_whatever_token_it_shows(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ready() -> None: ...

    tokens = Tokens.load(home)
    door = doors.RawDoor(tokens, build_server(ready, registers=[]), Registry())  # type: ignore[arg-type]
    listener = await doors.listen_unix(home)
    assert stat.S_IMODE(home.socket_file.stat().st_mode) == 0o600
    real = os.getuid()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as serving:
            serving.start_soon(door.serve, listener)
            monkeypatch.setattr(os, "getuid", lambda: real + 1)
            async with await anyio.connect_unix(home.socket_file) as stream:
                said = json.loads(await stream.receive())
            monkeypatch.undo()
            assert said["error"]["code"] == "forbidden"
            assert said["error"]["message"] == f"This daemon belongs to user {real + 1}, you are {real}."
            async with await anyio.connect_unix(home.socket_file) as stream:
                await stream.send(Hello("0.1.0", tokens.by_role["agent"], "mcp").line())
                assert json.loads(await stream.receive())["role"] == "agent"
            door.hang_up()
            await listener.aclose()


def test_tokens_are_made_once_private_and_different(home: Home) -> None:
    threads = [threading.Thread(target=make_tokens, args=(home,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = {role: read_token(home, role) for role in ROLES}
    assert len(set(first.values())) == 3
    assert all(len(token) >= 32 for token in first.values())
    assert sorted(path.name for path in home.tokens.iterdir()) == sorted(ROLES)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in home.tokens.iterdir())
    assert Tokens.load(home).by_role == first
    assert first["owner"] not in repr(Tokens.load(home))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.chmod(0o644), "can be read by others"),
        (lambda path: path.write_text(""), "is empty or damaged"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is empty or damaged"),
        (lambda path: path.unlink(), "There is no owner token"),
    ],
)
def test_a_token_file_that_is_not_right_is_named(home: Home, damage: object, says: str) -> None:
    make_tokens(home)
    damage(home.tokens / "owner")  # type: ignore[operator]
    with pytest.raises(TokenError, match=says) as error:
        read_token(home, "owner")
    assert str(home.tokens / "owner") in error.value.message
    assert error.value.hint


def test_a_role_may_do_what_lower_roles_may() -> None:
    assert [[allows(role, needed) for needed in ROLES] for role in ROLES] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("0.1.0", "0.1.1"),
        ("0.9", "0.10"),
        ("1.0.0rc1", "1.0.0"),
        ("1.0.dev3", "1"),
        ("0.1.0", "1"),
        ("rubbish", "0.0.1"),
    ],
)
def test_versions_are_compared_as_people_read_them(older: str, newer: str) -> None:
    assert is_older(older, newer)
    assert not is_older(newer, older)
    assert not is_older(newer, newer)


def test_versions_that_mean_the_same_replace_nothing() -> None:
    assert not is_older("1.0", "1.0.0")
    assert not is_older("1.0.0", "1.0+local")
    assert not is_older("1.0.0", "1.0.post1")


def test_what_answers_in_place_of_a_daemon_is_told_apart() -> None:
    with pytest.raises(AbsentError):
        read_welcome(b"")
    with pytest.raises(UnreachableError, match="is not evalpurse"):
        read_welcome(b"HTTP/1.1 400 Bad Request\n")
    with pytest.raises(UnreachableError, match="speaks handshake 2, this client speaks 1"):
        read_welcome(b'{"evalpurse":2,"version":"3","role":"agent"}\n')
    with pytest.raises(HandshakeError):
        read_hello(b"[]\n")


@pytest.mark.anyio
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
async def test_lines_are_the_same_however_they_are_cut(size: int) -> None:
    lines = [b"first", b"", b"x" * 500, "ü".encode() * 100, b"last"]
    data = b"\n".join(lines) + b"\nnever ended"
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    theirs.close()
    stream = await anyio.abc.UNIXSocketStream.from_socket(ours)
    real = stream.receive

    async def receive(_: int = 0) -> bytes:
        return await real(size)

    stream.receive = receive  # type: ignore[method-assign, assignment]
    async with stream:
        assert [line async for line in doors.read_lines(stream)] == lines


def test_a_place_for_sockets_that_others_control_is_refused(tmp_path: Path) -> None:
    private = tmp_path / "private"
    doors.make_private(private)
    doors.make_private(private)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(private)
    with pytest.raises(HandshakeError, match="not a private folder"):
        doors.make_private(tmp_path / "link")
    private.chmod(0o777)
    with pytest.raises(HandshakeError, match="not a private folder"):
        doors.make_private(private)
