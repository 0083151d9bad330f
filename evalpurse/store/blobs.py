"""Content under the SHA-256 of itself: compressed, written once, verified on every read.

Transcripts, logs, artifacts and everything of a holdout case live here, where SQL cannot reach. A digest that
`put` returned is durable. Small content is packed (see `pack`); large content is a file of its own, named by
its digest and put in place by a rename, so a file that exists is a whole one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import anyio.to_thread

from evalpurse.store.disk import free_bytes, is_disk_full
from evalpurse.store.errors import (
    BlobDamagedError,
    BlobMissingError,
    DiskFullError,
    StoreClosedError,
    StoreError,
)
from evalpurse.store.folders import sync_folder
from evalpurse.store.pack import Pack, Row

CONTENT_BYTES_MAX = 1 << 30
PACKED_BYTES_MAX = 64 << 10  # compressed; above it a file of its own is no slower and keeps the pack small
INLINE_BYTES_MAX = 256 << 10  # hashed and compressed in about a millisecond
LEVEL = 3

_UNFINISHED = "unfinished-"


class Blobs:
    """The blobs in a folder. Every method is safe from any thread; `put_async` is for the event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opening = threading.Lock()
        self._opened: Pack | None = None
        self._closed = False

    def put(self, content: bytes) -> str:
        """Stores content and returns its digest (64 hex digits); durable, and idempotent.

        Raises:
            DiskFullError: nothing was stored; may be tried again.
            StoreError: larger than 1 GiB, or the store is closed.
        """
        return self.put_many([content])[0]

    def put_many(self, contents: Sequence[bytes]) -> list[str]:
        """Stores several contents for the price of about one; digests in the order given.

        Raises:
            As `put`. Some of the contents may be stored then.
        """
        digests, done = self._start(contents)
        if done is not None:
            done.result()
        return digests

    async def put_async(self, contents: Sequence[bytes]) -> list[str]:
        """As `put_many` for the event loop: without a thread when the contents are small.

        Raises:
            As `put`. Some of the contents may be stored then.
        """
        if sum(map(len, contents)) > INLINE_BYTES_MAX or self._opened is None:
            return await anyio.to_thread.run_sync(self.put_many, contents)
        digests, done = self._start(contents)
        if done is not None:
            await asyncio.wrap_future(done)
        return digests

    def get(self, digest: str) -> bytes:
        """The content with this digest.

        Raises:
            BlobMissingError: there is none.
            BlobDamagedError: what is stored is not that content; names the digest and the file.
        """
        path, stored = self._stored(digest)
        return _verified(digest, path, stored)

    def has(self, digest: str) -> bool:
        """Whether something is stored under this digest (it is not read)."""
        return self._pack().has(_digest_bytes(digest)) or self._file(digest).exists()

    def close(self) -> None:
        """Finishes what is being written; no call works afterwards."""
        with self._opening:
            self._closed = True
            if self._opened is not None:
                self._opened.close()

    def _pack(self) -> Pack:
        if self._opened is not None and not self._closed:
            return self._opened
        with self._opening:
            if self._closed:
                raise StoreClosedError("The store is closed.")
            if self._opened is None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                for leftover in self._folder.glob(f"{_UNFINISHED}*"):  # of a process that was killed
                    leftover.unlink()
                self._opened = Pack(self._folder / "pack.sqlite")
            return self._opened

    def _start(self, contents: Sequence[bytes]) -> tuple[list[str], Future[None] | None]:
        pack = self._pack()
        digests: list[str] = []
        small: list[Row] = []
        for content in contents:
            if len(content) > CONTENT_BYTES_MAX:
                raise StoreError(f"A blob of {len(content)} bytes is too large; at most {CONTENT_BYTES_MAX}.")
            digest = hashlib.sha256(content)
            digests.append(digest.hexdigest())
            compressed = _compress(content)
            if len(compressed) <= PACKED_BYTES_MAX:
                small.append(Row(digest.digest(), compressed))
            else:
                self._write_file(digest.hexdigest(), compressed)
        return digests, pack.submit(small) if small else None

    def _file(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest[2:4] / f"{digest}.zst"

    def _write_file(self, digest: str, compressed: bytes) -> None:
        path = self._file(digest)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                _write_whole(path, compressed, beside=self._folder)
            # Also when it existed: another thread may have put it there a moment ago.
            for folder in (path.parent, path.parent.parent, self._folder):
                sync_folder(folder)
        except OSError as error:
            if is_disk_full(error):
                raise DiskFullError(
                    self._folder,
                    free_bytes=free_bytes(self._folder),
                    doing=f"writing a blob of {len(compressed)} bytes",
                ) from error
            raise StoreError(f"Blob {digest} could not be written to {path}: {error}") from error

    def _stored(self, digest: str) -> tuple[Path, bytes]:
        pack, path = self._pack(), self._file(digest)
        try:
            packed = pack.get(_digest_bytes(digest))
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # its subclasses are about something else
                raise StoreError(f"Blob {digest} cannot be read from {pack.path}: {error}") from error
            raise _damaged(digest, pack.path, str(error)) from error
        if packed is not None:
            return pack.path, packed
        try:
            return path, path.read_bytes()
        except FileNotFoundError:
            raise BlobMissingError(
                f"There is no blob {digest}: neither in {pack.path} nor at {path}.",
                hint="It was deleted, or the database and the blobs are not of the same home folder.",
                digest=digest,
                path=str(path),
            ) from None


def _write_whole(path: Path, data: bytes, *, beside: Path) -> None:
    descriptor, unfinished = tempfile.mkstemp(dir=beside, prefix=_UNFINISHED)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


_compressors = threading.local()  # one is not to be used by two threads at once


def _compress(content: bytes) -> bytes:
    import zstandard

    compressor = getattr(_compressors, "zstd", None)
    if compressor is None:
        compressor = _compressors.zstd = zstandard.ZstdCompressor(level=LEVEL)
    compressed: bytes = compressor.compress(content)
    return compressed


def _verified(digest: str, path: Path, stored: bytes) -> bytes:
    import zstandard

    try:
        announced = zstandard.frame_content_size(stored)
        # A damaged header must not make us allocate what it announces.
        if not 0 <= announced <= CONTENT_BYTES_MAX:
            raise _damaged(digest, path, f"it announces {announced} bytes")
        content: bytes = zstandard.ZstdDecompressor().decompress(stored) if announced else b""
    except zstandard.ZstdError as error:
        raise _damaged(digest, path, str(error)) from error
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise _damaged(digest, path, f"its content has the digest {found}")
    return content


def _damaged(digest: str, path: Path, what: str) -> BlobDamagedError:
    return BlobDamagedError(
        f"Blob {digest} in {path} is damaged: {what}.",
        hint="Restore it from a backup; other blobs are not affected.",
        digest=digest,
        path=str(path),
    )


def _digest_bytes(digest: str) -> bytes:
    try:
        known = bytes.fromhex(digest)
    except ValueError:
        known = b""
    if len(known) != 32 or digest != digest.lower():
        raise BlobMissingError(f"'{digest}' is not a digest: 64 lower-case hex digits.", digest=digest)
    return known
