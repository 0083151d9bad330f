"""The document collection: the source files of this interpreter's standard library.

Files are named by their POSIX path below the library's root, and nothing outside that root can be named.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

# Not what questions are about: the interpreter's own tests, bundled wheels, demos, generated help.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
QUOTED_NAME = re.compile(r"'([A-Za-z_]\w*)'")


class Hit(NamedTuple):
    """One line of one file; lines count from 1."""

    path: str
    line: int
    text: str


class Library:
    """Finds, searches and reads the files below one root."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    def of_this_interpreter(cls) -> Library:
        return cls(Path(sysconfig.get_path("stdlib")))

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Every source file, sorted."""
        return tuple(sorted(self._walk()))

    def read(self, path: str) -> str:
        """The text of a file; bytes that are not UTF-8 become replacement characters.

        Raises:
            KeyError: no such file in the collection.
        """
        return self._bytes(path).decode("utf-8", errors="replace")

    def search(self, pattern: re.Pattern[str], paths: Iterable[str], limit: int) -> list[Hit]:
        """The first `limit` lines that match, file by file."""
        compiled = re.compile(pattern.pattern.encode(), pattern.flags & ~re.UNICODE)
        hits: list[Hit] = []
        for path in paths:
            content = self._bytes(path)
            for match in compiled.finditer(content):
                hit = _hit(path, content, match.start())
                if not hits or hit != hits[-1]:
                    hits.append(hit)
                if len(hits) == limit:
                    return hits
        return hits

    def candidates(self, question: str, limit: int) -> list[str]:
        """The files most likely to hold the answer, best first.

        First the modules that the question names, longest name first; then files that define one of the
        names it quotes.
        """
        named = self.named(question)
        if len(named) >= limit:
            return named[:limit]
        names = QUOTED_NAME.findall(question)
        others = [path for path in self.paths if path not in named]
        return (named + list(self._defining(names, others)))[:limit]

    def named(self, question: str) -> list[str]:
        """Files of the modules whose dotted name stands in the question, longest name first."""
        known = set(self.paths)
        found: list[str] = []
        for name in sorted(set(DOTTED_NAME.findall(question)), key=lambda name: (-name.count("."), name)):
            stem = name.replace(".", "/")
            found += [path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in known]
        return found

    def _defining(self, names: list[str], paths: Iterable[str]) -> Iterator[str]:
        if not names:
            return
        words = [name.encode() for name in names]
        either = b"|".join(re.escape(word) for word in words)
        definition = re.compile(
            rb"^(?:(?:async )?def|class) (?:%b)\b|^(?:%b)\s*=" % (either, either), re.MULTILINE
        )
        for path in paths:
            content = self._bytes(path)
            # Looking for the bare words first is many times faster than the expression alone.
            if any(word in content for word in words) and definition.search(content):
                yield path

    def _bytes(self, path: str) -> bytes:
        if path not in self._known:
            raise KeyError(path)
        return (self._root / path).read_bytes()

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.paths)

    def _walk(self) -> Iterator[str]:
        top = os.fspath(self._root)
        for folder, folders, files in os.walk(top):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
            below = folder[len(top) :].strip(os.sep).replace(os.sep, "/")
            for name in files:
                if name.endswith(".py"):
                    yield f"{below}/{name}" if below else name


def _hit(path: str, content: bytes, offset: int) -> Hit:
    start = content.rfind(b"\n", 0, offset) + 1
    end = content.find(b"\n", offset)
    line = content[start : end if end >= 0 else len(content)]
    return Hit(path, content.count(b"\n", 0, start) + 1, line.decode("utf-8", errors="replace"))
