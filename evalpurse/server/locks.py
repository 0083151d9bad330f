"""File locks that end with the process that holds them, however it ends. Standard library only."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.01

if sys.platform == "win32":
    import msvcrt

    def _take(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _take(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def try_lock(path: Path) -> int | None:
    """The descriptor of a lock that is now held, or nothing when another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _take(descriptor)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def wait_for_lock(path: Path, timeout_s: float) -> int | None:
    """As `try_lock`, trying again until the time is over."""
    deadline = time.monotonic() + timeout_s
    while (descriptor := try_lock(path)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock right now."""
    if not path.exists():
        return False
    descriptor = try_lock(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


@contextlib.contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Holds a lock for a block.

    Raises:
        TimeoutError: another process holds it for longer.
    """
    descriptor = wait_for_lock(path, timeout_s)
    if descriptor is None:
        raise TimeoutError(f"{path} is locked by another process for more than {timeout_s:g} s.")
    try:
        yield
    finally:
        os.close(descriptor)
