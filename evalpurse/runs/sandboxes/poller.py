"""Looks after all remote sandboxes of one backend with a bounded number of calls.

A harness cannot tell us that it has ended, so we look: often while a run is young, seldom when it is old,
never more than `LOOKS_PER_S` in all and `IN_FLIGHT_MAX` at once. A look that fails is no evidence.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from evalpurse.runs.errors import SandboxError, SandboxGoneError

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOKS_PER_S = 40.0
IN_FLIGHT_MAX = 50
FIRST_S = 0.5
SHARE = 0.2
"""A pause is this share of the time that the run has taken: what waiting may add to its price."""
PAUSE_MAX_S = 15.0
FAILED_LOOKS_MAX_S = 600.0
"""So long looks may fail one after the other: a laptop that wakes up has no network at first."""


class Poller:
    """One for all sandboxes; each waits in its own task."""

    def __init__(self) -> None:
        self._calls = anyio.CapacityLimiter(IN_FLIGHT_MAX)
        self._watched = 0

    async def until(self, look: Callable[[], Awaitable[T | None]], *, until_s: float) -> T:
        """Repeats `look` until it finds something; looks for sure soon after `until_s` (seconds from now).

        Raises:
            SandboxGoneError: a look found that there is nothing to wait for.
            SandboxError: no look came through for ten minutes.
        """
        begun = anyio.current_time()
        due, good = begun + until_s, begun
        self._watched += 1
        try:
            while True:
                now = anyio.current_time()
                pause_s = self._pause_s(now - begun)
                if now < due < now + pause_s:
                    pause_s = due - now
                await anyio.sleep(pause_s)
                try:
                    async with self._calls:
                        found = await look()
                except SandboxGoneError:
                    raise
                except SandboxError as error:
                    if anyio.current_time() - good > FAILED_LOOKS_MAX_S:
                        raise
                    log.warning("a sandbox could not be looked at: %s", error)
                    await anyio.sleep(min(30.0, max(1.0, anyio.current_time() - good)))
                    continue
                good = anyio.current_time()
                if found is not None:
                    return found
        finally:
            self._watched -= 1

    def _pause_s(self, age_s: float) -> float:
        wanted_s = max(FIRST_S, min(PAUSE_MAX_S, SHARE * age_s))
        return max(wanted_s, self._watched / LOOKS_PER_S) * random.uniform(0.9, 1.1)  # noqa: S311 (no secret)
