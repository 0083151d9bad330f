"""Reads what a harness left behind, as evidence from a stranger.

Only regular files are opened, never through a link, never in a way that can wait; each part is cut to its
limit, and secrets are taken out before anything leaves here.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from dataclasses import dataclass

from evalpurse.runs.sandboxes.protocol import Limits, Output
from evalpurse.runs.sandboxes.redaction import Redactor

METRICS_BYTES_MAX = 1 << 20
ARTIFACTS_MAX = 10_000
ARTIFACTS_DEPTH_MAX = 64
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CUT = b"\n[... %d bytes cut ...]\n"


def open_regular(path: str, dir_fd: int | None = None) -> int | None:
    """A handle of a regular file; None when there is none, or it is a link, pipe, device or folder."""
    try:
        fd = os.open(path, _FILE, dir_fd=dir_fd)
    except OSError:
        return None  # missing, a link (ELOOP), a socket (ENXIO), unreadable: there is no such output
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def read_piece(fd: int, start: int, size: int) -> bytes:
    """Up to `size` bytes from `start`."""
    pieces = []
    while size > 0:
        piece = os.pread(fd, min(size, 1 << 20), start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
        size -= len(piece)
    return b"".join(pieces)


def read_head(fd: int, limit: int, redactor: Redactor) -> tuple[bytes, bool]:
    """The first `limit` bytes without secrets, and whether there were more."""
    content = redactor.redact(read_piece(fd, 0, limit + redactor.margin_bytes))
    return content[:limit], os.fstat(fd).st_size > limit


def read_ends(fd: int, limit: int, redactor: Redactor) -> tuple[bytes, bool]:
    """All of a log, or its beginning and its end (what ended it is usually said last)."""
    size = os.fstat(fd).st_size
    if size <= limit:
        return redactor.redact(read_piece(fd, 0, size))[:limit], False
    note = _CUT % (size - limit)
    half = max(0, limit - len(note)) // 2
    margin = redactor.margin_bytes
    head = redactor.redact(read_piece(fd, 0, half + margin))[:half]
    start = max(0, size - half - margin)
    tail = redactor.redact(read_piece(fd, start, size - start))
    return head + note + (tail[-half:] if half else b""), True


@dataclass
class Leavings:
    """Open handles on the parts of an output, so that their sizes are known before they are read."""

    answer: int | None
    answer_is_json: bool
    metrics: int | None
    transcript: int | None
    log: int | None
    artifacts: int | None

    @classmethod
    def open(cls, out: str, log: str) -> Leavings:
        """Opens what is there. `close` must be called."""
        try:
            folder = os.open(out, _FOLDER)
        except OSError:  # removed, or replaced by a link: then the harness left nothing
            return cls(
                None,
                answer_is_json=False,
                metrics=None,
                transcript=None,
                log=open_regular(log),
                artifacts=None,
            )
        try:
            as_json = open_regular("answer.json", folder)
            return cls(
                answer=as_json if as_json is not None else open_regular("answer.txt", folder),
                answer_is_json=as_json is not None,
                metrics=open_regular("metrics.json", folder),
                transcript=open_regular("transcript.jsonl", folder),
                log=open_regular(log),
                artifacts=_open_folder("artifacts", folder),
            )
        finally:
            os.close(folder)

    @property
    def size_bytes(self) -> int:
        """How much there is to read, artifacts left aside."""
        files = (self.answer, self.metrics, self.transcript, self.log)
        return sum(os.fstat(fd).st_size for fd in files if fd is not None)

    def close(self) -> None:
        for fd in (self.answer, self.metrics, self.transcript, self.log, self.artifacts):
            if fd is not None:
                os.close(fd)

    def read(self, limits: Limits, redactor: Redactor) -> Output:
        """Reads, cuts and redacts every part."""
        truncated: set[str] = set()

        def part(name: str, fd: int | None, limit: int) -> bytes | None:
            if fd is None:
                return None
            content, cut = read_head(fd, limit, redactor)
            if cut:
                truncated.add(name)
            return content

        answer = part("answer", self.answer, limits.answer_bytes)
        metrics = part("metrics", self.metrics, METRICS_BYTES_MAX)
        transcript = part("transcript", self.transcript, limits.transcript_bytes)
        log, log_cut = (
            read_ends(self.log, limits.log_bytes, redactor) if self.log is not None else (b"", False)
        )
        if log_cut:
            truncated.add("log")
        artifacts, artifacts_cut = None, False
        if self.artifacts is not None:
            pack = _Pack(limits.artifacts_bytes, redactor)
            artifacts, artifacts_cut = pack.of(self.artifacts), pack.left_out
        if artifacts_cut:
            truncated.add("artifacts")
        return Output(
            answer=answer,
            answer_is_json=self.answer_is_json,
            metrics=metrics,
            transcript=transcript,
            log=log,
            artifacts=artifacts,
            truncated=frozenset(truncated),
        )


class _Pack:
    """Makes one tar of at most `limit` bytes from the regular files of a folder.

    Files that do not fit are left out whole, and `left_out` tells. Names are in order, so that the same files
    make the same tar.
    """

    def __init__(self, limit: int, redactor: Redactor) -> None:
        self.left_out = False
        self._limit = limit
        self._redactor = redactor
        self._buffer = io.BytesIO()
        self._count = 0

    def of(self, folder: int) -> bytes | None:
        """The tar; None when there was nothing to pack."""
        with tarfile.open(fileobj=self._buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            self._add_folder(tar, folder, "", 0)
        return self._buffer.getvalue() if self._count else None

    def _add_folder(self, tar: tarfile.TarFile, folder: int, prefix: str, depth: int) -> None:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            if self._count >= ARTIFACTS_MAX or depth > ARTIFACTS_DEPTH_MAX:
                self.left_out = True
                return
            inner = _open_folder(name, folder)
            fd = None if inner is not None else open_regular(name, folder)
            try:
                if inner is not None:
                    self._add_folder(tar, inner, f"{prefix}{name}/", depth + 1)
                elif fd is not None:
                    self._add_file(tar, fd, f"{prefix}{name}")
            finally:
                for handle in (inner, fd):
                    if handle is not None:
                        os.close(handle)

    def _add_file(self, tar: tarfile.TarFile, fd: int, path: str) -> None:
        facts = os.fstat(fd)
        if not self._fits(facts.st_size):  # before it is read: it may be huge
            self.left_out = True
            return
        content = self._redactor.redact(read_piece(fd, 0, facts.st_size))
        if not self._fits(len(content)):
            self.left_out = True
            return
        entry = tarfile.TarInfo(self._redactor.redact_text(path))
        entry.size, entry.mode, entry.mtime = len(content), facts.st_mode & 0o755, int(facts.st_mtime)
        tar.addfile(entry, io.BytesIO(content))
        self._count += 1

    def _fits(self, size: int) -> bool:
        # Its headers (a long name takes more than one block), its content in whole blocks, the tar's own end.
        needed = 3 * tarfile.BLOCKSIZE + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        return self._buffer.tell() + needed + tarfile.RECORDSIZE <= self._limit


def _open_folder(name: str, parent: int) -> int | None:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except OSError:
        return None  # not a folder, or a link to one
