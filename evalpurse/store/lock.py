"""One process owns the data of a home folder.

The lock is taken on a file of its own: DuckDB's own lock on the database file is lost as soon as anything
in the process opens and closes that file. It ends with the process, however the process ends.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

from evalpurse.store.errors import StoreLockedError

log = logging.getLogger(__name__)

if sys.platform == "win32":
    import msvcrt

    _LOCKED_BYTE = 1 << 20  # far behind the pid: Windows does not let others read a locked byte

    def _take(descriptor: int) -> None:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)
else:
    import fcntl

    def _take(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


DEAD_HOLDER_S = 5.0


class DataLock:
    """Held from construction to `release()`.

    Raises:
        StoreLockedError: names the process that holds it.
    """

    def __init__(self, path: Path) -> None:
        # Not inheritable (the default of os.open): a harness must not keep the lock of a dead daemon.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _take_from_the_dead(descriptor)
        except OSError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise StoreLockedError(
                f"The data in {path.parent} is in use by process {holder or 'unknown'} (lock {path.name}).",
                hint="Use that process (`evalpurse daemon status`), or stop it first.",
                pid=holder,
                lock=str(path),
            ) from error
        self._descriptor: int | None = descriptor
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        except OSError as error:  # a full disk: the lock is taken all the same, only its holder has no name
            log.warning("the process id was not written to %s: %s", path, error)

    def release(self) -> None:
        """Lets the next process in; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _take_from_the_dead(descriptor: int) -> None:
    """Takes the lock, waiting a moment for a holder that has died.

    A process that it was just starting shares its descriptors until it executes its own program, and so keeps
    the lock for some milliseconds after a kill.
    """
    deadline = time.monotonic() + DEAD_HOLDER_S
    while True:
        try:
            _take(descriptor)
        except OSError:
            holder = _holder(descriptor)
            if holder is None or _is_alive(holder) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is someone else's, or the system does not tell
        return True
    return True


def _holder(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0) if hasattr(os, "pread") else os.read(descriptor, 32)
    return int(text) if text.strip().isdigit() else None
