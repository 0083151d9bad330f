"""Room on the disk: how much there is, and a reserve that is given up when there is none.

A full disk is the one failure that takes the means to recover with it. The ballast is a file of real bytes
that nobody needs: deleting it lets the database be closed, opened and checkpointed, and the ledger settle.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

log = logging.getLogger(__name__)

BALLAST_BYTES = 64 << 20
BALLAST_ONLY_ABOVE_FREE_BYTES = 2 << 30


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write in the file system of a folder."""
    return shutil.disk_usage(folder).free


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of the system, SQLite or DuckDB (which only has words for it) says: no room."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    text = str(error).lower()
    return any(words in text for words in ("no space left", "disk is full", "disk quota exceeded"))


class Ballast:
    """A reserve of `size_bytes` at `path`, made only while more than `only_above_free_bytes` are free."""

    def __init__(self, path: Path, *, size_bytes: int, only_above_free_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._only_above_free_bytes = only_above_free_bytes

    def keep(self) -> None:
        """Makes the reserve where it is missing and there is plenty of room."""
        if self._path.exists() or free_bytes(self._path.parent) < self._only_above_free_bytes:
            return
        if not self._size_bytes:
            return
        unfinished = self._path.with_suffix(".new")
        try:
            _write_real_bytes(unfinished, self._size_bytes)
            unfinished.replace(self._path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            log.warning("no ballast was made at %s: %s", self._path, error)

    def drop(self) -> bool:
        """Gives the reserve up because the disk is full; whether there was one."""
        given_up = self.remove()
        if given_up:
            log.error("the disk is full: deleted the reserve of %d bytes at %s", self._size_bytes, self._path)
        return given_up

    def remove(self) -> bool:
        """Deletes the reserve, as when the store is closed; whether there was one."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True


def _write_real_bytes(path: Path, size_bytes: int) -> None:
    # A sparse file would free nothing when it is deleted.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size_bytes)
            return
        block = os.urandom(1 << 20)  # not zeros: a compressing file system would store nothing
        for written in range(0, size_bytes, len(block)):
            os.write(descriptor, block[: size_bytes - written])
    finally:
        os.close(descriptor)
