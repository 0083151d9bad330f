"""One connection of a client to the daemon of a home: found by daemon.json, opened by a token.

Says apart the three ways to fail, because each has its own next step: nobody is there (start a daemon),
the system forbids to connect (leave the sandbox), the daemon says no (read why). Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Self

from evalpurse import __version__
from evalpurse.home import Home
from evalpurse.server.errors import AbsentError, BlockedError, UnreachableError
from evalpurse.server.handshake import LINE_BYTES_MAX, Hello, Welcome, read_welcome
from evalpurse.server.locks import is_locked
from evalpurse.server.tokens import read_token

HANDSHAKE_TIMEOUT_S = 10.0
READ_BUFFER_BYTES = 256 << 10


@dataclass(frozen=True)
class Address:
    """What daemon.json says: where the daemon listens, and who it is."""

    pid: int
    version: str
    socket: str | None = None
    tcp_port: int | None = None
    http_port: int | None = None
    home: str | None = None
    """The folder it serves: a copied daemon.json must not lead to the daemon of the original."""

    @classmethod
    def read(cls, home: Home) -> Address | None:
        """The address of the daemon that last opened its doors here; nothing when there is none."""
        try:
            said = json.loads(home.daemon_file.read_bytes())
            address = cls(**{name: said.get(name) for name in cls.__dataclass_fields__})
        except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
            return None
        return address if address.home == str(home.path) else None

    def write(self, home: Home) -> None:
        """Replaces daemon.json in one step, so that a client reads the old one or the new one."""
        draft = home.daemon_file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(self.__dict__) + "\n", encoding="utf-8")
        draft.chmod(0o600)
        draft.replace(home.daemon_file)


class Link:
    """An open connection, past its handshake."""

    def __init__(self, sock: socket.socket, reader: BinaryIO, welcome: Welcome) -> None:
        self.socket = sock
        self.reader = reader
        self.version = welcome.version
        self.role = welcome.role

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: dict[str, Any]) -> None:
        """One JSON line to the daemon."""
        self.socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def lines(self) -> Iterator[bytes]:
        """The daemon's lines until it closes."""
        while line := self.reader.readline():
            yield line

    def end_of_input(self) -> None:
        """Tells the daemon that nothing more comes; what it still has to say arrives."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close_soon(self) -> None:
        """Makes a thread that reads this link come to its end; that thread closes it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection."""
        self.close_soon()
        self.reader.close()
        self.socket.close()


def open_link(home: Home, *, door: str, role: str) -> Link:
    """Connects to the daemon of a home.

    Raises:
        AbsentError: no daemon serves this home.
        BlockedError: the operating system forbids to connect.
        UnreachableError: something is there and does not answer as a daemon does.
        RefusedError: the daemon does not let this client in.
        TokenError: the token file is missing, damaged or not private.
    """
    address = Address.read(home)
    if address is not None and address.tcp_port is not None and not is_locked(home.daemon_alive_lock):
        raise AbsentError(f"The daemon of {home.path} is gone.")  # another program may own its port now
    sock = _connect(home, address)
    reader: BinaryIO = sock.makefile("rb", buffering=READ_BUFFER_BYTES)  # type: ignore[assignment]
    try:
        sock.sendall(Hello(__version__, read_token(home, role), door).line())
        welcome = read_welcome(reader.readline(LINE_BYTES_MAX))
        sock.settimeout(None)
        return Link(sock, reader, welcome)
    except TimeoutError:
        _abandon(sock, reader)
        pid = address.pid if address else "unknown"
        raise UnreachableError(
            f"The daemon of {home.path} (pid {pid}) did not answer within {HANDSHAKE_TIMEOUT_S:.0f} s.",
            hint=f"See {home.log_file}; `evalpurse daemon stop` ends it.",
        ) from None
    except (ConnectionError, BrokenPipeError):
        _abandon(sock, reader)
        raise AbsentError(f"The daemon of {home.path} went away.") from None
    except BaseException:
        _abandon(sock, reader)
        raise


def _abandon(sock: socket.socket, reader: BinaryIO) -> None:
    reader.close()
    sock.close()


def _connect(home: Home, address: Address | None) -> socket.socket:
    if address is not None and address.tcp_port is not None:
        family, target = socket.AF_INET, ("127.0.0.1", address.tcp_port)
    elif hasattr(socket, "AF_UNIX"):
        path = address.socket if address is not None and address.socket else str(home.socket_file)
        family, target = socket.AF_UNIX, path  # type: ignore[assignment]
    else:
        raise AbsentError(f"No daemon serves {home.path}.")
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    try:
        sock.connect(target)
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        raise AbsentError(f"No daemon serves {home.path}.") from None
    except PermissionError as error:
        sock.close()
        raise _blocked(target, error) from None
    except OSError as error:
        sock.close()
        raise UnreachableError(f"Connecting to {target} failed: {error}.") from error
    return sock


def _blocked(target: object, error: OSError) -> BlockedError:
    if os.environ.get("CODEX_SANDBOX_NETWORK_DISABLED") == "1":
        return BlockedError(
            f"This shell runs in a sandbox that forbids sockets, so {target} cannot be reached.",
            hint="Use evalpurse's MCP tools instead (they are outside the sandbox), or run this command in "
            "a shell with network access.",
        )
    return BlockedError(
        f"The system forbids to connect to {target}: {error.strerror}.",
        hint="Check that this user owns the home folder, and that no sandbox forbids sockets.",
    )
