"""Images without warmth: the base image, the source when setup needs it, and the setup commands."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio.to_thread

from evalpurse.config import Settings
from evalpurse.runs.errors import SetupFailedError
from evalpurse.runs.sandboxes import modal_client, modal_scripts
from evalpurse.runs.sandboxes.modal_payload import Source
from evalpurse.runs.sandboxes.protocol import Machine, Prepared

if TYPE_CHECKING:
    from evalpurse.runs.sandboxes.modal_backend import ModalBackend

BUILDS = "images"
SOURCE = f"{modal_scripts.ROOT}/source"
APPLY = 'mkdir -p "$1/source" && tar -xzf "$1/run/source.tar" -C "$1/source"\n'


class BuiltImage(Protocol):
    """An image that is built and known to the client by its id."""

    @property
    def image(self) -> Any: ...

    @property
    def started(self) -> str:
        """`warm` or `cold`."""


class ImageMaker(Protocol):
    """Builds the image of a variant, and packs what a run of it still needs of the source."""

    async def image_for(
        self, prepared: Prepared, setup: Sequence[str], env: Mapping[str, str], machine: Machine
    ) -> BuiltImage: ...

    async def source_payload(self, prepared: Prepared, built: BuiltImage) -> Source: ...


@dataclass(frozen=True)
class PlainImage:
    """`holds_source`: setup ran in it, so it is there with what setup made."""

    image: Any
    holds_source: bool
    started: str = "cold"


@dataclass(frozen=True)
class PlainSource:
    """The whole source, or nothing."""

    tarball: Path | None
    apply: str


class PlainImages:
    """Every variant gets an image of its own setup, and every run the whole source."""

    def __init__(self, backend: ModalBackend, settings: Settings) -> None:
        self._backend = backend
        self._settings = settings
        self._packed: dict[str, PlainSource] = {}
        self._packing = anyio.Lock()

    async def image_for(
        self, prepared: Prepared, setup: Sequence[str], env: Mapping[str, str], machine: Machine
    ) -> PlainImage:
        modal = modal_client.load()
        if machine.dockerfile:
            file = prepared.folder / machine.dockerfile
            if not file.resolve().is_relative_to(prepared.folder.resolve()) or not file.is_file():
                raise SetupFailedError(f"Dockerfile {machine.dockerfile!r} is not in the source.")
            image = modal.Image.from_dockerfile(str(file), context_dir=str(prepared.folder))
        else:
            image = modal.Image.from_registry(machine.image or self._settings.modal_image)
        if setup:
            image = image.add_local_dir(str(prepared.folder), SOURCE, copy=True).workdir(SOURCE)
            image = image.run_commands(*setup, env=dict(env) or None)
        image = image.entrypoint([])
        app = await self._backend.app(BUILDS)
        try:
            await image.build.aio(app)
        except modal.exception.ImageBuildError as error:
            raise SetupFailedError(
                f"The image cannot be built: {error}", hint="Mend the command or the image."
            ) from error
        return PlainImage(image, bool(setup))

    async def source_payload(self, prepared: Prepared, built: BuiltImage) -> PlainSource:
        if isinstance(built, PlainImage) and built.holds_source:
            return PlainSource(None, "")
        async with self._packing:
            found = self._packed.get(prepared.variant_digest)
            if found is None:
                found = PlainSource(await anyio.to_thread.run_sync(_pack, prepared.folder), APPLY)
                self._packed[prepared.variant_digest] = found
        return found


def _pack(folder: Path) -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for entry in sorted(folder.iterdir()):
            tar.add(entry, entry.name)
    content = buffer.getvalue()
    target = folder.parent / f"source-{hashlib.sha256(content).hexdigest()[:16]}.tar.gz"
    target.write_bytes(content)
    return target
