"""What a sandbox is to the rest of evalpurse: a private place that runs one harness, once.

Every backend keeps four promises. A sandbox is found again by its name after the daemon died. Its limits
hold whatever the harness does. What a grader brings enters only after the harness and all its processes
are gone. After `terminate` nothing of it is running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol

Network = Literal["blocked", "open"]


@dataclass(frozen=True)
class Limits:
    """What one attempt may use. Sizes are bytes, times seconds; `timeout_s` is wall clock of the harness.

    `slack_s` is how long its sandbox may live beyond harness and graders: its start, what is restored in it,
    the collection, its end.
    """

    timeout_s: float = 600.0
    grade_timeout_s: float = 120.0
    slack_s: float = 30.0
    cpu_s: float = 3600.0
    memory_bytes: int = 4 << 30
    processes: int = 256
    disk_bytes: int = 2 << 30
    answer_bytes: int = 4 << 20
    log_bytes: int = 8 << 20
    transcript_bytes: int = 32 << 20
    artifacts_bytes: int = 64 << 20


@dataclass(frozen=True)
class Prepared:
    """A variant's source with its overlay applied and its setup run, ready to be copied into sandboxes."""

    variant_digest: str
    folder: Path


@dataclass(frozen=True)
class Machine:
    """What a variant asks of the machine that its runs are on; empty and zero leave it to the backend.

    `cpu` and `memory_mb` are requests, the `_limit` ones hard limits (the request where they are zero).
    """

    image: str = ""
    dockerfile: str = ""
    cpu: float = 0.0
    cpu_limit: float = 0.0
    memory_mb: int = 0
    memory_limit_mb: int = 0
    gpu: str = ""
    region: str = ""
    runtime: Literal["", "gvisor", "vm"] = ""
    docker: bool = False
    allow_domains: tuple[str, ...] = ()
    world: str = ""
    restore: tuple[str, ...] = ()


@dataclass(frozen=True)
class SandboxSpec:
    """Everything a sandbox is made from. `case_files` maps a relative POSIX path to its content."""

    name: str
    tags: Mapping[str, str]
    prepared: Prepared
    command: Sequence[str]
    case_files: Mapping[str, bytes]
    params: Mapping[str, Any]
    env: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    network: Network
    limits: Limits
    allowance_usd: str
    machine: Machine = Machine()


class EndReason(Enum):
    """Why a harness is no longer running."""

    EXITED = "exited"
    """It ended by itself, with an exit code or a signal that nobody here sent."""
    TIMEOUT = "timeout"
    """It was ended at its deadline."""
    CPU = "cpu"
    """It used up its processor time."""
    MEMORY = "memory"
    """It went over its memory."""
    PROCESSES = "processes"
    """It had more processes than allowed."""
    DISK = "disk"
    """It wrote more than allowed."""
    STOPPED = "stopped"
    """It was ended by `stop`: its exit code tells nothing about it."""
    LOST = "lost"
    """The sandbox disappeared, or its end left no evidence: an infrastructure failure."""


@dataclass(frozen=True)
class Ended:
    """The end of a harness. `exit_code` is negative for a signal, None when nothing is known."""

    reason: EndReason
    exit_code: int | None
    started_at: datetime
    ended_at: datetime
    detail: str = ""


@dataclass(frozen=True)
class Output:
    """What a harness left behind, each part cut to its limit (`truncated` names the parts that were)."""

    answer: bytes | None
    answer_is_json: bool
    metrics: bytes | None
    transcript: bytes | None
    log: bytes
    artifacts: bytes | None
    truncated: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ExecResult:
    """A finished grader command. `exit_code` is None when it was ended at its timeout or at a limit.

    The last line of `log` then says which.
    """

    exit_code: int | None
    log: bytes
    files: Mapping[str, bytes]


class Sandbox(Protocol):
    """One live sandbox. Steps are called in order; `wait` may be called again after a recovery."""

    name: str
    tags: Mapping[str, str]
    created_at: datetime

    async def start(self) -> None:
        """Starts the harness, detached: it survives this process. At most once, however often called."""

    async def wait(self) -> Ended:
        """Returns when the harness and all its processes are gone, ending them at the deadline.

        Cancelling the wait leaves the harness running.
        """

    async def stop(self) -> Ended | None:
        """Ends the harness and all its processes now and keeps the sandbox; None when it never started."""

    async def get(self) -> Output:
        """Reads what the harness left in its output folder."""

    async def exec(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes],
        timeout_s: float,
        fetch: Sequence[str] = (),
    ) -> ExecResult:
        """Runs a grader command after the harness is gone.

        `files` are placed in a fresh folder that the harness never saw, which is the working folder and
        `EVALPURSE_GRADER`; the harness's working folder is `EVALPURSE_SOURCE`, its output `EVALPURSE_OUT`,
        the case `EVALPURSE_CASE`. `fetch` names files of that folder to bring back (missing ones are left
        out, each at most 1 MiB).
        """

    async def terminate(self) -> None:
        """Ends every process of the sandbox and removes it. Safe to call twice, and from a shield."""


class Backend(Protocol):
    """A maker of sandboxes."""

    name: str
    can_vanish: bool
    """Whether a sandbox can disappear without us; then the intent to create one is recorded first."""

    @property
    def isolation_statement(self) -> str:
        """What keeps its sandboxes apart, and what does not, for people."""

    def check(self, machine: Machine, network: Network) -> None:
        """Whether it can give a variant what it asks for.

        Raises:
            BadLaunchError: names the field, and what this backend has.
        """

    def nusd_per_second(self, machine: Machine) -> int:
        """The most that a second of one sandbox of this kind can cost, in nano-dollars."""

    def start_kind(self, variant_digest: str) -> str:
        """How runs of a prepared variant start, `warm` or `cold`; empty when there is no difference."""

    async def prepare(
        self,
        prepared: Prepared,
        setup: Sequence[str],
        env: Mapping[str, str],
        machine: Machine,
        *,
        done: bool,
    ) -> None:
        """What has to be done once a variant: setup commands, an image.

        Called once in each process; `done` says that an earlier process had brought it to its end.

        Raises:
            SetupFailedError: names the command that failed, with the end of its output.
        """

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Makes a sandbox with source, case and params in place; the harness is not yet running.

        Raises:
            SandboxError: an infrastructure failure; nothing is left behind.
            BackendRefusedError: no further attempt would do better; nothing is left behind.
        """

    async def find(self, name: str) -> Sandbox | None:
        """A sandbox made earlier, perhaps by a daemon that died; None when it is gone."""

    async def list(self, tags: Mapping[str, str]) -> Sequence[str]:
        """Names of all sandboxes that carry these tags."""

    async def close(self) -> None:
        """Lets go of pollers; sandboxes stay as they are."""
