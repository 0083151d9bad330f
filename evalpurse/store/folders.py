"""Names in a folder are durable only once the folder itself is synced."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Makes created, renamed and removed names in a folder durable (Windows has no such thing)."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
