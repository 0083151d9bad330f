"""Things with names: the account, environments, apps, secrets, and the files of mounts."""

# ruff: noqa: N802 - methods carry the names that the protocol calls them by
from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from tests.fake_modal.blobs import Blobs
from tests.fake_modal.cloud import ENVIRONMENT, Cloud
from tests.fake_modal.wire import Empty, api, conflict, exists, invalid, new_id, not_found


class Account:
    """Who is asking: the client's hello and the token of the V2 RPCs."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud

    async def ClientHello(self, request: Any, call: Any) -> Any:
        return api.ClientHelloResponse(image_builder_version=self._cloud.settings.image_builder_version)

    async def AuthTokenGet(self, request: Any, call: Any) -> Any:
        return api.AuthTokenGetResponse(
            token=self._cloud.tokens.issue("client", self._cloud.settings.auth_token_s)
        )

    async def WorkspaceNameLookup(self, request: Any, call: Any) -> Any:
        return api.WorkspaceNameLookupResponse(workspace_name="fake-workspace", username="fake-user")


class Environments:
    """Environments exist only when made; the default one is `main`."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self.ids: dict[str, str] = {ENVIRONMENT: new_id("en")}

    def resolve(self, name: str) -> str:
        """The environment's name; empty means the default one."""
        name = name or ENVIRONMENT
        if name not in self.ids:
            raise not_found(f"Environment '{name}' not found")
        return name

    async def EnvironmentGetOrCreate(self, request: Any, call: Any) -> Any:
        name = request.deployment_name or ENVIRONMENT
        if request.object_creation_type == api.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
            self.ids.setdefault(name, new_id("en"))
        name = self.resolve(name)
        settings = api.EnvironmentSettings(image_builder_version=self._cloud.settings.image_builder_version)
        return api.EnvironmentGetOrCreateResponse(
            environment_id=self.ids[name], metadata=api.EnvironmentMetadata(name=name, settings=settings)
        )

    async def EnvironmentCreate(self, request: Any, call: Any) -> Any:
        if request.name in self.ids:
            raise exists(f"Environment '{request.name}' already exists")
        self.ids[request.name] = new_id("en")
        return Empty()

    async def EnvironmentList(self, request: Any, call: Any) -> Any:
        items = [
            api.EnvironmentListItem(name=n, environment_id=i, default=n == ENVIRONMENT)
            for n, i in self.ids.items()
        ]
        return api.EnvironmentListResponse(items=items)


@dataclass
class App:
    """One App; a stopped one stays to be looked up by id."""

    id: str
    name: str
    environment: str
    created_at: float
    stopped_at: float = 0.0
    tags: dict[str, str] = field(default_factory=dict)

    def metadata(self) -> Any:
        state = api.APP_STATE_STOPPED if self.stopped_at else api.APP_STATE_DEPLOYED
        lifecycle = api.AppLifecycle(app_state=state, created_at=self.created_at, stopped_at=self.stopped_at)
        return api.AppHandleMetadata(
            description=self.name, app_id=self.id, environment_name=self.environment, lifecycle=lifecycle
        )


class Apps:
    """Apps by name within an environment. A stopped App frees its name: the next lookup makes a new one."""

    def __init__(self, cloud: Cloud, environments: Environments, on_stop: Callable[[str], None]) -> None:
        self._cloud = cloud
        self._environments = environments
        self._on_stop = on_stop
        self.by_id: dict[str, App] = {}

    def named(self, name: str, environment: str) -> App | None:
        running = [
            a
            for a in self.by_id.values()
            if not a.stopped_at and (a.name, a.environment) == (name, environment)
        ]
        return running[0] if running else None

    def get(self, app_id: str) -> App:
        if app_id not in self.by_id:
            raise not_found(f"App '{app_id}' not found")
        return self.by_id[app_id]

    def running(self, app_id: str) -> App:
        app = self.get(app_id)
        if app.stopped_at:
            raise conflict(f"App '{app.name}' ({app.id}) is stopped")
        return app

    async def AppGetOrCreate(self, request: Any, call: Any) -> Any:
        app: App | None
        if request.app_name in self.by_id:
            app = self.by_id[request.app_name]
        else:
            environment = self._environments.resolve(request.environment_name)
            app = self.named(request.app_name, environment)
            if app is None and request.object_creation_type == api.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                app = App(new_id("ap"), request.app_name, environment, self._cloud.moment())
                self.by_id[app.id] = app
        if app is None:
            raise not_found(f"App '{request.app_name}' not found in environment '{request.environment_name}'")
        return api.AppGetOrCreateResponse(app_id=app.id, handle_metadata=app.metadata())

    async def AppGetInfo(self, request: Any, call: Any) -> Any:
        return api.AppGetInfoResponse(info=self.get(request.app_id).metadata())

    async def AppList(self, request: Any, call: Any) -> Any:
        environment = self._environments.resolve(request.environment_name)
        return api.AppListResponse(
            apps=[
                api.AppListResponse.AppListItem(
                    app_id=a.id,
                    name=a.name,
                    description=a.name,
                    state=api.APP_STATE_STOPPED if a.stopped_at else api.APP_STATE_DEPLOYED,
                    created_at=a.created_at,
                    stopped_at=a.stopped_at,
                    metadata=a.metadata(),
                )
                for a in self.by_id.values()
                if a.environment == environment
            ]
        )

    async def AppStop(self, request: Any, call: Any) -> Any:
        app = self.get(request.app_id)
        app.stopped_at = app.stopped_at or time.time()
        self._on_stop(app.id)
        return Empty()

    async def AppSetTags(self, request: Any, call: Any) -> Any:
        self.get(request.app_id).tags = dict(request.tags)
        return Empty()

    async def AppGetTags(self, request: Any, call: Any) -> Any:
        return api.AppGetTagsResponse(tags=self.get(request.app_id).tags)


@dataclass
class Secret:
    """A set of environment variables. Nameless ones belong to an App or one client."""

    id: str
    name: str
    environment: str
    values: dict[str, str]
    created_at: float
    last_used_at: float = 0.0

    def metadata(self) -> Any:
        return api.SecretMetadata(
            name=self.name,
            keys=sorted(self.values),
            environment_name=self.environment,
            last_used_at=self.last_used_at,
            creation_info=api.CreationInfo(created_at=self.created_at, created_by="fake-user"),
        )


class Secrets:
    """Secrets by name; values leave only into the environment of sandboxes."""

    def __init__(self, cloud: Cloud, environments: Environments) -> None:
        self._cloud = cloud
        self._environments = environments
        self.by_id: dict[str, Secret] = {}

    def get(self, secret_id: str) -> Secret:
        if secret_id not in self.by_id:
            raise not_found(f"Secret '{secret_id}' not found")
        return self.by_id[secret_id]

    def named(self, name: str, environment: str) -> Secret | None:
        return next((s for s in self.by_id.values() if (s.name, s.environment) == (name, environment)), None)

    def environment_of(self, sources: Iterable[Any]) -> dict[str, str]:
        """The variables of an ordered list of sources; later ones win."""
        values: dict[str, str] = {}
        for source in sources:
            if source.WhichOneof("source") == "secret_id":
                secret = self.get(source.secret_id)
                secret.last_used_at = time.time()
                values |= secret.values
            else:
                values |= dict(source.env.contents)
        return values

    async def SecretGetOrCreate(self, request: Any, call: Any) -> Any:
        environment = self._environments.resolve(request.environment_name)
        kind, name = request.object_creation_type, request.deployment_name
        secret = self.named(name, environment) if name else None
        if kind == api.OBJECT_CREATION_TYPE_UNSPECIFIED and secret is None:
            raise not_found(f"Secret '{name}' not found in environment '{environment}'")
        if kind == api.OBJECT_CREATION_TYPE_CREATE_FAIL_IF_EXISTS and secret is not None:
            raise exists(f"Secret '{name}' already exists in environment '{environment}'")
        if secret is None:
            secret = Secret(new_id("st"), name, environment, dict(request.env_dict), time.time())
            self.by_id[secret.id] = secret
        elif kind == api.OBJECT_CREATION_TYPE_CREATE_OVERWRITE_IF_EXISTS:
            secret.values = dict(request.env_dict)
        missing = [key for key in request.required_keys if key not in secret.values]
        if missing:
            raise not_found(f"Secret '{name}' is missing key(s): {', '.join(missing)}")
        return api.SecretGetOrCreateResponse(secret_id=secret.id, metadata=secret.metadata())

    async def SecretGetInfo(self, request: Any, call: Any) -> Any:
        return api.SecretGetInfoResponse(metadata=self.get(request.secret_id).metadata())

    async def SecretUpdate(self, request: Any, call: Any) -> Any:
        secret = self.get(request.secret_id)
        for update in request.updates:
            if update.HasField("value"):
                secret.values[update.key] = update.value
            else:
                secret.values.pop(update.key, None)
        return Empty()

    async def SecretDelete(self, request: Any, call: Any) -> Any:
        self.get(request.secret_id)
        del self.by_id[request.secret_id]
        return Empty()

    async def SecretList(self, request: Any, call: Any) -> Any:
        environment = self._environments.resolve(request.environment_name)
        before = request.pagination.created_before or float("inf")
        found = [
            s
            for s in self.by_id.values()
            if s.name and s.environment == environment and s.created_at < before
        ]
        found.sort(key=lambda s: -s.created_at)
        return api.SecretListResponse(
            environment_name=environment,
            items=[
                api.SecretListItem(
                    label=s.name,
                    secret_id=s.id,
                    created_at=s.created_at,
                    last_used_at=s.last_used_at,
                    environment_name=environment,
                    metadata=s.metadata(),
                )
                for s in found[: request.pagination.max_objects or None]
            ],
        )


@dataclass(frozen=True)
class Mount:
    """A list of files by content: absolute name, sha256, permission bits."""

    id: str
    files: tuple[tuple[str, str, int], ...]

    @property
    def digest(self) -> str:
        return sha256(repr(sorted(self.files)).encode()).hexdigest()


class Mounts:
    """Files of `add_local_*` and of build contexts, stored once per content."""

    def __init__(self, cloud: Cloud, blobs: Blobs) -> None:
        self._cloud = cloud
        self._blobs = blobs
        self.by_id: dict[str, Mount] = {}
        self._named: dict[str, Mount] = {}
        self.files_uploaded = 0

    def get(self, mount_id: str) -> Mount:
        if mount_id not in self.by_id:
            raise not_found(f"Mount '{mount_id}' not found")
        return self.by_id[mount_id]

    async def MountBatchedCheckExistence(self, request: Any, call: Any) -> Any:
        missing = [digest for digest in request.sha256_hex_hashes if not self._blobs.has(digest)]
        return api.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    async def MountPutFile(self, request: Any, call: Any) -> Any:
        source = request.WhichOneof("data_oneof")
        if source is None:
            return api.MountPutFileResponse(exists=self._blobs.has(request.sha256_hex))
        data = request.data if source == "data" else self._blobs.uploaded(request.data_blob_id)
        if sha256(data).hexdigest() != request.sha256_hex:
            raise invalid("The content does not have the given sha256.")
        self._blobs.put(request.sha256_hex, data)
        self.files_uploaded += 1
        return api.MountPutFileResponse(exists=True)

    async def MountGetOrCreate(self, request: Any, call: Any) -> Any:
        lookup = (
            request.deployment_name and request.object_creation_type == api.OBJECT_CREATION_TYPE_UNSPECIFIED
        )
        if lookup:
            if (
                request.namespace == api.DEPLOYMENT_NAMESPACE_GLOBAL
            ):  # parts of the client's own images: left empty
                mount = self._named.setdefault(request.deployment_name, Mount(new_id("mo"), ()))
            elif request.deployment_name in self._named:
                mount = self._named[request.deployment_name]
            else:
                raise not_found(f"Mount '{request.deployment_name}' not found")
        else:
            files = tuple(
                (f.filename, f.sha256_hex, f.mode if f.HasField("mode") else 0o644) for f in request.files
            )
            mount = Mount(new_id("mo"), files)
            if request.deployment_name:
                self._named[request.deployment_name] = mount
        self.by_id[mount.id] = mount
        return api.MountGetOrCreateResponse(
            mount_id=mount.id,
            handle_metadata=api.MountHandleMetadata(content_checksum_sha256_hex=mount.digest),
        )
