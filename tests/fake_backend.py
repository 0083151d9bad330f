"""A backend without processes: each sandbox does what its script says, and outlives the services.

`Sandboxes` is the world outside the daemon: services may be closed and opened again over it, as after a
crash, and it remembers every harness that was ever started.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import anyio

from evalpurse.runs.errors import SandboxError
from evalpurse.runs.sandboxes.protocol import (
    Ended,
    EndReason,
    ExecResult,
    Machine,
    Network,
    Output,
    Prepared,
    SandboxSpec,
)


@dataclass(frozen=True)
class Script:
    """What one sandbox does. `gate` holds the harness back until it is set."""

    answer: str = "42"
    exit_code: int = 0
    reason: EndReason = EndReason.EXITED
    usage: Any = ()
    over_allowance: bool = False
    create_error: str = ""
    gate: anyio.Event | None = None


Choose = Callable[[SandboxSpec], Script]


@dataclass
class Sandboxes:
    """All sandboxes that exist, by name, and what was done to them."""

    choose: Choose = field(default=lambda spec: Script())
    alive: dict[str, FakeSandbox] = field(default_factory=dict)
    started: Counter[str] = field(default_factory=Counter)
    created: list[str] = field(default_factory=list)
    live_now: int = 0
    live_max: int = 0
    prepared: int = 0
    any_started: anyio.Event = field(default_factory=anyio.Event)


class FakeSandbox:
    """One scripted sandbox."""

    def __init__(self, world: Sandboxes, spec: SandboxSpec, script: Script) -> None:
        self.name = spec.name
        self.tags: Mapping[str, str] = spec.tags
        self.created_at = datetime.now(UTC)
        self._world = world
        self._script = script
        self._started_at: datetime | None = None
        self._stopped = False

    async def start(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self._started_at is None:
            self._started_at = datetime.now(UTC)
            self._world.started[self.name] += 1
            self._world.live_now += 1
            self._world.live_max = max(self._world.live_max, self._world.live_now)
            self._world.any_started.set()

    async def wait(self) -> Ended:
        if self._script.gate is not None:
            await self._script.gate.wait()
        await anyio.lowlevel.checkpoint()
        return self._ended(self._script.reason, self._script.exit_code)

    async def stop(self) -> Ended | None:
        await anyio.lowlevel.checkpoint()
        return None if self._started_at is None else self._ended(EndReason.EXITED, -9)

    def _ended(self, reason: EndReason, code: int) -> Ended:
        if not self._stopped:
            self._stopped = True
            self._world.live_now -= 1
        assert self._started_at is not None
        return Ended(reason, None if reason is EndReason.LOST else code, self._started_at, datetime.now(UTC))

    async def get(self) -> Output:
        await anyio.lowlevel.checkpoint()
        metrics: dict[str, Any] = {"steps": 3}
        if self._script.usage is not None:
            metrics["usage"] = list(self._script.usage)
        if self._script.over_allowance:
            metrics["over_allowance"] = True
        return Output(
            self._script.answer.encode(),
            False,
            json.dumps(metrics).encode(),
            b'{"turn": 1}\n',
            b"hello\n",
            None,
        )

    async def exec(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes],
        timeout_s: float,
        fetch: Sequence[str] = (),
    ) -> ExecResult:
        await anyio.lowlevel.checkpoint()
        return ExecResult(0, b"", {})

    async def terminate(self) -> None:
        await anyio.lowlevel.checkpoint()
        self._world.alive.pop(self.name, None)


class FakeBackend:
    """A door to the sandboxes; one for each daemon."""

    name = "fake"
    isolation_statement = "none: nothing is run"

    def __init__(self, world: Sandboxes, *, nusd_per_second: int = 0, can_vanish: bool = False) -> None:
        self._world = world
        self._nusd_per_second = nusd_per_second
        self.can_vanish = can_vanish

    def check(self, machine: Machine, network: Network) -> None:
        return None

    def nusd_per_second(self, machine: Machine) -> int:
        return self._nusd_per_second

    def start_kind(self, variant_digest: str) -> str:
        return ""

    async def prepare(
        self,
        prepared: Prepared,
        setup: Sequence[str],
        env: Mapping[str, str],
        machine: Machine,
        *,
        done: bool,
    ) -> None:
        await anyio.lowlevel.checkpoint()
        self._world.prepared += 1

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        await anyio.lowlevel.checkpoint()
        script = self._world.choose(spec)
        self._world.created.append(spec.name)
        if script.create_error:
            raise SandboxError(script.create_error)
        assert spec.name not in self._world.alive, "a sandbox of this name exists"
        sandbox = FakeSandbox(self._world, spec, script)
        self._world.alive[spec.name] = sandbox
        return sandbox

    async def find(self, name: str) -> FakeSandbox | None:
        await anyio.lowlevel.checkpoint()
        return self._world.alive.get(name)

    async def list(self, tags: Mapping[str, str]) -> Sequence[str]:
        await anyio.lowlevel.checkpoint()
        return [name for name, found in self._world.alive.items() if tags.items() <= found.tags.items()]

    async def close(self) -> None:
        return None
