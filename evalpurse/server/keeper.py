"""The services of the daemon: opened once behind the doors, kept, drained, closed.

Opening may take seconds (a migration) or fail for good (a newer schema, a lock that another process holds),
and neither may keep a client from being told. Whoever needs the services waits for them here and gets them,
or the reason.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from evalpurse.config import Settings
from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.server.errors import StartingError

if TYPE_CHECKING:
    from evalpurse.runs.services import Services

log = logging.getLogger(__name__)

OpenServices = Callable[[Home, Settings], AbstractAsyncContextManager["Services"]]


class State(Enum):
    """Where the services are in their life."""

    OPENING = "opening"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


class Keeper:
    """Holds the services of one home for the life of the daemon."""

    def __init__(self, home: Home, settings: Settings, open_services: OpenServices | None = None) -> None:
        self._home = home
        self._settings = settings
        self._open = open_services
        self._settled = anyio.Event()
        self._close = anyio.Event()
        self.state = State.OPENING
        self.services: Services | None = None
        self._failure: dict[str, Any] | None = None

    async def ready(self) -> Services:
        """The services, when they are open.

        Raises:
            StartingError: they could not be opened, or are closed again; says why.
        """
        await self._settled.wait()
        if self.services is None:
            raise self._why_not()
        return self.services

    async def run(self) -> None:
        """Opens the services and keeps them until `close()`; never raises for a failed opening."""
        if self._close.is_set():
            self.state = State.CLOSED
            self._settled.set()
            return
        try:
            opener = self._open if self._open is not None else await anyio.to_thread.run_sync(_import_opener)
            async with opener(self._home, self._settings) as services:
                self.services = services
                self.state = State.READY
                self._settled.set()
                log.info("services are open")
                await self._close.wait()
                self.services = None
                self.state = State.CLOSED
            log.info("services are closed")
        except EvalpurseError as error:
            self._fail(error.code, error.message, error.hint, error.facts)
            log.error("services failed: %s", error)  # noqa: TRY400 - the sentence is complete
        except Exception as error:
            reference = secrets.token_hex(4)
            log.exception("services failed, ref %s", reference)
            hint = f"Its trace is in the daemon's log under ref {reference} (`evalpurse daemon logs`)."
            self._fail("internal", f"{type(error).__name__}: {error}.", hint, {"ref": reference})

    def close(self) -> None:
        """Lets the services be closed; `run` returns when they are."""
        self._close.set()

    async def drain(self, timeout_s: float) -> bool:
        """Asks the services to launch nothing more and to bring to an end what runs; whether they did."""
        drain = getattr(self.services, "drain", None)
        if drain is None:
            return True
        with anyio.move_on_after(timeout_s) as scope:
            await drain()
        return not scope.cancelled_caught

    def describe(self) -> dict[str, Any]:
        """The services as `daemon.status` shows them."""
        shown: dict[str, Any] = {"state": self.state.value}
        if self._failure is not None:
            shown["error"] = self._failure
        return shown

    def _fail(self, code: str, message: str, hint: str, facts: dict[str, Any]) -> None:
        self.services = None
        self.state = State.FAILED
        self._failure = {"code": code, "message": message, "hint": hint, "facts": facts}
        self._settled.set()

    def _why_not(self) -> StartingError:
        if self._failure is None:
            return StartingError(
                "evalpurse is on its way out and takes no more calls.", hint="Call again in a few seconds."
            )
        return StartingError(
            f"evalpurse could not open its data: {self._failure['message']}",
            hint=f"{self._failure['hint']} Then run: evalpurse daemon stop (the next call starts it anew).",
            cause=self._failure["code"],
            **self._failure["facts"],
        )


def _import_opener() -> OpenServices:
    from evalpurse.runs.services import Services

    return Services.open
