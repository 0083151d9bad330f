"""The git program, started so that nothing but the named repository has a say.

No `GIT_*` variable, hook, file system monitor, network or question to a person takes part.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

from evalpurse.runs.errors import SourceError

GIT_TIMEOUT_S = 120.0
_COPY_BYTES = 1 << 20
_ASKED_AHEAD = 100
"""Requests on their way to git at once: they must fit a pipe, or both sides would wait for each other."""

# Settings that could start a program or the network. They win over every configuration file. The user's own
# configuration is read otherwise: safe.directory, excludesFile and autocrlf decide what counts as changed.
_QUIET = (
    "core.fsmonitor=false",
    f"core.hooksPath={os.devnull}",
    "protocol.allow=never",
    "core.quotePath=false",
    "submodule.recurse=false",
)


def git_environment() -> dict[str, str]:
    """The environment for git: nothing of ours may point it at another repository or start a program."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return kept | {
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }


def _command(repo: Path, args: Iterable[str]) -> list[str]:
    settings = [part for setting in _QUIET for part in ("-c", setting)]
    return ["git", *settings, "-C", os.fspath(repo), "--no-pager", *args]


def run_git(repo: Path, *args: str, sent: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    try:
        # An empty input is an immediate end of file, so that git never waits for a person.
        return subprocess.run(
            _command(repo, args),
            input=sent,
            capture_output=True,
            env=git_environment(),
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise SourceError("git is not installed, or not on PATH.", hint="Install git.") from error
    except subprocess.TimeoutExpired as error:
        raise SourceError(
            f"git {args[0]} in {repo} did not end within {GIT_TIMEOUT_S:.0f} s.",
            hint="Try it by hand; a network drive or a very large repository may be slow.",
        ) from error


def reason_of(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    text = " ".join(line.strip() for line in lines if not line.startswith("hint:"))
    return text.removeprefix("fatal: ").removeprefix("error: ")[:500] or f"git exit code {done.returncode}"


class MissingBlobError(SourceError):
    """A repository lacks a blob that one of its commits names."""


class BlobReader:
    """Reads blobs of one repository through one git process, one at a time."""

    def __init__(self, repo: Path) -> None:
        self._repo = repo

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            _command(self._repo, ["cat-file", "--batch"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=git_environment(),
        )
        return self

    def __exit__(self, *_: object) -> None:
        # Not after an orderly end: a reader that is left in the middle of a blob would wait for us.
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # requests that were not sent
                    pipe.close()
        self._process.wait()

    def read(self, shas: Sequence[str]) -> Iterator[Iterator[bytes]]:
        """The blobs in the order asked for, each as pieces; each to be read to its end before the next.

        Raises:
            MissingBlobError: the repository does not have one of them.
        """
        sent = self._process.stdin
        if sent is None:
            raise RuntimeError("pipes of a running process are missing")
        for start in range(0, len(shas), _ASKED_AHEAD):
            asked = shas[start : start + _ASKED_AHEAD]
            try:
                sent.write("".join(f"{sha}\n" for sha in asked).encode())
                sent.flush()
            except BrokenPipeError as error:
                raise MissingBlobError("git ended early") from error
            for sha in asked:
                yield self._pieces(sha)

    def _pieces(self, sha: str) -> Iterator[bytes]:
        received = self._process.stdout
        if received is None:
            raise RuntimeError("pipes of a running process are missing")
        header = received.readline().split()
        if header[1:2] != [b"blob"]:
            raise MissingBlobError(f"blob {sha} is missing")
        left = int(header[2])
        while left:
            piece = received.read(min(left, _COPY_BYTES))
            if not piece:
                raise MissingBlobError(f"blob {sha} could not be read")
            left -= len(piece)
            yield piece
        received.read(1)
