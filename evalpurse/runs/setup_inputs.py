"""Which files of a source the setup of a variant may have read: when one of them changed, setup runs anew.

The rule errs to one side: what it does not know counts as having read everything. It is written out in
docs/modal.md for those whose setup never comes out warm.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

MANIFESTS = (
    *("*requirements*", "*constraints*", "pyproject.toml", "setup.py", "setup.cfg", "MANIFEST.in"),
    *("package.json", "*lock*", "*shrinkwrap*", ".npmrc", ".yarnrc*", "Pipfile", "environment*.y*ml"),
    *("go.mod", "go.sum", "Cargo.toml", "Gemfile", "*.gemspec", ".python-version", ".nvmrc", "uv.toml"),
)
"""Names (or folders) of files that installers look for by themselves."""

COMPILED = frozenset({".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".pyx", ".pxd", ".rs", ".go", ".f90"})
_SYSTEM = re.compile(r"(apt-get|apt|apk|dnf|yum) |(mkdir|true|echo)( |$)")
_INSTALLER = re.compile(
    r"((python3?|uv run python) -m )?pip3? install |uv (pip install |sync\b)|poetry install\b|npm ci\b"
)
_EDITABLE = re.compile(r"(^| )(-e|--editable)[ =]|^(uv sync|poetry install)\b")
_UNKNOWN = re.compile(r"[|<>`$(){}*?~\n]")


def setup_input(
    setup: Sequence[str], changed: Iterable[str], added_or_removed: Iterable[str], dockerfile_text: str | None
) -> str | None:
    """Why setup may come out otherwise for these changed paths; None when it cannot.

    `changed` has every path that differs, `added_or_removed` those that only one of the trees has.
    """
    paths, shapes = sorted(changed), sorted(added_or_removed)
    if not paths:
        return None
    if dockerfile_text is not None and re.search(r"(?im)^\s*(COPY|ADD)\s|--mount", dockerfile_text):
        return f"the Dockerfile takes files of the source, and {paths[0]} changed"
    if not setup:
        return None
    for path in paths:
        parts = PurePosixPath(path).parts
        if any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in MANIFESTS):
            return f"{path} changed, which installers read"
    for command in setup:
        for step in re.split(r"\s*(?:&&|;)\s*", command.strip()):
            reason = _read_by(step, paths, shapes)
            if reason is not None:
                return reason
    return None


def _read_by(step: str, paths: Sequence[str], shapes: Sequence[str]) -> str | None:
    if not step or (_SYSTEM.match(step) and not _UNKNOWN.search(step)):
        return None
    if _UNKNOWN.search(step) or not _INSTALLER.match(step):
        return f"{paths[0]} changed, and {step!r} may read any file"
    try:
        words = shlex.split(step)
    except ValueError:
        return f"{paths[0]} changed, and {step!r} cannot be read"
    if _EDITABLE.search(step):
        reason = _linked_by(step, paths, shapes)
        if reason is not None:
            return reason
    return _named_by(step, words, paths)


def _linked_by(step: str, paths: Sequence[str], shapes: Sequence[str]) -> str | None:
    """An editable install finds the code where it lies: what is there, and what was compiled, was read."""
    if shapes:
        return f"{shapes[0]} was added or removed, and {step!r} looks at what is there"
    for path in paths:
        if PurePosixPath(path).suffix in COMPILED:
            return f"{path} changed, which {step!r} may compile"
    return None


def _named_by(step: str, words: Sequence[str], paths: Sequence[str]) -> str | None:
    for before, word in zip(["", *words], words, strict=False):
        value = word.partition("=")[2] if word.startswith("--") else word
        if before in ("-e", "--editable") or word.startswith("--editable="):
            continue
        reason = _names(value, step, paths)
        if reason is not None:
            return reason
    return None


def _names(word: str, step: str, paths: Sequence[str]) -> str | None:
    """Whether a word is a place in the source: that, all below it, and its like beside it are read."""
    if word.startswith("-") or "//" in word:
        return None
    place = PurePosixPath(word.partition("[")[0] or "-")
    if str(place) == "." or ".." in place.parts or place.is_absolute():
        return f"{paths[0]} changed, and {step!r} installs the source"
    for path in paths:
        other = PurePosixPath(path)
        like = place.suffix and other.parent == place.parent and other.suffix == place.suffix
        if other.is_relative_to(place) or like:
            return f"{path} changed, and {step!r} names {word}"
    return None
