"""How fast sandboxes are asked for: a token bucket that slows down when it is told to.

The workspace's limit is shared with everybody who uses it and is in no documentation, so the configured rate
is only where it starts: each refusal halves it and pauses everyone, each success gives a little back.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import anyio

SLOWEST_PER_S = 0.2
_GIVEN_BACK = 0.05
_JITTER = 0.2


class CreateRate:
    """At most `per_s` turns a second on average, with bursts of one second's worth."""

    def __init__(self, per_s: float, *, jitter: Callable[[float, float], float] = random.uniform) -> None:
        self._most_per_s = per_s
        self.per_s = per_s
        """The rate now."""
        self._next = 0.0
        self._pause_until = 0.0
        self._jitter = jitter

    async def turn(self) -> None:
        """Returns when one more create may be sent."""
        now = anyio.current_time()
        burst_s = max(0.0, 1.0 - 1.0 / self._most_per_s)
        mine = max(self._next, now - burst_s, self._pause_until)
        self._next = mine + self._jitter(1 - _JITTER, 1 + _JITTER) / self.per_s
        await anyio.sleep(max(0.0, mine - now))
        while anyio.current_time() < self._pause_until:
            # Refused meanwhile: those who waited go on spread out, not as a herd.
            left_s = self._pause_until - anyio.current_time()
            await anyio.sleep(left_s + self._jitter(0.0, 1.0) / self.per_s)

    def accepted(self) -> None:
        """A create went through."""
        self.per_s = min(self._most_per_s, self.per_s + _GIVEN_BACK * self._most_per_s)

    def refused(self, retry_after_s: float) -> None:
        """A create was refused for its rate; nobody asks again before `retry_after_s`."""
        if anyio.current_time() >= self._pause_until:  # one burst is one refusal
            slowest_per_s = min(SLOWEST_PER_S, self._most_per_s)
            self.per_s = max(slowest_per_s, self.per_s / 2)
        self._pause_until = max(self._pause_until, anyio.current_time() + retry_after_s)
