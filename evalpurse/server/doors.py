"""The raw doors: a Unix socket, and loopback TCP where there are none.

A connection is let in when the kernel says it is this user's (Unix), and when its first line shows a token.
What a connection may do is decided there once; tools see it as their `Session`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import ByteStream, Listener, SocketAttribute, SocketStream
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp.types import INVALID_REQUEST, PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter
from pydantic import ValidationError

from evalpurse import __version__
from evalpurse.home import Home
from evalpurse.server.control import Registry
from evalpurse.server.errors import HandshakeError, RefusedError
from evalpurse.server.handshake import LINE_BYTES_MAX, MESSAGE_BYTES_MAX, Hello, Welcome, read_hello, refusal
from evalpurse.server.tokens import Tokens
from evalpurse.tools.app import ToolServer
from evalpurse.tools.texts import valid
from evalpurse.tools.toolbox import Session

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
CONNECTIONS_MAX = 256
_CHUNK_BYTES = 256 << 10
_BACKLOG = 128
_MACOS_LOCAL_PEERCRED = 0x001


@dataclass
class Guest:
    """One connection that was let in."""

    session: Session
    version: str
    since: float = field(default_factory=time.time)


class RawDoor:
    """Lets connections in and hands each to the MCP server or to the control door."""

    def __init__(self, tokens: Tokens, server: ToolServer, control: Registry) -> None:
        self._tokens = tokens
        self._server = server
        self._control = control
        self.guests: list[Guest] = []
        self.draining = False
        self._streams: set[ByteStream] = set()

    async def serve(self, listener: Listener[SocketStream]) -> None:
        """Accepts until the listener is closed, and serves its connections until cancelled."""
        async with listener, anyio.create_task_group() as connections:
            with contextlib.suppress(anyio.ClosedResourceError):
                await listener.serve(self._handle, connections)

    def hang_up(self) -> None:
        """Ends every connection as if its client had gone, which lets each end in its own order."""
        for stream in self._streams:
            with contextlib.suppress(OSError, anyio.ClosedResourceError):
                _raw(stream).shutdown(socket.SHUT_RDWR)

    async def _handle(self, stream: ByteStream) -> None:
        self._streams.add(stream)
        try:
            async with stream:
                lines = read_lines(stream)
                try:
                    hello, session = await self._greet(stream, lines)
                except RefusedError as no:
                    await stream.send(refusal(__version__, no.answered, no.message, no.hint))
                    return
                await stream.send(Welcome(__version__, session.role).line())
                guest = Guest(session, hello.version)
                self.guests.append(guest)
                try:
                    if hello.door == "mcp":
                        await self._serve_mcp(stream, lines, session)
                    else:
                        await self._control.serve(lines, stream.send, session)
                finally:
                    self.guests.remove(guest)
        except Exception as error:  # one connection must not end the others
            if not _is_hang_up(error):
                log.exception("a connection failed")
        finally:
            self._streams.discard(stream)

    async def _greet(self, stream: ByteStream, lines: AsyncIterator[bytes]) -> tuple[Hello, Session]:
        peer = peer_uid(stream)
        if peer is not None and peer != os.getuid():
            raise RefusedError(
                "forbidden",
                f"This daemon belongs to user {os.getuid()}, you are {peer}.",
                "Use your own home.",
            )
        try:
            with anyio.fail_after(HANDSHAKE_TIMEOUT_S):
                hello = read_hello(await anext(lines, b""))
        except TimeoutError:
            raise RefusedError(
                HandshakeError.code, f"No first line came within {HANDSHAKE_TIMEOUT_S:.0f} s."
            ) from None
        except HandshakeError as error:
            raise RefusedError(error.code, error.message, error.hint) from None
        role = self._tokens.role_of(hello.token)
        if role is None:
            raise RefusedError(
                "bad_token",
                "The token is not one of this home's.",
                "Tokens are in the folder 'tokens' of the home; the daemon reads them when it starts.",
            )
        if len(self._streams) > CONNECTIONS_MAX:
            message = f"The daemon serves {CONNECTIONS_MAX} connections already."
            raise RefusedError("too_many_connections", message, "End other clients.")
        if self.draining:
            raise RefusedError("draining", "The daemon is on its way out.", "Try again.")
        return hello, Session(role=role, door="raw")

    async def _serve_mcp(self, stream: ByteStream, lines: AsyncIterator[bytes], session: Session) -> None:
        to_server, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](16)
        write_stream, from_server = anyio.create_memory_object_stream[SessionMessage](16)
        metadata = ServerMessageMetadata(request_context=session)

        complaints = write_stream.clone()  # one task writes to the socket

        async def pump_in() -> None:
            async with to_server, complaints:
                async for line in lines:
                    if not line.strip():
                        continue
                    try:
                        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValidationError as error:
                        await complaints.send(SessionMessage(_complaint(line, error)))
                        continue
                    await to_server.send(SessionMessage(message, metadata))

        async def pump_out() -> None:
            async with from_server:
                async for sent in from_server:
                    text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await stream.send(text.encode() + b"\n")

        async with anyio.create_task_group() as outward:
            outward.start_soon(pump_out)
            async with anyio.create_task_group() as inward:
                inward.start_soon(pump_in)
                await self._server.serve(read_stream, write_stream)
                inward.cancel_scope.cancel()


def _complaint(line: bytes, error: ValidationError) -> JSONRPCError:
    """The answer to a line that is no message, under the id that its client waits for."""
    found = error.errors(include_url=False, include_input=False)[0]
    log.info("a client sent a line that is no message: %s", found["type"])
    if found["type"] == "json_invalid":
        said = ErrorData(code=PARSE_ERROR, message=f"The line is not JSON that can be read. {found['msg']}.")
    else:
        said = ErrorData(code=INVALID_REQUEST, message="The line is JSON, but not a JSON-RPC message.")
    return JSONRPCError(jsonrpc="2.0", id=_id_of(line), error=said)


_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_TOKEN = re.compile(_STRING + rb"|[][{}]")
_ID_VALUE = re.compile(rb"\s*:\s*(-?[0-9]{1,18}(?![0-9.eE])|" + _STRING + rb")")


def _id_of(line: bytes) -> int | str | None:
    """The id of a request that no parser takes because of something else that is in it."""
    depth = 0
    for token in _TOKEN.finditer(line):
        text = token.group()
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and text == b'"id"' and (value := _ID_VALUE.match(line, token.end())):
            with contextlib.suppress(ValueError):  # it is the id itself that cannot be read
                found: int | str = json.loads(value[1].decode(errors="replace"), strict=False)
                return valid(found) if isinstance(found, str) else found
    return None


def _is_hang_up(error: BaseException) -> bool:
    """Whether all that went wrong is that the client is gone."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_hang_up(inner) for inner in error.exceptions)
    return isinstance(error, (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream))


async def read_lines(stream: ByteStream, max_bytes: int = MESSAGE_BYTES_MAX) -> AsyncIterator[bytes]:
    """The lines of a stream, without copying what came before over and over.

    Raises:
        HandshakeError: a line is longer than allowed.
    """
    parts: list[bytes] = []
    size = 0
    limit = LINE_BYTES_MAX  # of the first line, which comes from a stranger
    while True:
        try:
            chunk = await stream.receive(_CHUNK_BYTES)
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            _check_size(size + len(end), limit)
            line = b"".join((*parts, end))
            parts, size, limit = [], 0, max_bytes
            yield line
        parts.append(rest)
        size += len(rest)
        _check_size(size, limit)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise HandshakeError(f"A line is longer than {limit:,} bytes.")


def peer_uid(stream: ByteStream) -> int | None:
    """The user at the other end of a Unix socket, by the kernel; nothing for TCP."""
    raw = _raw(stream)
    if raw.family != getattr(socket, "AF_UNIX", None):
        return None
    if hasattr(socket, "SO_PEERCRED"):
        credentials = raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[1])
    credentials = raw.getsockopt(0, _MACOS_LOCAL_PEERCRED, struct.calcsize("II"))
    return int(struct.unpack("II", credentials)[1])


def _raw(stream: ByteStream) -> socket.socket:
    raw: socket.socket = stream.extra(SocketAttribute.raw_socket)  # noqa: S610 - not Django's
    return raw


async def listen_unix(home: Home) -> Listener[SocketStream]:
    """Opens the socket of a home; whatever a dead daemon left in its place goes.

    The caller holds `home.daemon_alive_lock`, so no living daemon can own that place.
    """
    path = home.socket_file
    if path.parent != home.path:
        make_private(path.parent)
    before = os.umask(0o177)
    try:
        return await anyio.create_unix_listener(path, mode=0o600, backlog=_BACKLOG)
    finally:
        os.umask(before)


async def listen_tcp() -> Listener[SocketStream]:
    """Opens the raw door on loopback TCP, on a free port."""
    listeners = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0, backlog=_BACKLOG)
    return listeners.listeners[0]


def local_port(listener: Listener[SocketStream]) -> int:
    """The port that a TCP listener got."""
    port: int = listener.extra(SocketAttribute.local_port)  # noqa: S610 - not Django's
    return port


def make_private(folder: Path) -> None:
    """Makes a folder in a shared place that only this user can enter.

    Raises:
        HandshakeError: somebody else made it first, or opened it to others.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise HandshakeError(
            f"{folder} is not a private folder of this user.",
            hint=f"Remove it, or set EVALPURSE_HOME to a shorter path (this one needs no {folder}).",
        )


def describe(guest: Guest) -> dict[str, Any]:
    """A connection as `daemon.status` shows it."""
    age_s = round(time.time() - guest.since, 1)
    return {"door": guest.session.door, "role": guest.session.role, "version": guest.version, "age_s": age_s}
