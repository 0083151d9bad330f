"""One sandbox on Modal, from its start to its termination.

The harness runs detached and its output stays in files of the sandbox, so nothing here has to last as long as
a run. What ended it is told from what its supervisor wrote, from the word that we left before we ended it,
and, when the sandbox itself is gone, from the status that Modal keeps.
"""

from __future__ import annotations

import base64
import gzip
import io
import math
import os
import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import anyio.to_thread

from evalpurse.runs.errors import BackendRefusedError, SandboxError, SandboxGoneError
from evalpurse.runs.sandboxes import modal_scripts as scripts
from evalpurse.runs.sandboxes.capture import METRICS_BYTES_MAX, Leavings, read_ends
from evalpurse.runs.sandboxes.materialise import checked_path
from evalpurse.runs.sandboxes.modal_client import Meaning, is_client_error, load, meaning_of, told
from evalpurse.runs.sandboxes.poller import Poller
from evalpurse.runs.sandboxes.protocol import Ended, EndReason, ExecResult, Limits, Output
from evalpurse.runs.sandboxes.redaction import Redactor

GRACE_S = 2.0
"""Between SIGTERM at the deadline and SIGKILL."""
OVERDUE_S = 5.0
"""So long after the deadline the harness is ended from here, if its own supervisor has not done it."""
FETCH_BYTES_MAX = 1 << 20
START_S = 300.0
LOOK_S = 120.0
SMALL_BYTES = 256 << 10
ARGUMENT_CHARS_MAX = 60_000
"""The client refuses commands above 65,536 characters."""
_TAR_ROOM_BYTES = 1 << 20
_MEMBERS_MAX = 50_000
_SIGXCPU, _SIGXFSZ, _SIGKILL = -24, -25, -9
TAILS_MAX = 8
TAIL_BYTES_MAX = 64 << 10


@dataclass(frozen=True)
class Known:
    """What must be known of a sandbox by any daemon; kept in the home folder, never in the sandbox."""

    timeout_s: float
    grade_timeout_s: float
    slack_s: float = Limits.slack_s
    secret_names: Sequence[str] = ()
    memory_mb: int = 0
    before: str = ""
    """Processes that were in the sandbox before the harness, as pid:start, separated by spaces."""


@dataclass
class Rooms:
    """Bounds that all sandboxes of a backend share."""

    poller: Poller = field(default_factory=Poller)
    calls: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(50))
    tails: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(TAILS_MAX))


class ModalSandbox:
    """See the protocol; made by `ModalBackend`."""

    def __init__(
        self,
        name: str,
        tags: Mapping[str, str],
        created_at: datetime,
        remote: Any,
        known: Known | None,
        redactor: Redactor | None,
        rooms: Rooms,
        *,
        payload: Callable[[], Awaitable[bytes]] | None = None,
        on_started: Callable[[Known], Awaitable[None]] | None = None,
        on_removed: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """`known` and `redactor` are None when this home folder does not know what it was made with."""
        self.name = name
        self.tags = tags
        self.created_at = created_at
        self._remote = remote
        self._known = known
        self._redactor = redactor
        self._rooms = rooms
        self._payload = payload
        self._on_started = on_started
        self._on_removed = on_removed
        self._limits = Limits()
        if known is not None:
            self._limits = Limits(
                timeout_s=known.timeout_s, grade_timeout_s=known.grade_timeout_s, slack_s=known.slack_s
            )
        self._started_s: float | None = None
        self._ended: Ended | None = None
        self._output: Output | None = None
        self._begun_s: float | None = None
        self._artifacts_left = False
        self._stopping = False
        self._removed = False

    @property
    def started(self) -> bool:
        """Whether this process started its harness."""
        return self._started_s is not None

    # the steps

    async def start(self) -> None:
        """Sends what the run needs and starts its supervisor, in one command; at most once."""
        if self._started_s is not None:
            return
        if self._payload is None:
            return  # found again: `wait` sees how far it came
        payload = await self._payload()
        # Shielded: cut in the middle, it would leave a sandbox that nobody can tell whether it runs.
        with anyio.CancelScope(shield=True):
            await self._start(payload)

    async def _start(self, payload: bytes) -> None:
        small = base64.b64encode(gzip.compress(payload, 5)).decode() if len(payload) < SMALL_BYTES else ""
        if small and len(small) < ARGUMENT_CHARS_MAX:
            boot, stdin = [scripts.BOOT_SMALL, "sh", scripts.ROOT, small], None
        else:
            boot, stdin = [scripts.BOOT, "sh", scripts.ROOT], payload
        answer = await self._command(
            ["sh", "-c", *boot], stdin=stdin, limit=_TAR_ROOM_BYTES, timeout_s=START_S
        )
        word, _, rest = answer.decode(errors="replace").partition(" ")
        if word.strip() == "again":
            self._started_s = time.time()
            return
        if word != "started":
            raise SandboxError(
                f"Sandbox {self.name} could not be furnished: "
                + answer.decode(errors="replace")[-2000:].strip()
            )
        self._payload = None
        self._started_s = time.time()
        before = rest.partition(" ")[2].strip()
        if self._known is not None:
            self._known = Known(**{**self._known.__dict__, "before": before})
            if self._on_started is not None:
                await self._on_started(self._known)

    async def wait(self) -> Ended:
        if self._ended is None:
            due_s = self._launched_s + self._limits.timeout_s + GRACE_S
            await self._rooms.poller.until(self._look_again, until_s=max(0.0, due_s - time.time()))
        if self._ended is None:
            raise AssertionError("the poller returned without an end")
        return self._ended

    @property
    def _launched_s(self) -> float:
        """About when the run's supervisor started: its own word is not needed for that."""
        return self._started_s if self._started_s is not None else self.created_at.timestamp()

    @property
    def _overdue(self) -> bool:
        """Whether it should have been ended in the sandbox by now."""
        if self._begun_s is not None:
            return time.time() > self._begun_s + self._limits.timeout_s + GRACE_S + OVERDUE_S
        return time.time() > self._launched_s + self._limits.timeout_s + self._limits.slack_s

    async def stop(self) -> Ended | None:
        if self._ended is None:
            with anyio.CancelScope(shield=True):
                async with self._rooms.calls:
                    if await self._look("stopped") == "idle":
                        return None
        return self._ended

    async def get(self) -> Output:
        if self._ended is None:
            raise SandboxError(
                f"Sandbox {self.name} cannot be read before its harness is gone.", hint="Wait for it first."
            )
        if self._output is None:
            raise SandboxError(
                f"The output of sandbox {self.name} went with it. {self._ended.detail}".strip()
            )
        return self._output

    async def exec(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes],
        timeout_s: float,
        fetch: Sequence[str] = (),
    ) -> ExecResult:
        if self._ended is None:
            raise SandboxError(
                f"Sandbox {self.name} cannot be graded before its harness is gone.", hint="Wait for it first."
            )
        # No name that a harness could have guessed and prepared.
        folder = f"{scripts.ROOT}/grader-{secrets.token_hex(8)}"
        names = [name for name in fetch if _inside(name)]
        limits = self._limits
        cap = limits.log_bytes + FETCH_BYTES_MAX * len(names) + _TAR_ROOM_BYTES
        arguments = [
            scripts.ROOT, self.name, self._before, folder, f"{timeout_s:g}", str(limits.log_bytes),
            str(FETCH_BYTES_MAX), "\n".join(names), *command,
        ]  # fmt: skip
        async with self._rooms.calls:
            raw = await self._command(
                ["sh", "-c", scripts.GRADE, "sh", *arguments],
                stdin=_tar({f"{checked_path(path)}": content for path, content in files.items()}),
                limit=cap,
                timeout_s=timeout_s + LOOK_S,
            )
        head, _, packed = raw.partition(b"\n")
        words = head.decode(errors="replace").split()
        if words[:2] != ["state", "graded"]:
            raise SandboxError(f"A grader of sandbox {self.name} could not run: {head[-500:]!r}")
        swept, code, late, size = words[2:6]
        if swept != "yes":
            raise SandboxError(f"Processes of a grader of sandbox {self.name} could not be ended.")
        return await anyio.to_thread.run_sync(
            self._grader_result, packed, int(code), late == "yes", int(size), timeout_s, names
        )

    async def terminate(self) -> None:
        if self._removed:
            return
        self._stopping = True  # before it happens: the exit code of a sandbox does not tell who ended it
        with anyio.CancelScope(shield=True):
            try:
                async with self._rooms.calls:
                    await self._remote.terminate.aio()
            except Exception as error:
                if meaning_of(error) is not Meaning.GONE or not is_client_error(error):
                    raise self._failed(error, f"to end sandbox {self.name}") from error
            self._removed = True
            await self._remote.detach.aio()
            if self._on_removed is not None:
                await self._on_removed(self.name)

    async def tail(self, size_bytes: int = 16 << 10) -> str:
        """The end of the harness's log while it runs, without secrets; at most eight are read at once.

        Raises:
            SandboxError: it cannot be read, or this home folder does not know the secrets in it.
        """
        redactor = self._known_redactor()
        size = min(size_bytes, TAIL_BYTES_MAX)
        async with self._rooms.tails:
            raw = await self._command(
                ["sh", "-c", scripts.TAIL, "sh", scripts.ROOT, str(size + redactor.margin_bytes)],
                stdin=None,
                limit=size + redactor.margin_bytes,
                timeout_s=LOOK_S,
            )
        return redactor.redact(raw)[-size:].decode(errors="replace")

    # looking

    @property
    def _before(self) -> str:
        return self._known.before if self._known is not None else ""

    async def _look_again(self) -> Ended | None:
        if await self._look("timeout" if self._overdue else "-") == "idle":
            raise SandboxGoneError(f"Sandbox {self.name} was made, and never given what to run.")
        return self._ended

    async def _look(self, verdict: str) -> str:
        """One look: `idle`, `running` or `ended`; when it has ended, its output comes with it."""
        redactor = self._known_redactor()
        limits = self._limits
        sizes = [limits.answer_bytes, METRICS_BYTES_MAX, limits.transcript_bytes, limits.artifacts_bytes]
        raw = await self._look_for(verdict, [*sizes, limits.log_bytes, redactor.margin_bytes])
        if raw is None:
            return "ended"
        head, _, packed = raw.partition(b"\n")
        words = head.decode(errors="replace").split()
        if words[:1] != ["state"] or len(words) < 2:
            raise SandboxError(f"Sandbox {self.name} answered {head[-500:]!r} to a look.")
        if words[1] == "running" and len(words) == 4:
            self._begun_s = time.time() - (float(words[3]) - float(words[2]))
        elif words[1] == "ended":
            try:
                if len(packed) < SMALL_BYTES:  # handing it to a thread would take longer
                    self._output = self._unpack(packed, int(words[9]))
                else:
                    self._output = await anyio.to_thread.run_sync(self._unpack, packed, int(words[9]))
            except (tarfile.TarError, OSError, EOFError) as error:
                raise SandboxError(f"The output of sandbox {self.name} cannot be read: {error}.") from error
            self._ended = self._judge(words[2:])
        return words[1]

    async def _look_for(self, verdict: str, sizes: list[int]) -> bytes | None:
        """The raw answer; without the artifacts when they are too large; None when the sandbox is gone."""
        while True:
            cap = sum(sizes) + 8 * sizes[-1] + _TAR_ROOM_BYTES
            command = ["sh", "-c", scripts.LOOK, "sh", scripts.ROOT, self.name, verdict, self._before]
            try:
                return await self._command(
                    [*command, " ".join(map(str, sizes))], stdin=None, limit=cap, timeout_s=LOOK_S
                )
            except _TooMuchError:
                if sizes[3] == 0:
                    raise SandboxError(
                        f"The output of sandbox {self.name} is larger than {cap} bytes."
                    ) from None
                sizes[3] = 0
                self._artifacts_left = True
            except SandboxGoneError as error:
                self._ended = await self._how_it_went(str(error))
                return None

    async def _how_it_went(self, error: str) -> Ended:
        """The end of a sandbox that is gone, by the status that Modal keeps of it."""
        now = datetime.now(UTC)
        if self._stopping:
            return Ended(EndReason.STOPPED, None, self.created_at, now, "It was stopped.")
        status, code = "", None
        try:
            code = await self._remote.poll.aio()
            result = getattr(getattr(self._remote, "_impl", None), "result", None)
            status = _status_name(result)
        except Exception as failure:
            if not is_client_error(failure):
                raise
        status = status.removeprefix("GENERIC_STATUS_")
        if status == "KERNEL_OOM_KILL":
            return Ended(EndReason.MEMORY, code, self.created_at, now, "The sandbox ran out of memory.")
        told_status = f" with status {status}" if status else ""
        return Ended(
            EndReason.LOST,
            code,
            self.created_at,
            now,
            f"The sandbox disappeared{told_status}. {error}".strip(),
        )

    def _judge(self, words: Sequence[str]) -> Ended:
        swept, code_text, begun, ended, up, why, oom, _ = words
        now = datetime.now(UTC)
        if swept != "yes":
            return Ended(EndReason.PROCESSES, None, self.created_at, now, "Its processes could not be ended.")

        def moment(uptime: str) -> datetime:
            return now - timedelta(seconds=max(0.0, float(up) - float(uptime)))

        started_at = moment(begun) if begun != "-" else self.created_at
        ended_at = max(started_at, moment(ended)) if ended != "-" else now
        code = _signed(int(code_text)) if code_text != "-" else None
        if why == "timeout" and begun == "-":
            why = "restore"
        reason, detail = self._reason(why, code, int(oom))
        return Ended(reason, code, started_at, ended_at, detail)

    def _reason(  # noqa: PLR0911 (one line an ending)
        self, why: str, code: int | None, oom: int
    ) -> tuple[EndReason, str]:
        limits = self._limits
        memory = f"{self._known.memory_mb} MiB are allowed" if self._known is not None else "see its limit"
        if why == "timeout":
            return EndReason.TIMEOUT, f"It was ended at its deadline, {limits.timeout_s:g} s after its start."
        if why == "stopped":
            return EndReason.STOPPED, "It was stopped."
        if why == "restore":
            tail = self._output.log.decode(errors="replace")[-500:].strip() if self._output else ""
            return EndReason.LOST, f"A restore command failed or did not end: {tail}"
        if code is None and not oom:
            return EndReason.LOST, "Its supervisor is gone and left no exit status."
        if code is None or oom:
            return EndReason.MEMORY, f"It went over its memory: {memory}."
        if code == _SIGKILL:
            return EndReason.MEMORY, f"It was killed, and not by us: most likely out of memory ({memory})."
        if code == _SIGXCPU:
            return EndReason.CPU, f"It used up its {limits.cpu_s:g} s of processor time."
        if code == _SIGXFSZ:
            return EndReason.DISK, f"It wrote a file larger than the {limits.disk_bytes} bytes allowed."
        return EndReason.EXITED, ""

    # what comes back

    def _unpack(self, packed: bytes, log_size: int) -> Output:
        """Reads the output with the same care as one of this machine: from memory when there is little."""
        files = _small_files(packed)
        if files is not None:
            leavings = _leavings_of(files, log_size)
            try:
                return self._without_artifacts(leavings.read(self._limits, self._known_redactor()))
            finally:
                leavings.close()
        folder = tempfile.mkdtemp(prefix="evalpurse-")
        try:
            out = f"{folder}/out"
            os.mkdir(out, 0o700)
            _extract(packed, out)
            log = f"{folder}/log"
            _join_log(out, log, log_size)
            leavings = Leavings.open(out, log)
            try:
                output = leavings.read(self._limits, self._known_redactor())
            finally:
                leavings.close()
        finally:
            shutil.rmtree(folder)
        return self._without_artifacts(output)

    def _without_artifacts(self, output: Output) -> Output:
        if not self._artifacts_left:
            return output
        return replace(output, truncated=output.truncated | {"artifacts"})

    def _grader_result(
        self, packed: bytes, code: int, late: bool, size: int, timeout_s: float, names: Sequence[str]
    ) -> ExecResult:
        redactor = self._known_redactor()
        folder = tempfile.mkdtemp(prefix="evalpurse-")
        try:
            _extract(packed, folder)
            _join_log(folder, f"{folder}/log", size)
            fd = os.open(f"{folder}/log", os.O_RDONLY | os.O_CLOEXEC)
            try:
                log, _ = read_ends(fd, self._limits.log_bytes, redactor)
            finally:
                os.close(fd)
            found = {}
            for name in names:
                path = f"{folder}/files/{name}"
                if os.path.isfile(path):
                    with open(path, "rb") as file:
                        found[name] = redactor.redact(file.read())[:FETCH_BYTES_MAX]
        finally:
            shutil.rmtree(folder)
        if late:
            why = f"It was ended at its timeout, {timeout_s:g} s after its start."
            log = log.rstrip(b"\n") + b"\n" * bool(log) + why.encode() + b"\n"
        return ExecResult(None if late else _signed(code), log, found)

    def _known_redactor(self) -> Redactor:
        if self._redactor is None:
            raise SandboxGoneError(
                f"Sandbox {self.name} was made with secrets that this home folder does not know; what it "
                "wrote cannot be read without showing them."
            )
        return self._redactor

    # one command

    async def _command(
        self, command: Sequence[str], *, stdin: bytes | None, limit: int, timeout_s: float
    ) -> bytes:
        """Runs a command of ours in the sandbox and returns what it printed.

        Raises:
            SandboxGoneError: the sandbox is not there any more.
            SandboxError: the command could not be run, or did not end in time.
            _TooMuchError: it printed more than `limit` bytes.
        """
        stream_type = load().stream_type.StreamType
        try:
            with anyio.fail_after(timeout_s):
                process = await self._remote.exec.aio(
                    *command, stderr=stream_type.DEVNULL, text=False, timeout=math.ceil(timeout_s)
                )
                if stdin is not None:
                    process.stdin.write(stdin)
                    process.stdin.write_eof()
                    await process.stdin.drain.aio()
                pieces, size = [], 0
                async for piece in process.stdout:
                    pieces.append(piece)
                    size += len(piece)
                    if size > limit:
                        raise _TooMuchError  # noqa: TRY301 (told apart below)
                return b"".join(pieces)
        except TimeoutError as error:
            raise SandboxError(f"Sandbox {self.name} did not answer within {timeout_s:g} s.") from error
        except _TooMuchError:
            raise
        except Exception as error:
            if is_client_error(error) and meaning_of(error) is Meaning.GONE:
                raise SandboxGoneError(f"{type(error).__name__}: {error}") from error
            raise self._failed(error, f"a command in sandbox {self.name}") from error

    def _failed(self, error: Exception, doing: str) -> SandboxError:
        """Once a sandbox is there, even a refusal (a token that ran out) may pass: only time ends it."""
        ours = told(error, doing)
        if isinstance(ours, BackendRefusedError):
            return SandboxError(ours.message, hint=ours.hint)
        return ours if isinstance(ours, SandboxError) else SandboxError(str(ours))


class _TooMuchError(Exception):
    """A command printed more than it may."""


def _signed(code: int) -> int:
    """A shell's exit code with signals as negative numbers."""
    return 128 - code if 128 < code <= 192 else code


def _status_name(result: Any) -> str:
    """The finer status of an ended sandbox, which the client keeps in a private place; empty if it moved."""
    from modal_proto import api_pb2

    status = getattr(result, "status", None)
    return "" if not status else api_pb2.GenericResult.GenericStatus.Name(status)


def _inside(name: str) -> bool:
    parts = name.split("/")
    return (
        "\n" not in name and not name.startswith("/") and all(part not in ("", ".", "..") for part in parts)
    )


def _tar(files: Mapping[str, bytes], *, mode: int = 0o600) -> bytes:
    """A tar of files under relative paths."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _small_files(packed: bytes) -> dict[str, bytes] | None:
    """The files of a tar, by name; None when there is much, or more than those that are always there."""
    if len(packed) > SMALL_BYTES:
        return None
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as tar:
        for entry in tar:
            name = entry.name.removeprefix("./")
            content = tar.extractfile(entry) if entry.isfile() else None
            if content is not None and "/" not in name:
                found[name] = content.read()
            elif name not in ("", "."):
                return None
    return found


def _leavings_of(files: Mapping[str, bytes], log_size: int) -> Leavings:
    """The same as `Leavings.open`, of files in memory."""

    def handle(content: bytes | None) -> int | None:
        return None if content is None else _handle({0: content}, len(content))

    as_json = files.get("answer.json")
    head, tail = files.get("log.head"), files.get("log.tail", b"")
    log = None if head is None else _handle({0: head, log_size - len(tail): tail}, log_size)
    return Leavings(
        answer=handle(as_json if as_json is not None else files.get("answer.txt")),
        answer_is_json=as_json is not None,
        metrics=handle(files.get("metrics.json")),
        transcript=handle(files.get("transcript.jsonl")),
        log=log,
        artifacts=None,
    )


def _handle(parts: Mapping[int, bytes], size: int) -> int:
    """A handle of a file that nobody else sees, with content at some places; what lies between is empty."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("evalpurse", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    for start, content in parts.items():
        if content:
            os.pwrite(fd, content, start)
    os.ftruncate(fd, size)
    return fd


def _extract(packed: bytes, folder: str) -> None:
    """Writes the regular files of a tar that a stranger may have made into a folder of ours."""
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as tar:
        for count, entry in enumerate(tar):
            parts = [part for part in entry.name.split("/") if part not in ("", ".")]
            if not parts or ".." in parts or not (entry.isfile() or entry.isdir()) or count > _MEMBERS_MAX:
                continue
            path = "/".join([folder, *parts])
            if entry.isdir():
                os.makedirs(path, mode=0o700, exist_ok=True)
                continue
            os.makedirs(path.rpartition("/")[0], mode=0o700, exist_ok=True)
            content = tar.extractfile(entry)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as target:
                if content is not None:
                    shutil.copyfileobj(content, target)
            os.chmod(path, 0o600 | entry.mode & 0o155)
            os.utime(path, (entry.mtime, entry.mtime))


def _join_log(folder: str, log: str, size: int) -> None:
    """The two ends of a log in a file of its whole size; what lies between is never read."""
    with open(log, "wb") as whole:
        for name, from_end in (("log.head", False), ("log.tail", True)):
            if not os.path.exists(f"{folder}/{name}"):
                continue
            with open(f"{folder}/{name}", "rb") as part:
                content = part.read()
            whole.seek(max(0, size - len(content)) if from_end else 0)
            whole.write(content)
        whole.truncate(max(size, whole.tell()))
