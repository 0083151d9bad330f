"""The empty folders of sandboxes: made once, used again by a next sandbox when nothing was done to them.

Making and removing folders is most of what a short run costs, and on some disks each removal waits for the
device. A used folder is kept only when it is as if new: empty, our own, private, without attributes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import sys
from collections import deque
from pathlib import Path

from evalpurse.runs.sandboxes.layout import Layout
from evalpurse.runs.sandboxes.materialise import remove_tree

SPARE = ".spare"
SPARE_MAX = 256
QUICK_ENTRIES_MAX = 200
"""More entries than this are removed on a worker thread."""
_FOLDER_BYTES_MAX = 8192  # a folder that held very many names stays large on some file systems
_MODE = 0o040700
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LONG = struct.calcsize("l")
_GET_FLAGS = 0x80006601 | _LONG << 16  # FS_IOC_GETFLAGS
_SET_FLAGS = 0x40006602 | _LONG << 16  # FS_IOC_SETFLAGS
_TOP_OF_HIERARCHY = 0x00020000  # FS_TOPDIR_FL
_Attributes = tuple[bool, list[str], bytes]


class Folders:
    """Makes and takes back the folders of sandboxes inside one `work` folder.

    Only one daemon may use a `work` folder at a time.
    """

    def __init__(self, work: str) -> None:
        self._root = f"{work}/{SPARE}"
        self._spare: deque[str] = deque()
        _spread(work)
        remove_tree(self._root)  # nobody vouches for what an earlier daemon left
        Path(self._root).mkdir(mode=0o700)
        fd = os.open(self._root, _OPEN)
        try:
            self._new = _attributes(fd)
        finally:
            os.close(fd)

    def make(self, layout: Layout) -> None:
        """Makes a sandbox's folders.

        Raises:
            FileExistsError: there is a sandbox, or the rest of one, in its place.
            OSError: the system refuses.
        """
        while self._spare:
            spare = self._spare.popleft()  # the oldest, so that the work is spread over the disk
            try:
                os.rename(spare, layout.root)
            except FileNotFoundError:
                continue  # someone tidied up
            except OSError as error:
                self._spare.append(spare)
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise FileExistsError(error.errno, os.strerror(error.errno), layout.root) from error
                raise
            return
        for folder in (layout.root, *layout.folders):
            os.mkdir(folder, 0o700)

    def take_back(self, layout: Layout) -> bool:
        """Empties a sandbox's folders and keeps them, if that is quick and they are as if new.

        False: it is still there, at least in part, and has to be removed. All processes that could write to
        it must be gone.
        """
        if len(self._spare) >= SPARE_MAX:
            return False
        kept = f"{self._root}/{layout.root.rpartition('/')[2]}"
        try:
            if not self._empty(layout):
                return False
            os.rename(layout.root, kept)
        except OSError:
            return False  # closed folders and the like: the other way has the means, and says why if it fails
        self._spare.append(kept)
        return True

    def _empty(self, layout: Layout) -> bool:
        """Removes all but the sandbox's own folders; False when that takes long or one is not as if new."""
        extra: list[str] = []
        left = self._clear(layout.root, extra, QUICK_ENTRIES_MAX, None)
        own = set(layout.folders)
        if not own.issubset(extra):
            return False
        for folder in layout.folders:
            left = self._clear(folder, extra, left, self._new)
        extra = [folder for folder in extra if folder not in own]
        for folder in extra:  # grows on the way
            left = self._clear(folder, extra, left, None)
        for folder in reversed(extra):
            os.rmdir(folder)
        return left >= 0

    def _clear(self, folder: str, found: list[str], left: int, new: _Attributes | None) -> int:
        """Removes a folder's files and notes its folders; the number of entries that may still be removed.

        Negative once there are too many, or when the folder is not like a `new` one.
        """
        if left < 0:
            return left
        fd = os.open(folder, _OPEN)
        try:
            if new is not None and _attributes(fd) != new:
                return -1
            with os.scandir(fd) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        return left
                    if entry.is_dir(follow_symlinks=False):
                        found.append(f"{folder}/{entry.name}")
                    else:
                        os.unlink(entry.name, dir_fd=fd)
        finally:
            os.close(fd)
        return left


def _attributes(fd: int) -> _Attributes:
    """What a harness may have done to a folder itself: size and rights, extended attributes, file flags."""
    facts = os.fstat(fd)
    plain = facts.st_mode == _MODE and facts.st_uid == os.getuid() and facts.st_size <= _FOLDER_BYTES_MAX
    names = os.listxattr(fd) if sys.platform == "linux" else []
    return plain, names, _flags(fd)


def _flags(fd: int) -> bytes:
    flags = bytearray(8)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # not every file system has them
            fcntl.ioctl(fd, _GET_FLAGS, flags)
    return bytes(flags)


def _spread(folder: str) -> None:
    """Asks ext4 to put each folder that is made in this one into another region of the disk.

    It otherwise keeps all sandboxes in one region and there, without a journal, looks at every inode that was
    freed in the last minute before it takes a new one: half a millisecond a file after some thousand runs.
    Other file systems refuse, which does no harm.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        fd = os.open(folder, _OPEN)
        try:
            (flags,) = struct.unpack_from("i", _flags(fd))
            fcntl.ioctl(fd, _SET_FLAGS, struct.pack("i4x", flags | _TOP_OF_HIERARCHY))
        finally:
            os.close(fd)
