"""What the tests of local sandboxes share: a bench on which a harness is a few lines of Python or shell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.sandboxes.isolation import Isolator
from evalpurse.runs.sandboxes.local import LocalBackend
from evalpurse.runs.sandboxes.local_sandbox import LocalSandbox
from evalpurse.runs.sandboxes.protocol import Ended, Limits, Machine, Output, Prepared, SandboxSpec

ISOLATIONS = ("off", "require")
MIB = 1 << 20


def skip_without_bubblewrap(setting: str, home: Home) -> None:
    if setting == "require":
        isolation = Isolator(home.path, "auto").isolation
        if isolation.kind != "bubblewrap":
            pytest.skip(isolation.limits)


@dataclass
class Bench:
    """A backend and a prepared source; `run` takes a harness through all steps."""

    home: Home
    backend: LocalBackend
    isolation: str
    prepared: Prepared
    made: list[LocalSandbox] = field(default_factory=list)

    async def prepare(self, setup: Sequence[str], **env: str) -> None:
        """Runs setup commands in the prepared source."""
        await self.backend.prepare(self.prepared, setup, env, Machine(), done=False)

    def spec(
        self,
        command: Sequence[str] | str,
        *,
        name: str = "",
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        case_files: Mapping[str, bytes] | None = None,
        params: Mapping[str, Any] | None = None,
        network: Literal["blocked", "open"] = "blocked",
        tags: Mapping[str, str] | None = None,
        machine: Machine | None = None,
    ) -> SandboxSpec:
        """`command`: arguments, or a Python program as text."""
        return SandboxSpec(
            name=name or f"exp_test.{len(self.made):05d}.1",
            tags=tags or {"experiment": "exp_test"},
            prepared=self.prepared,
            command=[sys.executable, "-c", command] if isinstance(command, str) else command,
            case_files=case_files if case_files is not None else {"input.txt": b"a question"},
            params=params or {},
            env=env or {},
            secrets=secrets or {},
            network=network,
            limits=limits or Limits(timeout_s=20),
            allowance_usd="0.10",
            machine=machine or Machine(),
        )

    async def create(self, command: Sequence[str] | str, **settings: Any) -> LocalSandbox:
        sandbox = await self.backend.create(self.spec(command, **settings))
        self.made.append(sandbox)
        return sandbox

    async def start(self, command: Sequence[str] | str, **settings: Any) -> LocalSandbox:
        sandbox = await self.create(command, **settings)
        await sandbox.start()
        return sandbox

    async def run(self, command: Sequence[str] | str, **settings: Any) -> tuple[Ended, Output]:
        sandbox = await self.start(command, **settings)
        ended = await sandbox.wait()
        return ended, await sandbox.get()

    def another_backend(self) -> LocalBackend:
        """As a later daemon would open it."""
        return LocalBackend(self.home, Settings(local_isolation=self.isolation))


@asynccontextmanager
async def bench_in(home: Home, isolation: str) -> AsyncIterator[Bench]:
    skip_without_bubblewrap(isolation, home)
    source = home.sources / "prepared" / "v1" / "source"
    source.mkdir(parents=True)
    (source / "harness.txt").write_text("pinned")
    backend = LocalBackend(home, Settings(local_isolation=isolation))
    bench = Bench(home, backend, isolation, Prepared("v1", source))
    try:
        yield bench
    finally:
        for sandbox in bench.made:
            await sandbox.terminate()
        await backend.close()
        assert running(*(sandbox.name for sandbox in bench.made)) == []


def running(*names: str) -> list[int]:
    """Ids of live processes whose environment names one of these sandboxes."""
    wanted = {f"EVALPURSE_RUN={name}" for name in names}
    listed = subprocess.run(
        ["ps", "-E" if sys.platform == "darwin" else "e", "-A", "-ww", "-opid=", "-ostat=", "-ocommand="],
        check=True,
        capture_output=True,
    )
    found = []
    for line in listed.stdout.decode(errors="replace").splitlines():
        pid, state, *words = line.split()
        if wanted.intersection(words) and not state.startswith("Z"):
            found.append(int(pid))
    return found


def tight(**limits: Any) -> Limits:
    return replace(Limits(timeout_s=20), **limits)


def is_root() -> bool:
    return os.getuid() == 0


def write_in(folder: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
