"""Content by sha256, and the HTTP side of uploads and downloads.

The client sends what is large past gRPC: volume blocks and blobs are PUT to, and read from, URLs that an RPC
named. Faults apply to these requests too, under the names `BlockPut`, `BlockGet` and `BlobPut`.
"""

# ruff: noqa: N802 - methods carry the names that the protocol calls them by
from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.fake_modal.cloud import Cloud
from tests.fake_modal.faults import Faults
from tests.fake_modal.wire import api, new_id, not_found

MAX_BODY_BYTES = 1 << 30
HTTP_OF = {"UNAVAILABLE": 503, "NOT_FOUND": 404, "RESOURCE_EXHAUSTED": 429, "PERMISSION_DENIED": 403}


class Blobs:
    """Files named by the sha256 of what is in them."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self.folder = cloud.folder / "blobs"
        self.folder.mkdir()
        self._uploads: dict[str, bytes | None] = {}
        self.stored = 0
        self.received_bytes = 0

    def path(self, digest: str) -> Path:
        return self.folder / digest[:2] / digest

    def has(self, digest: str) -> bool:
        return self.path(digest).exists()

    def put(self, digest: str, data: bytes) -> None:
        path = self.path(digest)
        if path.exists():
            return
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(f".{os.urandom(4).hex()}")
        partial.write_bytes(data)
        partial.replace(path)
        self.stored += 1

    def get(self, digest: str) -> bytes:
        return self.path(digest).read_bytes()

    def uploaded(self, blob_id: str) -> bytes:
        data = self._uploads.get(blob_id)
        if data is None:
            raise not_found(f"Blob '{blob_id}' was not uploaded")
        return data

    def receive(self, blob_id: str, data: bytes) -> None:
        self._uploads[blob_id] = data

    def expects(self, blob_id: str) -> bool:
        return blob_id in self._uploads

    async def BlobCreate(self, request: Any, call: Any) -> Any:
        blob_id = new_id("bl")
        self._uploads[blob_id] = None
        return api.BlobCreateResponse(blob_id=blob_id, upload_url=f"{self._cloud.http_url}/blob/{blob_id}")

    async def BlobGet(self, request: Any, call: Any) -> Any:
        self.uploaded(request.blob_id)
        return api.BlobGetResponse(download_url=f"{self._cloud.http_url}/blob/{request.blob_id}")


class HttpSide:
    """The web server beside gRPC: blocks, blobs, and the door of `RemoteFake`."""

    def __init__(
        self,
        blobs: Blobs,
        faults: Faults,
        volume_file: Callable[[str, str], Path],
        admin: Callable[[str, dict[str, Any]], Awaitable[Any]],
    ) -> None:
        self._blobs = blobs
        self._faults = faults
        self._volume_file = volume_file
        self._admin = admin
        self.counts: dict[str, int] = {}

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_put("/block/{digest}", self._put_block)
        app.router.add_get("/volume/{volume}", self._get_block)
        app.router.add_put("/blob/{blob}", self._put_blob)
        app.router.add_get("/blob/{blob}", self._get_blob)
        app.router.add_post("/admin", self._admin_call)
        return app

    async def _put_block(self, request: web.Request) -> web.Response:
        digest = request.match_info["digest"]
        if (broken := await self._suffer("BlockPut", request, digest)) is not None:
            return broken
        data = await request.read()
        self._blobs.received_bytes += len(data)
        actual = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        if actual != digest:
            return web.Response(status=400, text=f"the block has sha256 {actual}, not {digest}")
        await asyncio.to_thread(self._blobs.put, digest, data)
        return web.Response(body=b"stored:" + digest.encode())

    async def _get_block(self, request: web.Request) -> web.StreamResponse:
        path, start, length = (request.query[key] for key in ("path", "start", "len"))
        if (broken := await self._suffer("BlockGet", request, path)) is not None:
            return broken

        def read() -> bytes:
            with self._volume_file(request.match_info["volume"], path).open("rb") as file:
                file.seek(int(start))
                return file.read(int(length))

        return web.Response(body=await asyncio.to_thread(read))

    async def _put_blob(self, request: web.Request) -> web.Response:
        blob_id = request.match_info["blob"]
        if (broken := await self._suffer("BlobPut", request, blob_id)) is not None:
            return broken
        if not self._blobs.expects(blob_id):
            return web.Response(status=404, text=f"no upload {blob_id} is expected")
        data = await request.read()
        self._blobs.receive(blob_id, data)
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return web.Response(headers={"ETag": f'"{md5}"'})

    async def _get_blob(self, request: web.Request) -> web.Response:
        return web.Response(body=self._blobs.uploaded(request.match_info["blob"]))

    async def _admin_call(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            return web.json_response({"result": await self._admin(body["method"], body["params"])})
        except Exception as error:  # noqa: BLE001 - told to the caller, who raises it
            return web.json_response({"error": f"{type(error).__name__}: {error}"})

    async def _suffer(self, name: str, request: web.Request, subject: str) -> web.Response | None:
        self.counts[name] = self.counts.get(name, 0) + 1
        fault = self._faults.take(name, [subject])
        if fault is None:
            return None
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.hang:
            await self._faults.hold(name)
        if fault.after_bytes is not None:
            await request.content.read(fault.after_bytes)
        if fault.disconnect and request.transport is not None:
            request.transport.abort()
        return (
            web.Response(status=HTTP_OF.get(fault.status, 500), text=fault.message) if fault.status else None
        )
