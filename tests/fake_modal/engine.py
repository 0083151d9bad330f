"""The fake, put together: its parts, its two servers, and what a test may ask of it or do to it.

Everything here runs on one event loop. `Admin` is the whole of what a test can reach, in values that survive
JSON, because the fake may be another process.
"""

from __future__ import annotations

import asyncio
import importlib
import shutil
import time
from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from aiohttp import web
from grpclib import GRPCError, Status

from tests.fake_modal.billing import Billing
from tests.fake_modal.blobs import Blobs, HttpSide
from tests.fake_modal.cloud import TOKEN_ID, TOKEN_SECRET, Cloud, Logs, Settings
from tests.fake_modal.faults import Fault, Faults
from tests.fake_modal.gateway import Gateway, LimitedServer, Logged
from tests.fake_modal.images import Image, Images
from tests.fake_modal.machine import choose_host
from tests.fake_modal.registry import Account, Apps, Environments, Mounts, Secret, Secrets
from tests.fake_modal.router import Router
from tests.fake_modal.sandboxes import RESULTS, Sandbox, Sandboxes
from tests.fake_modal.volumes import Volumes
from tests.fake_modal.wire import api_grpc, new_id, router_grpc

UNAUTHENTICATED_RPCS = {"ClientHello"}
V2_SUFFIX = "V2"


class Engine:
    """One running fake. Must be started and stopped on the same loop."""

    def __init__(self, folder: Path, mode: str, settings: Settings) -> None:
        self._folder = folder
        self._mode = mode
        self._settings = settings
        self.faults = Faults()
        self.mode_reason = ""

    async def start(self, port: int) -> None:
        host, self.mode_reason = await choose_host(self._mode, self._folder)
        self.cloud = cloud = Cloud(self._folder, host, self._settings)
        (self._folder / "sandboxes").mkdir()
        environments, self.blobs = Environments(cloud), Blobs(cloud)
        self.secrets = Secrets(cloud, environments)
        self.mounts, self.volumes = Mounts(cloud, self.blobs), Volumes(cloud, environments, self.blobs)
        self.apps = Apps(cloud, environments, self._end_app)
        self.images = Images(cloud, self.apps, self.secrets, self.mounts, self.blobs)
        self.sandboxes = Sandboxes(
            cloud, environments, self.apps, self.images, self.secrets, self.mounts, self.volumes, self.blobs
        )
        self.billing = Billing(cloud, self.sandboxes, self.apps)
        self.router = Router(cloud, self.sandboxes, self.images, self.secrets)
        control = [
            Account(cloud), environments, self.apps, self.secrets, self.mounts, self.volumes, self.images,
            self.blobs, self.sandboxes, self.billing, Logs(cloud),
        ]  # fmt: skip
        self.gateway = Gateway(self.faults, self._authenticate, self.sandboxes.alias)
        codec = importlib.import_module("modal._utils.grpc_utils").custom_detail_codec
        self._grpc = LimitedServer(
            [
                self.gateway.servable(api_grpc.ModalClientBase, control),
                self.gateway.servable(router_grpc.TaskCommandRouterBase, [self.router]),
            ],
            codec,
            self._settings.max_streams,
        )
        await self._grpc.start("127.0.0.1", port)
        listening: Any = self._grpc._server
        cloud.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        self.admin = Admin(self)
        self._http = HttpSide(self.blobs, self.faults, self.volumes.file, self.admin.dispatch)
        self._runner = web.AppRunner(self._http.application(), access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        cloud.http_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Ends every sandbox and both servers and removes the folder."""
        await self.images.close()
        await self.sandboxes.close()
        self._grpc.close()
        self._grpc.drop_connections()
        await self._grpc.wait_closed()
        await self._runner.cleanup()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def drop_connections(self) -> int:
        return self._grpc.drop_connections()

    def http_counts(self) -> dict[str, int]:
        return dict(self._http.counts)

    def _end_app(self, app_id: str) -> None:
        self.sandboxes.end_app(app_id)  # exists by then; apps and sandboxes know each other

    def _authenticate(self, rpc: str, metadata: Any) -> None:
        if rpc.startswith("Task") or "authorization" in metadata:
            return  # the router checks its own token against the task
        if rpc in UNAUTHENTICATED_RPCS and "x-modal-token-id" not in metadata:
            return
        given = (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret"))
        if given != (TOKEN_ID, TOKEN_SECRET):
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed or unknown")
        if self.cloud.token_expired:
            raise GRPCError(Status.UNAUTHENTICATED, "Token has expired")
        needs_auth_token = rpc.startswith("Sandbox") and rpc.endswith(V2_SUFFIX)
        if needs_auth_token and not self.cloud.tokens.valid_for(
            metadata.get("x-modal-auth-token", ""), "client"
        ):
            raise GRPCError(Status.UNAUTHENTICATED, "The auth token is missing or not valid (any more)")


class Admin:
    """What a test may do. Every public method takes and returns JSON values."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def dispatch(self, method: str, params: dict[str, Any]) -> Any:
        if method.startswith("_") or method == "dispatch" or not hasattr(self, method):
            raise ValueError(f"the fake has no '{method}'")
        result = getattr(self, method)(**params)
        return await result if asyncio.iscoroutine(result) else result

    def describe(self) -> dict[str, Any]:
        cloud = self._engine.cloud
        return {
            "url": cloud.url,
            "http_url": cloud.http_url,
            "mode": cloud.host.mode,
            "mode_reason": self._engine.mode_reason,
            "folder": str(cloud.folder),
        }

    def inject(self, **fault: Any) -> None:
        self._engine.faults.inject(Fault(**fault))

    def release(self, rpc: str) -> None:
        self._engine.faults.release(rpc)

    def clear_faults(self) -> None:
        self._engine.faults.clear()

    def set(self, **changes: Any) -> None:
        known = {field.name for field in fields(Settings)}
        for name, value in changes.items():
            if name not in known:
                raise ValueError(f"no setting is called '{name}'")
            setattr(self._engine.cloud.settings, name, value)

    def counts(self) -> dict[str, int]:
        return {**self._engine.gateway.counts, **self._engine.http_counts()}

    def statuses(self, rpc: str) -> dict[str, int]:
        found: Counter[str] = Counter()
        for (name, status), count in self._engine.gateway.statuses.items():
            if name == rpc:
                found[status] += count
        return dict(found)

    def calls(self, rpc: str = "", about: str = "", limit: int = 1000) -> list[dict[str, Any]]:
        def wanted(call: Logged) -> bool:
            return (not rpc or call.rpc == rpc) and (not about or about in call.names)

        return [asdict(call) for call in self._engine.gateway.log if wanted(call)][-limit:]

    async def wait_calls(self, rpc: str, count: int, timeout_s: float, *, in_flight: bool) -> None:
        gateway = self._engine.gateway

        def reached() -> bool:
            return (gateway.in_flight if in_flight else gateway.counts)[rpc] >= count

        try:
            await asyncio.wait_for(gateway.until(reached), timeout_s)
        except TimeoutError:
            now = (gateway.in_flight if in_flight else gateway.counts)[rpc]
            raise TimeoutError(f"{rpc}: {now} of {count} calls after {timeout_s} s") from None

    def crashes(self) -> list[str]:
        return list(self._engine.gateway.crashes)

    def sandboxes(self, app: str = "", *, running: bool = False) -> list[dict[str, Any]]:
        return [
            self._sandbox_facts(s)
            for s in self._engine.sandboxes.by_id.values()
            if (not running or s.running)
            and (not app or app in {s.app_id, self._engine.apps.get(s.app_id).name})
        ]

    def live(self) -> dict[str, int]:
        return {"now": self._engine.sandboxes.live, "peak": self._engine.sandboxes.peak}

    def end(self, sandbox: str, status: str, exit_code: int | None = None) -> None:
        if status not in RESULTS or status == "UNSPECIFIED":
            raise ValueError(f"'{status}' is none of {', '.join(RESULTS[1:])}")
        self._engine.sandboxes.end(self._engine.sandboxes.find(sandbox), status, exit_code)

    def vanish(self, sandbox: str) -> None:
        self._engine.sandboxes.vanish(self._engine.sandboxes.find(sandbox))

    def kill_execs(self, sandbox: str) -> int:
        running = [e for e in self._engine.sandboxes.find(sandbox).execs.values() if e.returncode is None]
        for command in running:
            command.kill()
        return len(running)

    def images(self) -> list[dict[str, Any]]:
        return [self._image_facts(image) for image in self._engine.images.by_id.values()]

    def volumes(self) -> dict[str, Any]:
        volumes, blobs = self._engine.volumes, self._engine.blobs
        return {
            "names": sorted(v.name for v in volumes.by_id.values() if v.name),
            "blocks_wanted": volumes.blocks_wanted,
            "blocks_known": volumes.blocks_known,
            "received_bytes": blobs.received_bytes,
            "files_uploaded": self._engine.mounts.files_uploaded,
        }

    def secrets(self) -> dict[str, dict[str, str]]:
        return {s.name: dict(s.values) for s in self._engine.secrets.by_id.values() if s.name}

    def put_secret(self, name: str, values: dict[str, str], environment: str) -> None:
        secrets = self._engine.secrets
        known = secrets.named(name, environment)
        if known is not None:
            known.values = dict(values)
            return
        secret = Secret(new_id("st"), name, environment, dict(values), time.time())
        secrets.by_id[secret.id] = secret

    def apps(self) -> list[dict[str, Any]]:
        return [
            {
                "id": a.id,
                "name": a.name,
                "environment": a.environment,
                "stopped": bool(a.stopped_at),
                "tags": a.tags,
            }
            for a in self._engine.apps.by_id.values()
        ]

    def bill(self) -> dict[str, Any]:
        return self._engine.billing.bill()

    def expire_token(self, *, expired: bool) -> None:
        self._engine.cloud.token_expired = expired

    def revoke_tokens(self) -> None:
        self._engine.cloud.tokens.revoke_all()

    def drop_connections(self) -> int:
        return self._engine.drop_connections()

    def _image_facts(self, image: Image) -> dict[str, Any]:
        return {
            "id": image.id,
            "kind": image.kind,
            "status": image.status,
            "builds": image.builds,
            "base_id": image.base_id,
            "base_tag": image.base_tag,
            "commands": list(image.commands),
            "skipped": list(image.skipped),
            "env": dict(image.env),
            "workdir": image.workdir,
            "ttl_s": image.ttl_s,
            "log": self._engine.cloud.logs.text(image.task_id),
        }

    def _sandbox_facts(self, sandbox: Sandbox) -> dict[str, Any]:
        definition = sandbox.definition
        return {
            "id": sandbox.id,
            "task_id": sandbox.task_id,
            "app_id": sandbox.app_id,
            "name": sandbox.name,
            "tags": dict(sandbox.tags),
            "image_id": sandbox.image.id,
            "status": sandbox.status or "RUNNING",
            "vanished": sandbox.vanished,
            "exit_code": sandbox.exit_code,
            "created_at": sandbox.created_at,
            "ended_at": sandbox.ended_at,
            "ready_at": sandbox.ready_at,
            "timeout_s": definition.timeout_secs,
            "idle_timeout_s": definition.idle_timeout_secs,
            "cores": list(sandbox.cores),
            "gib": list(sandbox.gib),
            "limited": [bool(definition.resources.milli_cpu_max), bool(definition.resources.memory_mb_max)],
            "network": dict(sandbox.network),
            "workdir": sandbox.machine.workdir,
            "env_names": sorted(sandbox.machine.env),
            "mounts": [{"path": m.path, "read_only": m.read_only} for m in sandbox.machine.mounts],
            "runtime": definition.runtime,
            "regions": list(definition.scheduler_placement.regions),
            "gpu": definition.resources.gpu_config.gpu_type,
            "options": dict(definition.experimental_options_v2),
            "entrypoint": list(definition.entrypoint_args),
            "execs": len(sandbox.execs),
        }
