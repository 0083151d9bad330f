"""What a world is made of, as a list whose digest is the world's identity.

The list has every file, folder and link with its path, permissions, owner (as numbers), size, content digest
or target, in one order and one form: the same content gives the same bytes wherever it lies and however the
file system lists it. Times are no part of it, and neither is the top folder itself.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from evalpurse.runs.content import canonical_json
from evalpurse.runs.errors import WorldError

FORMAT = 1
ENTRIES_MAX = 200_000
PROBLEMS_SHOWN = 10
_EFFECTIVE = os.access in os.supports_effective_ids
Kind = Literal["file", "folder", "link"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in a world. `path` is relative with `/`; what a kind does not have is empty or 0."""

    path: str
    kind: Kind
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size: int = 0
    sha256: str = ""
    target: str = ""

    def facts(self) -> dict[str, Any]:
        """Its line in the manifest."""
        if self.kind == "link":  # permissions and owner of a link mean nothing
            return {"path": self.path, "kind": self.kind, "target": self.target}
        facts = {"path": self.path, "kind": self.kind, "mode": self.mode, "uid": self.uid, "gid": self.gid}
        if self.kind == "file":
            facts |= {"size": self.size, "sha256": self.sha256}
        return facts

    @property
    def mounted_mode(self) -> int:
        """Its permissions where it is mounted: nobody may write, the owner may read."""
        return self.mode & 0o555 | (0o500 if self.kind == "folder" else 0o400)


@dataclass(frozen=True)
class Manifest:
    """All entries of a world, ordered by the bytes of their paths."""

    entries: tuple[Entry, ...]
    content: bytes = field(repr=False)
    digest: str

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Manifest:
        """The manifest of entries in any order."""
        ordered = tuple(sorted(entries, key=lambda entry: entry.path.encode()))
        content = canonical_json({"format": FORMAT, "entries": [entry.facts() for entry in ordered]})
        return cls(ordered, content, hashlib.sha256(content).hexdigest())

    @classmethod
    def parse(cls, content: bytes, digest: str) -> Manifest:
        """The manifest that was stored under a digest.

        Raises:
            ValueError: it is not what the digest stands for, or of a format that is not known here.
        """
        found = hashlib.sha256(content).hexdigest()
        if found != digest:
            raise ValueError(f"the manifest has the digest {found[:12]}, not {digest[:12]}")
        facts = json.loads(content)
        if facts["format"] != FORMAT:
            raise ValueError(f"the manifest has format {facts['format']}; known is {FORMAT}")
        return cls(tuple(Entry(**entry) for entry in facts["entries"]), content, digest)

    @property
    def files(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == "file"]

    @property
    def bytes(self) -> int:
        """Sum of the sizes of all files."""
        return sum(entry.size for entry in self.entries if entry.kind == "file")


@dataclass(frozen=True, slots=True)
class Seen:
    """One thing as a scan saw it; `stamp` differs when it was written to, replaced or renamed since."""

    entry: Entry
    stamp: tuple[int, int, int, int, int, int]


@dataclass
class _Scan:
    root: str
    inside: str
    found: dict[str, Seen] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def scan(root: str) -> dict[str, Seen]:
    """Everything below a folder, by path, without reading any content. Follows no link.

    Raises:
        WorldError: the folder is empty or too large, or holds what a world cannot hold; names the first ones.
    """
    walk = _Scan(root, os.path.realpath(root))
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(f"{root}/{folder}") as entries:
                for entry in entries:
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    if _note(walk, path):
                        pending.append(path)
        except PermissionError:
            walk.problems.append(f"{folder or root}: this user may not read the folder")
        except OSError as error:
            walk.problems.append(f"{_shown(folder) or root}: {error.strerror}")
        if len(walk.found) > ENTRIES_MAX:
            raise WorldError(
                f"{root} holds more than {ENTRIES_MAX:,} files and folders; a world may hold that many.",
                hint="Pack what belongs together into archives, and unpack them with a restore command.",
            )
    _refuse(walk)
    return walk.found


def _note(walk: _Scan, path: str) -> bool:
    """Takes one entry in, or notes why it cannot be; True for a folder to look into."""
    if not _is_utf8(path):
        walk.problems.append(f"{_shown(path)}: its name is not UTF-8")
        return False
    try:
        facts = os.lstat(f"{walk.root}/{path}")
    except OSError as error:
        walk.problems.append(f"{path}: {error.strerror}")
        return False
    mode = stat.S_IMODE(facts.st_mode)
    problem = ""
    if stat.S_ISDIR(facts.st_mode):
        entry = Entry(path, "folder", mode, facts.st_uid, facts.st_gid)
    elif stat.S_ISREG(facts.st_mode):
        entry = Entry(path, "file", mode, facts.st_uid, facts.st_gid, facts.st_size)
        if not os.access(f"{walk.root}/{path}", os.R_OK, effective_ids=_EFFECTIVE):
            problem = "this user may not read it"
    elif stat.S_ISLNK(facts.st_mode):
        target = os.readlink(f"{walk.root}/{path}")
        entry = Entry(path, "link", target=target)
        problem = _problem_of_link(walk, path, target)
    else:
        walk.problems.append(f"{path}: is a {_special(facts.st_mode)}")
        return False
    if problem:
        walk.problems.append(f"{path}: {problem}")
    walk.found[path] = Seen(entry, stamp_of(facts))
    return entry.kind == "folder"


def stamp_of(facts: os.stat_result) -> tuple[int, int, int, int, int, int]:
    """What changes when a file is written to, replaced, or given other permissions."""
    return (
        facts.st_dev,
        facts.st_ino,
        facts.st_mode,
        facts.st_size,
        facts.st_mtime_ns,
        facts.st_ctime_ns,
    )


def _problem_of_link(walk: _Scan, path: str, target: str) -> str:
    if not _is_utf8(target):
        return "the target of the link is not UTF-8"
    if os.path.isabs(target):
        return f"the link leads to the absolute path {target}, which is elsewhere in a sandbox"
    depth = path.count("/")
    for part in target.split("/"):
        depth += -1 if part == ".." else part not in ("", ".")
        if depth < 0:
            return f"the link to {target} leaves the world"
    return _problem_of_target(walk, path, target)


def _problem_of_target(walk: _Scan, path: str, target: str) -> str:
    """The end of a link, which other links may lead to."""
    try:
        real = os.path.realpath(f"{walk.inside}/{path}", strict=True)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"the link to {target} leads round in a circle"
        return f"the link leads to {target}, which does not exist"
    inside = real == walk.inside or real.startswith(f"{walk.inside}/")
    return "" if inside else f"the link to {target} leaves the world"


def _special(mode: int) -> str:
    kinds: tuple[tuple[Callable[[int], bool], str], ...] = (
        (stat.S_ISFIFO, "named pipe"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISBLK, "device"),
        (stat.S_ISCHR, "device"),
    )
    return next((name for is_kind, name in kinds if is_kind(mode)), "thing of an unknown kind")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _refuse(walk: _Scan) -> None:
    if walk.problems:
        shown = sorted(walk.problems)[:PROBLEMS_SHOWN]
        more = len(walk.problems) - len(shown)
        raise WorldError(
            f"{walk.root} cannot be a world: " + "; ".join(shown) + (f"; and {more} more." if more else "."),
            hint="Mend or remove these, or add a folder without them. Nothing was added.",
            problems=len(walk.problems),
        )
    if not walk.found:
        raise WorldError(
            f"{walk.root} is empty: there is nothing to add.",
            hint="Put the files of the world into it first.",
        )


def resolved(manifest: Manifest) -> Iterator[tuple[str, Entry]]:
    """Files by path with every link replaced by what it leads to, for a place that has no links.

    Raises:
        WorldError: a link leads to a folder that contains it, which no copy can hold; or links multiply the
            files beyond what a world may hold.
    """
    by_path = {entry.path: entry for entry in manifest.entries}
    inside: dict[str, list[Entry]] = {}
    for entry in manifest.entries:
        inside.setdefault(entry.path.rpartition("/")[0], []).append(entry)
    count = 0
    pending: list[tuple[str, str, frozenset[str]]] = [("", "", frozenset([""]))]
    while pending:
        shown, folder, within = pending.pop()
        for entry in inside.get(folder, ()):
            name = entry.path.rpartition("/")[2]
            path = f"{shown}/{name}" if shown else name
            real = _follow(by_path, entry.path)
            found = by_path.get(real)
            count += 1
            if count > ENTRIES_MAX:
                raise WorldError(f"With its links followed the world has more than {ENTRIES_MAX:,} files.")
            if found is not None and found.kind == "file":
                yield path, found
            elif real in within:
                raise WorldError(
                    f"The link {entry.path} leads to a folder that contains it, which Modal cannot hold.",
                    hint="Remove the link and add the world under a new name.",
                )
            else:
                pending.append((path, real, within | {real}))


def _follow(by_path: dict[str, Entry], path: str) -> str:
    """The path of the file or folder that a path leads to; '' is the world itself."""
    parts = path.split("/")
    at: list[str] = []
    hops = 0
    while parts:
        part = parts.pop(0)
        if part == "..":
            at = at[:-1]
        elif part not in ("", "."):
            entry = by_path.get("/".join([*at, part]))
            if entry is not None and entry.kind == "link":
                hops += 1
                if hops > len(by_path):
                    raise WorldError(f"The link {path} leads round in a circle.")
                parts = entry.target.split("/") + parts
            else:
                at.append(part)
    return "/".join(at)
