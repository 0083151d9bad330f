"""Where things are in the folder of a local sandbox, and what its record file holds.

The record is written last and in one piece: a folder without a readable record was never a sandbox, and is
what a daemon that died while making one left behind.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, cast

from evalpurse.runs.errors import SandboxError
from evalpurse.runs.sandboxes.materialise import write_file
from evalpurse.runs.sandboxes.protocol import EndReason, Limits, SandboxSpec

SCHEMA_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def checked_name(name: str) -> str:
    """The name, if it can be that of a folder.

    Raises:
        SandboxError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise SandboxError(f"{name!r} cannot be the name of a sandbox.")
    return name


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of one sandbox. `source`, `out` and `tmp` are the harness's to write."""

    root: str

    @property
    def source(self) -> str:
        return f"{self.root}/source"

    @property
    def case(self) -> str:
        return f"{self.root}/case"

    @property
    def out(self) -> str:
        return f"{self.root}/out"

    @property
    def params(self) -> str:
        return f"{self.root}/params.json"

    @property
    def record(self) -> str:
        return f"{self.root}/sandbox.json"

    @property
    def run(self) -> str:
        return f"{self.root}/run"

    @property
    def log(self) -> str:
        return f"{self.root}/log"

    @property
    def verdict(self) -> str:
        return f"{self.root}/verdict"

    @property
    def folders(self) -> tuple[str, ...]:
        return (self.source, self.case, self.out, f"{self.root}/tmp")

    @property
    def writable(self) -> tuple[str, ...]:
        return (self.source, self.out, f"{self.root}/tmp")


@dataclass(frozen=True)
class Record:
    """What any daemon must know of a sandbox. Secrets are named, their values are not here."""

    name: str
    tags: Mapping[str, str]
    created_at: datetime
    command: Sequence[str]
    env: Mapping[str, str]
    network: Literal["blocked", "open"]
    limits: Limits
    allowance_usd: str
    prepared: str
    secret_names: Sequence[str]
    free_bytes: int
    """Disk use that was there before the harness started."""
    world: str = ""
    """Digest of the world that is mounted."""
    restore: Sequence[str] = ()

    @classmethod
    def of(cls, spec: SandboxSpec, free_bytes: int) -> Record:
        return cls(
            name=spec.name,
            tags=dict(spec.tags),
            created_at=datetime.now(UTC),
            command=list(spec.command),
            env=dict(spec.env),
            network=spec.network,
            limits=spec.limits,
            allowance_usd=spec.allowance_usd,
            prepared=str(spec.prepared.folder),
            secret_names=sorted(spec.secrets),
            free_bytes=free_bytes,
            world=spec.machine.world,
            restore=list(spec.machine.restore),
        )

    def write(self, layout: Layout) -> None:
        facts = {
            "schema_version": SCHEMA_VERSION,
            **self.__dict__,
            "created_at": self.created_at.isoformat(),
            "limits": self.limits.__dict__,
        }
        write_file(layout.record, json.dumps(facts).encode() + b"\n")

    @classmethod
    def read(cls, layout: Layout) -> Record | None:
        """None when there is no whole record, or one of a version that this one does not know."""
        try:
            with open(layout.record, "rb") as file:
                text = file.read()
            facts: dict[str, Any] = json.loads(text)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        if facts.pop("schema_version", None) != SCHEMA_VERSION:
            return None
        facts["created_at"] = datetime.fromisoformat(facts["created_at"])
        facts["limits"] = Limits(**facts["limits"])
        return cls(**facts)


@dataclass(frozen=True)
class Verdict:
    """Why a harness was ended from outside; written before it is ended, so that no daemon misses it."""

    reason: EndReason
    detail: str

    def write(self, layout: Layout) -> Verdict:
        """Writes it, unless there is one already; returns the one that counts.

        Raises:
            OSError: it can be written neither way, as when the sandbox's folder is gone.
        """
        line = json.dumps([self.reason.value, self.detail]).encode() + b"\n"
        try:
            write_file(layout.verdict, line)
        except FileExistsError:
            return Verdict.read(layout) or self
        return self

    @classmethod
    def read(cls, layout: Layout) -> Verdict | None:
        try:
            fd = os.open(layout.verdict, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            text = os.read(fd, 65536)
        finally:
            os.close(fd)
        if not text.endswith(b"\n"):
            return None
        reason, detail = cast("list[str]", json.loads(text))
        return cls(EndReason(reason), detail)
