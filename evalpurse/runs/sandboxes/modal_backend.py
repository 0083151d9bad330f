"""Sandboxes on Modal: one App an experiment, one Sandbox an attempt, found again by name.

The name of a sandbox is the attempt's id and its tags say whose it is, so any daemon of this home folder can
find it; nobody else's is ever touched. Limits and lifetime are always set, so that what a sandbox can cost is
known before it is made. `modal` itself is imported when the first experiment needs it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from evalpurse.config import Settings
from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.runs.errors import BackendRefusedError, BadLaunchError, SandboxError, SetupFailedError
from evalpurse.runs.sandboxes import modal_client
from evalpurse.runs.sandboxes.create_rate import CreateRate
from evalpurse.runs.sandboxes.environment import check_names
from evalpurse.runs.sandboxes.modal_client import Meaning, is_client_error, meaning_of, told
from evalpurse.runs.sandboxes.modal_payload import payload_of
from evalpurse.runs.sandboxes.modal_rates import Rates
from evalpurse.runs.sandboxes.modal_sandbox import Known, ModalSandbox, Rooms
from evalpurse.runs.sandboxes.protocol import Machine, Network, Prepared, SandboxSpec
from evalpurse.runs.sandboxes.redaction import Redactor
from evalpurse.runs.sandboxes.secret_values import modal_secret_name, secret_values

if TYPE_CHECKING:
    from evalpurse.runs.sandboxes.modal_images import BuiltImage, ImageMaker

log = logging.getLogger(__name__)

CREATE_S = 300.0
THROTTLED_MAX_S = 1800.0
"""So long a create is asked for again when the answer is: too fast."""
LIFETIME_MAX_S = 24 * 3600
WORLD = "/evalpurse/world"
READY_S = 240
DOCKER_START = "mkdir -p /var/log; dockerd >/var/log/dockerd.log 2>&1 & exec sleep infinity"

WorldVolume = Callable[[str], Awaitable[Any]]
"""Gives the volume of a world (name or digest), to be mounted."""


class ModalBackend:
    """Makes and finds the sandboxes of one home folder on Modal."""

    name = "modal"
    can_vanish = True

    def __init__(
        self,
        home: Home,
        settings: Settings,
        *,
        images: Callable[[ModalBackend], ImageMaker] | None = None,
        worlds: WorldVolume | None = None,
    ) -> None:
        """`images` builds what runs start from, `worlds` gives the volume of a world, by name or digest."""
        self._home = home
        self._home_id = home.identity()
        self._settings = settings
        self._make_images = images
        self._images: ImageMaker | None = None
        self._worlds = worlds
        self._rates = Rates.table()
        self._client: Any = None
        self._connecting = anyio.Lock()
        self._apps: dict[str, Any] = {}
        self._app_lock = anyio.Lock()
        self._built: dict[str, BuiltImage] = {}
        self._rate = CreateRate(settings.modal_creates_per_s)
        self._rooms = Rooms()
        self._live: dict[str, ModalSandbox] = {}
        self._folder = home.path / "modal"

    @property
    def isolation_statement(self) -> str:
        return (
            "Each run has a sandbox of its own on Modal, with hard limits of cores, memory and lifetime. The "
            "harness is root in it: grader commands run there after all its processes are gone, with the "
            "programs of its image as the harness left them, and with the network that the variant was given."
        )

    @property
    def rates(self) -> Rates:
        """The rates that holds are made with."""
        return self._rates

    @property
    def client(self) -> Any:
        """The connected client; `connect` comes first."""
        if self._client is None:
            raise SandboxError("There is no connection to Modal yet.", hint="Launch again in a moment.")
        return self._client

    @property
    def connected(self) -> bool:
        """Whether Modal is in use."""
        return self._client is not None

    @property
    def live(self) -> Sequence[ModalSandbox]:
        """Sandboxes that this process made or found, and has not ended."""
        return list(self._live.values())

    # before anything is made

    async def connect(self) -> None:
        """Connects once, and asks for the account's rates.

        Raises:
            BadLaunchError: no package, no credentials, or Modal does not accept them; says what to do.
        """
        if self._client is not None:
            return
        async with self._connecting:
            if self.connected:  # by somebody else, meanwhile
                return
            client = await modal_client.connect(self._home)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._rates = await self._ask_rates(client)
            self._client = client

    async def _ask_rates(self, client: Any) -> Rates:
        modal = modal_client.load()
        try:
            with anyio.fail_after(modal_client.CONNECT_S):
                workspace = modal.Workspace.from_context(client=client)
                hourly = await workspace.billing.rates.aio()
            return Rates.live(dict(hourly))
        except Exception as error:
            if not is_client_error(error) and not isinstance(error, TimeoutError):
                raise
            table = Rates.table()
            log.warning("Modal's rates cannot be read (%s); holds use the %s", error, table.source)
            return table

    def check(self, machine: Machine, network: Network) -> None:
        cpu, cpu_limit, memory, memory_limit = self._sizes(machine)
        if cpu_limit < cpu:
            raise BadLaunchError(f"cpu_limit is {cpu_limit:g} cores, below the {cpu:g} requested by cpu.")
        if memory_limit < memory:
            raise BadLaunchError(f"memory_limit_mb is {memory_limit}, below the {memory} of memory_mb.")
        if machine.runtime == "vm" and machine.gpu:
            raise BadLaunchError("VM sandboxes have no GPU.", hint="Leave out gpu, or use runtime='gvisor'.")
        if machine.docker and machine.runtime != "vm":
            raise BadLaunchError("docker needs a VM sandbox.", hint="Make the variant with runtime='vm'.")
        if machine.docker and not (machine.image or machine.dockerfile):
            raise BadLaunchError(
                "docker needs an image that has dockerd.", hint="Give image, for example docker:28-dind."
            )
        if machine.allow_domains and network == "open":
            raise BadLaunchError(
                "allow_domains has no effect on an open network.", hint="Use network='blocked'."
            )
        self._rates.nusd_per_second(machine, cpu=cpu_limit, memory_mb=memory_limit)

    def nusd_per_second(self, machine: Machine) -> int:
        _, cpu_limit, _, memory_limit = self._sizes(machine)
        return self._rates.nusd_per_second(machine, cpu=cpu_limit, memory_mb=memory_limit)

    def _sizes(self, machine: Machine) -> tuple[float, float, int, int]:
        """Cores and MiB, each as request and limit; the memory of a VM cannot grow."""
        cpu = machine.cpu or (min(self._settings.modal_cpu, machine.cpu_limit or math.inf))
        memory = machine.memory_mb or int(
            min(self._settings.modal_memory_mb, machine.memory_limit_mb or math.inf)
        )
        memory_limit = machine.memory_limit_mb or memory
        if machine.runtime == "vm":
            memory = max(memory, memory_limit)
        return cpu, machine.cpu_limit or cpu, memory, memory_limit

    def start_kind(self, variant_digest: str) -> str:
        built = self._built.get(variant_digest)
        return "" if built is None else built.started

    async def prepare(
        self,
        prepared: Prepared,
        setup: Sequence[str],
        env: Mapping[str, str],
        machine: Machine,
        *,
        done: bool,  # noqa: ARG002 (an image that was built is found again by its definition)
    ) -> None:
        check_names(env)
        await self.connect()
        if machine.world:
            await self._world(machine.world)  # before the fan-out: it may have to be uploaded
        if self._images is None:
            self._images = self._make_images(self) if self._make_images else self._plain_images()
        try:
            self._built[prepared.variant_digest] = await self._images.image_for(prepared, setup, env, machine)
        except EvalpurseError:
            raise
        except Exception as error:
            ours = told(error, "to build an image")
            if isinstance(ours, BackendRefusedError):
                raise SetupFailedError(str(ours), hint=ours.hint) from error
            raise ours from error

    def _plain_images(self) -> ImageMaker:
        from evalpurse.runs.sandboxes.modal_images import PlainImages

        return PlainImages(self, self._settings)

    # apps

    def app_name(self, experiment_id: str) -> str:
        return f"evalpurse-{self._home_id}-{experiment_id}"

    async def app(self, experiment_id: str, *, make: bool = True) -> Any | None:
        """The App of an experiment; None when there is none and it is not to be made."""
        async with self._app_lock:
            known = self._apps.get(experiment_id)
            if known is None:
                try:
                    known = await self._modal.App.lookup.aio(
                        self.app_name(experiment_id),
                        client=self.client,
                        environment_name=self._environment,
                        create_if_missing=make,
                    )
                except Exception as error:
                    if is_client_error(error) and meaning_of(error) is Meaning.GONE and not make:
                        return None
                    raise told(error, f"to look up App {self.app_name(experiment_id)}") from error
                self._apps[experiment_id] = known
            return known

    async def stop_app(self, experiment_id: str) -> None:
        """The kill switch: ends every sandbox of an experiment that may still be there.

        Raises:
            SandboxError: it could not be done; try again.
        """
        if self._client is None:
            return
        app = await self.app(experiment_id, make=False)
        self._apps.pop(experiment_id, None)
        if app is None:
            return
        try:
            await app.stop.aio(client=self.client)
        except Exception as error:
            if is_client_error(error) and meaning_of(error) is Meaning.GONE:
                return
            raise SandboxError(str(told(error, f"to stop App {app.name}"))) from error

    @property
    def _modal(self) -> ModuleType:
        return modal_client.load()

    @property
    def _environment(self) -> str | None:
        return self._settings.modal_environment or None

    # sandboxes

    async def create(self, spec: SandboxSpec) -> ModalSandbox:
        check_names(spec.env)
        built = self._built.get(spec.prepared.variant_digest)
        if built is None or self._images is None:
            raise SandboxError(f"The image of sandbox {spec.name} is not built.")
        app = await self.app(_experiment_of(spec.name))
        arguments = await self._arguments(spec)
        known = Known(
            timeout_s=spec.limits.timeout_s,
            grade_timeout_s=spec.limits.grade_timeout_s,
            slack_s=spec.limits.slack_s,
            secret_names=sorted(spec.secrets),
            memory_mb=self._sizes(spec.machine)[3],
        )
        remote, created_at, tags = await self._create(spec, app, built, arguments)
        self._remember(spec.name, known)
        images = self._images

        async def payload() -> bytes:
            if spec.machine.docker:
                await _ready(spec.name, remote)
            source = await images.source_payload(spec.prepared, built)
            return await anyio.to_thread.run_sync(partial(payload_of, spec, source))

        sandbox = ModalSandbox(
            spec.name,
            tags,
            created_at,
            remote,
            known,
            self._redactor(spec.secrets),
            self._rooms,
            payload=payload,
            on_started=partial(self._remember_later, spec.name),
            on_removed=self._forget,
        )
        self._live[spec.name] = sandbox
        return sandbox

    async def _create(
        self, spec: SandboxSpec, app: Any, built: BuiltImage, arguments: Mapping[str, Any]
    ) -> tuple[Any, datetime, dict[str, str]]:
        """Asks until there is a sandbox of this name; a repetition never makes a second one."""
        give_up = anyio.current_time() + THROTTLED_MAX_S
        command = ["sh", "-c", DOCKER_START] if spec.machine.docker else ["sleep", "infinity"]
        while True:
            await self._rate.turn()
            created_at = datetime.now(UTC)
            tags = self._tags(spec, created_at)
            try:
                # Shielded: an answer that nobody reads is a sandbox that nobody knows.
                with anyio.CancelScope(shield=True), anyio.fail_after(CREATE_S):
                    remote = await self._modal.Sandbox.create.aio(
                        *command, app=app, name=spec.name, image=built.image, tags=tags, **arguments
                    )
            except TimeoutError as error:
                raise SandboxError(f"Sandbox {spec.name} was not made within {CREATE_S:g} s.") from error
            except Exception as error:
                if not is_client_error(error):
                    raise
                meaning = meaning_of(error)
                if meaning is Meaning.EXISTS:
                    return await self._made_before(spec.name)
                if meaning is not Meaning.THROTTLED or anyio.current_time() > give_up:
                    raise self._refused_or_failed(error, spec) from error
                self._rate.refused(modal_client.retry_after_s(error) or 1.0)
                continue
            self._rate.accepted()
            return remote, created_at, tags

    def _refused_or_failed(self, error: Exception, spec: SandboxSpec) -> EvalpurseError:
        meaning = meaning_of(error)
        doing = f"to make sandbox {spec.name}"
        if meaning is Meaning.THROTTLED:
            return SandboxError(f"Modal refused {doing} for its rate for {THROTTLED_MAX_S:g} s: {error}")
        if meaning is Meaning.GONE:
            secrets = ", ".join(spec.secrets) or "none"
            return BackendRefusedError(
                f"Modal does not know something that sandbox {spec.name} is made with: {error}",
                hint=f"Look at the variant's image, world and secrets ({secrets}); secrets reach Modal with "
                "`evalpurse secrets sync`.",
                quota=False,
            )
        return told(error, doing)

    async def _made_before(self, name: str) -> tuple[Any, datetime, dict[str, str]]:
        """The sandbox of a create whose answer was lost."""
        found = await self._look_up(name)
        if found is None:
            raise SandboxError(f"Modal has a sandbox {name}, and does not give it back.")
        remote, tags = found
        return remote, _created_at(tags), tags

    async def _arguments(self, spec: SandboxSpec) -> dict[str, Any]:
        machine, limits = spec.machine, spec.limits
        cpu, cpu_limit, memory, memory_limit = self._sizes(machine)
        lifetime_s = math.ceil(limits.timeout_s + limits.grade_timeout_s + limits.slack_s)
        if lifetime_s > LIFETIME_MAX_S:
            raise BackendRefusedError(
                f"Harness, graders and slack need {lifetime_s} s; a Modal sandbox lives {LIFETIME_MAX_S} s.",
                hint="Lower timeout_s of the case or the variant.",
                quota=False,
            )
        arguments: dict[str, Any] = {
            "client": self.client,
            "timeout": lifetime_s,
            "cpu": (cpu, cpu_limit),
            "memory": (memory, memory_limit),
            "env": self._env(spec),
            "secrets": [
                self._modal.Secret.from_name(
                    modal_secret_name(self._home_id, name),
                    environment_name=self._environment,
                    required_keys=[name],
                    client=self.client,
                )
                for name in spec.secrets
            ],
            "gpu": machine.gpu or None,
            "region": machine.region or None,
            "runtime": machine.runtime or None,
        }
        if spec.network == "blocked" and machine.allow_domains:
            arguments["outbound_domain_allowlist"] = list(machine.allow_domains)
        elif spec.network == "blocked":
            arguments["block_network"] = True
        if machine.world:
            arguments["volumes"] = {WORLD: await self._world(machine.world)}
        if machine.docker:
            arguments["readiness_probe"] = self._modal.Probe.with_exec("docker", "info")
        return arguments

    async def _world(self, world: str) -> Any:
        if self._worlds is None:
            raise SandboxError("There are no worlds on this backend.")
        return await self._worlds(world)

    @staticmethod
    def _env(spec: SandboxSpec) -> dict[str, str]:
        return {
            **spec.env,
            "EVALPURSE_RUN": spec.name,
            "EVALPURSE_ALLOWANCE_USD": spec.allowance_usd,
        }

    def _tags(self, spec: SandboxSpec, created_at: datetime) -> dict[str, str]:
        return {
            **spec.tags,
            "nonce": self._nonce(spec.name),
            "created_ms": str(round(created_at.timestamp() * 1000)),
        }

    def _nonce(self, name: str) -> str:
        """By it a sandbox is known as one that this home folder made, whatever else has its name."""
        return hashlib.sha256(f"{self._home_id}:{name}".encode()).hexdigest()[:32]

    async def find(self, name: str) -> ModalSandbox | None:
        known = self._live.get(name)
        if known is not None:
            return known
        await self._connected()
        found = await self._look_up(name)
        if found is None:
            return None
        remote, tags = found
        facts = self._recall(name)
        redactor = None
        if facts is not None:
            values = secret_values(self._home, facts.secret_names)
            redactor = Redactor(values) if all(values.values()) else None
        sandbox = ModalSandbox(
            name, tags, _created_at(tags), remote, facts, redactor, self._rooms, on_removed=self._forget
        )
        self._live[name] = sandbox
        return sandbox

    async def _connected(self) -> None:
        try:
            await self.connect()
        except BadLaunchError as error:
            raise SandboxError(error.message, hint=error.hint) from error

    async def _look_up(self, name: str) -> tuple[Any, dict[str, str]] | None:
        """A running sandbox of ours by its name, with its tags; None when there is none."""
        try:
            remote = await self._modal.Sandbox.from_name.aio(
                self.app_name(_experiment_of(name)),
                name,
                environment_name=self._environment,
                client=self.client,
            )
            tags = dict(await remote.get_tags.aio())
        except Exception as error:
            if is_client_error(error) and meaning_of(error) is Meaning.GONE:
                return None
            raise SandboxError(str(told(error, f"to find sandbox {name}"))) from error
        if tags.get("nonce") != self._nonce(name):
            log.warning("sandbox %s on Modal is not of this home folder; it is left alone", name)
            return None
        return remote, tags

    async def list(self, tags: Mapping[str, str]) -> Sequence[str]:
        """Attempts of this home whose sandbox runs; needs the tag `experiment`, which names the App."""
        await self._connected()
        return sorted([name async for name, _ in self.owned(tags)])

    async def owned(self, tags: Mapping[str, str]) -> AsyncIterator[tuple[str, Any]]:
        """Running sandboxes that carry these tags and are provably of this home, with their names."""
        experiment_id = tags.get("experiment", "")
        app = await self.app(experiment_id, make=False)
        if app is None:
            return
        wanted = {**tags, "home": self._home_id}
        try:
            async for remote in self._modal.Sandbox.list.aio(
                app_id=app.app_id, tags=wanted, client=self.client
            ):
                found = dict(await remote.get_tags.aio())
                name = f"{found.get('run', '')}.{found.get('attempt', '')}"
                if found.get("nonce") == self._nonce(name):
                    yield name, remote
        except Exception as error:
            raise SandboxError(str(told(error, f"to list sandboxes of {experiment_id}"))) from error

    def uses(self, name: str) -> bool:
        """Whether this process made or found a sandbox, and has not ended it."""
        return name in self._live

    async def end(self, name: str, remote: Any) -> None:
        """Ends a sandbox that `owned` gave.

        Raises:
            SandboxError: it could not be ended.
        """
        try:
            await remote.terminate.aio()
            await remote.detach.aio()
        except Exception as error:
            if not (is_client_error(error) and meaning_of(error) is Meaning.GONE):
                raise SandboxError(str(told(error, f"to end sandbox {name}"))) from error
        await self._forget(name)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                await client.close.aio()

    # what this home remembers of a sandbox

    def _redactor(self, names: Mapping[str, str]) -> Redactor:
        return Redactor(secret_values(self._home, names))

    def _remember(self, name: str, known: Known) -> None:
        """One line a state, the last one counts; a line that was not finished was never written."""
        with open(self._folder / f"{name}.json", "ab") as file:
            file.write(json.dumps(asdict(known)).encode() + b"\n")

    async def _remember_later(self, name: str, known: Known) -> None:
        self._remember(name, known)

    def _recall(self, name: str) -> Known | None:
        try:
            lines = (self._folder / f"{name}.json").read_bytes().split(b"\n")[:-1]
            return Known(**json.loads(lines[-1]))
        except (FileNotFoundError, IndexError, ValueError, TypeError):
            return None

    async def _forget(self, name: str) -> None:
        self._live.pop(name, None)
        (self._folder / f"{name}.json").unlink(missing_ok=True)


async def _ready(name: str, remote: Any) -> None:
    """Returns when dockerd answers in a sandbox."""
    try:
        await remote.wait_until_ready.aio(timeout=READY_S)
    except Exception as error:
        raise SandboxError(f"Docker did not start in {name} within {READY_S} s: {error}") from error


def _experiment_of(name: str) -> str:
    return name.partition(".")[0]


def _created_at(tags: Mapping[str, str]) -> datetime:
    return datetime.fromtimestamp(int(tags["created_ms"]) / 1000, UTC)
