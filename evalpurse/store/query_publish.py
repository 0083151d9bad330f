"""Copies of public tables for the query worker: one Arrow file a table, in memory where the system allows.

All tables of a query come from one snapshot of the store. A copy is used again while the store has not
changed, and for about half a second more when it is big; older ones are removed, and the rest stays within a
bound. Files of a query that is running stay until it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import anyio
import anyio.to_thread

from evalpurse.home import Home
from evalpurse.store.errors import QueryFailedError
from evalpurse.store.policy import PUBLIC
from evalpurse.store.query_worker import NOBODY

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

QUERY_BYTES_MAX: Final = 1_000_000_000
CACHE_BYTES_MAX: Final = 512_000_000
BIG_BYTES: Final = 8_000_000  # copying less costs a few milliseconds: always fresh
REUSE_S: Final = 0.5
REUSE_FACTOR: Final = (
    3.0  # or so many times as long as the copy took, so that copying is never all that is done
)
SPARE_BYTES: Final = 16_000_000
_PREFIX: Final = f"evalpurse-query-{os.getuid()}-"
_ABANDONED_S: Final = 60.0


class PublishedStore(Protocol):
    """What is needed of the store."""

    @property
    def data_version(self) -> int:
        """Another number after every commit; read before the rows, these are at least as new."""
        ...

    async def snapshot(self, statements: Mapping[str, str]) -> Mapping[str, pa.Table]:
        """The results of several SELECTs, all read in one read-only transaction."""
        ...


@dataclass
class Copy:
    """One published table. Copies with the same `snapshot` were read together."""

    name: str
    path: Path
    size_bytes: int
    version: int
    snapshot: int
    read_at: float
    reusable_until: float
    used_at: float
    readers: int = 0


class Published(NamedTuple):
    """Where a query's tables are, and the age in seconds of what they show (0: nothing has changed since)."""

    paths: dict[str, str]
    age_s: float


class Publisher:
    """Publishes tables into private folders that it makes on first use and removes when closed."""

    def __init__(self, store: PublishedStore, home: Home, *, roots: Iterable[Path] | None = None) -> None:
        self._store = store
        self._roots = tuple(roots) if roots is not None else default_roots()
        self._prefix = f"{_PREFIX}{hashlib.sha256(os.fsencode(home.path)).hexdigest()[:8]}-"
        self._folders: dict[Path, tuple[Path, int]] = {}
        self._copies: dict[str, Copy] = {}
        self._outdated: list[Copy] = []
        self._publishing = anyio.Lock()
        self._snapshots = 0
        for root in self._roots:
            remove_abandoned(root)

    @asynccontextmanager
    async def publish(self, names: frozenset[str]) -> AsyncIterator[Published]:
        """The files of some public tables, for as long as the block runs.

        Raises:
            QueryFailedError: they are too big, or there is no room for them; says how big.
        """
        async with self._publishing:
            copies, age_s = self._reusable(names)
            if len(copies) < len(names):
                copies, age_s = await self._read(names), 0.0
            for copy in copies:
                copy.readers += 1
                copy.used_at = time.monotonic()
        try:
            yield Published({copy.name: str(copy.path) for copy in copies}, age_s)
        finally:
            for copy in copies:
                copy.readers -= 1
            self._evict()

    def _reusable(self, names: frozenset[str]) -> tuple[list[Copy], float]:
        copies = [self._copies[name] for name in sorted(names) if name in self._copies]
        if len(copies) < len(names):
            return [], 0.0
        version = self._store.data_version
        if all(copy.version == version for copy in copies):
            return copies, 0.0
        now = time.monotonic()
        together = len({copy.snapshot for copy in copies}) == 1
        if together and any(copy.size_bytes > BIG_BYTES and now < copy.reusable_until for copy in copies):
            return copies, now - copies[0].read_at
        return [], 0.0

    async def _read(self, names: frozenset[str]) -> list[Copy]:
        """Reads all of them, even those that are current: only one snapshot is sure to be consistent."""
        read_at, version = time.monotonic(), self._store.data_version
        tables = await self._store.snapshot({name: PUBLIC[name].statement for name in sorted(names)})
        total_bytes = sum(table.nbytes for table in tables.values())
        if total_bytes > QUERY_BYTES_MAX:
            sizes = ", ".join(f"{name} {table.nbytes / 1e6:,.0f} MB" for name, table in tables.items())
            raise QueryFailedError(
                f"The tables of this query have {total_bytes / 1e6:,.0f} MB ({sizes});"
                f" {QUERY_BYTES_MAX / 1e6:,.0f} MB are allowed.",
                hint="Read fewer tables in one query.",
            )
        paths = await anyio.to_thread.run_sync(self._write, tables, total_bytes)
        self._snapshots += 1
        now = time.monotonic()
        reusable_until = now + max(REUSE_S, REUSE_FACTOR * (now - read_at))
        copies = []
        for name, path in paths.items():
            if name in self._copies:
                self._outdated.append(self._copies.pop(name))
            size_bytes = path.stat().st_size
            copy = Copy(name, path, size_bytes, version, self._snapshots, read_at, reusable_until, now)
            self._copies[name] = copy
            copies.append(copy)
        return copies

    def _write(self, tables: Mapping[str, pa.Table], total_bytes: int) -> dict[str, Path]:
        failures = []
        for root in self._roots:
            paths: dict[str, Path] = {}
            try:
                free_bytes = shutil.disk_usage(root).free
                if free_bytes < total_bytes + SPARE_BYTES:
                    failures.append(f"{root} has {free_bytes / 1e6:,.0f} MB free")
                    continue
                for name, table in tables.items():
                    paths[name] = self._folder(root) / f"{name}-{secrets.token_hex(8)}.arrow"
                    _write_table(table, paths[name])
            except OSError as error:
                _remove(paths)
                failures.append(f"{root}: {error.strerror or error}")
            except BaseException:
                _remove(paths)
                raise
            else:
                return paths
        raise QueryFailedError(
            f"There is no room to copy {', '.join(tables)} ({total_bytes / 1e6:,.0f} MB) for a query:"
            f" {'; '.join(failures)}.",
            hint="Free some memory, or space in the temp folder.",
        )

    def _folder(self, root: Path) -> Path:
        """This process's private folder under a root, locked while the process lives."""
        if root not in self._folders:
            folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=root))
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._folders[root] = (folder, lock)
            let_worker_read(folder, 0o710)
        return self._folders[root][0]

    def _evict(self) -> None:
        """Forgets what is outdated and, beyond the bound, what was not used for longest."""
        now, version = time.monotonic(), self._store.data_version
        kept_bytes = sum(copy.size_bytes for copy in self._copies.values())
        for copy in sorted(self._copies.values(), key=lambda copy: copy.used_at):
            young = copy.size_bytes > BIG_BYTES and now < copy.reusable_until
            outdated = copy.version != version and not young
            if copy.readers == 0 and (outdated or kept_bytes > CACHE_BYTES_MAX):
                kept_bytes -= copy.size_bytes
                self._outdated.append(self._copies.pop(copy.name))
        for copy in [copy for copy in self._outdated if copy.readers == 0]:
            copy.path.unlink(missing_ok=True)
            self._outdated.remove(copy)

    def close(self) -> None:
        """Removes every file and folder."""
        for folder, lock in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
        self._folders.clear()
        self._copies.clear()
        self._outdated.clear()


def _write_table(table: pa.Table, path: Path) -> None:
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    let_worker_read(path, 0o640)


def _remove(paths: dict[str, Path]) -> None:
    for path in paths.values():
        path.unlink(missing_ok=True)


def let_worker_read(path: Path, mode: int) -> None:
    """A worker that gave up root reads through its group; it can list and write nothing."""
    if os.geteuid() == 0:
        os.chown(path, 0, NOBODY)
        path.chmod(mode)


def default_roots() -> tuple[Path, ...]:
    """Memory first, where the system has it; then the temp folder, in case memory is small."""
    roots = (Path("/dev/shm"), Path(tempfile.gettempdir()))  # noqa: S108 - private folders inside, mode 0700
    return tuple(root for root in roots if root.is_dir() and os.access(root, os.W_OK | os.X_OK))


def remove_abandoned(root: Path) -> None:
    """Removes the folders of processes that died: those whose lock nobody holds."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            stat = folder.lstat()
            if not folder.is_dir() or folder.is_symlink() or stat.st_uid != os.getuid():
                continue
            # A folder without its lock is one being made this moment, unless it is old.
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            if folder.exists() and time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)
            continue
        except OSError:
            continue  # not ours to judge
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(lock)
