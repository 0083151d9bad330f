"""What `sb.filesystem.*` execs inside a sandbox, done here without a process.

The client speaks to it as to any command: a JSON argument, content on stdin or stdout, and on failure a JSON
object on stderr with a kind that it turns into its own exceptions.
"""

# ruff: noqa: N802 - methods carry the names that the protocol calls them by
from __future__ import annotations

import asyncio
import contextlib
import errno
import grp
import json
import os
import pwd
import shutil
import stat
from pathlib import Path
from typing import IO, Any

from tests.fake_modal.machine import Machine
from tests.fake_modal.processes import IN_MEMORY_BYTES, FileOutput, Output

PROGRAM = "/__modal/.bin/modal-sandbox-fs-tools"
KINDS = {
    errno.ENOENT: "NotFound",
    errno.EISDIR: "IsDirectory",
    errno.ENOTDIR: "NotDirectory",
    errno.EACCES: "PermissionDenied",
    errno.EPERM: "PermissionDenied",
    errno.EROFS: "PermissionDenied",
    errno.ENOTEMPTY: "DirectoryNotEmpty",
    errno.EEXIST: "PathAlreadyExists",
    errno.EFBIG: "FileTooLarge",
    errno.ENOTSUP: "NotSupported",
}


class FsTool:
    """One file operation in the shape of a process."""

    def __init__(self, machine: Machine, command: str, read_limit: int | None) -> None:
        self.stdout, self.stderr = Output(), Output()
        self.returncode: int | None = None
        self.exited = asyncio.Event()
        self.stdin_offset = 0
        self.stdin_closed = False
        self._machine = machine
        self._read_limit = read_limit
        self._writing: tuple[IO[bytes], Path, Path] | None = None
        [(verb, argument)] = json.loads(command).items()
        try:
            getattr(self, f"_{verb}", self._unknown)(argument)
        except OSError as error:
            self._fail(error)
        if self._writing is None and self.returncode is None:
            self._end(0)

    async def write_stdin(self, offset: int, data: bytes, *, eof: bool) -> None:
        if offset > self.stdin_offset:
            raise ValueError(f"stdin is at byte {self.stdin_offset}, cannot write at {offset}")
        data = data[self.stdin_offset - offset :]
        if self._writing is None:
            if data:
                raise BrokenPipeError("the file operation has ended")
            return
        file, partial, target = self._writing
        file.write(data)
        self.stdin_offset += len(data)
        if eof:
            file.close()
            self._writing = None
            self.stdin_closed = True
            partial.replace(target)
            self._end(0)

    def kill(self, number: int = 9) -> None:
        if self._writing is not None:
            self._writing[0].close()
            self._writing[1].unlink(missing_ok=True)
            self._writing = None
        if self.returncode is None:
            self._end(-number)

    def release(self) -> None:
        """Closes the file it reads, and lets go of its output."""
        self.stdout.discard()
        self.stderr.discard()

    def _end(self, code: int) -> None:
        self.returncode = code
        self.stdout.close()
        self.stderr.close()
        self.exited.set()

    def _fail(self, error: OSError) -> None:
        kind = KINDS.get(error.errno or 0, "Other")
        payload = {"error_kind": kind, "message": error.strerror or str(error), "detail": str(error)}
        self.stderr.feed(json.dumps(payload).encode())
        self._end(1)

    def _writable(self, path: str) -> Path:
        located = self._machine.locate(path)
        if located.read_only:
            raise OSError(errno.EROFS, "Read-only file system", path)
        return located.path

    def _unknown(self, argument: Any) -> None:
        raise OSError(errno.ENOTSUP, "This file operation is not imitated", str(argument))

    def _ReadFile(self, argument: dict[str, Any]) -> None:
        path = self._machine.locate(argument["path"]).path
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory", argument["path"])
        size = path.stat().st_size
        if self._read_limit is not None and size > self._read_limit:
            raise OSError(
                errno.EFBIG, f"File of {size} bytes is over the limit of {self._read_limit}", str(path)
            )
        if size <= IN_MEMORY_BYTES:
            self.stdout.feed(path.read_bytes())
        else:
            self.stdout = FileOutput(path.open("rb"), size)

    def _WriteFile(self, argument: dict[str, Any]) -> None:
        target = self._writable(argument["path"])
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory", argument["path"])
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", argument["path"]) from error
        partial = target.with_name(f".{target.name[:200]}.{os.urandom(4).hex()}.partial")
        self._writing = (partial.open("wb"), partial, target)
        if target.exists():
            partial.chmod(stat.S_IMODE(target.stat().st_mode))

    def _ListFiles(self, argument: dict[str, Any]) -> None:
        folder = self._machine.locate(argument["path"]).path
        entries = [
            describe(entry, f"{argument['path'].rstrip('/')}/{entry.name}")
            for entry in sorted(folder.iterdir())
        ]
        self.stdout.feed(json.dumps(entries).encode())

    def _Stat(self, argument: dict[str, Any]) -> None:
        path = self._machine.locate(argument["path"], follow=False).path
        self.stdout.feed(json.dumps(describe(path, argument["path"])).encode())

    def _MakeDirectory(self, argument: dict[str, Any]) -> None:
        path = self._writable(argument["path"])
        if path.exists() and not (argument["parents"] and path.is_dir()):
            raise FileExistsError(errno.EEXIST, "File exists", argument["path"])
        path.mkdir(parents=argument["parents"], exist_ok=argument["parents"])

    def _Remove(self, argument: dict[str, Any]) -> None:
        located = self._machine.locate(argument["path"], follow=False)
        if located.read_only:
            raise OSError(errno.EROFS, "Read-only file system", argument["path"])
        path = located.path
        if path.is_dir() and not path.is_symlink():
            if argument["recursive"]:
                shutil.rmtree(path)
            else:
                path.rmdir()
        else:
            path.unlink()


def describe(path: Path, shown: str) -> dict[str, Any]:
    """One entry as the client reads it; a link describes itself."""
    info = path.lstat()
    kind = "file"
    if stat.S_ISLNK(info.st_mode):
        kind = "symlink"
    elif stat.S_ISDIR(info.st_mode):
        kind = "directory"
    owner, group = str(info.st_uid), str(info.st_gid)
    with contextlib.suppress(KeyError):
        owner, group = pwd.getpwuid(info.st_uid).pw_name, grp.getgrgid(info.st_gid).gr_name
    return {
        "name": shown.rstrip("/").rpartition("/")[2],
        "path": shown,
        "type": kind,
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "permissions": stat.filemode(info.st_mode)[1:],
        "owner": owner,
        "group": group,
        "modified_time": info.st_mtime,
        "symlink_target": str(path.readlink()) if kind == "symlink" else None,
    }
