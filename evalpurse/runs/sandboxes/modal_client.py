"""The `modal` client, imported and connected when the first experiment needs it, and what its errors mean.

Who retries what is one table, `meaning_of`: an infrastructure failure ends one attempt, a refusal that no
repetition can change stops the whole batch.
"""

from __future__ import annotations

import os
import tomllib
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

import anyio

from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.runs.errors import BackendRefusedError, BadLaunchError, SandboxError

if TYPE_CHECKING:
    from pathlib import Path

CONNECT_S = 30.0
_TUNED = {
    # We pace creates ourselves: the client would repeat refused ones for ever and without jitter.
    "MODAL_MAX_THROTTLE_WAIT": "0",
    # A connection a sandbox: given back soon after use, made again for the next look.
    "MODAL_SANDBOX_CHANNEL_IDLE_TIMEOUT": "5",
}
HOW_TO_INSTALL = "Install it with: pip install 'evalpurse[modal]', then start the daemon again."
HOW_TO_SIGN_IN = (
    "Make a token with `modal token new`, or write token_id and token_secret into {file}, then start the "
    "daemon again. `evalpurse doctor --modal` checks it."
)


class Meaning(Enum):
    """What an error of the client says about what was asked."""

    THROTTLED = "throttled"
    """Too fast: the same again later."""
    EXISTS = "exists"
    """A sandbox of this name is running."""
    GONE = "gone"
    """What was asked about is not there."""
    REFUSED = "refused"
    """No repetition helps: credentials, permission, a bad request."""
    QUOTA = "quota"
    """No repetition helps until somebody raises a limit."""
    FAILED = "failed"
    """The service failed: an infrastructure failure."""


def load() -> ModuleType:
    """The `modal` package.

    Raises:
        BadLaunchError: it is not installed.
    """
    for name, value in _TUNED.items():
        os.environ.setdefault(name, value)
    try:
        import modal
        import modal.exception
    except ImportError as error:
        raise BadLaunchError(f"Modal's client cannot be imported ({error}).", hint=HOW_TO_INSTALL) from error
    return modal


def retry_after_s(error: Exception) -> float | None:
    """How long the server asks to wait before the same call; None when it does not say so."""
    # Under its private name: the public one warns, because it will go together with the gRPC base class.
    for detail in getattr(error, "_grpc_details", None) or ():
        after = getattr(detail, "retry_after_secs", None)
        if after is not None:
            return float(after)
    return None


def meaning_of(error: Exception) -> Meaning:
    """What to do about an error of the client."""
    kinds = load().exception
    if isinstance(error, kinds.ResourceExhaustedError):
        return Meaning.QUOTA if retry_after_s(error) is None else Meaning.THROTTLED
    if isinstance(error, kinds.AlreadyExistsError):
        return Meaning.EXISTS
    if isinstance(error, (kinds.NotFoundError, kinds.ConflictError)):
        return Meaning.GONE
    if isinstance(error, (kinds.AuthError, kinds.PermissionDeniedError, kinds.InvalidError)):
        return Meaning.REFUSED
    return Meaning.FAILED


def is_client_error(error: Exception) -> bool:
    """Whether an exception is one that calls of the client end with, and no defect of ours."""
    import grpclib.exceptions

    kinds = load().exception
    return isinstance(
        error,
        (kinds.Error, grpclib.exceptions.GRPCError, grpclib.exceptions.StreamTerminatedError, OSError),
    )


def told(error: Exception, doing: str) -> EvalpurseError:
    """The error as ours: `SandboxError` for what a new attempt may mend, else `BackendRefusedError`."""
    if not is_client_error(error):
        raise error
    what = f"{doing}: {type(error).__name__}: {error}"
    meaning = meaning_of(error)
    if meaning is Meaning.QUOTA:
        return BackendRefusedError(
            f"Modal refused {what}",
            hint="A spend or capacity limit of the workspace is reached. Raise it in Modal's settings (Usage "
            "and billing), or lower modal_max_live in config.toml, then launch the rest again.",
            quota=True,
        )
    kinds = load().exception
    if isinstance(error, (kinds.AuthError, kinds.PermissionDeniedError)):
        return BackendRefusedError(
            f"Modal does not allow this token {what}",
            hint="Make a new one with `modal token new` and start the daemon again.",
            quota=False,
        )
    if meaning is Meaning.REFUSED:
        return BackendRefusedError(
            f"Modal refused {what}", hint="No repetition helps: change the variant or its case.", quota=False
        )
    return SandboxError(f"Modal failed {what}")


def credentials(home: Home) -> tuple[str, str]:
    """Token id and secret: from `modal.toml` of the home folder, else from the client's own settings.

    Raises:
        BadLaunchError: there are none, or the file cannot be read.
    """
    file = home.path / "modal.toml"
    if file.exists():
        return _from_file(file)
    config = load().config.config
    token_id, token_secret = config.get("token_id"), config.get("token_secret")
    if not token_id or not token_secret:
        raise BadLaunchError(
            "There are no Modal credentials on this machine.", hint=HOW_TO_SIGN_IN.format(file=file)
        )
    return token_id, token_secret


def _from_file(file: Path) -> tuple[str, str]:
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
        return str(given["token_id"]), str(given["token_secret"])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError) as error:
        raise BadLaunchError(
            f"{file} does not hold Modal credentials ({type(error).__name__}: {error}).",
            hint="It needs two lines: token_id = '...' and token_secret = '...'.",
        ) from error


async def connect(home: Home) -> Any:
    """A connected client.

    Raises:
        BadLaunchError: no package, no credentials, or they are not accepted; the hint says what to do.
    """
    modal = load()
    token_id, token_secret = credentials(home)
    file = home.path / "modal.toml"
    try:
        with anyio.fail_after(CONNECT_S):
            client = await modal.Client.from_credentials.aio(token_id, token_secret)
            await client.hello.aio()
    except TimeoutError as error:
        raise BadLaunchError(
            f"Modal did not answer within {CONNECT_S:g} s.", hint="Look at the network, then launch again."
        ) from error
    except Exception as error:
        if not is_client_error(error):
            raise
        raise BadLaunchError(
            f"Modal does not accept the connection: {type(error).__name__}: {error}",
            hint=HOW_TO_SIGN_IN.format(file=file),
        ) from error
    return client
