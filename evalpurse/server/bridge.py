"""`evalpurse mcp`: what an MCP host starts, a pump between its pipes and the daemon's socket.

The bridge outlives the daemon, because hosts never restart a server that ended. When the daemon goes away,
every call in flight is answered with an error; the next message starts a daemon again and shows it the
handshake of the old one. A message is sent to at most one daemon: whether a call was carried out is never
guessed. Only JSON-RPC is written to stdout. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from evalpurse.errors import EvalpurseError
from evalpurse.home import Home
from evalpurse.server.errors import LostError
from evalpurse.server.handshake import MESSAGE_BYTES_MAX
from evalpurse.server.link import Link
from evalpurse.server.spawn import Launch, ensure

REPLAY_ID = "evalpurse-bridge-initialize"
LAST_WORDS_TIMEOUT_S = 0.5
REPLAY_TIMEOUT_S = 10.0
_SEND_ATTEMPTS_MAX = 3
_SERVER_ERROR = -32000

# How the daemon writes the head of a message. Results can be megabytes: only the head is looked at.
_HEAD = re.compile(rb'\{"jsonrpc":"2\.0","id":(-?\d+|"(?:[^"\\]|\\.)*"),"(method|result|error)"')
_NOTIFICATION = b'{"jsonrpc":"2.0","method"'


@dataclass
class _State:
    """What both threads of the bridge share, under one lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    in_flight: dict[str, str] = field(default_factory=dict)  # id of a client's request -> its method
    asked: set[str] = field(default_factory=set)  # ids of the daemon's requests that await the client
    stale: set[str] = field(default_factory=set)  # the same of a daemon that is gone: answers go nowhere
    sending: str | None = None  # the request that is being written right now
    link: Link | None = None


class Bridge:
    """One client on stdin and stdout, and one daemon after another."""

    def __init__(self, home: Home, stdin: BinaryIO, stdout_fd: int, launch: Launch | None = None) -> None:
        self._home = home
        self._stdin = stdin
        self._stdout_fd = stdout_fd
        self._launch = launch
        self._state = _State()
        self._write_lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._initialize: dict[str, Any] | None = None  # of a client of the handshake era
        self._initialized: bytes | None = None
        self._told: set[str] = set()
        self._answered = threading.Condition(self._state.lock)
        self._closing = False
        self._deaf = False

    def run(self) -> int:
        """Pumps until the client closes stdin; returns the exit code."""
        with contextlib.suppress(EvalpurseError):  # told to the client when it asks for something
            self._connect()
        while not self._deaf and (line := self._stdin.readline()):
            if line.strip():
                self._forward(line if line.endswith(b"\n") else line + b"\n")
        self._finish()
        return 0

    def _forward(self, line: bytes) -> None:
        message = _parse(line)
        if len(line) > MESSAGE_BYTES_MAX:  # the daemon would hang up, and it would look like its end
            if message is not None and "method" in message and "id" in message:
                too_long = f"A message of {len(line):,} bytes is above the limit of {MESSAGE_BYTES_MAX:,}."
                self._answer_error(_key(message["id"]), too_long, "message_too_large")
            return
        if message is not None and self._is_stale_answer(message):
            return
        request_id = None
        if message is not None and "method" in message:
            request_id = _key(message["id"]) if "id" in message else None
            self._note(message, line)
        try:
            self._send(line, request_id, str((message or {}).get("method", "")))
        except EvalpurseError as error:
            if request_id is not None and message is not None:
                self._answer_error(request_id, f"{error}", error.code)

    def _note(self, message: dict[str, Any], line: bytes) -> None:
        """Remembers what a later daemon must be shown, and forgets what will not be answered."""
        if message["method"] == "initialize":
            self._initialize = message
        elif message["method"] == "notifications/initialized":
            self._initialized = line
        elif message["method"] == "notifications/cancelled":
            with self._state.lock:
                self._state.in_flight.pop(_key(message.get("params", {}).get("requestId")), None)

    def _is_stale_answer(self, message: dict[str, Any]) -> bool:
        if "method" in message or "id" not in message:
            return False
        key = _key(message["id"])
        with self._state.lock:
            self._state.asked.discard(key)
            if key in self._state.stale:
                self._state.stale.discard(key)
                return True
        return False

    def _send(self, line: bytes, request_id: str | None, method: str) -> None:
        """Sends to the daemon; a second time only if the first was cut off, since a part is never acted on.

        Raises:
            EvalpurseError: why the message could not be sent.
        """
        for _ in range(_SEND_ATTEMPTS_MAX):
            link = self._state.link or self._connect()
            with self._state.lock:
                if self._state.link is not link:
                    continue  # it went away in between
                self._state.sending = request_id
                if request_id is not None:
                    self._state.in_flight[request_id] = method
            try:
                link.socket.sendall(line)
            except OSError:
                self._drop(link)
                continue
            finally:
                with self._state.lock:
                    self._state.sending = None
                    gone = self._state.link is not link
            if gone and request_id is not None:
                self._answer_error(request_id, self._lost_message(), LostError.code)
            return
        raise LostError("The daemon went away each time it was sent this message.", hint=self._log_hint())

    def _drop(self, link: Link) -> None:
        """Gives up a link and waits until its reader has answered for everything that went over it."""
        link.close_soon()
        if self._reader is not None:
            self._reader.join()

    def _connect(self) -> Link:
        """Opens a link, starting a daemon if need be, and replays the handshake of the client's era.

        Raises:
            EvalpurseError: why there is no daemon.
        """
        if self._reader is not None:
            self._reader.join()  # it has answered for the calls of the last daemon
        link = ensure(self._home, door="mcp", role="agent", launch=self._launch, say=self._say)
        try:
            self._replay(link)
        except BaseException:
            link.close()
            raise
        self._state.link = link
        self._reader = threading.Thread(target=self._pump_back, args=(link,), daemon=True)
        self._reader.start()
        return link

    def _replay(self, link: Link) -> None:
        if self._initialize is None or self._initialized is None:
            return  # a client of the stateless era, or its own handshake is still to come
        link.socket.settimeout(REPLAY_TIMEOUT_S)
        try:
            link.send({**self._initialize, "id": REPLAY_ID})
            for line in link.lines():
                if json.loads(line).get("id") == REPLAY_ID:
                    break
            link.socket.sendall(self._initialized)
        except OSError as error:
            raise LostError(f"The new daemon did not take the handshake: {error}.") from error
        link.socket.settimeout(None)

    def _pump_back(self, link: Link) -> None:
        try:
            for line in link.lines():
                self._settle(line)
                self._write(line)
        except (OSError, ValueError):  # reset by the daemon's end, or closed by this side
            pass
        finally:
            self._lose(link)

    def _settle(self, line: bytes) -> None:
        head = _HEAD.match(line)
        if head is None:
            if line.startswith(_NOTIFICATION):
                return
            message = _parse(line) or {}
            if "id" not in message:
                return
            key, kind = _key(message["id"]), "method" if "method" in message else "result"
        else:
            key, kind = _key(json.loads(head[1])), head[2].decode()
        with self._state.lock:
            if kind == "method":
                self._state.asked.add(key)
                self._state.stale.discard(key)  # a new daemon counts from the start again
            else:
                self._state.in_flight.pop(key, None)
                self._answered.notify_all()

    def _lose(self, link: Link) -> None:
        """Answers for every call that the daemon took with it."""
        with self._state.lock:
            self._state.link = None
            lost = [key for key in self._state.in_flight if key != self._state.sending]
            for key in lost:
                del self._state.in_flight[key]
            self._state.stale |= self._state.asked
            self._state.asked.clear()
        with contextlib.suppress(OSError):
            link.close()
        if not self._closing:
            for key in lost:
                self._answer_error(key, self._lost_message(), LostError.code)

    def _lost_message(self) -> str:
        return (
            "The evalpurse daemon went away while this call was in flight. Experiments are recorded and go "
            "on; the daemon starts again with your next call. Look first whether the call took effect "
            "(launch_experiment with the same idempotency key never pays twice), then repeat it. "
            + self._log_hint()
        )

    def _log_hint(self) -> str:
        return f"Its log: {self._home.log_file}"

    def _answer_error(self, key: str, message: str, code: str) -> None:
        with self._state.lock:
            self._state.in_flight.pop(key, None)
        error = {"code": _SERVER_ERROR, "message": message, "data": {"code": code}}
        answer = {"jsonrpc": "2.0", "id": json.loads(key), "error": error}
        self._write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        with self._write_lock:
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(self._stdout_fd, view) :]
            except OSError:
                self._deaf = True  # the client is gone: nobody is left to tell

    def _say(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            print(f"evalpurse: {sentence}", file=sys.stderr, flush=True)

    def _finish(self) -> None:
        """Lets answers that are on their way through, but not for long: a host waits for this process."""
        with self._state.lock:
            self._answered.wait_for(lambda: not self._state.in_flight, LAST_WORDS_TIMEOUT_S)
            self._closing = True
            link = self._state.link
        if link is not None and self._reader is not None:
            link.end_of_input()
            self._reader.join(LAST_WORDS_TIMEOUT_S)


def _key(request_id: Any) -> str:
    return json.dumps(request_id)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None  # the daemon says what is wrong with it
    return message if isinstance(message, dict) else None


def run(home: Home, launch: Launch | None = None) -> int:
    """Serves this process's stdin and stdout; stray output of anything else goes to stderr."""
    stdout_fd = os.dup(1)
    os.dup2(2, 1)
    code = Bridge(home, sys.stdin.buffer, stdout_fd, launch).run()
    sys.stderr.flush()
    os._exit(code)  # a reader thread may still wait for a daemon that does not hang up
