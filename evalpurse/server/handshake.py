"""The first line each side says on the raw socket, and which of two versions is older.

A client names itself, shows its token and asks for a door; the daemon answers with its version and the role
of the token, or with an error. What follows belongs to the door. Standard library only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from evalpurse.server.errors import AbsentError, HandshakeError, RefusedError, UnreachableError

PROTOCOL = 1
LINE_BYTES_MAX = 64 << 10  # of the first line
MESSAGE_BYTES_MAX = 64 << 20  # of those that follow
DOORS = ("mcp", "control")


@dataclass(frozen=True)
class Hello:
    """What a client says first."""

    version: str
    token: str
    door: str

    def line(self) -> bytes:
        return _line(evalpurse=PROTOCOL, version=self.version, token=self.token, door=self.door)


@dataclass(frozen=True)
class Welcome:
    """What the daemon answers to a client it lets in."""

    version: str
    role: str

    def line(self) -> bytes:
        return _line(evalpurse=PROTOCOL, version=self.version, role=self.role)


def refusal(version: str, code: str, message: str, hint: str = "") -> bytes:
    """The line for a client that is not let in."""
    error = {"code": code, "message": message, "hint": hint}
    return _line(evalpurse=PROTOCOL, version=version, error=error)


def read_hello(line: bytes) -> Hello:
    """A client's first line.

    Raises:
        HandshakeError: it is not one; says what is missing.
    """
    said = _parse(line)
    if said is None or said.get("evalpurse") != PROTOCOL:
        raise HandshakeError(
            f"The first line must be a JSON object with evalpurse={PROTOCOL}.",
            hint="Connect through `evalpurse mcp`.",
        )
    wrong = [name for name in ("version", "token", "door") if not isinstance(said.get(name), str)]
    if wrong:
        raise HandshakeError(f"The first line has no text for: {', '.join(wrong)}.")
    if said["door"] not in DOORS:
        raise HandshakeError(f"There is no door {said['door']!r}.", hint=f"Doors: {', '.join(DOORS)}.")
    return Hello(said["version"], said["token"], said["door"])


def read_welcome(line: bytes) -> Welcome:
    """The daemon's first line.

    Raises:
        RefusedError: the daemon does not let this client in.
        AbsentError: there is no line, because the daemon is going away.
        UnreachableError: whatever answers is not an evalpurse daemon that this client understands.
    """
    if not line:
        raise AbsentError("The daemon closed the connection: it is going away.")
    said = _parse(line)
    if said is None or "evalpurse" not in said:
        raise UnreachableError("What answers at the daemon's address is not evalpurse.")
    error = said.get("error")
    if error:
        raise RefusedError(error["code"], error["message"], error.get("hint", ""), version=said["version"])
    if said["evalpurse"] != PROTOCOL:
        raise UnreachableError(
            f"The daemon speaks handshake {said['evalpurse']}, this client speaks {PROTOCOL}.",
            hint="Update this client to the daemon's version.",
        )
    return Welcome(said["version"], said["role"])


def is_older(version: str, than: str) -> bool:
    """Whether a version is older than another; a pre-release comes before its release."""
    return _order(version) < _order(than)


def _order(version: str) -> tuple[tuple[int, ...], int]:
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    if numbers is None:
        return (), 0
    release = tuple(int(part) for part in numbers.group().split("."))
    while release and release[-1] == 0:
        release = release[:-1]
    rest = version[numbers.end() :]
    return release, 1 if not rest or rest.startswith(("+", ".post")) else 0


def _line(**said: Any) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None
