"""Sandboxes on the control plane: made, named, tagged, listed, waited for, and ended in every way."""

# ruff: noqa: N802 - methods carry the names that the protocol calls them by
from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from grpclib import GRPCError, Status

from tests.fake_modal.blobs import Blobs
from tests.fake_modal.cloud import Cloud
from tests.fake_modal.fstools import FsTool
from tests.fake_modal.images import Image, Images
from tests.fake_modal.machine import HOST_FOLDERS, IDLE, Machine, copy_tree
from tests.fake_modal.machine import Mount as MachineMount
from tests.fake_modal.processes import Process
from tests.fake_modal.registry import Apps, Environments, Mounts, Secrets
from tests.fake_modal.volumes import Volumes
from tests.fake_modal.wire import Empty, api, conflict, exists, invalid, new_id, not_found, unimplemented

DEFAULT_MILLI_CPU = 125
DEFAULT_MEMORY_MIB = 128
EXIT_CODES = {"TERMINATED": 137, "TIMEOUT": 124}
RESULTS = tuple(
    v.name.removeprefix("GENERIC_STATUS_") for v in api.GenericResult.GenericStatus.DESCRIPTOR.values
)


@dataclass
class Sandbox:
    """One sandbox, from its create to long after its end."""

    id: str
    task_id: str
    app_id: str
    definition: Any
    machine: Machine
    image: Image
    tags: dict[str, str]
    created_at: float
    ended_at: float = 0.0
    ready_at: float = 0.0
    status: str = ""
    exit_code: int = 0
    reason: str = ""
    vanished: bool = False
    entrypoint: Process | None = None
    execs: dict[str, Process | FsTool] = field(default_factory=dict)
    network: dict[str, Any] = field(default_factory=dict)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    booting: asyncio.Task[None] | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    idle_timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return str(self.definition.name)

    @property
    def running(self) -> bool:
        return not self.status

    @property
    def cores(self) -> tuple[float, float]:
        """Request and limit in cores; without a limit both are the request."""
        resources = self.definition.resources
        request = resources.milli_cpu or DEFAULT_MILLI_CPU
        return request / 1000, max(resources.milli_cpu_max, request) / 1000

    @property
    def gib(self) -> tuple[float, float]:
        """Request and limit in GiB; without a limit both are the request."""
        resources = self.definition.resources
        request = resources.memory_mb or DEFAULT_MEMORY_MIB
        return request / 1024, max(resources.memory_mb_max, request) / 1024

    def result(self) -> Any:
        if self.running:
            return api.GenericResult()
        status = getattr(api.GenericResult, f"GENERIC_STATUS_{self.status}")
        return api.GenericResult(status=status, exitcode=self.exit_code, exception=self.reason)

    def metadata(self) -> Any:
        return api.SandboxHandleMetadata(result=self.result(), app_id=self.app_id)


class CreateBucket:
    """The rate of creates: a bucket of tokens that fills at the set rate."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._tokens = 0.0
        self._at = 0.0

    def take(self) -> None:
        """Raises GRPCError when there is no token."""
        settings, now = self._cloud.settings, time.monotonic()
        if settings.create_rate is None:
            return
        filled = (
            settings.create_burst if not self._at else self._tokens + (now - self._at) * settings.create_rate
        )
        self._tokens, self._at = min(filled, settings.create_burst), now
        if self._tokens >= 1:
            self._tokens -= 1
            return
        wait = (1 - self._tokens) / settings.create_rate
        details = [api.RPCRetryPolicy(retry_after_secs=wait)] if settings.create_policy else None
        raise GRPCError(Status.RESOURCE_EXHAUSTED, "Sandbox creation rate limit exceeded", details)


class Sandboxes:
    """The V2 RPCs of `modal.Sandbox`, and what tests do to sandboxes behind the client's back."""

    def __init__(
        self,
        cloud: Cloud,
        environments: Environments,
        apps: Apps,
        images: Images,
        secrets: Secrets,
        mounts: Mounts,
        volumes: Volumes,
        blobs: Blobs,
    ) -> None:
        self._cloud = cloud
        self._environments = environments
        self._apps = apps
        self._images = images
        self._secrets = secrets
        self._mounts = mounts
        self._volumes = volumes
        self._blobs = blobs
        self._bucket = CreateBucket(cloud)
        self._cleaner = ThreadPoolExecutor(2, "fake-modal-cleaner")
        self._tasks: set[asyncio.Task[None]] = set()
        self._by_key: dict[str, str] = {}
        self._by_task: dict[str, Sandbox] = {}
        self.by_id: dict[str, Sandbox] = {}
        self._running: dict[str, Sandbox] = {}
        self._names: dict[tuple[str, str], list[Sandbox]] = {}
        self.peak = 0

    @property
    def live(self) -> int:
        return len(self._running)

    def get(self, sandbox_id: str) -> Sandbox:
        sandbox = self.by_id.get(sandbox_id)
        if sandbox is None or sandbox.vanished:
            raise not_found(f"Sandbox '{sandbox_id}' not found")
        return sandbox

    def of_task(self, task_id: str) -> Sandbox:
        sandbox = self._by_task.get(task_id)
        if sandbox is None or sandbox.vanished:
            raise not_found(f"Task '{task_id}' not found")
        return sandbox

    def alias(self, name: str) -> str:
        """The name of the sandbox with this id or task id."""
        sandbox = self.by_id.get(name) or self._by_task.get(name)
        return sandbox.name if sandbox else ""

    def find(self, reference: str) -> Sandbox:
        """By id, task id or name, the newest first."""
        for sandbox in reversed(self.by_id.values()):
            if reference in {sandbox.id, sandbox.task_id, sandbox.name}:
                return sandbox
        raise not_found(f"no sandbox is known as '{reference}'")

    def end(self, sandbox: Sandbox, status: str, exit_code: int | None = None, reason: str = "") -> None:
        """Ends a running sandbox with a result; everything in it is killed. Later ends change nothing."""
        if not sandbox.running:
            return
        sandbox.status, sandbox.reason, sandbox.ended_at = status, reason, time.time()
        sandbox.exit_code = EXIT_CODES.get(status, 0) if exit_code is None else exit_code
        self._running.pop(sandbox.id, None)
        for timer in [*sandbox.timers, *([sandbox.idle_timer] if sandbox.idle_timer else [])]:
            timer.cancel()
        sandbox.finished.set()
        self._keep(asyncio.get_running_loop().create_task(self._dispose(sandbox)))

    def end_app(self, app_id: str) -> None:
        for sandbox in list(self._running.values()):
            if sandbox.app_id == app_id:
                self.end(sandbox, "TERMINATED")

    def vanish(self, sandbox: Sandbox) -> None:
        """The sandbox is gone and nobody knows of it any more; its bill stays."""
        self.end(sandbox, "INTERNAL_FAILURE", reason="vanished")
        sandbox.vanished = True

    async def close(self) -> None:
        for sandbox in list(self._running.values()):
            self.end(sandbox, "TERMINATED")
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._cleaner.shutdown()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def booted(self, sandbox: Sandbox) -> Machine:
        """The machine, started. The first caller starts it."""
        if sandbox.booting is None:
            sandbox.booting = asyncio.get_running_loop().create_task(self._boot(sandbox))
        await asyncio.shield(sandbox.booting)
        if not sandbox.running:
            raise not_found(f"Sandbox '{sandbox.id}' has already shut down")
        return sandbox.machine

    def busy(self, sandbox: Sandbox, *, starting: bool) -> None:
        """Keeps the idle clock: it runs while no command does."""
        if sandbox.idle_timer is not None:
            sandbox.idle_timer.cancel()
            sandbox.idle_timer = None
        limit = sandbox.definition.idle_timeout_secs
        active = any(e.returncode is None for e in sandbox.execs.values())
        if limit and not starting and not active and sandbox.running:
            loop = asyncio.get_running_loop()
            sandbox.idle_timer = loop.call_later(limit, self.end, sandbox, "IDLE_TIMEOUT")

    async def SandboxCreateV2(self, request: Any, call: Any) -> Any:
        self._bucket.take()
        key = str(call.metadata.get("x-idempotency-key", ""))
        if self._cloud.settings.dedupe_creates and key in self._by_key:
            return self._created(self.by_id[self._by_key[key]])
        self._check(request)
        sandbox = self._make(request)
        self._by_key[key] = sandbox.id
        return self._created(sandbox)

    async def SandboxWaitV2(self, request: Any, call: Any) -> Any:
        sandbox = self.get(request.sandbox_id)
        if sandbox.running and request.timeout:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(sandbox.finished.wait(), request.timeout)
            sandbox = self.get(request.sandbox_id)
        return api.SandboxWaitResponse(result=sandbox.result(), metadata=sandbox.metadata())

    async def SandboxTerminateV2(self, request: Any, call: Any) -> Any:
        sandbox = self.get(request.sandbox_id)
        if not sandbox.running:
            return api.SandboxTerminateResponse(existing_result=sandbox.result())
        self.end(sandbox, "TERMINATED")
        return api.SandboxTerminateResponse()

    async def SandboxListV2(self, request: Any, call: Any) -> Any:
        environment = "" if request.app_id else self._environments.resolve(request.environment_name)
        if request.app_id:
            self._apps.get(request.app_id)
        wanted = {(tag.tag_name, tag.tag_value) for tag in request.tags}
        before = request.before_timestamp or float("inf")
        pool = self.by_id.values() if request.include_finished else self._running.values()
        found = [
            s
            for s in pool
            if s.created_at < before
            and not s.vanished
            and (s.app_id == request.app_id if request.app_id else self._environment(s) == environment)
            and wanted <= s.tags.items()
        ]
        found.sort(key=lambda s: -s.created_at)
        return api.SandboxListResponse(
            sandboxes=[self._info(s) for s in found[: self._cloud.settings.page_size]]
        )

    async def SandboxGetFromNameV2(self, request: Any, call: Any) -> Any:
        environment = self._environments.resolve(request.environment_name)
        app = self._apps.named(request.app_name, environment)
        if app is None:
            raise not_found(f"App '{request.app_name}' not found in environment '{environment}'")
        for sandbox in reversed(self._names.get((app.id, request.sandbox_name), [])):
            if not sandbox.vanished and (sandbox.running or request.include_terminated):
                return api.SandboxGetFromNameResponse(sandbox_id=sandbox.id, metadata=sandbox.metadata())
        raise not_found(f"Sandbox with name '{request.sandbox_name}' not found in App '{request.app_name}'")

    async def SandboxSetName(self, request: Any, call: Any) -> Any:
        sandbox = self.get(request.sandbox_id)
        if sandbox.name and sandbox.name != request.name:
            raise conflict(f"Sandbox '{sandbox.id}' is already named '{sandbox.name}'")
        if not sandbox.name:
            self._claim(sandbox.app_id, request.name)
            sandbox.definition.name = request.name
            self._names.setdefault((sandbox.app_id, request.name), []).append(sandbox)
        return api.SandboxSetNameResponse()

    async def SandboxTagsGetV2(self, request: Any, call: Any) -> Any:
        return api.SandboxTagsGetResponse(tags=tag_messages(self.get(request.sandbox_id).tags))

    async def SandboxTagsSetV2(self, request: Any, call: Any) -> Any:
        self.get(request.sandbox_id).tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        return Empty()

    async def SandboxGetTaskIdV2(self, request: Any, call: Any) -> Any:
        return api.SandboxGetTaskIdResponse(task_id=self.get(request.sandbox_id).task_id)

    async def SandboxGetCommandRouterAccess(self, request: Any, call: Any) -> Any:
        by_task = request.WhichOneof("target") == "task_id"
        sandbox = self.of_task(request.task_id) if by_task else self.get(request.sandbox_id)
        if not sandbox.running:
            raise conflict(f"Sandbox '{sandbox.id}' has already shut down")
        access = self._access(sandbox)
        return api.SandboxGetCommandRouterAccessResponse(
            jwt=access.jwt, url=access.url, worker_ipv4_address="127.0.0.1"
        )

    async def SandboxGetTunnelsV2(self, request: Any, call: Any) -> Any:
        return api.SandboxGetTunnelsResponse(tunnels=self._tunnels(self.get(request.sandbox_id)))

    async def SandboxGetFromName(self, request: Any, call: Any) -> Any:
        raise not_found(
            f"Sandbox with name '{request.sandbox_name}' not found: there are no V1 sandboxes here"
        )

    async def SandboxWait(self, request: Any, call: Any) -> Any:
        raise not_found(f"Sandbox '{request.sandbox_id}' not found: there are no V1 sandboxes here")

    def _environment(self, sandbox: Sandbox) -> str:
        return self._apps.get(sandbox.app_id).environment

    def _claim(self, app_id: str, name: str) -> None:
        if any(s.running for s in self._names.get((app_id, name), ())):
            raise exists(f"Sandbox with name '{name}' already exists in this App")

    def _check(self, request: Any) -> None:
        definition, settings = request.definition, self._cloud.settings
        app = self._apps.running(request.app_id)
        if self._images.get(definition.image_id).status != "SUCCESS":
            raise conflict(f"Image '{definition.image_id}' is not built")
        for secret_id in [
            *definition.secret_ids,
            *(s.secret_id for s in request.secret_sources if s.secret_id),
        ]:
            self._secrets.get(secret_id)
        for mount_id in definition.mount_ids:
            self._mounts.get(mount_id)
        for mount in definition.volume_mounts:
            self._volumes.get(mount.volume_id)
        check_imitated(definition)
        if not 0 < definition.timeout_secs <= settings.max_timeout_s:
            raise invalid(
                f"timeout is {definition.timeout_secs} s; it must be 1 to {settings.max_timeout_s} s"
            )
        check_resources(definition.resources)
        if definition.name:
            self._claim(app.id, definition.name)
        if settings.live_limit is not None and self.live >= settings.live_limit:
            details = [api.RPCRetryPolicy(retry_after_secs=1.0)] if settings.live_policy else None
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED, f"{self.live} sandboxes are running, the limit", details
            )

    def _make(self, request: Any) -> Sandbox:
        definition = request.definition
        image = self._images.get(definition.image_id)
        number = self._cloud.number()
        sandbox_id, task_id = f"sb-v2-{number:06d}-{new_id('x')[2:10]}", new_id("ta") + "V"
        access = definition.network_access
        closed = access.network_access_type == api.NetworkAccess.BLOCKED or (
            access.network_access_type == api.NetworkAccess.ALLOWLIST
            and not access.allowed_cidrs
            and not access.allowed_domains
        )
        env = {
            **image.env,
            "MODAL_SANDBOX_ID": sandbox_id,
            "MODAL_TASK_ID": task_id,
            "MODAL_IMAGE_ID": image.id,
            "MODAL_IS_REMOTE": "1",
            **self._secrets.environment_of(request.secret_sources),
        }
        machine = Machine(
            sandbox_id,
            self._cloud.folder / "sandboxes" / sandbox_id,
            mounts=[self._machine_mount(mount) for mount in definition.volume_mounts],
            env=env,
            workdir=definition.workdir or image.workdir or "/root",
            offline=closed or definition.block_network,
        )
        tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        sandbox = Sandbox(
            sandbox_id, task_id, request.app_id, definition, machine, image, tags, self._cloud.moment(),
            network=network_facts(access),
        )  # fmt: skip
        self.by_id[sandbox_id] = self._by_task[task_id] = self._running[sandbox_id] = sandbox
        if sandbox.name:
            self._names.setdefault((sandbox.app_id, sandbox.name), []).append(sandbox)
        self.peak = max(self.peak, self.live)
        loop = asyncio.get_running_loop()
        sandbox.timers.append(loop.call_later(definition.timeout_secs, self.end, sandbox, "TIMEOUT"))
        self.busy(sandbox, starting=False)
        if not is_idle(self._entrypoint(sandbox), definition.timeout_secs):
            sandbox.booting = loop.create_task(self._boot(sandbox))
        return sandbox

    def _machine_mount(self, mount: Any) -> MachineMount:
        folder = self._volumes.get(mount.volume_id).inside(mount.sub_path or "/")
        folder.mkdir(parents=True, exist_ok=True)
        return MachineMount(mount.mount_path.rstrip("/"), folder, mount.read_only)

    def _entrypoint(self, sandbox: Sandbox) -> Sequence[str]:
        given, image = tuple(sandbox.definition.entrypoint_args), sandbox.image
        return (*image.entrypoint, *(given or image.cmd)) or IDLE

    async def _boot(self, sandbox: Sandbox) -> None:
        """Lays out the root folder and starts the entrypoint; a failure ends the sandbox."""
        try:
            await self._lay_out(sandbox)
            sandbox.entrypoint = await self._cloud.host.start(sandbox.machine, self._entrypoint(sandbox))
        except (OSError, RuntimeError) as error:
            self.end(sandbox, "INIT_FAILURE", exit_code=1, reason=str(error))
            return
        if not sandbox.running:  # ended while it started
            await self._cloud.host.stop(sandbox.machine)
            return
        self._keep(asyncio.create_task(self._follow(sandbox, sandbox.entrypoint)))

    async def _lay_out(self, sandbox: Sandbox) -> None:
        root = sandbox.machine.root
        root.mkdir(parents=True)
        mounted = [
            entry for mount_id in sandbox.definition.mount_ids for entry in self._mounts.get(mount_id).files
        ]
        if mounted or any(sandbox.image.root.iterdir()):
            await asyncio.to_thread(self._copy_content, sandbox, mounted)
        sandbox.machine.prepare()
        folder = sandbox.machine.locate(sandbox.machine.workdir)
        if not folder.read_only:
            folder.path.mkdir(parents=True, exist_ok=True)

    def _copy_content(self, sandbox: Sandbox, mounted: Sequence[tuple[str, str, int]]) -> None:
        copy_tree(sandbox.image.root, sandbox.machine.root)
        for name, digest, mode in mounted:
            located = sandbox.machine.locate("/" + name.lstrip("/"))
            if located.read_only:
                raise OSError(f"add_local_* to {name}: the host's program folders cannot be written to here")
            located.path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._blobs.path(digest), located.path)
            located.path.chmod(mode)

    async def _follow(self, sandbox: Sandbox, entrypoint: Process) -> None:
        """Copies the entrypoint's output to the logs and ends the sandbox when it ends."""
        readers = [
            asyncio.create_task(self._log_output(sandbox, output, descriptor))
            for output, descriptor in ((entrypoint.stdout, 1), (entrypoint.stderr, 2))
        ]
        await entrypoint.exited.wait()
        await asyncio.gather(*readers)
        code = entrypoint.returncode or 0
        self.end(sandbox, "SUCCESS" if code == 0 else "FAILURE", exit_code=code if code >= 0 else 128 - code)

    async def _log_output(self, sandbox: Sandbox, output: Any, descriptor: int) -> None:
        at = 0
        while True:
            at = max(at, output.start)
            data = output.read(at)
            if data:
                at += len(data)
                self._cloud.logs.write(sandbox.task_id, data.decode(errors="replace"), descriptor)
            elif output.closed:
                return
            else:
                await output.changed()

    async def _dispose(self, sandbox: Sandbox) -> None:
        if sandbox.booting is not None:
            await asyncio.wait([sandbox.booting])
        await self._cloud.host.stop(sandbox.machine)
        for running in sandbox.execs.values():
            running.kill()
        for running in sandbox.execs.values():
            await running.exited.wait()
        await asyncio.sleep(0)  # those who wait for an end see it before the output goes
        for running in sandbox.execs.values():
            running.release()
        if sandbox.booting is not None:
            root, loop = sandbox.machine.root, asyncio.get_running_loop()
            await loop.run_in_executor(self._cleaner, lambda: shutil.rmtree(root, ignore_errors=True))

    def _created(self, sandbox: Sandbox) -> Any:
        return api.SandboxCreateV2Response(
            sandbox_id=sandbox.id,
            task_id=sandbox.task_id,
            metadata=sandbox.metadata(),
            command_router_access=self._access(sandbox),
            tunnels=self._tunnels(sandbox),
        )

    def _access(self, sandbox: Sandbox) -> Any:
        token = self._cloud.tokens.issue(sandbox.task_id, self._cloud.settings.router_token_s)
        return api.CommandRouterAccess(jwt=token, url=self._cloud.url)

    def _tunnels(self, sandbox: Sandbox) -> list[Any]:
        return [
            api.TunnelData(
                host="127.0.0.1",
                port=port.port,
                container_port=port.port,
                unencrypted_host="127.0.0.1" if port.unencrypted else None,
                unencrypted_port=port.port if port.unencrypted else None,
            )
            for port in sandbox.definition.open_ports.ports
        ]

    def _info(self, sandbox: Sandbox) -> Any:
        return api.SandboxInfo(
            id=sandbox.id,
            created_at=sandbox.created_at,
            app_id=sandbox.app_id,
            name=sandbox.name,
            tags=tag_messages(sandbox.tags),
            image_id=sandbox.image.id,
            timeout_secs=sandbox.definition.timeout_secs,
            metadata=sandbox.metadata(),
            task_info=api.TaskInfo(
                id=sandbox.task_id,
                sandbox_id=sandbox.id,
                started_at=sandbox.created_at,
                finished_at=sandbox.ended_at,
                result=sandbox.result(),
            ),
        )


def is_idle(entrypoint: Sequence[str], timeout_s: float) -> bool:
    """Whether the entrypoint only waits, longer than the sandbox lives: it may start when it is needed."""
    if len(entrypoint) != 2 or entrypoint[0] != "sleep":
        return False
    return entrypoint[1] == "infinity" or (entrypoint[1].isdigit() and int(entrypoint[1]) >= timeout_s)


def check_imitated(definition: Any) -> None:
    """Raises GRPCError for what this fake cannot give."""
    for mount in definition.volume_mounts:
        top = PurePosixPath(mount.mount_path).parts[1:2]
        if not top or top[0] in HOST_FOLDERS:
            raise invalid(f"A volume at '{mount.mount_path}' would hide programs of the host: not imitated.")
    if definition.cloud_bucket_mounts or definition.nfs_mounts or definition.proxy_id:
        raise unimplemented("Bucket mounts, network file systems and proxies are not imitated.")


def check_resources(resources: Any) -> None:
    """Raises GRPCError when a limit is below its request."""
    for request, limit, what in (
        (resources.milli_cpu, resources.milli_cpu_max, "CPU"),
        (resources.memory_mb, resources.memory_mb_max, "memory"),
    ):
        if limit and limit < request:
            raise invalid(f"The {what} limit {limit} is below the request {request}")


def tag_messages(tags: dict[str, str]) -> list[Any]:
    return [api.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]


def network_facts(access: Any) -> dict[str, Any]:
    """The network of a sandbox as tests read it."""
    return {
        "type": api.NetworkAccess.NetworkAccessType.Name(access.network_access_type),
        "cidrs": list(access.allowed_cidrs),
        "domains": list(access.allowed_domains),
    }
