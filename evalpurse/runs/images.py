"""Images that runs start from: each built once, step by step, before the fan-out.

What an image is made of is its key, so variants that agree in it share one build and its failure. Each setup
command is a step of its own with a deadline, so whatever ends badly has a name. A handle is given out only
when its image is built and known by its id: no create has to ask for it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.content import canonical_json, digest_of
from evalpurse.runs.errors import BackendRefusedError, SetupFailedError
from evalpurse.runs.sandboxes import modal_client
from evalpurse.runs.sandboxes.modal_images import BUILDS, SOURCE
from evalpurse.runs.sandboxes.modal_images import BuiltImage as AnyImage
from evalpurse.runs.sandboxes.modal_scripts import ROOT
from evalpurse.runs.sandboxes.protocol import Machine, Prepared
from evalpurse.runs.source_delta import (
    Tree,
    apply_script,
    check_script,
    delta_between,
    pack,
    scan,
    tree_hash,
)
from evalpurse.runs.warm import Recipe, WarmBase, WarmBases
from evalpurse.store.blobs import Blobs

if TYPE_CHECKING:
    from evalpurse.runs.sandboxes.modal_backend import ModalBackend

log = logging.getLogger(__name__)

STEP_S = 1800.0
"""A setup command, or the build of a base, that takes longer has failed."""
LOG_S = 30.0
LOG_BYTES_MAX = 4 << 20
LOG_ENTRIES_MAX = 5000
TOLD_CHARS = 2000


@dataclass(frozen=True)
class SourcePayload:
    """What a run is sent of its source: all of it, what differs from a warm image, or nothing (`none`)."""

    kind: str
    tarball: Path | None
    tree_hash: str
    apply: str


@dataclass(frozen=True)
class BuiltImage:
    """A built image. `holds_source`: setup ran in it over the variant's own source."""

    image: Any
    digest: str
    build_log_blob: str
    holds_source: bool = False
    warm: WarmBase | None = None

    @property
    def started(self) -> str:
        """How runs start from it: `warm` or `cold`."""
        return "cold" if self.warm is None else "warm"


@dataclass
class _Build:
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    built: BuiltImage | None = None


class Builder:
    """Builds an image from a recipe and a source folder, and keeps the log of every step."""

    def __init__(
        self,
        backend: Callable[[], ModalBackend],
        home: Home,
        settings: Settings,
        blobs: Blobs,
        *,
        step_s: float = STEP_S,
    ) -> None:
        self._backend = backend
        self._folder = home.sources / "payloads"
        self._settings = settings
        self._blobs = blobs
        self._step_s = step_s

    async def build(
        self, recipe: Recipe, folder: Path, *, with_source: bool, checked: bool = False
    ) -> tuple[Any, str]:
        """A built image and the blob of its log. `checked`: setup must leave the source as it was.

        Raises:
            SetupFailedError: names the step that failed or hung, with the end of its log.
        """
        image = self._base(recipe, folder)
        base = recipe.dockerfile or recipe.image or self._settings.modal_image
        await self._step(image, f"the base {base}")
        if with_source:
            image = await self._with_source(image, folder)
            await self._step(image, "the source")
        for number, command in enumerate(recipe.setup, 1):
            image = image.run_commands(command, env=dict(recipe.env) or None)
            what = f"setup command {number} of {len(recipe.setup)}, {command!r},"
            await self._step(image, what)
        if checked:
            image = image.run_commands(f"sh {ROOT}/run/check.sh {ROOT}")
            await self._step(image, "the check of the source after setup")
        if with_source:  # a run finds a sandbox folder with nothing but the source
            image = image.run_commands(f"rm -rf {ROOT}/run")
        image = image.entrypoint([])
        await self._step(image, "its end")
        return image, await self._keep(await _log_of(image))

    async def _with_source(self, image: Any, folder: Path) -> Any:
        """The same payload and proof as in a run: what `COPY` makes of links and modes is its own."""
        own = await anyio.to_thread.run_sync(scan, folder)
        payload = await anyio.to_thread.run_sync(packed, self._folder, folder, own, None)
        scripts = {"apply": payload.apply, "check": check_script(payload.tree_hash)}
        image = image.add_local_file(str(payload.tarball), f"{ROOT}/run/source.tar", copy=True)
        for name, script in scripts.items():
            file = self._folder / f"{digest_of(script.encode())}.sh"
            await anyio.to_thread.run_sync(file.write_text, script)
            image = image.add_local_file(str(file), f"{ROOT}/run/{name}.sh", copy=True)
        return image.run_commands(f"sh {ROOT}/run/apply.sh {ROOT}").workdir(SOURCE)

    async def known(self, image_id: str) -> Any | None:
        """A handle of an image that was built before; None when it cannot be had now."""
        modal = modal_client.load()
        try:
            app = await self._app()
            image = modal.Image.from_id(image_id, client=self._backend().client)
            with anyio.fail_after(LOG_S):
                await image.build.aio(app)
        except Exception as error:
            if not modal_client.is_client_error(error) and not isinstance(error, TimeoutError):
                raise
            log.warning("image %s cannot be used, so runs start cold: %s", image_id, error)
            return None
        return image

    async def _app(self) -> Any:
        backend = self._backend()
        await backend.connect()
        return await backend.app(BUILDS)

    def _base(self, recipe: Recipe, folder: Path) -> Any:
        modal = modal_client.load()
        if not recipe.dockerfile:
            return modal.Image.from_registry(recipe.image or self._settings.modal_image)
        file = folder / recipe.dockerfile
        if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
            raise SetupFailedError(
                f"Dockerfile {recipe.dockerfile!r} is not in the source.",
                hint="Give its path from the root of the repository, as it is at the commit.",
            )
        return modal.Image.from_dockerfile(str(file), context_dir=str(folder))

    async def _step(self, image: Any, what: str) -> None:
        modal = modal_client.load()
        app = await self._app()
        try:
            with anyio.fail_after(self._step_s):
                await image.build.aio(app)
        except TimeoutError as error:
            raise SetupFailedError(
                f"Building the image: {what} did not end within {self._step_s:g} s.",
                hint="A setup command has no input and must end by itself: no prompts, no servers.",
            ) from error
        except modal.exception.ImageBuildError as error:
            text = await _log_of(image)
            raise SetupFailedError(
                f"Building the image: {what} failed: {_reason(text) or error}",
                hint=f"The end of its log:\n{text[-TOLD_CHARS:]}",
                log_blob=await self._keep(text),
            ) from error
        except Exception as error:
            ours = modal_client.told(error, f"to build {what}")  # raises what is no error of the client
            if isinstance(ours, BackendRefusedError):
                raise SetupFailedError(ours.message, hint=ours.hint) from error
            raise ours from error

    async def _keep(self, text: str) -> str:
        content = text.encode(errors="replace")[-LOG_BYTES_MAX:]
        return await anyio.to_thread.run_sync(self._blobs.put, content)


async def _log_of(image: Any) -> str:
    """The build log of an image, all its steps; a log that cannot be read is no reason to fail."""
    try:
        with anyio.fail_after(LOG_S):
            return "".join([entry.message async for entry in image.logs.tail.aio(LOG_ENTRIES_MAX)])
    except Exception as error:
        if not modal_client.is_client_error(error) and not isinstance(error, TimeoutError):
            raise
        return f"(the log cannot be read: {error})\n"


def _reason(text: str) -> str:
    """The line of a build log that says what failed, with the step that a Dockerfile was at."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    steps = [line.removeprefix("=> ") for line in lines if line.startswith("=> Step")]
    failed = [line for line in lines if "failed" in line or "Terminating task due to error" in line]
    found = failed[-1].removeprefix("Terminating task due to error: ") if failed else ""
    return f"{steps[-1]}: {found}" if steps and found else found


class Images:
    """The image of each variant, and what its runs still need of the source."""

    def __init__(
        self,
        home: Home,
        builder: Builder,
        warm: WarmBases,
        repo_of: Callable[[str], Awaitable[str]],
    ) -> None:
        """`repo_of` gives the repository of a variant by its digest."""
        self._folder = home.sources / "payloads"
        self._builder = builder
        self._warm = warm
        self._repo_of = repo_of
        self._builds: dict[str, _Build] = {}
        self._warm_handles: dict[str, Any] = {}
        self._payloads: dict[tuple[str, str], SourcePayload] = {}
        self._packing = anyio.Lock()

    async def image_for(
        self, prepared: Prepared, setup: Sequence[str], env: Mapping[str, str], machine: Machine
    ) -> BuiltImage:
        """The image that runs of a variant start from: a warm one that fits, else its own.

        Raises:
            SetupFailedError: names the step that failed.
        """
        recipe = Recipe(
            repo=await self._repo_of(prepared.variant_digest),
            image=machine.image,
            dockerfile=machine.dockerfile,
            setup=tuple(setup),
            env=dict(env),
            runtime=machine.runtime,
        )
        own = await anyio.to_thread.run_sync(scan, prepared.folder)
        base = await self._warm.fitting(recipe, own, prepared.folder)
        if base is not None:
            handle = await self._warm_handle(base)
            if handle is not None:
                return BuiltImage(handle, base.image_id, base.log_blob, warm=base)
        return await self._cold(recipe, prepared.folder, own)

    async def _warm_handle(self, base: WarmBase) -> Any | None:
        if base.image_id not in self._warm_handles:
            handle = await self._builder.known(base.image_id)
            if handle is None:
                return None
            self._warm_handles[base.image_id] = handle
        return self._warm_handles[base.image_id]

    async def _cold(self, recipe: Recipe, folder: Path, own: Tree) -> BuiltImage:
        """Built once a key; the source is part of the key when a step can see it."""
        sees_source = bool(recipe.setup or recipe.dockerfile)
        key = digest_of(canonical_json([recipe.key, tree_hash(own) if sees_source else ""]))
        build = self._builds.setdefault(key, _Build())
        async with build.lock:
            if build.built is None:
                holds_source = bool(recipe.setup)
                image, log_blob = await self._builder.build(recipe, folder, with_source=holds_source)
                build.built = BuiltImage(image, key, log_blob, holds_source=holds_source)
        return build.built

    async def source_payload(self, prepared: Prepared, built: AnyImage) -> SourcePayload:
        """What has to be sent so that the variant's source is there; packed once a variant and image.

        Raises:
            UnsupportedSourceError: a name that cannot be sent.
        """
        if not isinstance(built, BuiltImage):
            raise TypeError(f"{built!r} is not of this maker")
        key = (prepared.variant_digest, built.digest)
        found = self._payloads.get(key)
        if found is not None:
            return found
        async with self._packing:
            if key not in self._payloads:
                self._payloads[key] = await anyio.to_thread.run_sync(self._payload, prepared.folder, built)
        return self._payloads[key]

    def _payload(self, folder: Path, built: BuiltImage) -> SourcePayload:
        own = scan(folder)
        if built.warm is None and built.holds_source:
            return SourcePayload("none", None, tree_hash(own), "")
        return packed(self._folder, folder, own, built.warm.tree if built.warm is not None else None)


def packed(payloads: Path, folder: Path, own: Tree, base: Tree | None) -> SourcePayload:
    """A payload that makes a source, from nothing or from a warm base; packed once. Blocking."""
    delta = delta_between(base or {}, own)
    expected = tree_hash(own)
    target = payloads / f"{digest_of(canonical_json([expected, delta.written, delta.gone]))}.tar.gz"
    if not target.exists():
        pack(folder, own, delta, target)
    kind = "full" if base is None else "delta"
    return SourcePayload(kind, target, expected, apply_script(expected, strict=base is not None))
