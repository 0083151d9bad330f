"""The home folder: where everything that evalpurse remembers lives, and nothing else does.

One daemon owns one home. The folder is private to its user (mode 0700). Imported by the bridge and the
command line, so this module needs only the standard library.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOCKET_PATH_BYTES_MAX = 100  # the kernel allows 108 with the final NUL on Linux, 104 on macOS


@dataclass(frozen=True)
class Home:
    """Names every place inside a home folder; creates nothing until `create()`."""

    path: Path

    @classmethod
    def find(cls) -> Home:
        """`$EVALPURSE_HOME`, else `~/.evalpurse`."""
        named = os.environ.get("EVALPURSE_HOME")
        return cls(Path(named).expanduser().resolve() if named else Path.home() / ".evalpurse")

    def create(self) -> Home:
        """Makes the folders that are missing, readable by this user only."""
        for folder in (
            self.path,
            self.tokens,
            self.blobs,
            self.work,
            self.sources,
            self.backups,
            self.secrets,
        ):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self

    def identity(self) -> str:
        """A random name for this home, made once: by it a sandbox is known as ours wherever it runs."""
        file = self.path / "identity"
        try:
            with file.open("x", encoding="utf-8") as fresh:
                fresh.write(secrets.token_hex(8))
        except FileExistsError:
            pass
        return file.read_text(encoding="utf-8")

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def tokens(self) -> Path:
        """One file a role: `owner`, `agent`, `viewer`; mode 0600."""
        return self.path / "tokens"

    @property
    def secrets(self) -> Path:
        """One file a secret, named as its environment variable; mode 0600; never copied to the store."""
        return self.path / "secrets"

    @property
    def results_file(self) -> Path:
        return self.path / "results.duckdb"

    @property
    def ledger_file(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def data_lock(self) -> Path:
        """Locked by the one process that owns the data; separate from the files it guards."""
        return self.path / "data.lock"

    @property
    def blobs(self) -> Path:
        return self.path / "blobs"

    @property
    def work(self) -> Path:
        """One folder a local sandbox."""
        return self.path / "work"

    @property
    def sources(self) -> Path:
        """Harness sources at a commit, prepared once and copied into each run."""
        return self.path / "sources"

    @property
    def worlds(self) -> Path:
        """Files of worlds, each content once; made when the first world is added."""
        return self.path / "worlds"

    @property
    def backups(self) -> Path:
        return self.path / "backups"

    @property
    def daemon_file(self) -> Path:
        """What a client needs to find the running daemon: pid, version, socket, HTTP port."""
        return self.path / "daemon.json"

    @property
    def daemon_lock(self) -> Path:
        """Held while a client starts a daemon, so that two clients start one."""
        return self.path / "daemon.lock"

    @property
    def daemon_alive_lock(self) -> Path:
        """Held by the daemon as long as it lives, so that two never serve one home; holds its pid."""
        return self.path / "daemon.alive"

    @property
    def log_file(self) -> Path:
        return self.path / "daemon.log"

    @property
    def socket_file(self) -> Path:
        """The raw socket; in a short private folder when the home's own path is too long for one."""
        inside = self.path / "raw.sock"
        if len(os.fsencode(inside)) <= SOCKET_PATH_BYTES_MAX:
            return inside
        digest = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        uid = os.getuid() if hasattr(os, "getuid") else 0
        base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        return base / f"evalpurse-{uid}" / f"{digest}.sock"
