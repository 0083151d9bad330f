"""The steps of a smoke tour: each tries one thing that runs depend on, and says what it found.

Everything that a step makes is known to the tour before it is used, so that `end` finds it whatever happened.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import anyio

from evalpurse.config import Settings
from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.runs.sandboxes.modal_client import is_client_error, load, told
from evalpurse.runs.sandboxes.modal_rates import Rates
from evalpurse.runs.sandboxes.protocol import Machine
from evalpurse.runs.smoke_run import WholeRun, problem_of, temporary_folder
from evalpurse.runs.vault import write_modal_secret

log = logging.getLogger(__name__)

IMAGE = "python:3.12-slim"
CPU, MEMORY_MB = (0.125, 0.25), (128, 256)
LIFETIME_S = 300
SANDBOXES = 5
"""All but the last have a blocked network; the last one shows that an open one is different."""
EXECS = 10
CHECK_S, BUILD_S = 60.0, 600.0
WORLD = "/evalpurse/world"
FILE_BYTES = 1 << 20
SNAPSHOT_LIVES_S = 3600
REACH = ("1.1.1.1", 443)
_CALL = """\
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()
except OSError:
    print("closed")
else:
    print("open")
"""

Connect = Callable[[], Awaitable[Any]]
"""Gives a new, connected `modal.Client` each time."""


class _CheckError(Exception):
    """What was tried did not do what it should."""


class _UnclearError(Exception):
    """What was tried tells nothing here."""


@dataclass(frozen=True)
class Check:
    """One thing that was tried. `unclear`: it cannot be told here; `skip`: something before it failed."""

    name: str
    state: Literal["pass", "fail", "unclear", "skip"]
    found: str
    seconds: float
    mend: str = ""


@dataclass
class _Made:
    """What exists on Modal now because of this tour."""

    name: str
    environment: str
    clients: list[Any] = field(default_factory=list)
    app: Any = None
    image: Any = None
    sandboxes: list[Any] = field(default_factory=list)
    born: list[float] = field(default_factory=list)
    lived_s: dict[int, float] = field(default_factory=dict)
    """By place in `born`; what is missing lived as long as it may."""
    world: Any = None
    secret: bool = False
    run: WholeRun | None = None

    @property
    def where(self) -> dict[str, Any]:
        return {"environment_name": self.environment or None, "client": self.clients[0]}


class Tour:
    """One tour: what it made, and what it found."""

    def __init__(self, home: Home, settings: Settings, connect: Connect, reach: tuple[str, int]) -> None:
        self.name = f"smoke.{secrets.token_hex(6)}"
        self.rates = Rates.table()
        self.checks: list[Check] = []
        self._home = home
        self._settings = settings
        self._home_id = home.identity()
        self._connect = connect
        self._reach = reach
        self._made = _Made(self._app_name(self.name), settings.modal_environment)
        self._create_s: list[float] = []
        self._first_s: list[float] = []
        self._exec_s: list[float] = []
        self._snapshot_s: list[float] = []

    @property
    def _modal(self) -> ModuleType:
        return load()

    def _app_name(self, name: str) -> str:
        return f"evalpurse-{self._home_id}-{name}"

    async def enter(self) -> None:
        """Connects and reads the rates. Raises an EvalpurseError that says what to do."""
        began = time.monotonic()
        client = await self._connect()
        self._made.clients.append(client)
        self._note("connect", "pass", "the token is accepted", began)
        began = time.monotonic()
        try:
            workspace = self._modal.Workspace.from_context(client=client)
            with anyio.fail_after(CHECK_S):
                self.rates = Rates.live(dict(await workspace.billing.rates.aio()))
        except Exception as error:  # noqa: BLE001 (no plan shows rates for certain; it is told as found)
            reason, _ = _reason(error)
            self._note("rates", "unclear", f"not readable, so the {self.rates.source} holds: {reason}", began)
        else:
            self._note("rates", "pass", self.rates.source, began)

    async def look_around(self) -> None:
        """Every check in order; one that later ones stand on stops the tour when it fails."""
        steps: list[tuple[str, Callable[[], Awaitable[str]], bool]] = [
            ("app", self._lookup, True),
            ("image", self._build, True),
            ("secret", self._secret, False),
            ("volume", self._volume, False),
            ("create", self._create, True),
            ("exec", self._execs, True),
            ("files", self._files, False),
            ("secret in the sandbox", self._secret_inside, False),
            ("world mounted read-only", self._mounted, False),
            ("network", self._network, False),
            ("re-attach", self._again, False),
            ("snapshot", self._snapshot, False),
            ("whole run", self._whole_run, False),
        ]
        going = True
        for name, step, needed in steps:
            if going:
                going = await self._try(name, step) or not needed
            else:
                self.checks.append(Check(name, "skip", "not tried after what failed", 0.0))

    async def end(self) -> list[float]:
        """Ends and removes everything; returns how long each sandbox lived, at most its own timeout."""
        await self._try("ended", self._end_all)
        await self._try("nothing left", self._nothing_left)
        lived = [
            min(self._made.lived_s.get(place, LIFETIME_S), LIFETIME_S)
            for place in range(len(self._made.born))
        ]
        await self.leave()
        return lived

    async def leave(self) -> None:
        """Closes the connections."""
        if self._made.run is not None:
            await self._made.run.close()
        for client in self._made.clients:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                await client.close.aio()

    async def end_app(self, name: str) -> None:
        """Ends all sandboxes of an earlier tour.

        Raises:
            SandboxError, BackendRefusedError: Modal does not do it.
        """
        modal = self._modal
        try:
            app = await modal.App.lookup.aio(self._app_name(name), **self._made.where)
            await app.stop.aio(client=self._made.clients[0])
            whole = await modal.App.lookup.aio(self._app_name(name.replace(".", "-")), **self._made.where)
            await whole.stop.aio(client=self._made.clients[0])
        except modal.exception.NotFoundError:
            return
        except Exception as error:
            raise told(error, f"to end the smoke tour {name}") from error

    def latency(self) -> dict[str, list[float]]:
        """Percentiles of what was timed."""
        timed = {
            "create_s": self._create_s,
            "create_to_first_output_s": self._first_s,
            "exec_s": self._exec_s,
            "snapshot_s": self._snapshot_s,
        }
        return {
            name: [round(_percentile(values, 0.5), 4), round(_percentile(values, 0.95), 4), len(values)]
            for name, values in timed.items()
            if values
        }

    # One check each; the text says what was found.

    async def _lookup(self) -> str:
        made = self._made
        made.app = await self._modal.App.lookup.aio(made.name, create_if_missing=True, **made.where)
        return f"App {made.name}" + (f" in {made.environment}" if made.environment else "")

    async def _build(self) -> str:
        self._made.image = self._modal.Image.from_registry(IMAGE).entrypoint([])
        await self._made.image.build.aio(self._made.app)
        return IMAGE

    async def _secret(self) -> str:
        self._secret_value = secrets.token_urlsafe(24)
        await write_modal_secret(
            self._made.clients[0],
            self._made.name,
            {"SMOKE_SECRET": self._secret_value},
            self._made.environment,
        )
        self._made.secret = True
        return "made one with one key"

    async def _volume(self) -> str:
        made = self._made
        volume = self._modal.Volume.from_name(made.name, create_if_missing=True, version=2, **made.where)
        await volume.hydrate.aio(made.clients[0])
        made.world = volume
        async with volume.batch_upload.aio() as batch:
            batch.put_file(io.BytesIO(b"a document\n"), "/docs/a.txt")
        return "made one of version 2 with one file"

    async def _create(self) -> str:
        for number in range(SANDBOXES):
            began = time.monotonic()
            self._made.born.append(began)
            sandbox = await self._sandbox(number)
            self._create_s.append(time.monotonic() - began)
            self._made.sandboxes.append(sandbox)
            said = await self._output(sandbox, "echo", "up")
            if said != b"up\n":
                raise _CheckError(f"`echo up` in a new sandbox printed {said[:200]!r}")
            self._first_s.append(time.monotonic() - began)
        p50, p95 = (_percentile(self._first_s, share) for share in (0.5, 0.95))
        return f"{SANDBOXES} sandboxes; create to first output p50 {p50:.2f} s, p95 {p95:.2f} s"

    async def _sandbox(self, number: int) -> Any:
        made, modal = self._made, self._modal
        options: dict[str, Any] = {}
        if made.world is not None:
            options["volumes"] = {WORLD: made.world.with_mount_options(read_only=True)}
        if made.secret:
            options["secrets"] = [
                modal.Secret.from_name(made.name, required_keys=["SMOKE_SECRET"], **made.where)
            ]
        with anyio.CancelScope(shield=True):  # an answer that nobody reads is a sandbox that nobody ends
            return await modal.Sandbox.create.aio(
                "sleep",
                "infinity",
                app=made.app,
                name=f"{self.name}.{number}",
                tags={"home": self._home_id, "experiment": "smoke"},
                image=made.image,
                cpu=CPU,
                memory=MEMORY_MB,
                timeout=LIFETIME_S,
                block_network=number < SANDBOXES - 1,
                client=made.clients[0],
                **options,
            )

    async def _execs(self) -> str:
        for number in range(EXECS):
            began = time.monotonic()
            said = await self._output(self._made.sandboxes[0], "sh", "-c", f"echo {number}; exit 0")
            self._exec_s.append(time.monotonic() - began)
            if said != f"{number}\n".encode():
                raise _CheckError(f"`echo {number}` printed {said[:200]!r}")
        failing = await self._made.sandboxes[0].exec.aio("sh", "-c", "exit 3", text=False)
        code = await failing.wait.aio()
        if code != 3:
            raise _CheckError(f"`exit 3` ended with exit code {code}")
        p50, p95 = (_percentile(self._exec_s, share) for share in (0.5, 0.95))
        return f"{EXECS} commands; p50 {p50:.3f} s, p95 {p95:.3f} s; exit codes come back"

    async def _files(self) -> str:
        sandbox, content = self._made.sandboxes[0], os.urandom(FILE_BYTES)
        await sandbox.filesystem.write_bytes.aio(content, "/evalpurse/out/blob")
        digest = (await self._output(sandbox, "sha256sum", "/evalpurse/out/blob")).split(b" ")[0].decode()
        back = await sandbox.filesystem.read_bytes.aio("/evalpurse/out/blob")
        if digest != hashlib.sha256(content).hexdigest() or back != content:
            raise _CheckError("a file of 1 MiB that went in is another one inside, or when it comes back")
        return "1 MiB went in and came back the same"

    async def _secret_inside(self) -> str:
        if not self._made.secret:
            raise _CheckError("there is no secret to look for")
        said = await self._output(self._made.sandboxes[0], "sh", "-c", 'printf %s "$SMOKE_SECRET"')
        if said.decode() != self._secret_value:
            raise _CheckError("the variable of the secret has another value inside")
        return "a sandbox has the value of a secret that it was given by name"

    async def _mounted(self) -> str:
        if self._made.world is None:
            raise _CheckError("there is no volume to mount")
        sandbox = self._made.sandboxes[0]
        said = await self._output(sandbox, "cat", f"{WORLD}/docs/a.txt")
        if said != b"a document\n":
            raise _CheckError(f"the file of the volume reads {said[:200]!r}")
        script = f"echo x > {WORLD}/docs/a.txt; echo $?; cat {WORLD}/docs/a.txt"
        written, _, kept = (await self._output(sandbox, "sh", "-c", script)).partition(b"\n")
        if written == b"0" or kept != b"a document\n":
            raise _CheckError("a volume that is mounted read-only can be written")
        return "the volume's file is there and cannot be changed"

    async def _network(self) -> str:
        host, port = self._reach
        call = ("python3", "-c", _CALL, host, str(port))
        blocked, opened = [
            (await self._output(self._made.sandboxes[at], *call)).strip() for at in (0, SANDBOXES - 1)
        ]
        if blocked == b"open":
            raise _CheckError(f"a sandbox with a blocked network reached {host}:{port}")
        if blocked != b"closed":
            raise _CheckError(f"the call from a blocked sandbox printed {blocked[:200]!r}")
        if opened != b"open":
            raise _UnclearError(f"{host}:{port} was not reached, but from an open sandbox neither")
        return f"{host}:{port} is reached from an open sandbox and not from a blocked one"

    async def _again(self) -> str:
        made, modal = self._made, self._modal
        await self._output(made.sandboxes[0], "sh", "-c", "mkdir -p /evalpurse && echo mark > /evalpurse/m")
        second = await self._connect()
        made.clients.append(second)
        found = await modal.Sandbox.from_name.aio(
            made.name, f"{self.name}.0", environment_name=made.environment or None, client=second
        )
        if await self._output(found, "cat", "/evalpurse/m") != b"mark\n":
            raise _CheckError("the sandbox that a new client found is not the one that was made")
        tags = await found.get_tags.aio()
        await found.detach.aio()
        if tags.get("home") != self._home_id:
            raise _CheckError(f"its tags are {tags}")
        names = await self._running(second)
        if names != SANDBOXES:
            raise _CheckError(f"{names} of {SANDBOXES} sandboxes are found by their tags")
        return "a new client finds them by name and by tags"

    async def _running(self, client: Any) -> int:
        listed = self._modal.Sandbox.list.aio(
            app_id=self._made.app.app_id, tags={"home": self._home_id}, client=client
        )
        return len([sandbox async for sandbox in listed])

    async def _snapshot(self) -> str:
        began = time.monotonic()
        image = await self._made.sandboxes[0].snapshot_filesystem.aio(ttl=SNAPSHOT_LIVES_S)
        self._snapshot_s.append(time.monotonic() - began)
        if not image.object_id:
            raise _CheckError("the snapshot has no id")
        return f"{self._snapshot_s[0]:.2f} s; it expires by itself after {SNAPSHOT_LIVES_S // 60} min"

    async def _whole_run(self) -> str:
        made = self._made
        machine = Machine(
            image=IMAGE,
            cpu=CPU[0],
            cpu_limit=CPU[1],
            memory_mb=MEMORY_MB[0],
            memory_limit_mb=MEMORY_MB[1],
        )
        made.run = WholeRun(self._home, self._settings, self.name.replace(".", "-"), machine)
        with temporary_folder() as folder:
            prepared = await made.run.prepare(Path(folder))
            began, place = time.monotonic(), len(made.born)
            made.born.append(began)
            async with made.run.sandbox(prepared) as sandbox:
                problem = await problem_of(sandbox)
            made.lived_s[place] = time.monotonic() - began
        if problem:
            raise _CheckError(problem)
        return (
            f"setup, harness, output, exit code and grader in {made.lived_s[place]:.2f} s, as experiments do"
        )

    async def _end_all(self) -> str:
        made, modal = self._made, self._modal
        problems: list[str] = []
        for number, sandbox in enumerate(made.sandboxes):
            try:
                await sandbox.terminate.aio(wait=True)
                await sandbox.detach.aio()
                made.lived_s[number] = time.monotonic() - made.born[number]
            except Exception as error:  # noqa: BLE001 (the others must be ended all the same)
                problems.append(f"sandbox {number}: {_reason(error)[0]}")
        removals: list[tuple[str, Any]] = []
        if made.app is not None:
            removals.append(("App", lambda: made.app.stop.aio(client=made.clients[0])))
        if made.run is not None:
            removals.append(("App of the whole run", made.run.end))
        if made.world is not None:
            removals.append(("volume", lambda: modal.Volume.objects.delete.aio(made.name, **made.where)))
        if made.secret:
            removals.append(("secret", lambda: modal.Secret.objects.delete.aio(made.name, **made.where)))
        for what, remove in removals:
            try:
                await remove()
            except Exception as error:  # noqa: BLE001 (as above)
                problems.append(f"{what}: {_reason(error)[0]}")
        if problems:
            raise _CheckError("; ".join(problems))
        return f"{len(made.sandboxes)} sandboxes, the App, the volume and the secret"

    async def _nothing_left(self) -> str:
        made, modal = self._made, self._modal
        left = []
        if made.run is not None and (names := await made.run.end()):
            left.append(", ".join(names))
        if made.app is not None and (running := await self._running(made.clients[0])):
            left.append(f"{running} sandboxes")
        for number, sandbox in enumerate(made.sandboxes):
            again = await modal.Sandbox.from_id.aio(sandbox.object_id, client=made.clients[0])
            if await again.poll.aio() is None:
                left.append(f"sandbox {number}")
        for what, kind in (("volume", modal.Volume), ("secret", modal.Secret)):
            try:
                await kind.from_name(made.name, **made.where).hydrate.aio(made.clients[0])
            except modal.exception.NotFoundError:
                continue
            left.append(f"the {what}")
        if left:
            raise _CheckError(
                f"{', '.join(left)} of App {made.name} are still there. Sandboxes end by themselves within "
                f"{LIFETIME_S} s; remove the rest on modal.com"
            )
        return "no sandbox runs; volume and secret are gone"

    # How a check is carried out.

    async def _output(self, sandbox: Any, *command: str) -> bytes:
        process = await sandbox.exec.aio(*command, text=False, timeout=int(CHECK_S))
        printed: bytes = await process.stdout.read.aio()
        await process.wait.aio()
        return printed

    async def _try(self, name: str, step: Callable[[], Awaitable[str]]) -> bool:
        """Whether it did not fail; what it found is noted."""
        began = time.monotonic()
        try:
            with anyio.fail_after(BUILD_S if step in (self._build, self._whole_run) else CHECK_S):
                found = await step()
        except _UnclearError as doubt:
            self._note(name, "unclear", str(doubt), began)
        except Exception as error:
            reason, mend = _reason(error)
            log.exception("smoke: %s failed", name)
            self._note(name, "fail", reason, began, mend)
            return False
        else:
            self._note(name, "pass", found, began)
        return True

    def _note(
        self,
        name: str,
        state: Literal["pass", "fail", "unclear"],
        found: str,
        began: float,
        mend: str = "",
    ) -> None:
        self.checks.append(Check(name, state, found, round(time.monotonic() - began, 3), mend))


def _reason(error: Exception) -> tuple[str, str]:
    """What went wrong, and what to do."""
    if isinstance(error, EvalpurseError):
        return error.message, error.hint
    if isinstance(error, _CheckError):
        return str(error), ""
    if isinstance(error, TimeoutError):
        return "it did not end in time", "Look at status.modal.com, then try again."
    if is_client_error(error):
        ours = told(error, "a step of the tour")
        return ours.message, ours.hint
    return f"{type(error).__name__}: {error}", ""


def _percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else math.nan
