"""The task command router: commands in a sandbox, their streams, snapshots and readiness.

Streams are addressed by byte offset, so that a client that lost its connection goes on where it was. A
command started twice under one exec id is started once.
"""

# ruff: noqa: N802 - methods carry the names that the protocol calls them by
from __future__ import annotations

import asyncio
import shutil
import time
from typing import Any

from grpclib import GRPCError, Status

from tests.fake_modal.cloud import Cloud
from tests.fake_modal.faults import Fault, disconnect
from tests.fake_modal.fstools import PROGRAM, FsTool
from tests.fake_modal.images import Images
from tests.fake_modal.machine import HOST_FOLDERS, Machine, copy_tree
from tests.fake_modal.processes import Output, Process
from tests.fake_modal.registry import Secrets
from tests.fake_modal.sandboxes import Sandbox, Sandboxes, network_facts
from tests.fake_modal.wire import Empty, conflict, invalid, not_found, router_pb, unimplemented

NOT_CONTENT = {*HOST_FOLDERS, "dev", "proc"}
PROBE_INTERVAL_S = 0.1
SIGKILL = 9
FORGET_COMMAND_S = 120.0
FORGET_FILE_S = 20.0


class Router:
    """The RPCs that the client sends over a sandbox's own connection."""

    def __init__(self, cloud: Cloud, sandboxes: Sandboxes, images: Images, secrets: Secrets) -> None:
        self._cloud = cloud
        self._sandboxes = sandboxes
        self._images = images
        self._secrets = secrets
        self._tasks: set[asyncio.Task[None]] = set()

    async def TaskExecStart(self, request: Any, call: Any) -> Any:
        sandbox = self._sandbox(request.task_id, call)
        if request.HasField("pty_info"):
            raise unimplemented("A pty is not imitated.")
        if request.container_id:
            raise unimplemented("Sidecars are not imitated.")
        env = self._secrets.environment_of(request.secret_sources)
        machine = await self._sandboxes.booted(sandbox)
        if request.exec_id not in sandbox.execs:
            self._sandboxes.busy(sandbox, starting=True)
            running = await self._start(machine, request, env)
            sandbox.execs[request.exec_id] = running
            watch = asyncio.create_task(self._watch(sandbox, request.exec_id, request.timeout_secs))
            self._tasks.add(watch)
            watch.add_done_callback(self._tasks.discard)
        return router_pb.TaskExecStartResponse()

    async def TaskExecStdioRead(self, stream: Any, request: Any, call: Any) -> None:
        _, running = self._exec(request, call)
        is_stdout = request.file_descriptor == router_pb.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        output = running.stdout if is_stdout else running.stderr
        at = request.offset
        while True:
            data = output.read(at)
            if data:
                at = await self._send(stream, router_pb.TaskExecStdioReadResponse(data=data), at, call.fault)
            elif output.closed:
                return
            else:
                await output.changed()

    async def TaskExecWait(self, request: Any, call: Any) -> Any:
        sandbox, running = self._exec(request, call)
        await running.exited.wait()
        return router_pb.TaskExecWaitResponse(**self._ending(sandbox, running))

    async def TaskExecPoll(self, request: Any, call: Any) -> Any:
        sandbox, running = self._exec(request, call)
        return router_pb.TaskExecPollResponse(
            **self._ending(sandbox, running) if running.exited.is_set() else {}
        )

    async def TaskExecStdinWrite(self, request: Any, call: Any) -> Any:
        _, running = self._exec(request, call)
        await self._write(running, request.offset, request.data, eof=request.eof)
        return router_pb.TaskExecStdinWriteResponse()

    async def TaskExecStdinWriteStream(self, stream: Any, first: Any, call: Any) -> None:
        if not first.HasField("start"):
            raise invalid("The first message of a stdin stream must be its start.")
        _, running = self._exec(first.start, call)
        fault: Fault | None = call.fault
        offset, sent = first.start.offset, 0
        async for message in stream:
            if message.HasField("end"):
                await self._write(running, offset, b"", eof=True)
                continue
            data = message.data
            broken = (
                fault is not None and fault.after_bytes is not None and sent + len(data) > fault.after_bytes
            )
            if broken and fault is not None:
                data = data[: (fault.after_bytes or 0) - sent]
            await self._write(running, offset, data, eof=False)
            offset, sent = offset + len(data), sent + len(data)
            if broken:
                await self._break(stream, fault)
        await stream.send_message(router_pb.TaskExecStdinWriteStreamResponse())

    async def TaskExecStdinStatus(self, request: Any, call: Any) -> Any:
        _, running = self._exec(request, call)
        return router_pb.TaskExecStdinStatusResponse(
            num_bytes_written=running.stdin_offset, closed=running.stdin_closed
        )

    async def SandboxStdioReadV2(self, stream: Any, request: Any, call: Any) -> None:
        sandbox = self._sandbox(request.task_id, call, ended=True)
        if sandbox.running:
            await self._sandboxes.booted(sandbox)
        if sandbox.entrypoint is None:
            return
        is_stdout = request.file_descriptor == router_pb.SANDBOX_STDIO_FILE_DESCRIPTOR_STDOUT
        output: Output = sandbox.entrypoint.stdout if is_stdout else sandbox.entrypoint.stderr
        at = request.offset
        while True:
            at = max(at, output.start)
            data = output.read(at)
            if data:
                response = router_pb.SandboxStdioReadV2Response(data=data, starting_offset=at)
                at = await self._send(stream, response, at, call.fault)
            elif output.closed:
                return
            else:
                await output.changed()

    async def SandboxStdinWriteV2(self, request: Any, call: Any) -> Any:
        sandbox = self._sandbox(request.task_id, call)
        await self._sandboxes.booted(sandbox)
        if sandbox.entrypoint is None:
            raise conflict("The entrypoint does not run.")
        await self._write(sandbox.entrypoint, request.offset, request.data, eof=request.eof)
        return router_pb.SandboxStdinWriteV2Response()

    async def SandboxWaitUntilReady(self, request: Any, call: Any) -> Any:
        sandbox = self._sandbox(request.task_id, call)
        probe = sandbox.definition.readiness_probe
        kind = probe.WhichOneof("probe_oneof")
        if kind is None:
            raise conflict("The sandbox has no readiness probe.")
        port = f"exec 3<>/dev/tcp/127.0.0.1/{probe.tcp_port}"
        argv = ["bash", "-c", port] if kind == "tcp_port" else list(probe.exec_command.argv)
        machine = await self._sandboxes.booted(sandbox)
        deadline = time.monotonic() + request.timeout
        while not sandbox.ready_at:
            attempt = await self._cloud.host.run(machine, argv, {}, machine.workdir, (False, False))
            await attempt.exited.wait()
            if attempt.returncode == 0:
                sandbox.ready_at = time.time()
            elif not sandbox.running:
                raise not_found(f"Sandbox '{sandbox.id}' ended before it was ready")
            elif time.monotonic() > deadline:
                raise GRPCError(Status.DEADLINE_EXCEEDED, f"not ready within {request.timeout} s")
            else:
                await asyncio.sleep(probe.interval_ms / 1000 or PROBE_INTERVAL_S)
        return router_pb.SandboxWaitUntilReadyTcrResponse(ready_at=sandbox.ready_at)

    async def TaskSnapshotFilesystem(self, request: Any, call: Any) -> Any:
        sandbox = self._sandbox(request.task_id, call)
        machine = await self._sandboxes.booted(sandbox)
        image = await self._images.new_snapshot(
            "filesystem", machine.root, sandbox.image, request.ttl_seconds, NOT_CONTENT
        )
        for mount in machine.mounts:  # the links that stand for mounts in plain mode
            link = image.root / mount.path.lstrip("/")
            if link.is_symlink():
                link.unlink()
        return router_pb.TaskSnapshotFilesystemResponse(image_id=image.id)

    async def TaskSnapshotDirectory(self, request: Any, call: Any) -> Any:
        sandbox = self._sandbox(request.task_id, call)
        machine = await self._sandboxes.booted(sandbox)
        folder = machine.locate(request.path.decode()).path
        if not folder.is_dir():
            raise not_found(f"'{request.path.decode()}' is no directory in the sandbox")
        image = await self._images.new_snapshot("directory", folder, None, request.ttl_seconds, set())
        return router_pb.TaskSnapshotDirectoryResponse(image_id=image.id)

    async def TaskMountDirectory(self, request: Any, call: Any) -> Any:
        machine = await self._sandboxes.booted(self._sandbox(request.task_id, call))
        folder = self._clearable(machine, request.path.decode())
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if request.image_id:
            await asyncio.to_thread(copy_tree, self._images.get(request.image_id).root, folder)
        return Empty()

    async def TaskUnmountDirectory(self, request: Any, call: Any) -> Any:
        machine = await self._sandboxes.booted(self._sandbox(request.task_id, call))
        folder = self._clearable(machine, request.path.decode())
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return Empty()

    async def TaskReloadVolumes(self, request: Any, call: Any) -> Any:
        self._sandbox(request.task_id, call)
        return router_pb.TaskReloadVolumesResponse()

    async def TaskSetNetworkAccess(self, request: Any, call: Any) -> Any:
        self._sandbox(request.task_id, call).network = network_facts(request.network_access)
        return router_pb.TaskSetNetworkAccessResponse()

    def _sandbox(self, task_id: str, call: Any, *, ended: bool = False) -> Sandbox:
        """The sandbox of a task, if the caller may speak to it and it runs (or `ended` is allowed)."""
        sandbox = self._sandboxes.of_task(task_id)
        token = str(call.metadata.get("authorization", "")).removeprefix("Bearer ")
        if not self._cloud.tokens.valid_for(token, task_id):
            raise GRPCError(Status.UNAUTHENTICATED, "The router token is not valid (any more).")
        if not sandbox.running and not ended:
            raise not_found(f"Sandbox '{sandbox.id}' has already shut down")
        return sandbox

    def _exec(self, request: Any, call: Any) -> tuple[Sandbox, Process | FsTool]:
        sandbox = self._sandbox(request.task_id, call)
        running = sandbox.execs.get(request.exec_id)
        if running is None:
            raise not_found(f"Exec '{request.exec_id}' not found in sandbox '{sandbox.id}'")
        return sandbox, running

    async def _start(self, machine: Machine, request: Any, env: dict[str, str]) -> Process | FsTool:
        argv = list(request.command_args)
        if not argv:
            raise invalid("A command must have at least one word.")
        if argv[0] == PROGRAM:
            return FsTool(machine, argv[1], self._cloud.settings.file_read_limit_bytes)
        cwd = request.workdir or machine.workdir
        if not machine.locate(cwd).path.is_dir():
            raise invalid(f"The working folder '{cwd}' does not exist in the sandbox.")
        capture = (
            request.stdout_config == router_pb.TASK_EXEC_STDOUT_CONFIG_PIPE,
            request.stderr_config == router_pb.TASK_EXEC_STDERR_CONFIG_PIPE,
        )
        try:
            return await self._cloud.host.run(machine, argv, env, cwd, capture)
        except FileNotFoundError as error:
            raise invalid(str(error)) from error

    async def _watch(self, sandbox: Sandbox, exec_id: str, timeout_s: int) -> None:
        """Ends a command at its timeout, lets the idle clock run after it, and forgets it in the end."""
        running = sandbox.execs[exec_id]
        try:
            await asyncio.wait_for(running.exited.wait(), timeout_s or None)
        except TimeoutError:
            running.kill()
            await running.exited.wait()
        self._sandboxes.busy(sandbox, starting=False)
        keep_s = FORGET_FILE_S if isinstance(running, FsTool) else FORGET_COMMAND_S
        sandbox.timers.append(asyncio.get_running_loop().call_later(keep_s, self._forget, sandbox, exec_id))

    def _forget(self, sandbox: Sandbox, exec_id: str) -> None:
        """Drops a command that ended long ago: a poller makes thousands in the life of a sandbox."""
        running = sandbox.execs.pop(exec_id, None)
        if running is not None:
            running.release()

    def _ending(self, sandbox: Sandbox, running: Process | FsTool) -> dict[str, int]:
        code = running.returncode or 0
        if not sandbox.running:
            return {"signal": SIGKILL}
        return {"code": code} if code >= 0 else {"signal": -code}

    async def _write(self, running: Process | FsTool, offset: int, data: bytes, *, eof: bool) -> None:
        try:
            await running.write_stdin(offset, data, eof=eof)
        except BrokenPipeError as error:
            raise conflict(f"The command does not read its stdin any more: {error}") from error
        except ValueError as error:
            raise GRPCError(Status.OUT_OF_RANGE, str(error)) from error

    async def _send(self, stream: Any, response: Any, at: int, fault: Fault | None) -> int:
        """Sends a piece of output and returns the offset after it; a fault lets only its first bytes pass."""
        left = None if fault is None or fault.after_bytes is None else fault.after_bytes
        if left is None or fault is None:
            await stream.send_message(response)
            return at + len(response.data)
        piece = response.data[:left]
        if piece:
            response.data = piece
            await stream.send_message(response)
        fault.after_bytes = left - len(piece)
        if fault.after_bytes <= 0:
            await self._break(stream, fault)
        return at + len(piece)

    async def _break(self, stream: Any, fault: Fault | None) -> None:
        """Ends a stream as its fault says: with a status, by a lost connection, or never."""
        if fault is None:
            return
        if fault.disconnect:
            disconnect(stream)
            raise GRPCError(Status.UNAVAILABLE, fault.message)
        error = fault.error()
        if error is not None:
            raise error
        await asyncio.Event().wait()  # open and silent, until the client gives up

    def _clearable(self, machine: Machine, path: str) -> Any:
        located = machine.locate(path)
        if located.read_only or located.path == machine.root:
            raise invalid(f"'{path}' cannot be mounted over here.")
        return located.path
