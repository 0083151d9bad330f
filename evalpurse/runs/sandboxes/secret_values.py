"""Values of secrets in a home folder: the present one of each, and former ones that may still be printed.

A secret may be given a new value while sandboxes run that hold the old one. So a value that goes is kept
until every attempt that was under way has ended, and a value that comes is kept here before anything can
hand it out: whatever a sandbox was given, its output is cleaned of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from evalpurse.home import Home

KNOWN = ".known"
_UNTIL, _COMING = ".until", ".coming"
MODAL_NAME_CHARS_MAX = 63


def present_value(home: Home, name: str) -> str | None:
    """The value that a sandbox made now is given; None when there is no such secret."""
    file = home.secrets / name
    return _read(file).rstrip("\n") if file.is_file() else None


def secret_values(home: Home, names: Iterable[str]) -> dict[str, list[str]]:
    """Every value that each secret may have in a sandbox that is alive, the present one first."""
    found: dict[str, list[str]] = {}
    for name in names:
        present = present_value(home, name)
        former = [_read(file) for file in _kept(home, name)]
        found[name] = [*([] if present is None else [present]), *former]
    return found


def modal_secret_name(home_id: str, name: str) -> str:
    """What a secret is called on Modal: one Modal Secret each, with this one key, apart for every home."""
    whole = f"evalpurse-{home_id}-{name}"
    if len(whole) <= MODAL_NAME_CHARS_MAX:
        return whole
    return f"evalpurse-{home_id}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def announce(home: Home, name: str, value: str) -> None:
    """Keeps a value before anything hands it out; `put_in_place` makes it the present one."""
    folder = _folder(home, name)
    if all(_read(file) != value for file in folder.glob(f"*{_COMING}")):
        _write(folder / f"{secrets.token_hex(8)}{_COMING}", value)


def put_in_place(home: Home, name: str, value: str) -> None:
    """Makes a value the present one, all or nothing, and keeps the one before."""
    present = present_value(home, name)
    if present is not None and present != value:
        _write(_folder(home, name) / secrets.token_hex(8), present)
    _write(home.secrets / f".{name}.{os.getpid()}", value).replace(home.secrets / name)
    for file in _folder(home, name).glob(f"*{_COMING}"):
        if _read(file) == value:
            file.unlink()
        else:
            file.rename(file.with_suffix(""))  # announced, perhaps handed out, and overtaken


def forget_former(home: Home, open_seqs: Iterable[int]) -> int:
    """Removes former values that no attempt under way can hold; returns how many.

    `open_seqs` are the journal numbers of all open holds. A value that has just gone is kept until every
    hold that is open now is resolved: whatever starts later gets the present value.
    """
    open_now = list(open_seqs)
    newest, oldest = max(open_now, default=0), min(open_now, default=None)
    removed = 0
    for folder in (home.secrets / KNOWN).glob("*"):
        for file in folder.iterdir():
            if file.suffix:
                continue
            mark = file.with_name(file.name + _UNTIL)
            if not mark.exists():
                _write(mark, str(newest))
            if oldest is None or int(mark.read_text(encoding="ascii")) < oldest:
                file.unlink()
                mark.unlink()
                removed += 1
    return removed


def _kept(home: Home, name: str) -> list[Path]:
    folder = home.secrets / KNOWN / name
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.suffix in ("", _COMING))


def _folder(home: Home, name: str) -> Path:
    folder = home.secrets / KNOWN / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _read(file: Path) -> str:
    return file.read_bytes().decode("utf-8")


def _write(place: Path, content: str) -> Path:
    """A private file, complete and on the disk or not there at all."""
    draft = place.with_name(f"{place.name}.{os.getpid()}.draft")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())
    return draft.replace(place)
