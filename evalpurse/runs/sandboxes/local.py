"""Sandboxes on this machine: private folders, in a bubblewrap jail where that works.

What is known of a sandbox is in its folder, written before the step that it tells of, so that a daemon that
is killed at any instant leaves a next one that can find the sandbox, end it or go on with it. Harnesses run
on when the daemon dies.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from decimal import Decimal
from functools import cached_property

import anyio
import anyio.to_thread

from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.errors import BadLaunchError, SandboxError, SetupFailedError, WorldError
from evalpurse.runs.sandboxes.capture import open_regular, read_ends
from evalpurse.runs.sandboxes.environment import base_environment, check_names
from evalpurse.runs.sandboxes.folders import Folders
from evalpurse.runs.sandboxes.isolation import Isolation, Isolator, Jail
from evalpurse.runs.sandboxes.layout import Layout, Record, checked_name
from evalpurse.runs.sandboxes.local_sandbox import LocalSandbox
from evalpurse.runs.sandboxes.materialise import (
    Tree,
    Trees,
    remove_tree,
    write_file,
    write_files,
)
from evalpurse.runs.sandboxes.monitor import Monitor
from evalpurse.runs.sandboxes.processes import ProcessTable, end_all, system_table
from evalpurse.runs.sandboxes.protocol import Limits, Machine, Network, Prepared, SandboxSpec
from evalpurse.runs.sandboxes.redaction import Redactor
from evalpurse.runs.sandboxes.secret_values import present_value, secret_values
from evalpurse.runs.sandboxes.supervisor import Launch
from evalpurse.runs.sandboxes.tasks import Engine
from evalpurse.runs.sandboxes.world_files import WorldFiles

SETUP_TIMEOUT_S = 900.0
SETUP_LIMITS = Limits(
    timeout_s=SETUP_TIMEOUT_S,
    cpu_s=8 * SETUP_TIMEOUT_S,
    memory_bytes=16 << 30,
    processes=2048,
    disk_bytes=50 << 30,
)
LOCAL_MACHINE = ("world", "restore")
"""What a variant may ask of this machine."""

SMALL_CASE_BYTES = 256 << 10
SMALL_CASE_FILES = 50
_SETUP_TAIL_BYTES = 4096
_SETUP_TAIL_LINES = 20
_NUSD_PER_USD = 10**9
_SLACK_BYTES = 64 << 10


class LocalBackend:
    """Makes and finds the sandboxes of one home folder."""

    name = "local"
    can_vanish = False

    def __init__(self, home: Home, settings: Settings, *, table: ProcessTable | None = None) -> None:
        self._home = home
        self._setting = settings.local_isolation
        self._nusd_per_second = math.ceil(Decimal(str(settings.local_usd_per_hour)) * _NUSD_PER_USD / 3600)
        self._table = table or system_table()
        self._trees = Trees()
        self._worlds = WorldFiles(home.worlds)
        self._worlds_checked: set[str] = set()
        self._sandboxes: dict[str, LocalSandbox] = {}
        self._making: set[str] = set()

    def check(self, machine: Machine, network: Network) -> None:  # noqa: ARG002 (a network is always there)
        asked = {field.name: getattr(machine, field.name) for field in fields(machine)}
        for name in LOCAL_MACHINE:
            asked.pop(name)
        given = sorted(name for name, value in asked.items() if value)
        if given:
            raise BadLaunchError(
                f"The local backend has no {', '.join(given)}: its runs are on this machine as it is.",
                hint="Launch with backend='modal', or make a variant without.",
            )

    def nusd_per_second(self, machine: Machine) -> int:  # noqa: ARG002 (one price for this machine)
        return self._nusd_per_second

    @property
    def isolation_statement(self) -> str:
        """What keeps local sandboxes apart on this machine, and what does not."""
        return self.isolation.limits

    @property
    def isolation(self) -> Isolation:
        """How sandboxes are kept apart on this machine; looks once, which takes about 10 ms.

        Raises:
            IsolationMissingError: the settings require isolation, and it does not work here.
        """
        return self._isolator.isolation

    @cached_property
    def _isolator(self) -> Isolator:
        return Isolator(self._home.path, self._setting)

    @cached_property
    def _engine(self) -> Engine:
        work = str(self._home.work)
        return Engine(self._isolator, self._table, Monitor(self._table, work), Folders(work), self._worlds)

    def start_kind(self, variant_digest: str) -> str:  # noqa: ARG002 (all start alike)
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
        if machine.world:
            try:
                await self._check_world(machine.world)
            except WorldError as error:
                raise SetupFailedError(error.message, hint=error.hint) from error
        prepared_folder = prepared.folder
        self._trees.forget(prepared_folder)
        if done or not setup:
            return
        check_names(env)
        digest = hashlib.sha256(os.fsencode(prepared_folder)).hexdigest()[:16]
        name = f"setup.{digest}"
        folder = str(self._home.work / name)
        await anyio.to_thread.run_sync(self._clear_setup, name, folder)
        try:
            for place in (folder, f"{folder}/tmp"):
                os.mkdir(place, 0o700)
            deadline = anyio.current_time() + SETUP_TIMEOUT_S
            for number, command in enumerate(setup):
                launch = self._setup_launch(name, folder, number, command, str(prepared_folder), env)
                await self._set_up(launch, command, deadline - anyio.current_time())
        except OSError as error:
            raise SandboxError(f"Setup in {prepared_folder} cannot run: {error}.") from error
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(remove_tree, folder)

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        checked_name(spec.name)
        check_names({**spec.env, **spec.secrets})
        engine = self._engine
        if spec.machine.world and (
            not engine.isolator.active or spec.machine.world not in self._worlds_checked
        ):
            await self._check_world_of(spec)
        tree = self._trees.kept(spec.prepared.folder)
        if tree is None:
            tree = await anyio.to_thread.run_sync(self._trees.read, spec.prepared.folder)
        layout = Layout(str(self._home.work / spec.name))
        self._making.add(spec.name)
        try:
            # A small sandbox is made here at once: handing it to a thread would take longer.
            if tree.small and _is_small(spec.case_files):
                record = _make(layout, spec, tree, engine.folders)
            else:
                record = await anyio.to_thread.run_sync(_make, layout, spec, tree, engine.folders)
        finally:
            self._making.discard(spec.name)
        sandbox = LocalSandbox(record, layout, engine, spec.secrets, fresh=True, on_removed=self._forget)
        self._sandboxes[spec.name] = sandbox
        return sandbox

    async def find(self, name: str) -> LocalSandbox | None:
        known = self._sandboxes.get(name)
        if known is not None or name in self._making:
            return known
        layout = Layout(str(self._home.work / checked_name(name)))
        record = Record.read(layout)
        if record is None:
            if os.path.lexists(layout.root):
                await anyio.to_thread.run_sync(remove_tree, layout.root)
            return None
        names = record.secret_names
        sandbox = LocalSandbox(
            record,
            layout,
            self._engine,
            {name: present_value(self._home, name) for name in names},
            fresh=False,
            on_removed=self._forget,
            former=secret_values(self._home, names),
        )
        self._sandboxes[name] = sandbox
        return sandbox

    async def list(self, tags: Mapping[str, str]) -> Sequence[str]:
        return await anyio.to_thread.run_sync(_names, str(self._home.work), dict(tags))

    async def close(self) -> None:
        engine = self.__dict__.get("_engine")
        if isinstance(engine, Engine):
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(engine.monitor.close)

    async def _check_world_of(self, spec: SandboxSpec) -> None:
        try:
            await self._check_world(spec.machine.world)
        except WorldError as error:
            raise SandboxError(
                f"Sandbox {spec.name} cannot have its world: {error.message}", hint=error.hint
            ) from error

    async def _check_world(self, digest: str) -> None:
        """Looks at all its files. In jails nothing can change them: once a process is enough there.

        Raises:
            WorldDamagedError: it is not what it was.
        """
        await anyio.to_thread.run_sync(self._worlds.check, digest)
        self._worlds_checked.add(digest)

    def _forget(self, sandbox: LocalSandbox) -> None:
        self._sandboxes.pop(sandbox.name, None)

    def _clear_setup(self, name: str, folder: str) -> None:
        """Ends and removes what a daemon that was killed during a setup has left."""
        if os.path.lexists(folder):
            end_all(name, self._table)
            remove_tree(folder)

    def _setup_launch(
        self, name: str, folder: str, number: int, command: str, prepared: str, env: Mapping[str, str]
    ) -> Launch:
        return Launch(
            name=name,
            command=["/bin/sh", "-c", command],
            environment={**base_environment(name, folder, prepared), **env},
            jail=Jail(
                workdir=prepared,
                writable=(prepared, f"{folder}/tmp"),
                readable=(),
                network="open",
                memory_bytes=SETUP_LIMITS.memory_bytes,
            ),
            run_file=f"{folder}/run-{number}",
            log_file=f"{folder}/log-{number}",
            cpu_s=SETUP_LIMITS.cpu_s,
            file_bytes=SETUP_LIMITS.disk_bytes,
        )

    async def _set_up(self, launch: Launch, command: str, timeout_s: float) -> None:
        folders = (launch.jail.workdir, os.path.dirname(launch.run_file))
        ended = await self._engine.carry_out(launch, SETUP_LIMITS, max(timeout_s, 0.0), folders, 0)
        if ended.exit_code == 0:
            return
        if ended.exit_code is None:
            how = ended.why
        elif ended.exit_code < 0:
            how = f"It was ended by signal {-ended.exit_code}."
        else:
            how = f"It ended with exit code {ended.exit_code}."
        tail = await anyio.to_thread.run_sync(_last_lines, launch.log_file)
        raise SetupFailedError(
            f"Setup command {command!r} failed. {how}\n{tail}".rstrip(),
            hint="Mend the command or the source, and make a new variant.",
            command=command,
            exit_code=ended.exit_code,
            log_tail=tail,
        )


def _is_small(files: Mapping[str, bytes]) -> bool:
    return len(files) <= SMALL_CASE_FILES and sum(map(len, files.values())) <= SMALL_CASE_BYTES


def _names(work: str, tags: Mapping[str, str]) -> list[str]:
    found = []
    for name in sorted(os.listdir(work)):
        record = Record.read(Layout(f"{work}/{name}"))
        if record is not None and tags.items() <= record.tags.items():
            found.append(name)
    return found


def _make(layout: Layout, spec: SandboxSpec, tree: Tree, folders: Folders) -> Record:
    """Makes a sandbox's folder, its record last; nothing is left when it fails."""
    try:
        if not _claim(layout, folders):
            remove_tree(layout.root)  # half-made by a daemon that died
            folders.make(layout)
    except OSError as error:
        raise SandboxError(f"Sandbox {spec.name} cannot be made: {error}.") from error
    try:
        tree.write(layout.source)
        write_files(layout.case, spec.case_files)
        write_file(layout.params, json.dumps(dict(spec.params), ensure_ascii=False).encode())
        record = Record.of(spec, tree.disk_bytes + sum(map(len, spec.case_files.values())) + _SLACK_BYTES)
        record.write(layout)
    except BaseException as error:
        remove_tree(layout.root)
        if isinstance(error, OSError):
            raise SandboxError(f"Sandbox {spec.name} cannot be made: {error}.") from error
        raise
    return record


def _claim(layout: Layout, folders: Folders) -> bool:
    try:
        folders.make(layout)
    except FileExistsError as error:
        if Record.read(layout) is None:
            return False
        name = layout.root.rpartition("/")[2]
        raise SandboxError(f"There is a sandbox {name} already.", hint="Terminate it first.") from error
    return True


def _last_lines(log_file: str) -> str:
    fd = open_regular(log_file)
    if fd is None:
        return ""
    try:
        content, _ = read_ends(fd, 2 * _SETUP_TAIL_BYTES, Redactor({}))
    finally:
        os.close(fd)
    lines = content[-_SETUP_TAIL_BYTES:].decode(errors="replace").splitlines()
    return "\n".join(lines[-_SETUP_TAIL_LINES:])
