"""What turns one source tree into another, and the proof that it did.

A tree is its regular files, their executable bit and its symlinks: what git knows, and nothing else of a
folder. Its hash is computed here and again inside the sandbox, from the files that are there, with nothing
but sh, tar and sha256sum (or shasum). Folders without files and owners are no part of a tree. Equal trees
give equal payloads, byte for byte.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from evalpurse.runs.errors import UnsupportedSourceError


@dataclass(frozen=True)
class Entry:
    """One file of a tree: SHA-256 of its content, or the target of a link (then `link` is True)."""

    content: str
    executable: bool = False
    link: bool = False


Tree = Mapping[str, Entry]
"""Entries by relative POSIX path."""


def scan(folder: Path) -> dict[str, Entry]:
    """The tree of a folder. Blocking: call it from a thread.

    Raises:
        UnsupportedSourceError: a name or link target that no line of text can hold, or something that is
            neither file, folder nor symlink.
    """
    found: dict[str, Entry] = {}
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        with os.scandir(folder / inside) as entries:
            for entry in entries:
                path = f"{inside}{entry.name}"
                if entry.is_symlink():
                    found[path] = Entry(_plain(str(Path(entry.path).readlink()), path), link=True)
                elif entry.is_dir():
                    waiting.append(f"{path}/")
                elif entry.is_file():
                    with Path(entry.path).open("rb") as file:
                        digest = hashlib.sha256(file.read()).hexdigest()
                        mode = os.fstat(file.fileno()).st_mode
                    found[path] = Entry(digest, executable=bool(mode & stat.S_IXUSR))
                else:
                    raise UnsupportedSourceError(f"{path!r} is neither a file, a folder nor a symlink.")
                _plain(entry.name, path)
    return found


def _plain(text: str, path: str) -> str:
    """Names that sha256sum would write in another form cannot be compared line by line."""
    if any(sign in text for sign in "\n\r\\") or text != text.encode(errors="replace").decode():
        raise UnsupportedSourceError(
            f"{path!r} has a line end, a backslash or bytes that are no UTF-8 in its name or link target.",
            hint="Rename it: sources for remote sandboxes need plain names.",
        )
    return text


def tree_hash(tree: Tree) -> str:
    """SHA-256 of one line a file (`digest  ./path`), then the executables, then the links, each by path."""
    names = sorted(tree)
    lines = [f"{tree[name].content}  ./{name}\n" for name in names if not tree[name].link]
    lines += [f"x ./{name}\n" for name in names if not tree[name].link and tree[name].executable]
    lines += [f"l ./{name} {tree[name].content}\n" for name in names if tree[name].link]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Delta:
    """Paths to write and paths to remove."""

    written: tuple[str, ...]
    gone: tuple[str, ...]


def delta_between(base: Tree, own: Tree) -> Delta:
    """What has to be written over and removed from `base` to get `own`."""
    written = tuple(sorted(path for path, entry in own.items() if base.get(path) != entry))
    return Delta(written, tuple(sorted(path for path in base if path not in own)))


def pack(folder: Path, own: Tree, delta: Delta, target: Path) -> Path:
    """Writes the payload: lists of what is expected and gone, and a tar of what is written. Atomic.

    Blocking: call it from a thread.
    """
    changed = io.BytesIO()
    with tarfile.open(fileobj=changed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in delta.written:
            _add(tar, folder, path, own[path])
    names = sorted(own)
    parts = {
        "files": _lines(f"./{name}" for name in names if not own[name].link),
        "links": _lines(f"./{name}" for name in names if own[name].link),
        "gone": _lines(f"./{name}" for name in delta.gone),
        "written": _lines(f"./{name}" for name in delta.written),
        "tree.tar": changed.getvalue(),
    }
    whole = io.BytesIO()
    # No name and no time in the header, so equal trees give equal bytes.
    with tarfile.open(fileobj=whole, mode="w:", format=tarfile.GNU_FORMAT) as tar:
        for name, content in parts.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            tar.addfile(entry, io.BytesIO(content))
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    fresh.write_bytes(_gzip(whole.getvalue()))
    fresh.replace(target)
    return target


def _gzip(content: bytes) -> bytes:
    return gzip.compress(content, compresslevel=3, mtime=0)


def _lines(names: Iterable[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()


def _add(tar: tarfile.TarFile, folder: Path, path: str, entry: Entry) -> None:
    info = tarfile.TarInfo(path)
    if entry.link:
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.content, 0o777
        tar.addfile(info)
        return
    content = (folder / path).read_bytes()
    if hashlib.sha256(content).hexdigest() != entry.content:
        raise UnsupportedSourceError(f"{path!r} of {folder} changed while it was packed.", hint="Try again.")
    info.size, info.mode = len(content), 0o755 if entry.executable else 0o644
    tar.addfile(info, io.BytesIO(content))


# $1 and $2: the folder with the lists, the source. Prints the tree hash of what is really there.
_HASH = r"""
if command -v sha256sum >/dev/null 2>&1; then sum=sha256sum
elif command -v shasum >/dev/null 2>&1; then sum="shasum -a 256"
else sum=; fi
tree_hash() (
  cd "$2" || exit 1
  {
    if [ -s "$1/files" ]; then tr '\n' '\0' <"$1/files" | xargs -0 $sum || exit 1; fi
    while IFS= read -r f; do
      if [ -L "$f" ]; then printf 'a link: %s\n' "$f"; elif [ -x "$f" ]; then printf 'x %s\n' "$f"; fi
    done <"$1/files"
    while IFS= read -r f; do printf 'l %s %s\n' "$f" "$(readlink "$f")"; done <"$1/links"
  } | $sum | { read -r digest _; printf '%s\n' "$digest"; }
)
"""

# Times of files become those of now: byte code that setup compiled from a file of before is then stale.
_APPLY = r"""
root=$1; source=$1/source; lists=$1/run/delta
rm -rf "$lists"; mkdir -p "$lists" "$source" || exit 1
tar -xzf "$root/run/source.tar" -C "$lists" || { echo "the source cannot be unpacked"; exit 1; }
cd "$source" || exit 1
while IFS= read -r f; do
  rm -f "$f" || { echo "$f cannot be removed"; exit 1; }
  rmdir -p "${f%/*}" 2>/dev/null
done <"$lists/gone"
mkdir -p "$source"; cd "$source" || exit 1
while IFS= read -r f; do rm -rf "$f"; done <"$lists/written"
tar -xmf "$lists/tree.tar" -C "$source" || { echo "the source cannot be written"; exit 1; }
"""

_VERIFY = r"""
if [ -z "$sum" ]; then
  echo "not verified: the image has neither sha256sum nor shasum"; [ "$strict" = no ]; exit
fi
found=$(tree_hash "$lists" "$source")
[ "$found" = "$expected" ] || { echo "the source has tree hash $found instead of $expected"; exit 1; }
rm -rf "$lists"
"""


def apply_script(expected: str, *, strict: bool) -> str:
    """A POSIX sh script: `$1` is the sandbox's folder, `$1/run/source.tar` the payload.

    It fails when the files that are there afterwards have another tree hash than `expected`; in an image
    that cannot compute one it fails if `strict` (a delta, which rests on what the image held), else says so.
    """
    settings = f"expected={expected}; strict={'yes' if strict else 'no'}\n"
    return settings + _HASH + _APPLY + _VERIFY


def check_script(expected: str) -> str:
    """A script that fails unless the source of the sandbox's folder `$1` still has this tree hash.

    The payload that it was made of must still be at `$1/run/source.tar`.
    """
    return (
        f"{_HASH}\n"
        'lists=$1/run/delta; mkdir -p "$lists" && tar -xzf "$1/run/source.tar" -C "$lists" || exit 1\n'
        '[ -n "$sum" ] || { echo "the image has neither sha256sum nor shasum"; exit 1; }\n'
        f'[ "$(tree_hash "$lists" "$1/source")" = {expected} ]'
        ' || { echo "setup changed files of the repository, so this image cannot be warm"; exit 1; }\n'
    )
