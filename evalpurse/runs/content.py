"""What people hand in, turned into something that has a digest: canonical JSON, relative paths, file texts.

The same content always gives the same bytes, so that a digest can stand for it; and no path made here can
point outside the folder that it is joined to.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

CONTENT_BYTES_MAX = 20_000_000
FILES_MAX = 2_000
JSON_DEPTH_MAX = 100
BASE64_PREFIX = "base64:"
_PATH_BYTES_MAX = 1_000
_NAME_BYTES_MAX = 255


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces, as UTF-8.

    Raises:
        ValueError: NaN or infinity, more than 100 levels deep, text that is not Unicode, or not JSON at all.
    """
    check_depth(value)
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has a lone surrogate, which is not valid Unicode text") from error
    except TypeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error} (NaN and infinity have no JSON form)") from error


def check_depth(value: Any) -> None:
    """Refuses JSON that is so deep that reading or comparing it could overflow the stack.

    Raises:
        ValueError: with the limit.
    """
    level = [value]
    for _ in range(JSON_DEPTH_MAX):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise ValueError(f"it is more than {JSON_DEPTH_MAX} levels deep")


def digest_of(content: bytes) -> str:
    """SHA-256 in hex: the same digest as the blob of this content."""
    return hashlib.sha256(content).hexdigest()


def checked_path(path: str) -> PurePosixPath:
    """A relative POSIX path that stays inside the folder it is joined to, and outside of any `.git`.

    Raises:
        ValueError: says what is wrong with the path.
    """
    shown = repr(path if len(path) <= 120 else path[:120] + "...")
    if not path or any(ord(char) < 32 or char == "\x7f" for char in path):
        raise ValueError(f"path {shown} is empty or has control characters")
    if path.startswith("/") or "\\" in path:
        raise ValueError(f"path {shown} must be relative, with '/' between its parts")
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"path {shown} has an empty, '.' or '..' part; it must stay inside its folder")
    if any(part.lower() == ".git" for part in parts):
        raise ValueError(f"path {shown} goes into .git, which is not part of a source")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError as error:
        raise ValueError(f"path {shown} is not valid Unicode text") from error
    if max(sizes) > _NAME_BYTES_MAX or sum(sizes) + len(sizes) > _PATH_BYTES_MAX:
        raise ValueError(
            f"path {shown} is too long: at most {_NAME_BYTES_MAX} bytes a part, {_PATH_BYTES_MAX} in all"
        )
    return PurePosixPath(path)


def checked_paths(paths: Iterable[str]) -> None:
    """Checks each path, and that none of them would have to be a file and a folder at once.

    Raises:
        ValueError: names the path.
    """
    checked = {checked_path(path) for path in paths}
    if len(checked) > FILES_MAX:
        raise ValueError(f"there are {len(checked)} files; at most {FILES_MAX} are allowed")
    for path in checked:
        for parent in path.parents:
            if parent in checked:
                raise ValueError(f"path '{parent}' is a file and also the folder of '{path}'")


def file_bytes(text: str) -> bytes:
    """The content that a file text stands for: itself as UTF-8, or what follows `base64:` decoded.

    Raises:
        ValueError: broken base64, or text that is not Unicode.
    """
    if text.startswith(BASE64_PREFIX):
        try:
            return base64.b64decode("".join(text[len(BASE64_PREFIX) :].split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"it starts with '{BASE64_PREFIX}' but is not base64: {error}") from error
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has a lone surrogate, which is not valid Unicode text") from error


def checked_files(files: Mapping[str, str]) -> int:
    """Checks paths and texts of files; returns their total size in bytes.

    Raises:
        ValueError: names the file and what is wrong.
    """
    checked_paths(files)
    total_bytes = 0
    for path, text in files.items():
        try:
            total_bytes += len(file_bytes(text))
        except ValueError as error:
            raise ValueError(f"file '{path}': {error}") from error
    return total_bytes


def check_size(total_bytes: int, of: str) -> None:
    """Refuses content above the limit of 20 MB.

    Raises:
        ValueError: with both numbers.
    """
    if total_bytes > CONTENT_BYTES_MAX:
        raise ValueError(
            f"{of} has {total_bytes:,} bytes; at most {CONTENT_BYTES_MAX:,} are allowed. "
            "Put large data into the harness repository, or let setup commands fetch it"
        )
