"""Makes the folder of a sandbox, measures it and removes it, whatever a harness did to it.

A prepared source is read once: small ones stay in memory, so that each further sandbox costs only the
writes. Nothing here follows a symbolic link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from evalpurse.runs.errors import SandboxError

SMALL_TREE_BYTES = 1 << 20
SMALL_TREE_FILES = 200
TREES_KEPT = 64
_ENTRY_BYTES_MIN = 512  # what an entry counts at least, so that a million empty files are not free
_BLOCK_BYTES = 4096
_COPY_STEP_BYTES = 1 << 30


@dataclass(frozen=True)
class _File:
    path: str
    mode: int
    mtime_ns: int
    content: bytes | None
    """None: too much to keep in memory; read again for each copy."""


@dataclass(frozen=True)
class Tree:
    """A folder as it was read: what to write to have it again. Paths are relative."""

    root: str
    folders: tuple[tuple[str, int], ...]
    files: tuple[_File, ...]
    links: tuple[tuple[str, str], ...]
    disk_bytes: int
    """About what a copy takes on disk."""
    small: bool
    """Whether a copy takes well under a millisecond, so that it needs no worker thread."""

    @classmethod
    def read(cls, root: Path) -> Tree:
        """Reads a folder.

        Raises:
            SandboxError: it cannot be read, or holds something that is neither file, folder nor link.
        """
        try:
            return _read_tree(str(root))
        except OSError as error:
            raise SandboxError(f"The prepared source {root} cannot be read: {error}.") from error

    def write(self, target: str) -> None:
        """Writes a copy into an existing folder: content, permissions, modification times, links."""
        for path, _ in self.folders:
            os.mkdir(f"{target}/{path}", 0o700)
        for file in self.files:
            self._write_file(file, f"{target}/{file.path}")
        for path, destination in self.links:
            os.symlink(destination, f"{target}/{path}")
        for path, mode in reversed(self.folders):  # last, inner ones first: a read-only folder takes no files
            if mode != 0o700:
                os.chmod(f"{target}/{path}", mode)

    def _write_file(self, file: _File, target: str) -> None:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if file.content is not None:
                _write_all(fd, file.content)
            else:
                _copy_content(f"{self.root}/{file.path}", fd)
            if file.mode != 0o600:
                os.fchmod(fd, file.mode)
            os.utime(fd, ns=(file.mtime_ns, file.mtime_ns))
        finally:
            os.close(fd)


class Trees:
    """The prepared sources of the last few variants, as read."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, Tree] = OrderedDict()

    def kept(self, root: Path) -> Tree | None:
        """The tree of a prepared folder if it was read before."""
        return self._kept.get(root)

    def read(self, root: Path) -> Tree:
        """The tree of a prepared folder, read at the first call."""
        tree = self._kept.get(root)
        if tree is None:
            tree = self._kept[root] = Tree.read(root)
            while len(self._kept) > TREES_KEPT:
                self._kept.popitem(last=False)
        return tree

    def forget(self, root: Path) -> None:
        """To be called when a prepared folder changes."""
        self._kept.pop(root, None)


def _read_tree(root: str) -> Tree:
    folders: list[tuple[str, int]] = []
    found: list[tuple[str, os.stat_result]] = []
    links: list[tuple[str, str]] = []
    pending = [""]
    while pending:
        inside = pending.pop()
        with os.scandir(f"{root}/{inside}") as entries:
            for entry in entries:
                path = f"{inside}/{entry.name}" if inside else entry.name
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    folders.append((path, stat.S_IMODE(facts.st_mode) | 0o700))
                    pending.append(path)
                elif stat.S_ISLNK(facts.st_mode):
                    links.append((path, os.readlink(f"{root}/{path}")))
                elif stat.S_ISREG(facts.st_mode):
                    found.append((path, facts))
                else:
                    raise SandboxError(f"The prepared source holds {path}, which is no file, folder or link.")
    total = sum(facts.st_size for _, facts in found)
    small = total <= SMALL_TREE_BYTES and len(found) + len(folders) + len(links) <= SMALL_TREE_FILES
    files = [
        _File(
            path,
            stat.S_IMODE(facts.st_mode) & 0o777,
            facts.st_mtime_ns,
            Path(root, path).read_bytes() if small else None,
        )
        for path, facts in found
    ]
    blocks = sum(-(-facts.st_size // _BLOCK_BYTES) for _, facts in found) + len(folders) + len(links)
    return Tree(root, tuple(sorted(folders)), tuple(files), tuple(links), blocks * _BLOCK_BYTES, small)


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def _copy_content(source: str, target_fd: int) -> None:
    source_fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if hasattr(os, "copy_file_range"):
            # Shares the blocks where the file system can (btrfs, xfs), copies inside the kernel elsewhere.
            try:
                while os.copy_file_range(source_fd, target_fd, _COPY_STEP_BYTES):
                    pass
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
            else:
                return
        with open(source_fd, "rb", closefd=False) as reader, open(target_fd, "wb", closefd=False) as writer:
            writer.seek(0)
            reader.seek(0)
            shutil.copyfileobj(reader, writer, 1 << 20)
    finally:
        os.close(source_fd)


def write_file(path: str, content: bytes) -> None:
    """Writes one new file, private to the user."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _write_all(fd, content)
    finally:
        os.close(fd)


def write_files(folder: str, files: Mapping[str, bytes]) -> None:
    """Writes files under their relative POSIX paths into an existing, empty folder.

    Raises:
        SandboxError: a path is absolute, leaves the folder, or is two things at once.
    """
    made: set[str] = set()
    for name, content in files.items():
        path = checked_path(name)
        parent = path.rpartition("/")[0]
        if parent and parent not in made:
            os.makedirs(f"{folder}/{parent}", mode=0o700, exist_ok=True)
            made.add(parent)
        write_file(f"{folder}/{path}", content)


def checked_path(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise SandboxError(f"File path {name!r} is not a relative path inside its folder.")
    return "/".join(parts)


def tree_bytes(root: str) -> int:
    """Disk use of a folder: allocated blocks of everything in it, at least 512 bytes an entry.

    Raises:
        FileNotFoundError: the folder itself is gone.
        OSError: ENAMETOOLONG for a path deeper than the system can name.
    """
    total = 0
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            entries = os.scandir(folder)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            if folder == root:
                raise
            continue  # removed, or closed by its owner, while we look: what it holds was counted before
        with entries:
            for entry in entries:
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                total += max(facts.st_blocks * 512, _ENTRY_BYTES_MIN)
                if stat.S_ISDIR(facts.st_mode):
                    pending.append(entry.path)
    return total


def remove_tree(root: str) -> None:
    """Removes a folder with read-only parts, any depth, any number of entries.

    Raises:
        SandboxError: something is still there.
    """
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(root)
    if not os.path.lexists(root):
        return
    # Closed folders, and trees deeper than a path or Python's stack can be: these tools walk by handle.
    subprocess.run(
        ["chmod", "-R", "u+rwX", "--", root], check=False, capture_output=True, stdin=subprocess.DEVNULL
    )
    removed = subprocess.run(
        ["rm", "-rf", "--", root], check=False, capture_output=True, stdin=subprocess.DEVNULL
    )
    if os.path.lexists(root):
        said = removed.stderr.decode(errors="replace").strip()[-500:]
        raise SandboxError(
            f"Sandbox folder {root} cannot be removed: {said}",
            hint="Remove it by hand.",
        )
