"""Faults on demand: which call of which RPC goes wrong, and how.

A fault is taken by a call before its handler runs, so that "the next two creates" means exactly two, however
many arrive at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from grpclib import GRPCError, Status

from tests.fake_modal.wire import api

When = Literal["before", "after"]


@dataclass
class Fault:
    """What happens to the next `times` calls of `rpc` (None: to all, until cleared).

    `status` is a gRPC status name; with `retry_after_s` it carries the retry policy that makes the client
    retry without limit. `when="after"` lets the call take effect and then loses the answer. `only` restricts
    it to calls that name this sandbox (its id, task id or name) or this app; the first `skip` matching calls
    pass. `after_bytes` belongs to streams and block transfers: that much arrives, then `status` or
    `disconnect` ends the stream, or, with neither, it stays open and silent.
    """

    rpc: str
    times: int | None = 1
    status: str = ""
    message: str = "injected fault"
    retry_after_s: float | None = None
    when: When = "before"
    delay_s: float = 0.0
    hang: bool = False
    disconnect: bool = False
    skip: int = 0
    only: str = ""
    after_bytes: int | None = None
    taken: int = field(default=0, init=False)

    def error(self) -> GRPCError | None:
        if not self.status:
            return None
        details = (
            [api.RPCRetryPolicy(retry_after_secs=self.retry_after_s)]
            if self.retry_after_s is not None
            else None
        )
        return GRPCError(Status[self.status], self.message, details)


class Faults:
    """The faults in force, and the calls that hang in one."""

    def __init__(self) -> None:
        self._rules: dict[str, deque[Fault]] = {}
        self._held: dict[str, asyncio.Event] = {}

    def inject(self, fault: Fault) -> None:
        if fault.status:
            Status[fault.status]  # a misspelt status fails here, not in the middle of a test
        self._rules.setdefault(fault.rpc, deque()).append(fault)

    def take(self, rpc: str, names: Iterable[str]) -> Fault | None:
        """The fault that this call suffers, if any."""
        rules = self._rules.get(rpc)
        if not rules:
            return None
        called = set(names)
        for rule in rules:
            if rule.only and rule.only not in called:
                continue
            if rule.skip > 0:
                rule.skip -= 1
                return None
            rule.taken += 1
            if rule.times is not None and rule.taken >= rule.times:
                rules.remove(rule)
            return rule
        return None

    async def hold(self, rpc: str) -> None:
        """Hangs until `release` names this RPC."""
        await self._held.setdefault(rpc, asyncio.Event()).wait()

    def release(self, rpc: str) -> None:
        self.clear(rpc)
        event = self._held.pop(rpc, None)
        if event is not None:
            event.set()

    def clear(self, rpc: str | None = None) -> None:
        if rpc is None:
            self._rules.clear()
        else:
            self._rules.pop(rpc, None)

    def waiting(self) -> list[str]:
        """RPCs that have calls hanging in a fault."""
        return sorted(self._held)


def disconnect(stream: Any) -> None:
    """Drops the connection that this call came in on, as a dead host would."""
    stream._stream._transport.abort()
