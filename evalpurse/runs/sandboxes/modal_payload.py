"""What is sent into a remote sandbox: one tar with the source, the case, the params and the scripts."""

from __future__ import annotations

import io
import json
import math
import shlex
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from evalpurse.runs.sandboxes import modal_scripts as scripts
from evalpurse.runs.sandboxes.materialise import checked_path
from evalpurse.runs.sandboxes.protocol import SandboxSpec

GRACE_S = 2
_ULIMIT_FILE_UNIT_BYTES = 512


class Source(Protocol):
    """How a source comes into a sandbox: a file that is sent, and a script that makes the source of it.

    The script is given the sandbox's folder and finds the file at `run/source.tar`; both may be empty when
    the image holds the source already.
    """

    @property
    def tarball(self) -> Path | None: ...

    @property
    def apply(self) -> str: ...


@dataclass(frozen=True)
class _Part:
    path: str
    content: bytes
    mode: int = 0o600


def payload_of(spec: SandboxSpec, source: Source) -> bytes:
    """The tar for one attempt."""
    limits = spec.limits
    cpu_s = max(1, math.ceil(limits.cpu_s))
    settings = {
        "timeout_s": f"{limits.timeout_s:g}",
        "whole_s": str(math.ceil(limits.timeout_s)),
        "grace_s": str(GRACE_S),
        "cpu_soft": str(cpu_s),
        "cpu_hard": str(cpu_s + 5),
        "file_blocks": str(limits.disk_bytes // _ULIMIT_FILE_UNIT_BYTES),
    }
    parts = [
        _Part("run/start.sh", scripts.START.encode()),
        _Part("run/supervise.sh", scripts.SUPERVISE.encode()),
        _Part("run/limits.sh", "".join(f"{key}={value}\n" for key, value in settings.items()).encode()),
        _Part("run/command.sh", f"exec {shlex.join(spec.command)}\n".encode()),
        _Part("params.json", json.dumps(dict(spec.params), ensure_ascii=False).encode()),
        *(_Part(f"case/{checked_path(path)}", content) for path, content in spec.case_files.items()),
    ]
    if source.apply:
        parts.append(_Part("run/apply.sh", source.apply.encode()))
    if source.tarball is not None:
        parts.append(_Part("run/source.tar", source.tarball.read_bytes()))
    if spec.machine.restore:
        parts.append(_Part("run/restore.sh", _restore(spec.machine.restore).encode()))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for part in parts:
            entry = tarfile.TarInfo(part.path)
            entry.size, entry.mode = len(part.content), part.mode
            tar.addfile(entry, io.BytesIO(part.content))
    return buffer.getvalue()


def _restore(commands: Sequence[str]) -> str:
    """A script that runs each command by itself and stops at the first that fails."""
    lines = []
    for number, command in enumerate(commands, 1):
        which = f"restore command {number} of {len(commands)}"
        lines.append(f"echo {shlex.quote(f'evalpurse: {which}: {command}')}")
        failed = f'{{ echo "evalpurse: {which} ended with exit code $?"; exit 1; }}'
        lines.append(f"/bin/sh -c {shlex.quote(command)} </dev/null || {failed}")
    return "\n".join(lines) + "\n"
