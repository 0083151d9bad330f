"""What can go wrong between a client and its daemon. Standard library only: the bridge raises these."""

from __future__ import annotations

from typing import ClassVar

from evalpurse.errors import EvalpurseError


class UnreachableError(EvalpurseError):
    """No daemon answers, and none could be started."""

    code: ClassVar[str] = "daemon_unreachable"


class AbsentError(UnreachableError):
    """No daemon serves this home right now; starting one is the answer."""

    code: ClassVar[str] = "daemon_absent"


class BlockedError(UnreachableError):
    """The operating system forbids this process to connect."""

    code: ClassVar[str] = "daemon_blocked"


class RefusedError(EvalpurseError):
    """The daemon answered, and said no."""

    def __init__(self, code: str, message: str, hint: str = "", **facts: object) -> None:
        super().__init__(message, hint=hint, **facts)
        self.answered = code


class LostError(UnreachableError):
    """The daemon went away while it was asked something."""

    code: ClassVar[str] = "daemon_lost"


class HomeInUseError(EvalpurseError):
    """Another daemon serves this home."""

    code: ClassVar[str] = "home_in_use"


class TokenError(EvalpurseError):
    """A token file is missing, empty or not private."""

    code: ClassVar[str] = "bad_token"


class HandshakeError(EvalpurseError):
    """A client's first line is not what the door expects."""

    code: ClassVar[str] = "bad_handshake"


class UnknownMethodError(EvalpurseError):
    """The control door has no such method."""

    code: ClassVar[str] = "unknown_method"


class BadParametersError(EvalpurseError):
    """A control method was called with parameters it does not take."""

    code: ClassVar[str] = "bad_parameters"


class StartingError(EvalpurseError):
    """The daemon could not open its data for a reason nobody foresaw."""

    code: ClassVar[str] = "open_failed"
