"""Worlds on Modal: one volume a home folder, a folder in it for each world, mounted read-only.

A world's folder counts once its `complete` file is there, which is written after all else was checked. What
an upload that failed has brought over is not sent again: whole batches are committed as they are done, and
Modal keeps each block of content once.

    DIGEST/files/...       what is mounted
    DIGEST/manifest.json   what it is made of
    DIGEST/complete        written last
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread

from evalpurse.errors import EvalpurseError
from evalpurse.runs.errors import BackendRefusedError, SandboxError, WorldError
from evalpurse.runs.sandboxes import modal_client
from evalpurse.runs.sandboxes.world_files import WorldFiles
from evalpurse.runs.sandboxes.world_manifest import Entry, Manifest, resolved

log = logging.getLogger(__name__)

BATCH_FILES = 1_000
BATCH_BYTES = 256 << 20
TRIES = 3


@dataclass(frozen=True)
class Upload:
    """What an upload did: files that the volume did not have, and those that it had from an earlier try."""

    sent_files: int
    sent_bytes: int
    found_files: int


@dataclass
class _UnderWay:
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    upload: Upload | None = None


class ModalWorlds:
    """Brings worlds to Modal, each once, and gives their volume to be mounted."""

    def __init__(
        self, files: WorldFiles, home_id: str, client: Callable[[], Any], *, environment: str = ""
    ) -> None:
        """`client` gives the connected Modal client; `environment` is Modal's, empty for its default."""
        self._files = files
        self._client = client
        self._environment = environment or None
        self.volume_name = f"evalpurse-worlds-{home_id}"
        self._volume: Any = None
        self._opening = anyio.Lock()
        self._worlds: dict[str, _UnderWay] = {}

    async def volume(self, digest: str) -> Any:
        """The volume of a world, to be mounted as it is; uploads the world if Modal does not have it.

        Raises:
            SandboxError: the upload failed; the next call goes on with it.
            BackendRefusedError: no repetition would help: the world in the home folder is damaged, it has
                links that Modal cannot hold, or Modal refuses.
        """
        await self.upload(digest)
        return self._volume.with_mount_options(read_only=True, sub_path=f"/{digest}/files")

    async def upload(self, digest: str) -> Upload:
        """Brings a world over, if it is not there. Concurrent calls share one upload.

        Raises:
            SandboxError, BackendRefusedError: as `volume`.
        """
        world = self._worlds.setdefault(digest, _UnderWay())
        async with world.lock:
            if world.upload is None:
                try:
                    world.upload = await self._bring(digest)
                except WorldError as error:
                    raise BackendRefusedError(error.message, hint=error.hint, quota=False) from error
                except SandboxError:
                    raise
                except Exception as error:
                    raise _told(error, digest) from error
        return world.upload

    async def _bring(self, digest: str) -> Upload:
        volume = await self._open()
        manifest = await anyio.to_thread.run_sync(self._files.check, digest)
        if f"{digest}/complete" in await _sizes(volume, f"/{digest}", recursive=False):
            return Upload(0, 0, len(manifest.files))
        there = await _sizes(volume, f"/{digest}", recursive=True)
        wanted = await anyio.to_thread.run_sync(lambda: dict(resolved(manifest)))
        missing = [
            (path, entry)
            for path, entry in sorted(wanted.items())
            if there.get(f"{digest}/files/{path}") != entry.size
        ]
        log.info("world %s: %d of %d files go to Modal", digest[:12], len(missing), len(wanted))
        for batch in _batches(missing):
            await self._send(volume, digest, batch)
        await _put(volume, f"/{digest}/manifest.json", manifest.content)
        await self._verify(volume, manifest, wanted)
        await _put(volume, f"/{digest}/complete", digest.encode())
        sent_bytes = sum(entry.size for _, entry in missing)
        return Upload(len(missing), sent_bytes, len(wanted) - len(missing))

    async def _open(self) -> Any:
        async with self._opening:
            if self._volume is None:
                modal = modal_client.load()
                volume = modal.Volume.from_name(
                    self.volume_name,
                    environment_name=self._environment,
                    create_if_missing=True,
                    version=2,
                    client=self._client(),
                )
                await volume.hydrate.aio()
                self._volume = volume
        return self._volume

    async def _send(self, volume: Any, digest: str, batch: Sequence[tuple[str, Entry]]) -> None:
        """One batch, committed as a whole. The client repeats single requests; this repeats the rest."""
        tree = self._files.tree(digest)
        for left in reversed(range(TRIES)):
            try:
                async with volume.batch_upload.aio(force=True) as upload:
                    for path, entry in batch:
                        # `entry` is what the path leads to: links are followed, so read where the content is.
                        upload.put_file(tree / entry.path, f"/{digest}/files/{path}", mode=entry.mounted_mode)
            except Exception as error:
                if not left or not _of_transfer(error):
                    raise
                log.warning("a batch of world %s failed, next try: %s", digest[:12], error)
            else:
                return

    async def _verify(self, volume: Any, manifest: Manifest, wanted: dict[str, Entry]) -> None:
        """Names and sizes of all files, and the whole manifest, as Modal has them.

        Content needs no second look: the client names each block by its SHA-256, and Modal takes no other.

        Raises:
            SandboxError: something is missing or different.
        """
        digest = manifest.digest
        there = await _sizes(volume, f"/{digest}", recursive=True)
        start = f"{digest}/files/"
        found = {path.removeprefix(start): size for path, size in there.items() if path.startswith(start)}
        expected = {path: entry.size for path, entry in wanted.items()}
        wrong = sorted(
            path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path)
        )
        if wrong:
            shown = ", ".join(wrong[:10])
            raise SandboxError(
                f"World {digest[:12]} on Modal differs from the one here in {len(wrong)} files: {shown}.",
                hint=f"If it stays so, remove /{digest} from the volume {self.volume_name}: "
                "it is uploaded again.",
            )
        parts = [part async for part in volume.read_file.aio(f"/{digest}/manifest.json")]
        if b"".join(parts) != manifest.content:
            raise SandboxError(f"The manifest of world {digest[:12]} came back changed from Modal.")


async def _sizes(volume: Any, folder: str, *, recursive: bool) -> dict[str, int]:
    """Sizes of files in, or below, a folder by path without the slash in front; none if it is not there."""
    kinds = modal_client.load()
    try:
        entries = await volume.listdir.aio(folder, recursive=recursive)
    except (kinds.exception.NotFoundError, FileNotFoundError):
        return {}
    return {
        entry.path.lstrip("/"): entry.size
        for entry in entries
        if entry.type == kinds.volume.FileEntryType.FILE
    }


async def _put(volume: Any, path: str, content: bytes) -> None:
    async with volume.batch_upload.aio(force=True) as upload:
        upload.put_file(io.BytesIO(content), path, mode=0o444)


def _batches(files: Sequence[tuple[str, Entry]]) -> Iterator[list[tuple[str, Entry]]]:
    """Files in order, cut so that a failure loses little and no request is too large."""
    batch: list[tuple[str, Entry]] = []
    size = 0
    for path, entry in files:
        if batch and (len(batch) >= BATCH_FILES or size + entry.size > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append((path, entry))
        size += entry.size
    if batch:
        yield batch


def _told(error: Exception, digest: str) -> EvalpurseError:
    """The error as ours; what is a defect and no failed transfer is raised as it is."""
    doing = f"the upload of world {digest[:12]}"
    if modal_client.is_client_error(error):
        return modal_client.told(error, doing)
    if not _of_transfer(error):
        raise error
    return SandboxError(f"Modal failed {doing}: {type(error).__name__}: {error}")


def _of_transfer(error: Exception) -> bool:
    """Whether an error comes from the way to Modal: its client, its web requests, or time running out."""
    import aiohttp

    return modal_client.is_client_error(error) or isinstance(
        error, (aiohttp.ClientError, TimeoutError, RuntimeError)
    )
