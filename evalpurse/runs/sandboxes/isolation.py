"""What keeps a local sandbox apart from the machine, and what does not: said, never pretended.

With bubblewrap a sandbox sees the machine read-only, nothing of other sandboxes or of the evalpurse home,
no processes but its own, and no network unless its variant asks for it; its supervisor is the first process
of its own process namespace, so that the kernel ends everything with it. Without bubblewrap a sandbox is a
private folder and a process group.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from evalpurse.runs.errors import IsolationMissingError

PROBE_TIMEOUT_S = 10.0
_HIDDEN_TMPFS_BYTES = 64 << 10

_WITH = (
    "bubblewrap: sees the machine read-only, writes only to its own sandbox, sees no other process, no other "
    "sandbox and nothing of the evalpurse home. It shares the kernel and runs as the same user: this holds "
    "against mistakes and ordinary misbehaviour, not against an attack on the kernel."
)
_WITHOUT = (
    "No isolation ({why}): each run has a private folder, its own process group and limits that are watched, "
    "but it can read and write whatever this user can, the network cannot be blocked, and a process that "
    "hides from its environment, session and parents is not found."
)

_CREDENTIAL_FOLDERS = (".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker", ".config/gcloud", ".config/gh")
_CREDENTIAL_FILES = (
    ".netrc",
    ".modal.toml",
    ".git-credentials",
    ".npmrc",
    ".pypirc",
    ".config/git/credentials",
)


@dataclass(frozen=True)
class Isolation:
    """How local sandboxes are kept apart. `network_blocked`: whether a run's network can be blocked."""

    kind: Literal["bubblewrap", "none"]
    network_blocked: bool
    limits: str
    """One paragraph for people: what it protects against and what not."""


@dataclass(frozen=True)
class Jail:
    """What one process tree may see. Paths are absolute; everything else of the machine is read-only."""

    workdir: str
    writable: Sequence[str]
    readable: Sequence[str]
    network: Literal["blocked", "open"]
    memory_bytes: int


class Interpreters(NamedTuple):
    """Folders of our own Python that a jail would hide: a harness may run on it wherever it is installed."""

    outside_home: Sequence[str]
    inside_home: Sequence[str]

    @classmethod
    def of(cls, home: str, prefixes: Collection[str]) -> Interpreters:
        """The prefixes that lie in scratch folders, apart from those inside the home."""
        found = sorted({str(Path(prefix).resolve()) for prefix in prefixes})
        inside = [path for path in found if Path(path).is_relative_to(home)]
        scratch = [path for path in found if any(Path(path).is_relative_to(folder) for folder in _SCRATCH)]
        return cls([path for path in scratch if path not in inside], inside)


class Isolator:
    """Wraps commands into bubblewrap, where that works and is wanted."""

    def __init__(self, home: Path, setting: str, program: str = "bwrap") -> None:
        """`setting` is `auto`, `require` or `off`.

        Raises:
            IsolationMissingError: isolation is required and does not work here.
        """
        self._home = str(home)
        self._bwrap, why = (None, "switched off") if setting == "off" else _find(program)
        if self._bwrap is None and setting == "require":
            raise IsolationMissingError(
                f"local_isolation is 'require', but bubblewrap does not work here: {why}.",
                hint="Install bubblewrap (apt install bubblewrap), or set local_isolation to 'auto'.",
            )
        if self._bwrap is None:
            self.isolation = Isolation("none", network_blocked=False, limits=_WITHOUT.format(why=why))
        else:
            self.isolation = Isolation("bubblewrap", network_blocked=True, limits=_WITH)
            self._first = [self._bwrap, *_NAMESPACES, *_machine(self._home)]
            self._interpreters = Interpreters.of(self._home, {sys.prefix, sys.base_prefix})

    @property
    def active(self) -> bool:
        return self._bwrap is not None

    def wrap(self, jail: Jail, info_fd: int, command: Sequence[str]) -> list[str]:
        """The command inside its jail. Its first process has the id that bubblewrap writes to `info_fd`."""
        if self._bwrap is None:
            return list(command)
        shared_memory = str(max(jail.memory_bytes // 2, 1 << 20))
        arguments = [*self._first]
        if jail.network == "blocked":
            arguments.append("--unshare-net")
        arguments += ["--size", shared_memory, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        for folder in _SCRATCH:
            arguments += ["--size", shared_memory, "--tmpfs", folder]
        # Before the home is hidden, or a home inside an interpreter's folder would be seen again.
        for path in self._interpreters.outside_home:
            arguments += ["--ro-bind", path, path]
        arguments += ["--size", str(_HIDDEN_TMPFS_BYTES), "--tmpfs", self._home]
        for path in (*self._interpreters.inside_home, *jail.readable):
            arguments += ["--ro-bind", path, path]
        for path in jail.writable:
            arguments += ["--bind", path, path]
        # Last, when the mount points are made: a write to what is hidden must fail, not seem to succeed.
        arguments += ["--remount-ro", self._home]
        arguments += ["--chdir", jail.workdir, "--info-fd", str(info_fd), "--"]
        return [*arguments, *command]


# The supervisor is the namespace's first process: when it ends the kernel has ended all others before its
# end can be seen. A session of its own keeps `kill 0` of a harness away from bubblewrap.
_NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--as-pid-1", "--new-session", "--cap-drop", "ALL")
# Root may write here by being root, without any privilege: one of these names the program that the kernel
# starts when a process crashes. bubblewrap covers some of them itself, but not where only files are writable.
_KERNEL_SWITCHES = ("sys", "sysrq-trigger", "fs", "acpi", "scsi", "mtrr", "irq", "bus")
_SCRATCH = tuple(folder for folder in ("/tmp", "/var/tmp") if Path(folder).is_dir())


def _machine(home: str) -> list[str]:
    arguments = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for name in _KERNEL_SWITCHES:
        if Path("/proc", name).exists():
            arguments += ["--ro-bind", f"/proc/{name}", f"/proc/{name}"]
    if Path("/run").is_dir():
        # Sockets can be connected to on a read-only mount: those of services (docker, D-Bus) live here.
        arguments += ["--size", str(_HIDDEN_TMPFS_BYTES), "--tmpfs", "/run"]
        if Path("/run/systemd/resolve").is_dir():
            arguments += ["--ro-bind", "/run/systemd/resolve", "/run/systemd/resolve"]
        arguments += ["--remount-ro", "/run"]
    user = Path.home()
    for name in _CREDENTIAL_FOLDERS:
        folder = user / name
        if folder.is_dir() and not Path(home).is_relative_to(folder):
            hidden = str(folder.resolve())
            arguments += ["--size", str(_HIDDEN_TMPFS_BYTES), "--tmpfs", hidden, "--remount-ro", hidden]
    for name in _CREDENTIAL_FILES:
        if (user / name).is_file():
            arguments += ["--ro-bind", "/dev/null", str((user / name).resolve())]
    return arguments


def _find(program: str) -> tuple[str | None, str]:
    """The program's path if it works here, else why not."""
    path = shutil.which(program)
    if path is None:
        return None, "bubblewrap is not installed"
    probe = [path, *_NAMESPACES, "--unshare-net", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    probe += ["--size", "65536", "--tmpfs", "/run", "--info-fd", "1", "--", "/bin/sh", "-c", "exit 0"]
    try:
        done = subprocess.run(
            probe, check=False, capture_output=True, stdin=subprocess.DEVNULL, timeout=PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"bubblewrap cannot be used: {error}"
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return None, f"bubblewrap fails here: {said[-1] if said else f'exit code {done.returncode}'}"
    return path, ""
