"""The process that parses and runs agent SQL, with nothing in reach that it could leak or break.

It holds no credentials, no home folder, no open files and, where the machine allows it, no user rights and no
network. Per query it maps the published tables it is given into an empty database of its own, shuts every
door of the engine, and answers within limits of memory, time, rows and bytes. Whoever started it ends it when
it does not answer in time: no setting of the engine stops every kernel.

Frames on stdin and stdout: four bytes of length, little-endian, then JSON. Started by `query_pool`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from typing import TYPE_CHECKING, Any, BinaryIO, Final
from uuid import UUID

if TYPE_CHECKING:
    import duckdb

ADDRESS_SPACE_BYTES: Final = 1_500_000_000
ENGINE_MEMORY: Final = "700MB"
ERROR_CHARACTERS_MAX: Final = 500
FETCH_ROWS: Final = 64
EXACT_INTEGER_MAX: Final = 2**53  # above it a JSON reader may round
QUERIES_PER_PROCESS: Final = 500
FRAME_BYTES_MAX: Final = 8_000_000
NOBODY: Final = 65_534

HEADER: Final = struct.Struct("<I")
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38

_SETTINGS: Final = """
SET enable_progress_bar = false;
SET enable_logging = false;
SET autoinstall_known_extensions = false;
SET autoload_known_extensions = false;
SET allow_community_extensions = false;
SET allow_extension_repositories = 'forbidden';
SET python_enable_replacements = false;
SET max_expression_depth = 200;
SET max_temp_directory_size = '0B';
SET TimeZone = 'UTC';
"""
_LOCK: Final = """
SET max_execution_time = {timeout_ms};
SET enable_external_access = false;
SET lock_configuration = true;
"""


def read_frame(stream: BinaryIO) -> Any:
    """The next frame; None when the other side has closed."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    return json.loads(stream.read(length))


def frame(value: Any) -> bytes:
    """A value as one frame."""
    content = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return HEADER.pack(len(content)) + content


# --- Leaving rights behind -------------------------------------------------------------------------------


def _lower_limit(kind: int, soft: int) -> bool:
    """Lowers a limit of this process; False where the system does not have it (address space on macOS)."""
    _, hard = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (soft, soft if hard == resource.RLIM_INFINITY else min(soft, hard)))
    except (OSError, ValueError):
        return False
    return True


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def leave_network() -> bool:
    """Moves into an empty network namespace; must happen while there is one thread."""
    libc = _libc()
    if libc is None:
        return False
    flags = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWUSER | _CLONE_NEWNET
    return bool(libc.unshare(flags) == 0)


def leave_root() -> bool:
    """From root to nobody, for good."""
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:
        return False
    return True


def _die_with_parent() -> None:
    """Set after the change of user, which clears it. macOS has none; there the end of stdin must do."""
    libc = _libc()
    if libc is not None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


# --- Stopping a query ------------------------------------------------------------------------------------


class Stopwatch(threading.Thread):
    """Interrupts the engine every 50 ms once a deadline has passed.

    One thread for the life of the process, because later there is no right to start another.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="stopwatch")
        self._changed = threading.Condition()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._deadline = 0.0

    def watch(self, connection: duckdb.DuckDBPyConnection | None, timeout_s: float = 0.0) -> None:
        """Watches a connection, or none."""
        with self._changed:
            self._connection = connection
            self._deadline = time.monotonic() + timeout_s
            self._changed.notify()

    def run(self) -> None:
        with self._changed:
            while True:
                if self._connection is None:
                    self._changed.wait()
                elif (rest_s := self._deadline - time.monotonic()) > 0:
                    self._changed.wait(rest_s)
                else:
                    self._connection.interrupt()
                    self._changed.wait(0.05)


# --- Rows as JSON ----------------------------------------------------------------------------------------


def json_safe(value: Any) -> Any:
    """A value as JSON has it: times in ISO, durations in seconds, decimals as floats, NaN as null.

    Numbers that a float cannot hold exactly become text.

    Raises:
        TypeError: binary data.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, dict):
        return {_key(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (int, float, Decimal)):
        return _number(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    return _as_text(value)


def _number(value: float | Decimal) -> float | str | None:
    if isinstance(value, int):
        return value if -EXACT_INTEGER_MAX <= value <= EXACT_INTEGER_MAX else str(value)
    number = float(value)
    if not math.isfinite(number):
        return None
    return number if isinstance(value, float) or abs(number) <= EXACT_INTEGER_MAX else str(value)


def _as_text(value: Any) -> str:
    if isinstance(value, (datetime, date, time_of_day)):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"values of type {type(value).__name__} cannot be shown")


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(json_safe(key))


# --- One request -----------------------------------------------------------------------------------------


class Worker:
    """Answers one request at a time; keeps nothing of one query for the next."""

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()
        self.stopwatch.start()
        self.answered = 0
        self._parser = self._connect()
        self._parser.execute(_LOCK.format(timeout_ms=10_000)).fetchall()
        self._spare: duckdb.DuckDBPyConnection | None = None
        self._used: duckdb.DuckDBPyConnection | None = None
        self._warm_up()

    def _connect(self) -> duckdb.DuckDBPyConnection:
        import duckdb

        config: dict[str, Any] = {
            "threads": 1,
            "async_threads": 0,
            "temp_directory": "",
            "memory_limit": ENGINE_MEMORY,
        }
        connection = duckdb.connect(":memory:", config=config)
        connection.execute(_SETTINGS).fetchall()
        return connection

    def _warm_up(self) -> None:
        """Makes the libraries load and start what they put off (Arrow's readers and threads, time zones).

        Afterwards no file can be opened that is not published, and no thread started.
        """
        import pyarrow as pa  # type: ignore[import-untyped]

        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
        now = datetime.now().astimezone()
        table = pa.table({"number": [1], "text": ["a"], "at": pa.array([now], pa.timestamp("us", tz="UTC"))})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        again = pa.ipc.open_file(pa.BufferReader(sink.getvalue())).read_all()
        limits = {"rows_max": 1, "bytes_max": 1_000, "timeout_s": 10.0}
        answer = self._run_on(
            self._take(), {"warm": again}, {"sql": "SELECT *, uuid(), 1.5 FROM warm", **limits}
        )
        if "rows" not in answer:
            raise RuntimeError(f"the query worker cannot run a query: {answer}")

    def prepare(self) -> None:
        """Throws the last query's database away and opens the next one's: most of what a query takes."""
        if self._used is not None:
            with contextlib.suppress(Exception):  # whatever it says, it is not used again
                self._used.close()
            self._used = None
        if self._spare is None:
            self._spare = self._connect()

    def _take(self) -> duckdb.DuckDBPyConnection:
        self.prepare()
        connection, self._spare = self._spare, None
        if connection is None:
            raise RuntimeError("no database")
        return connection

    def parse(self, sql: str) -> dict[str, Any]:
        """What the gate needs to decide. Any failure at all is an error of the query."""
        try:
            statements = self._parser.extract_statements(sql)
            kinds = [str(statement.type).rpartition(".")[2] for statement in statements]
            parameters = any(bool(statement.named_parameters) for statement in statements)
            rows = self._parser.execute("SELECT json_serialize_sql($1)", [sql]).fetchall()
        except BaseException as error:  # noqa: BLE001 - the recipe: whatever the parser raises refuses the query
            return {"error": _text(error), "leaving": not _is_ordinary(error)}
        return {"kinds": kinds, "parameters": parameters, "tree": rows[0][0]}

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a query over the published files; answers with rows, or with the engine's error."""
        import pyarrow as pa

        # Python's map and not Arrow's, which would start a thread to read from it.
        maps = {name: _map(path) for name, path in request["tables"].items()}
        _allow_bytes(ADDRESS_SPACE_BYTES + sum(map(len, maps.values())))
        tables = {name: pa.ipc.open_file(pa.py_buffer(content)).read_all() for name, content in maps.items()}
        return self._run_on(self._take(), tables, request)

    def _run_on(
        self, connection: duckdb.DuckDBPyConnection, tables: Mapping[str, Any], request: Mapping[str, Any]
    ) -> dict[str, Any]:
        timeout_s = request["timeout_s"]
        deadline = time.monotonic() + timeout_s
        try:
            for name, table in tables.items():
                connection.register(name, table)
            connection.execute(_LOCK.format(timeout_ms=max(1, round(timeout_s * 1000)))).fetchall()
            connection.execute("BEGIN TRANSACTION READ ONLY").fetchall()
            self.stopwatch.watch(connection, timeout_s)
            return _collect(connection.execute(request["sql"]), request["rows_max"], request["bytes_max"])
        except BaseException as error:  # noqa: BLE001 - every failure of a query is an answer
            late = time.monotonic() > deadline - 0.05 and not isinstance(error, TypeError)
            ordinary = _is_ordinary(error)
            return {
                "error": _text(error),
                "timeout": late,
                "ordinary": ordinary,
                "leaving": late or not ordinary,
            }
        finally:
            self.stopwatch.watch(None)
            self._used = connection


def _map(path: str) -> mmap.mmap:
    with open(path, "rb") as file:  # noqa: PTH123 - once per query, and pathlib is one more import
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def _collect(result: duckdb.DuckDBPyConnection, rows_max: int, bytes_max: int) -> dict[str, Any]:
    description = result.description or []
    rows: list[list[Any]] = []
    spent_bytes, cut = 0, ""
    while not cut and (batch := result.fetchmany(FETCH_ROWS)):
        for values in batch:
            row = [json_safe(value) for value in values]
            row_bytes = len(json.dumps(row))
            if len(rows) >= rows_max or spent_bytes + row_bytes > bytes_max:
                cut = "rows" if len(rows) >= rows_max else "bytes"
                break
            spent_bytes += row_bytes
            rows.append(row)
    if cut == "bytes" and not rows:
        raise TypeError(
            f"the first row has {row_bytes:,} bytes and {bytes_max:,} are allowed; select less, or left()"
        )
    return {
        "columns": [str(column[0]) for column in description],
        "types": [str(column[1]) for column in description],
        "rows": rows,
        "cut": cut,
    }


def _text(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, _stopping_errors()):
        text = text.partition("\n")[0]  # what follows is advice about settings that nobody can change here
    return text if len(text) <= ERROR_CHARACTERS_MAX else text[: ERROR_CHARACTERS_MAX - 1] + "…"


def _is_ordinary(error: BaseException) -> bool:
    """Whether the process is as good as before: the query was wrong, not the engine."""
    import duckdb

    return isinstance(error, (duckdb.Error, TypeError)) and not isinstance(error, _stopping_errors())


def _stopping_errors() -> tuple[type[BaseException], ...]:
    import duckdb

    engine = (duckdb.InternalException, duckdb.FatalException, duckdb.OutOfMemoryException)
    return (*engine, duckdb.InterruptException, MemoryError, RecursionError)


def _allow_bytes(soft: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # as in `_lower_limit`
        resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _allow_seconds(timeout_s: float) -> None:
    """A last resort if whoever watches this process is gone: the kernel ends it after so much work."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + timeout_s + 3)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


# --- The process -----------------------------------------------------------------------------------------


def _load_libraries() -> None:
    import duckdb  # noqa: F401 - shared libraries, before memory is limited
    import pyarrow.dataset  # type: ignore[import-untyped]
    import pyarrow.ipc  # type: ignore[import-untyped] # noqa: F401 - as above


def main(mapped_bytes_max: int, drop_root: bool) -> None:
    """Serves requests from stdin until it ends, an engine error happens or enough were served."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not break the frames
    for kind, soft in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 64)):
        _lower_limit(kind, soft)
    network_left = leave_network()
    _load_libraries()
    memory_limited = _lower_limit(resource.RLIMIT_AS, ADDRESS_SPACE_BYTES + mapped_bytes_max)
    _allow_bytes(ADDRESS_SPACE_BYTES)
    worker = Worker()
    user_left = leave_root() if drop_root else False
    _die_with_parent()
    if os.geteuid() != 0:
        _lower_limit(resource.RLIMIT_NPROC, 0)
    isolation = {"network": network_left, "user": user_left, "memory": memory_limited}
    answers.write(frame({"ready": isolation}))
    answers.flush()
    while (request := read_frame(requests)) is not None:
        _allow_seconds(request["timeout_s"])
        answer = worker.parse(request["sql"]) if request["op"] == "parse" else worker.run(request)
        worker.answered += request["op"] == "run"
        answer["leaving"] = bool(answer.get("leaving")) or worker.answered >= QUERIES_PER_PROCESS
        answers.write(frame(answer))
        answers.flush()
        if answer["leaving"]:
            return
        worker.prepare()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "drop-root")
