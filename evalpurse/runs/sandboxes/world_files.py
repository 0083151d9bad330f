"""The files of all worlds of one home: each content once, each world a folder of hard links to it.

A world is there when its manifest is, which is written last; until then nothing can mount it, and what an
interrupted add has stored is found again by the next one. What lies here is never written to: nobody may
write to it by its permissions, and its time is a fixed one, so that a change shows without reading.

    objects/ab/ab12....444   a content with the permissions that it is mounted with
    trees/DIGEST/            what is mounted
    manifests/DIGEST.json    what it is made of
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from evalpurse.runs.errors import WorldChangedError, WorldDamagedError, WorldError
from evalpurse.runs.sandboxes.world_manifest import PROBLEMS_SHOWN, Entry, Manifest, Seen, scan, stamp_of

TIME_S = 1_000_000_000
"""The modification time of every stored file, in seconds since the epoch."""

THREADS = min(4, os.cpu_count() or 1)
SMALL_BYTES = 1 << 20
_STEP_BYTES = 1 << 20
_CHUNK = 256
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Added:
    """What an add did. `stored_files` and `stored_bytes` were not in the home before."""

    manifest: Manifest
    stored_files: int
    stored_bytes: int


class WorldFiles:
    """Adds, checks and finds worlds by their digest. Blocking; safe to call from several threads."""

    def __init__(self, folder: Path) -> None:
        """`folder` is made at the first add."""
        self._folder = folder
        self._adding = threading.Lock()
        self._manifests: dict[str, Manifest] = {}

    def tree(self, digest: str) -> Path:
        """The folder to mount."""
        return self._folder / "trees" / digest

    def manifest_file(self, digest: str) -> Path:
        return self._folder / "manifests" / f"{digest}.json"

    def manifest(self, digest: str) -> Manifest:
        """What a world is made of.

        Raises:
            WorldDamagedError: the manifest is gone, or is not what its digest says.
        """
        known = self._manifests.get(digest)
        if known is None:
            try:
                known = Manifest.parse(self.manifest_file(digest).read_bytes(), digest)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise _damaged(digest, [f"its manifest cannot be read: {error}"]) from error
            self._manifests[digest] = known
        return known

    def add(self, source: Path, stop: threading.Event | None = None) -> Added:
        """Takes a folder in, whole or not at all. Ends early, with an error, once `stop` is set.

        Raises:
            WorldError: the folder cannot be a world; names what is in the way.
            WorldChangedError: files changed meanwhile.
        """
        root = os.path.realpath(source)
        if not os.path.isdir(root):
            raise WorldError(
                f"{source} is not a folder.", hint="Name the folder that holds the world's files."
            )
        own = os.path.realpath(self._folder)
        if own == root or own.startswith(f"{root}/") or root.startswith(f"{own}/"):
            raise WorldError(
                f"{source} holds, or is held by, the folder in which worlds are kept.",
                hint="Add a folder outside of the evalpurse home.",
            )
        try:
            with self._adding:
                return self._add(root, stop or threading.Event())
        except OSError as error:
            raise WorldError(
                f"{source} cannot be added: {error}.",
                hint="Nothing was added. What was copied is used by the next try.",
            ) from error

    def check(self, digest: str) -> Manifest:
        """Compares names, kinds, sizes, permissions and times with the manifest, without reading content.

        Raises:
            WorldDamagedError: they differ; names the first files.
        """
        manifest = self.manifest(digest)
        problems = self._differences(manifest)
        if problems:
            raise _damaged(digest, problems)
        return manifest

    def verify(self, digest: str, stop: threading.Event | None = None) -> list[str]:
        """Reads every file and compares it with the manifest; the list of what differs.

        A file whose content differs is marked, so that no `check` passes it from then on.

        Raises:
            WorldDamagedError: the manifest itself is gone or damaged.
        """
        self._manifests.pop(digest, None)
        manifest = self.manifest(digest)
        tree = self.tree(digest)
        stop = stop or threading.Event()

        def read(entry: Entry) -> str:
            path = tree / entry.path
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                return f"{entry.path}: {error.strerror}"
            if found == entry.sha256:
                return ""
            with contextlib.suppress(OSError):
                os.utime(path)
            return f"{entry.path}: its content has changed"

        changed = [problem for problem in _in_threads(read, manifest.files, stop) if problem]
        named = {problem.partition(":")[0] for problem in changed}
        return changed + [
            problem for problem in self._differences(manifest) if problem.partition(":")[0] not in named
        ]

    # Adding

    def keep_only(self, digests: Collection[str]) -> None:
        """Removes the files of all other worlds: of adds that came to no end."""
        with self._adding:
            for tree in (self._folder / "trees").glob("*"):
                if tree.name not in digests:
                    self.manifest_file(tree.name).unlink(missing_ok=True)
                    self._manifests.pop(tree.name, None)
                    _remove(tree)
            self._drop_unused()

    def _add(self, root: str, stop: threading.Event) -> Added:
        for name in ("objects", "trees", "manifests"):
            (self._folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        seen = scan(root)
        stored: dict[str, int] = {}

        def take(one: Seen) -> Entry:
            entry, new = self._take(root, one)
            if new:
                stored[self._object(entry)] = entry.size
            return entry

        files = [one for one in seen.values() if one.entry.kind == "file"]
        others = [one.entry for one in seen.values() if one.entry.kind != "file"]
        manifest = Manifest.of([*_in_threads(take, files, stop), *others])
        _refuse_changes(root, seen)
        if not self._is_whole(manifest):
            self._place(manifest)
        return Added(manifest, len(stored), sum(stored.values()))

    def _take(self, root: str, seen: Seen) -> tuple[Entry, bool]:
        """Hashes one file and stores its content if it is not there; whether it was new."""
        entry = seen.entry
        path = f"{root}/{entry.path}"
        try:
            fd = os.open(path, _OPEN)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                raise _changed([entry.path]) from error
            raise
        try:
            if stamp_of(os.fstat(fd)) != seen.stamp:
                raise _changed([entry.path])
            content = _read(fd, SMALL_BYTES + 1) if entry.size <= SMALL_BYTES else None
            sha256 = hashlib.sha256(content).hexdigest() if content is not None else _hash(fd)
            known = Entry(entry.path, "file", entry.mode, entry.uid, entry.gid, entry.size, sha256)
            target = self._object(known)
            new = not _is_intact(target, known)
            if new:
                self._store(fd, content, target, known)
            if stamp_of(os.fstat(fd)) != seen.stamp:
                raise _changed([entry.path])
        finally:
            os.close(fd)
        return known, new

    def _object(self, entry: Entry) -> str:
        name = f"{entry.sha256}.{entry.mounted_mode:o}"
        return f"{self._folder}/objects/{entry.sha256[:2]}/{name}"

    def _store(self, fd: int, content: bytes | None, target: str, entry: Entry) -> None:
        """Copies a content in; appears under its name only when it is whole."""
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        partial = f"{self._folder}/objects/.{threading.get_native_id()}.partial"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        out = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            copied = entry.sha256
            if content is None:
                copied = _copy(fd, out)
            else:
                _write(out, content)
            os.fchmod(out, entry.mounted_mode)
            os.utime(out, (TIME_S, TIME_S))
        except BaseException:
            os.unlink(partial)
            raise
        finally:
            os.close(out)
        if copied != entry.sha256:
            os.unlink(partial)
            raise _changed([entry.path])
        os.replace(partial, target)

    def _is_whole(self, manifest: Manifest) -> bool:
        try:
            self.check(manifest.digest)
        except WorldDamagedError:
            return False
        return True

    def _place(self, manifest: Manifest) -> None:
        """Builds the folder of a world aside, moves it into place, and then says that it is there."""
        tree, listed = self.tree(manifest.digest), self.manifest_file(manifest.digest)
        listed.unlink(missing_ok=True)
        for leftover in (self._folder / "trees").glob(".*"):
            _remove(leftover)
        partial = tree.with_name(f".{manifest.digest}")
        partial.mkdir(mode=0o700)
        self._fill(str(partial), manifest)
        if tree.exists():
            _remove(tree)
        partial.rename(
            tree
        )  # before its own folder is closed: moving a folder needs the right to write to it
        tree.chmod(0o500)
        os.sync()  # the content of all files is on the disk before the manifest vouches for it
        new = listed.with_suffix(".new")
        new.write_bytes(manifest.content)
        new.chmod(0o400)
        new.replace(listed)
        self._manifests[manifest.digest] = manifest

    def _fill(self, partial: str, manifest: Manifest) -> None:
        folders = [entry for entry in manifest.entries if entry.kind == "folder"]
        for entry in folders:
            os.mkdir(f"{partial}/{entry.path}", 0o700)
        for entry in manifest.entries:
            if entry.kind == "file":
                self._link(self._object(entry), f"{partial}/{entry.path}", entry)
            elif entry.kind == "link":
                os.symlink(entry.target, f"{partial}/{entry.path}")
        for entry in reversed(folders):
            os.chmod(f"{partial}/{entry.path}", entry.mounted_mode)

    def _link(self, stored: str, path: str, entry: Entry) -> None:
        try:
            os.link(stored, path)
        except OSError as error:
            # No links on this file system, or as many names as one file can have.
            if error.errno not in (errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV):
                raise
            shutil.copyfile(stored, path)
            os.chmod(path, entry.mounted_mode)
            os.utime(path, (TIME_S, TIME_S))

    def _drop_unused(self) -> None:
        """Removes contents that no world has: of adds that were given up."""
        for folder, _, names in os.walk(self._folder / "objects"):
            for name in names:
                path = f"{folder}/{name}"
                if os.lstat(path).st_nlink == 1:
                    os.unlink(path)

    # Checking

    def _differences(self, manifest: Manifest) -> list[str]:
        """What in a world's folder is not as the manifest has it, seen from outside."""
        tree = str(self.tree(manifest.digest))
        expected = {entry.path: entry for entry in manifest.entries}
        problems: list[str] = []
        pending = [""]
        while pending:
            folder = pending.pop()
            try:
                with os.scandir(f"{tree}/{folder}") as entries:
                    for found in entries:
                        path = f"{folder}/{found.name}" if folder else found.name
                        entry = expected.pop(path, None)
                        if entry is None:
                            problems.append(f"{path!r}: is not in the manifest")
                            continue
                        why = _difference(entry, found)
                        if why:
                            problems.append(f"{path}: {why}")
                        elif entry.kind == "folder":
                            pending.append(path)
            except OSError as error:
                problems.append(f"{folder or 'its folder'}: {error.strerror}")
        missing = sorted(expected)
        return problems + [f"{path}: is missing" for path in missing]


def _difference(entry: Entry, found: os.DirEntry[str]) -> str:
    facts = found.stat(follow_symlinks=False)
    if entry.kind == "link":
        same = stat.S_ISLNK(facts.st_mode) and os.readlink(found.path) == entry.target
        return "" if same else "is not the link that it was"
    if entry.kind == "folder":
        return "" if stat.S_ISDIR(facts.st_mode) else "is not a folder"
    if not stat.S_ISREG(facts.st_mode):
        return "is not a file"
    if facts.st_size != entry.size:
        return f"has {facts.st_size} bytes instead of {entry.size}"
    if stat.S_IMODE(facts.st_mode) != entry.mounted_mode:
        return f"has the permissions {stat.S_IMODE(facts.st_mode):o} instead of {entry.mounted_mode:o}"
    return "" if facts.st_mtime_ns == TIME_S * 10**9 else "was written to"


def _is_intact(path: str, entry: Entry) -> bool:
    """Whether a stored content is there and untouched, seen from outside."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return False
    return (
        stat.S_ISREG(facts.st_mode)
        and facts.st_size == entry.size
        and stat.S_IMODE(facts.st_mode) == entry.mounted_mode
        and facts.st_mtime_ns == TIME_S * 10**9
    )


def _refuse_changes(root: str, before: dict[str, Seen]) -> None:
    """Looks at everything once more.

    Raises:
        WorldChangedError: names what was changed, added or removed since.
    """
    after = scan(root)
    changed = [path for path in before.keys() | after.keys() if _moved(before.get(path), after.get(path))]
    if changed:
        raise _changed(changed)


def _moved(before: Seen | None, after: Seen | None) -> bool:
    if before is None or after is None:
        return True
    if before.entry.kind == "file" or after.entry.kind == "file":
        return before.stamp != after.stamp
    return before.entry != after.entry


def _changed(paths: Sequence[str]) -> WorldChangedError:
    shown = ", ".join(sorted(paths)[:PROBLEMS_SHOWN])
    more = len(paths) - PROBLEMS_SHOWN
    return WorldChangedError(
        f"Changed while it was added: {shown}" + (f" and {more} more." if more > 0 else "."),
        hint="Stop what writes there, or add a copy. Nothing was added.",
    )


def _damaged(digest: str, problems: Sequence[str]) -> WorldDamagedError:
    more = len(problems) - PROBLEMS_SHOWN
    return WorldDamagedError(
        f"World {digest[:12]} is not what it was: {'; '.join(problems[:PROBLEMS_SHOWN])}"
        + (f"; and {more} more." if more > 0 else "."),
        hint="Add it again from its source under the same name: what is damaged is put back.",
        problems=len(problems),
    )


def _in_threads(work: Callable[[T], R], items: Sequence[T], stop: threading.Event) -> list[R]:
    """Results in order; the first failure ends the rest. Hands out chunks: most items are small.

    Raises:
        WorldError: it was stopped.
    """
    failed = threading.Event()

    def chunk(start: int) -> list[R]:
        done = []
        try:
            for item in items[start : start + _CHUNK]:
                _go_on(stop)
                if failed.is_set():
                    break
                done.append(work(item))
        except BaseException:
            failed.set()
            raise
        return done

    with ThreadPoolExecutor(THREADS, thread_name_prefix="world") as pool:
        futures = [pool.submit(chunk, start) for start in range(0, len(items), _CHUNK)]
    for future in futures:
        error = future.exception()
        if error is not None:
            raise error
    return [result for future in futures for result in future.result()]


def _go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise WorldError("It was stopped before its end.", hint="Start it again.")


def _read(fd: int, limit: int) -> bytes:
    parts = []
    while limit > 0 and (part := os.read(fd, limit)):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)


def _write(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def _hash(fd: int) -> str:
    buffer = bytearray(_STEP_BYTES)
    view, digest = memoryview(buffer), hashlib.sha256()
    with open(fd, "rb", buffering=0, closefd=False) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def _copy(fd: int, out: int) -> str:
    """Copies a whole file; the digest of what was copied."""
    os.lseek(fd, 0, os.SEEK_SET)
    digest = hashlib.sha256()
    while part := os.read(fd, _STEP_BYTES):
        digest.update(part)
        _write(out, part)
    return digest.hexdigest()


def _remove(folder: Path) -> None:
    """Removes a world's folder; opens its folders, but touches no file, which other worlds may share."""
    for inner, _, _ in os.walk(folder):
        os.chmod(inner, 0o700)
    shutil.rmtree(folder)
