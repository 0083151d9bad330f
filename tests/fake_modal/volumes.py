"""Volumes of version 2: files put together from 8 MiB blocks that are uploaded once per content.

A volume is a folder; what a sandbox or an upload changes in it is there for all at once. (The real one shows
a mount what was committed when the container started, and later changes after a reload.)
"""

# ruff: noqa: N802 - methods carry the names that the protocol calls them by
from __future__ import annotations

import asyncio
import os
import shutil
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from tests.fake_modal.blobs import Blobs
from tests.fake_modal.cloud import Cloud
from tests.fake_modal.registry import Environments
from tests.fake_modal.wire import Empty, api, exists, invalid, new_id, not_found, unimplemented

BLOCK_BYTES = 8 << 20
LIST_BATCH = 500


@dataclass
class Volume:
    """One volume and the folder of its files."""

    id: str
    name: str
    environment: str
    folder: Path
    created_at: float

    def metadata(self) -> Any:
        info = api.CreationInfo(created_at=self.created_at, created_by="fake-user")
        return api.VolumeMetadata(version=api.VOLUME_FS_VERSION_V2, name=self.name, creation_info=info)

    def inside(self, path: str) -> Path:
        """The file of a path in the volume.

        Raises:
            GRPCError: the path leaves the volume.
        """
        parts = [part for part in PurePosixPath(path).parts if part not in {"/", "."}]
        if ".." in parts:
            raise invalid(f"Path '{path}' leaves the volume.")
        return self.folder.joinpath(*parts)


class Volumes:
    """The RPCs of `modal.Volume`, and counts of what deduplication saved."""

    def __init__(self, cloud: Cloud, environments: Environments, blobs: Blobs) -> None:
        self._cloud = cloud
        self._environments = environments
        self._blobs = blobs
        self.by_id: dict[str, Volume] = {}
        self.blocks_wanted = 0
        self.blocks_known = 0

    def get(self, volume_id: str) -> Volume:
        if volume_id not in self.by_id:
            raise not_found(f"Volume '{volume_id}' not found")
        return self.by_id[volume_id]

    def named(self, name: str, environment: str) -> Volume | None:
        return next((v for v in self.by_id.values() if (v.name, v.environment) == (name, environment)), None)

    def file(self, volume_id: str, path: str) -> Path:
        return self.get(volume_id).inside(path)

    async def VolumeGetOrCreate(self, request: Any, call: Any) -> Any:
        if request.version == api.VOLUME_FS_VERSION_V1:
            raise unimplemented("Volumes of version 1 are not imitated; ask for version=2.")
        environment = self._environments.resolve(request.environment_name)
        kind, name = request.object_creation_type, request.deployment_name
        volume = self.named(name, environment) if name else None
        if volume is not None and kind == api.OBJECT_CREATION_TYPE_CREATE_FAIL_IF_EXISTS:
            raise exists(f"Volume '{name}' already exists in environment '{environment}'")
        if volume is None:
            if kind == api.OBJECT_CREATION_TYPE_UNSPECIFIED:
                raise not_found(f"Volume '{name}' not found in environment '{environment}'")
            volume_id = new_id("vo")
            folder = self._cloud.folder / "volumes" / volume_id
            folder.mkdir(parents=True)
            volume = self.by_id[volume_id] = Volume(volume_id, name, environment, folder, time.time())
        return api.VolumeGetOrCreateResponse(
            volume_id=volume.id, version=api.VOLUME_FS_VERSION_V2, metadata=volume.metadata()
        )

    async def VolumeGetById(self, request: Any, call: Any) -> Any:
        volume = self.get(request.volume_id)
        return api.VolumeGetByIdResponse(volume_id=volume.id, metadata=volume.metadata())

    async def VolumeHeartbeat(self, request: Any, call: Any) -> Any:
        self.get(request.volume_id)
        return Empty()

    async def VolumeList(self, request: Any, call: Any) -> Any:
        environment = self._environments.resolve(request.environment_name)
        before = request.pagination.created_before or float("inf")
        found = [
            v
            for v in self.by_id.values()
            if v.name and v.environment == environment and v.created_at < before
        ]
        found.sort(key=lambda v: -v.created_at)
        items = [
            api.VolumeListItem(label=v.name, volume_id=v.id, created_at=v.created_at, metadata=v.metadata())
            for v in found[: request.pagination.max_objects or None]
        ]
        return api.VolumeListResponse(items=items, environment_name=environment)

    async def VolumeDelete(self, request: Any, call: Any) -> Any:
        volume = self.get(request.volume_id)
        del self.by_id[volume.id]
        await asyncio.to_thread(shutil.rmtree, volume.folder, ignore_errors=True)
        return Empty()

    async def VolumeRename(self, request: Any, call: Any) -> Any:
        volume = self.get(request.volume_id)
        if self.named(request.name, volume.environment) is not None:
            raise exists(f"Volume '{request.name}' already exists")
        volume.name = request.name
        return Empty()

    async def VolumePutFiles2(self, request: Any, call: Any) -> Any:
        volume = self.get(request.volume_id)
        if request.disallow_overwrite_existing_files:
            for file in request.files:
                if volume.inside(file.path).exists():
                    raise exists(f"File '{file.path}' already exists in the volume")
        missing, seen = [], set()
        for file_index, file in enumerate(request.files):
            for block_index, block in enumerate(file.blocks):
                digest = block.contents_sha256.hex()
                if not block.HasField("put_response"):
                    self.blocks_wanted += 1
                if digest in seen or self._blobs.has(digest):
                    self.blocks_known += 0 if block.HasField("put_response") else 1
                    continue
                seen.add(digest)
                missing.append(
                    api.VolumePutFiles2Response.MissingBlock(
                        file_index=file_index,
                        block_index=block_index,
                        put_url=f"{self._cloud.http_url}/block/{digest}",
                    )
                )
        if not missing:
            await asyncio.to_thread(self._commit, volume, request.files)
        return api.VolumePutFiles2Response(missing_blocks=missing)

    async def VolumeListFiles2(self, stream: Any, request: Any, call: Any) -> None:
        volume = self.get(request.volume_id)
        entries = await asyncio.to_thread(self._entries, volume, request.path, request.recursive)
        if request.HasField("max_entries"):
            entries = entries[: request.max_entries]
        for at in range(0, len(entries), LIST_BATCH):
            await stream.send_message(api.VolumeListFiles2Response(entries=entries[at : at + LIST_BATCH]))

    async def VolumeGetFile2(self, request: Any, call: Any) -> Any:
        path = self.file(request.volume_id, request.path)
        if not path.is_file():
            raise not_found(f"File '{request.path}' not found in the volume")
        size = path.stat().st_size
        length = min(request.len or size, size - request.start)
        base = f"{self._cloud.http_url}/volume/{request.volume_id}?path={quote(request.path, safe='')}"
        urls, at = [], request.start
        while at < request.start + length:
            end = min(request.start + length, (at // BLOCK_BYTES + 1) * BLOCK_BYTES)
            urls.append(f"{base}&start={at}&len={end - at}")
            at = end
        return api.VolumeGetFile2Response(get_urls=urls, size=size, start=request.start, len=length)

    async def VolumeRemoveFile2(self, request: Any, call: Any) -> Any:
        path = self.file(request.volume_id, request.path)
        if not path.exists():
            raise not_found(f"'{request.path}' not found in the volume")
        if not path.is_dir():
            path.unlink()
        elif request.recursive:
            await asyncio.to_thread(shutil.rmtree, path)
        else:
            raise invalid(f"'{request.path}' is a directory; remove it with recursive=True")
        return Empty()

    async def VolumeCopyFiles2(self, request: Any, call: Any) -> Any:
        volume = self.get(request.volume_id)
        await asyncio.to_thread(
            self._copy, volume, list(request.src_paths), request.dst_path, request.recursive
        )
        return Empty()

    def _commit(self, volume: Volume, files: Sequence[Any]) -> None:
        for file in files:
            target = volume.inside(file.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                raise invalid(f"'{file.path}' is a directory in the volume")
            partial = target.with_name(f".{os.urandom(6).hex()}.partial")
            with partial.open("wb") as content:
                for index, block in enumerate(file.blocks):
                    content.seek(index * BLOCK_BYTES)
                    with self._blobs.path(block.contents_sha256.hex()).open("rb") as source:
                        shutil.copyfileobj(source, content, 1 << 20)
                content.truncate(file.size)
            partial.chmod(file.mode if file.HasField("mode") else 0o644)
            partial.replace(target)

    def _entries(self, volume: Volume, path: str, recursive: bool) -> list[Any]:
        start = volume.inside(path)
        if not start.exists():
            raise not_found(f"'{path}' not found in the volume")
        if not start.is_dir():
            return [self._entry(volume, start)]
        return [
            self._entry(volume, entry) for entry in sorted(start.rglob("*") if recursive else start.iterdir())
        ]

    def _entry(self, volume: Volume, path: Path) -> Any:
        info = path.lstat()
        kind = api.FileEntry.FILE
        if stat.S_ISDIR(info.st_mode):
            kind = api.FileEntry.DIRECTORY
        elif stat.S_ISLNK(info.st_mode):
            kind = api.FileEntry.SYMLINK
        return api.FileEntry(
            path=path.relative_to(volume.folder).as_posix(),
            type=kind,
            mtime=int(info.st_mtime),
            size=info.st_size,
        )

    def _copy(self, volume: Volume, sources: Sequence[str], destination: str, recursive: bool) -> None:
        target = volume.inside(destination)
        for source in sources:
            path = volume.inside(source)
            if not path.exists():
                raise not_found(f"'{source}' not found in the volume")
            goal = target / path.name if target.is_dir() else target
            goal.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_dir():
                shutil.copy2(path, goal)
            elif recursive:
                shutil.copytree(path, goal, dirs_exist_ok=True)
            else:
                raise invalid(f"'{source}' is a directory; copy it with recursive=True")
