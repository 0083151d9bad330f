"""Starts a process without holding up the interpreter.

`subprocess` waits for the child's exec with the interpreter locked: on a busy machine each start would stop
the whole daemon for milliseconds. The C library's posix_spawn does the same work in a call during which
other threads go on. Where it lacks what is needed (a working folder, closing every other descriptor),
`subprocess` it is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache

_INFO_FD = 3
_OPAQUE_BYTES = 1024  # glibc's structures have 80, 336 and 128 bytes
_SETSIGDEF, _SETSID = 0x04, 0x80
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def spawn(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: str,
    stdin: int,
    output: int,
    info: int | None,
) -> int:
    """Starts a command as the leader of a new session and returns its process id; call it in a thread.

    `output` becomes its standard output and error, `info` the descriptor `number_in_child(info)`; it inherits
    nothing else.

    Raises:
        OSError: the system refuses, the folder or the program is missing.
    """
    library = _library()
    if library is None:
        return _by_subprocess(command, environment, folder, (stdin, output, info))
    path = command[0]
    actions, attributes, signals = (ctypes.create_string_buffer(_OPAQUE_BYTES) for _ in range(3))
    pid = ctypes.c_int()
    _check(library.posix_spawn_file_actions_init(actions), path)
    _check(library.posix_spawnattr_init(attributes), path)
    try:
        _check(library.posix_spawn_file_actions_addchdir_np(actions, os.fsencode(folder)), path)
        moves = [(stdin, 0), (output, 1), (output, 2), *([(info, _INFO_FD)] if info is not None else [])]
        for source, target in moves:
            _check(library.posix_spawn_file_actions_adddup2(actions, source, target), path)
        first_closed = 3 if info is None else _INFO_FD + 1
        _check(library.posix_spawn_file_actions_addclosefrom_np(actions, first_closed), path)
        library.sigemptyset(signals)
        for number in _IGNORED_BY_PYTHON:
            library.sigaddset(signals, int(number))
        _check(library.posix_spawnattr_setsigdefault(attributes, signals), path)
        _check(library.posix_spawnattr_setflags(attributes, _SETSIGDEF | _SETSID), path)
        arguments = _strings(command)
        variables = _strings([f"{name}={value}" for name, value in environment.items()])
        _check(
            library.posix_spawn(
                ctypes.byref(pid), os.fsencode(path), actions, attributes, arguments, variables
            ),
            path,
        )
    finally:
        library.posix_spawn_file_actions_destroy(actions)
        library.posix_spawnattr_destroy(attributes)
    return pid.value


def number_in_child(info: int) -> int:
    """The descriptor under which a child finds the extra file that it is given."""
    return info if _library() is None else _INFO_FD


@cache
def _library() -> ctypes.CDLL | None:
    """The C library, if it is one whose constants and sizes are known and which has what is needed."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    needed = ("gnu_get_libc_version", "posix_spawn_file_actions_addclosefrom_np")
    return library if all(hasattr(library, name) for name in needed) else None


def _check(error: int, path: str) -> None:
    if error:
        raise OSError(error, os.strerror(error), path)


def _strings(values: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [os.fsencode(value) for value in values]
    if any(b"\0" in value for value in encoded):
        raise ValueError("a command or variable has a NUL character")
    return (ctypes.c_char_p * (len(encoded) + 1))(*encoded, None)


def _by_subprocess(
    command: Sequence[str], environment: Mapping[str, str], folder: str, files: tuple[int, int, int | None]
) -> int:
    stdin, output, info = files
    process = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=output,
        stderr=output,
        env=environment,
        cwd=folder,
        pass_fds=() if info is None else (info,),
        start_new_session=True,
    )
    # It outlives us on purpose; Popen would warn, and would reap it behind our back.
    process.returncode = 0
    return process.pid
