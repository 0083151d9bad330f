"""The inside of a sandbox: a folder that is its root, the mounts over it, and commands run in it.

The sandbox's own folder is its whole file system: any absolute path outside the host's program folders is
private and writable. In *bwrap* mode that is enforced by bubblewrap, with a process namespace per sandbox. In
*plain* mode nothing is enforced: absolute paths in arguments and variables are rewritten by a rule.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.fake_modal.processes import Process, settle

HOST_FOLDERS = ("bin", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr")
"""Top folders that are the host's, read-only."""
OWN_FOLDERS = ("dev", "evalpurse", "proc", "root", "tmp", "work")
PLAIN_ROOTS = ("/app", "/evalpurse", "/srv", "/tmp", "/work", "/workspace", "/world")  # noqa: S108 - names inside a sandbox
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SYMLINK_HOPS = 40
ENTRYPOINT_KEEP = 1 << 20
IDLE = ("sleep", "infinity")


@dataclass(frozen=True)
class Mount:
    """A volume (or a part of it) at an absolute path."""

    path: str
    folder: Path
    read_only: bool


@dataclass(frozen=True)
class Located:
    """Where a sandbox path is on this machine."""

    path: Path
    read_only: bool


def python_home() -> Path | None:
    """The folder of this Python when it is not under /usr: sandboxes see it, read-only, where it is."""
    home = Path(sys.base_prefix)
    return None if home.parts[:2] == ("/", "usr") else home


@dataclass
class Machine:
    """One sandbox's root folder, what is mounted in it, and what every command of it gets."""

    id: str
    root: Path
    mounts: list[Mount] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/root"
    offline: bool = False
    shared: list[Path] = field(default_factory=list)

    def prepare(self) -> None:
        """Makes the folders that any root has; a root that came from an image keeps what it brought."""
        for name in OWN_FOLDERS:
            (self.root / name).mkdir(exist_ok=True)
        (self.root / "tmp").chmod(0o1777)
        for name in HOST_FOLDERS:
            host, own = Path("/", name), self.root / name
            if host.is_symlink() and not own.is_symlink():
                own.symlink_to(host.readlink())
            elif host.is_dir() and not host.is_symlink():
                own.mkdir(exist_ok=True)
        for mount in self.mounts:
            self.locate(mount.path.rstrip("/").rpartition("/")[0] or "/").path.mkdir(
                parents=True, exist_ok=True
            )

    def locate(self, path: str, *, follow: bool = True) -> Located:
        """Follows symbolic links as the sandbox would see them, so none leads out of its root.

        Raises:
            OSError: too many symbolic links.
        """
        pending, done, hops = deque(path.split("/")), list[str](), 0
        while pending:
            part = pending.popleft()
            if part in {"", "."}:
                continue
            if part == "..":
                done = done[:-1]
                continue
            here = self._backing([*done, part])
            if (follow or any(p not in {"", "."} for p in pending)) and here.path.is_symlink():
                hops += 1
                if hops > SYMLINK_HOPS:
                    raise OSError(40, "Too many levels of symbolic links", path)
                target = str(here.path.readlink())
                target = target.removeprefix(
                    str(self.root)
                )  # a link made in plain mode names its real target
                if target.startswith("/"):
                    done = []
                pending.extendleft(reversed(target.split("/")))
                continue
            done.append(part)
        return self._backing(done)

    def _backing(self, parts: Sequence[str]) -> Located:
        virtual = "/" + "/".join(parts)
        for mount in sorted(self.mounts, key=lambda m: -len(m.path)):
            base = mount.path.rstrip("/")
            if virtual == base or virtual.startswith(base + "/"):
                return Located(mount.folder / virtual[len(base) :].lstrip("/"), mount.read_only)
        if parts and parts[0] in HOST_FOLDERS and Path("/", parts[0]).exists():
            return Located(Path(virtual), read_only=True)
        home = python_home()
        if home is not None and virtual.startswith(str(home) + "/"):
            return Located(Path(virtual), read_only=True)
        return Located(self.root / virtual.lstrip("/"), read_only=False)


class Host(Protocol):
    """A way to run the commands of machines."""

    mode: str

    async def start(self, machine: Machine, argv: Sequence[str]) -> Process:
        """Starts the entrypoint; when it ends, everything in the machine ends."""

    async def run(
        self,
        machine: Machine,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        capture: tuple[bool, bool],
    ) -> Process:
        """Starts another command in a started machine."""

    async def build(self, machine: Machine, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Process:
        """Starts one command in a machine of its own that ends with it (an image's RUN step)."""

    async def stop(self, machine: Machine) -> None:
        """Ends every process of the machine; returns when they are gone."""


def base_env(home: str) -> dict[str, str]:
    python = python_home()
    path = f"{python}/bin:{SYSTEM_PATH}" if python else SYSTEM_PATH
    return {"PATH": path, "HOME": home, "LANG": "C.UTF-8", "SHELL": "/bin/sh"}


class BwrapHost:
    """Each machine is a bubblewrap container; further commands join its namespaces."""

    mode = "bwrap"

    def __init__(self) -> None:
        self._inits: dict[str, tuple[Process, int]] = {}
        self._unprivileged = os.geteuid() != 0

    async def start(self, machine: Machine, argv: Sequence[str]) -> Process:
        ready_read, ready_write = os.pipe()
        info_read, info_write = os.pipe()
        try:
            init = Process(
                [
                    *self._container(machine, machine.workdir),
                    "--info-fd",
                    str(info_write),
                    # The namespaces exist before the mounts: only a word from inside says that both do.
                    *(
                        "/bin/sh",
                        "-c",
                        f'printf . >/dev/fd/{ready_write}; exec "$@"',
                        "sh",
                        *argv,
                    ),
                ],
                env={**base_env("/root"), **machine.env},
                keep=ENTRYPOINT_KEEP,
                pass_fds=(ready_write, info_write),
            )
        finally:
            os.close(ready_write)
            os.close(info_write)
        try:
            word, info = await _read_pipe(ready_read, 1), await _read_pipe(info_read, 4096)
        finally:
            os.close(ready_read)
            os.close(info_read)
        if word != b".":
            await init.exited.wait()
            reason = init.stderr.read(init.stderr.start).decode(errors="replace").strip()
            raise RuntimeError(f"bubblewrap could not start {machine.id}: {reason}")
        self._inits[machine.id] = (init, json.loads(info)["child-pid"])
        return init

    async def run(
        self,
        machine: Machine,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        capture: tuple[bool, bool],
    ) -> Process:
        _, pid = self._inits[machine.id]
        namespaces = ["-m", "-p", "-i", "-u", *(["-n"] if machine.offline else [])]
        if self._unprivileged:
            namespaces += ["-U", "--preserve-credentials"]
        return Process(
            ["nsenter", "-t", str(pid), *namespaces, f"--wdns={cwd}", "--", *argv],
            env={**base_env("/root"), **machine.env, **env},
            capture=capture,
        )

    async def build(self, machine: Machine, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Process:
        return Process(
            [*self._container(machine, cwd), *argv], env={**base_env("/root"), **machine.env, **env}
        )

    async def stop(self, machine: Machine) -> None:
        init, _ = self._inits.pop(machine.id, (None, 0))
        if init is not None:
            init.kill_leader()  # and with it the first process of its namespace, so all others
            await init.exited.wait()
            init.finish()

    def _container(self, machine: Machine, cwd: str) -> list[str]:
        argv = ["bwrap", "--bind", str(machine.root), "/"]
        for name in HOST_FOLDERS:
            host = Path("/", name)
            if host.is_dir() and not host.is_symlink():
                argv += ["--ro-bind", str(host), str(host)]
        for shared in filter(None, [python_home(), *machine.shared]):
            argv += ["--ro-bind", str(shared), str(shared)]
        argv += ["--proc", "/proc", "--dev", "/dev"]
        for mount in machine.mounts:
            argv += ["--ro-bind" if mount.read_only else "--bind", str(mount.folder), mount.path]
        argv += [
            "--unshare-pid",
            "--unshare-ipc",
            "--unshare-uts",
            "--hostname",
            "modal",
            "--die-with-parent",
        ]
        if self._unprivileged:
            # As root inside: with another user bubblewrap nests a second user namespace, closed to nsenter.
            argv += ["--unshare-user", "--uid", "0", "--gid", "0"]
        else:
            argv += ["--cap-add", "ALL"]
        return [*argv, *(["--unshare-net"] if machine.offline else []), "--chdir", cwd]


class PlainHost:
    """Commands run as they are, in the sandbox's folder, with known absolute paths rewritten into it."""

    mode = "plain"

    def __init__(self) -> None:
        self._running: dict[str, list[Process]] = {}

    async def start(self, machine: Machine, argv: Sequence[str]) -> Process:
        return self._spawn(machine, argv, {}, machine.workdir, (True, True), ENTRYPOINT_KEEP)

    async def run(
        self,
        machine: Machine,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        capture: tuple[bool, bool],
    ) -> Process:
        return self._spawn(machine, argv, env, cwd, capture, None)

    async def build(self, machine: Machine, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Process:
        return self._spawn(machine, argv, env, cwd, (True, True), None)

    async def stop(self, machine: Machine) -> None:
        running = self._running.pop(machine.id, [])
        for process in running:
            process.kill()
        for pid in await asyncio.to_thread(marked_processes, machine.id):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for process in running:
            await process.exited.wait()
            process.finish()

    def _spawn(
        self,
        machine: Machine,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        capture: tuple[bool, bool],
        keep: int | None,
    ) -> Process:
        for mount in machine.mounts:
            link = machine.root / mount.path.lstrip("/")
            if not link.is_symlink() and not link.exists():
                link.symlink_to(mount.folder)
        rewrite = Rewriter(machine)
        full = {**base_env(str(machine.root / "root")), "PATH": os.environ.get("PATH", SYSTEM_PATH)}
        full |= {key: rewrite(value) for key, value in {**machine.env, **env}.items()}
        full |= {"SANDBOX_ROOT": str(machine.root), "FAKE_MODAL_SANDBOX": machine.id}
        full.setdefault("TMPDIR", str(machine.root / "tmp"))
        folder = str(machine.locate(cwd).path)
        try:
            process = Process(
                [rewrite(arg) for arg in argv], env=full, cwd=folder, capture=capture, keep=keep
            )
        except FileNotFoundError as error:
            raise FileNotFoundError(f"cannot run {argv[0]!r} in {cwd}: {error}") from error
        alive = [p for p in self._running.get(machine.id, []) if p.returncode is None]
        self._running[machine.id] = [*alive, process]
        return process


class Rewriter:
    """The plain mode's rule: a known root that begins a path in a text gets the sandbox's folder before it.

    Known are `PLAIN_ROOTS`, the working folder and the mount points. A path starts where the character
    before it is none that a path may contain. The content of files is never touched.
    """

    def __init__(self, machine: Machine) -> None:
        roots = {
            *PLAIN_ROOTS,
            *(mount.path.rstrip("/") for mount in machine.mounts),
            machine.workdir.rstrip("/"),
        }
        names = "|".join(re.escape(root) for root in sorted(roots - {"", "/root"}, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w./-])({names})(?=[^\w.-]|$)")
        self._root = str(machine.root)

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._root + match.group(1), text)


def marked_processes(machine_id: str) -> list[int]:
    """Pids of every process that inherited this machine's marker, also those that left its process groups."""
    marker = f"FAKE_MODAL_SANDBOX={machine_id}".encode()
    if Path("/proc/self/environ").exists():
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if marker in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found
    listing = subprocess.run(["ps", "axEww", "-o", "pid=,command="], capture_output=True, check=False).stdout
    return [int(line.split()[0]) for line in listing.splitlines() if marker in line]


async def _read_pipe(descriptor: int, limit: int) -> bytes:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    os.set_blocking(descriptor, False)
    loop.add_reader(descriptor, settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)
    return os.read(descriptor, limit)


async def choose_host(wanted: str, folder: Path) -> tuple[Host, str]:
    """The host for a wanted mode ("auto", "bwrap", "plain") and why it is not bwrap, if it is not.

    Raises:
        RuntimeError: bwrap was asked for and does not work here.
    """
    if wanted == "plain":
        return PlainHost(), "plain was asked for"
    reason = await _bwrap_trouble(folder)
    if not reason:
        return BwrapHost(), ""
    if wanted == "bwrap":
        raise RuntimeError(f"bubblewrap does not work here: {reason}")
    return PlainHost(), reason


async def _bwrap_trouble(folder: Path) -> str:
    for program in ("bwrap", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    root = folder / "probe"
    root.mkdir()
    host, machine = BwrapHost(), Machine("probe", root)
    try:
        machine.prepare()
        await host.start(machine, IDLE)
        inside = await host.run(machine, ["true"], {}, "/tmp", (True, True))  # noqa: S108 - inside the sandbox
        await inside.exited.wait()
        inside.finish()
        if inside.returncode != 0:
            words = inside.stderr.read(0).decode(errors="replace").strip()
            return f"nsenter answered {inside.returncode}: {words}"
    except (OSError, RuntimeError) as error:
        return str(error)
    finally:
        await host.stop(machine)
        shutil.rmtree(root, ignore_errors=True)
    return ""


def copy_tree(source: Path, target: Path) -> None:
    """Copies a tree with modes, owners, times and links; sockets, pipes and devices are left out.

    Blocking: call it in a thread.
    """
    target.mkdir(parents=True, exist_ok=True)
    plain = all(
        stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
        for path in source.rglob("*")
        for mode in [path.lstat().st_mode]
    )
    if plain:
        copied = subprocess.run(
            ["cp", "-a", f"{source}/.", f"{target}/"], check=False, capture_output=True, text=True
        )
        if (
            copied.returncode != 0 and "No such file or directory" not in copied.stderr
        ):  # a file that went meanwhile
            raise OSError(copied.stderr.strip())
        return
    for path in sorted(source.rglob("*")):
        mode, copy = path.lstat().st_mode, target / path.relative_to(source)
        if stat.S_ISDIR(mode):
            copy.mkdir(exist_ok=True)
            shutil.copystat(path, copy)
        elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            shutil.copy2(path, copy, follow_symlinks=False)
