"""Worlds: named, immutable sets of files that runs start from.

A name always stands for one digest. The row is written last, when all files are on the disk: a world that is
listed is there as a whole, and an add that did not finish is not seen anywhere.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from evalpurse.home import Home
from evalpurse.runs.errors import UnknownWorldError, WorldError, WorldExistsError
from evalpurse.runs.sandboxes.world_files import WorldFiles
from evalpurse.runs.sandboxes.world_manifest import Manifest
from evalpurse.store.database import Store
from evalpurse.store.records import WorldRow

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_LIKE_DIGEST = re.compile(r"[0-9a-f]{6,64}")

T = TypeVar("T")


@dataclass(frozen=True)
class AddedWorld:
    """An added world. `existing`: it had been added before under this name; `stored_*` is what was new."""

    row: WorldRow
    existing: bool
    stored_files: int
    stored_bytes: int


@dataclass(frozen=True)
class WorldMount:
    """A world that is whole and ready to be mounted. `folder` is read-only by its permissions."""

    digest: str
    folder: Path
    manifest_file: Path
    manifest: Manifest


class Worlds:
    """Adds, finds and checks worlds. One instance a home folder."""

    def __init__(self, store: Store, home: Home) -> None:
        self._store = store
        self._files = WorldFiles(home.worlds)
        self._adding = anyio.Lock()

    @property
    def files(self) -> WorldFiles:
        """Where the files of all worlds are."""
        return self._files

    async def add(self, folder: Path, name: str) -> AddedWorld:
        """Takes a folder in under a name, whole or not at all.

        What a try that was interrupted has copied is not copied again by the next one. The same folder under
        the same name changes nothing.

        Raises:
            WorldError: the name or the folder cannot be used; names what is in the way.
            WorldChangedError: files changed meanwhile.
            WorldExistsError: the name stands for other files.
        """
        if not NAME.fullmatch(name) or _LIKE_DIGEST.fullmatch(name):
            raise WorldError(
                f"{name!r} cannot be the name of a world.",
                hint="Names are 1 to 100 letters, digits, dots, dashes and underscores, and do not look "
                "like a digest.",
            )
        async with self._adding:
            added = await _in_thread(functools.partial(self._files.add, folder))
            rows = await self.list()
            known = next((row for row in rows if row.world == name), None)
            fits = known is None or known.world_digest == added.manifest.digest
            row = known or await self._name(name, added.manifest)
            kept = {row.world_digest, *(other.world_digest for other in rows)}
            await anyio.to_thread.run_sync(self._files.keep_only, kept)
        if not fits:
            raise WorldExistsError(
                f"World '{name}' exists with digest {row.world_digest[:12]}; the folder has "
                f"{added.manifest.digest[:12]}.",
                hint="A world never changes: choose another name. Nothing was added.",
                existing_digest=row.world_digest,
                given_digest=added.manifest.digest,
            )
        return AddedWorld(row, known is not None, added.stored_files, added.stored_bytes)

    async def _name(self, name: str, manifest: Manifest) -> WorldRow:
        blob = await anyio.to_thread.run_sync(self._store.blobs.put, manifest.content)
        row = WorldRow(name, manifest.digest, len(manifest.files), manifest.bytes, blob, datetime.now(UTC))
        await self._store.append([row])
        return row

    async def list(self) -> Sequence[WorldRow]:
        """All worlds, oldest first."""
        return [WorldRow(**row) for row in await self._store.fetch("list_worlds")]

    async def get(self, world: str) -> WorldRow:
        """The world of a name, of a digest, or of the first 6 or more characters of a digest.

        Raises:
            UnknownWorldError: there is none; names the nearest.
            WorldError: several digests start like this.
        """
        rows = await self._store.fetch("world_by_name", world=world)
        if not rows and _LIKE_DIGEST.fullmatch(world):
            rows = await self._store.fetch("worlds_by_digest", prefix=world)
            if len({row["world_digest"] for row in rows}) > 1:
                names = ", ".join(row["world"] for row in rows)
                raise WorldError(f"Several worlds have a digest that starts with {world}: {names}.")
        if not rows:
            raise UnknownWorldError.named(world, [row.world for row in await self.list()])
        return WorldRow(**rows[0])

    async def show(self, world: str) -> tuple[WorldRow, Manifest]:
        """A world with the list of all that is in it.

        Raises:
            UnknownWorldError, WorldError: as `get`.
            WorldDamagedError: the list is gone.
        """
        row = await self.get(world)
        return row, await anyio.to_thread.run_sync(self._files.manifest, row.world_digest)

    async def verify(self, world: str) -> Sequence[str]:
        """Reads all files of a world and compares them with its manifest; what differs, or nothing.

        Raises:
            UnknownWorldError, WorldError: as `get`.
            WorldDamagedError: the manifest itself is gone or damaged.
        """
        row = await self.get(world)
        return await _in_thread(functools.partial(self._files.verify, row.world_digest))

    async def mount(self, world: str) -> WorldMount:
        """A world to be mounted, after a check of names, sizes, permissions and times of all its files.

        Raises:
            UnknownWorldError, WorldError: as `get`.
            WorldDamagedError: it is not what it was.
        """
        digest = (await self.get(world)).world_digest
        manifest = await anyio.to_thread.run_sync(self._files.check, digest)
        return WorldMount(digest, self._files.tree(digest), self._files.manifest_file(digest), manifest)


async def _in_thread(work: Callable[[threading.Event], T]) -> T:
    """Long work, told to stop when the caller is cancelled: nobody should wait for gigabytes to be read."""
    stop = threading.Event()
    try:
        return await anyio.to_thread.run_sync(work, stop, abandon_on_cancel=True)
    finally:
        stop.set()
