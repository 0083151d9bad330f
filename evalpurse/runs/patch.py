"""The overlay of a variant: a patch and whole files on top of its source.

Nothing of an overlay can land outside the source folder: git refuses such patches, file paths are checked,
neither is written through a symlink, and no link may lead out afterwards.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from evalpurse.runs.content import checked_path, file_bytes
from evalpurse.runs.errors import OverlayError, PatchError
from evalpurse.runs.git import GIT_TIMEOUT_S, git_environment
from evalpurse.runs.sources import refuse_leaving_links

_FAILED_AT = re.compile(r"patch failed: (?P<path>.+):(?P<line>\d+)$", re.MULTILINE)
_HUNK_LINES_MAX = 20


def check_overlay(folder: Path, patch: str, files: Mapping[str, str]) -> None:
    """Checks an overlay against a source without changing it. Blocking: call it from a thread.

    Raises:
        PatchError: malformed or not applying, with git's reason and the hunk.
        OverlayError: a file would be written through a symlink or over a folder.
    """
    if patch:
        _git_apply(folder, patch, "--check")
    for path in files:
        _checked_target(folder, path)


def apply_overlay(folder: Path, patch: str, files: Mapping[str, str]) -> None:
    """Applies a patch, then writes the files, in a folder that the caller throws away on failure.

    Blocking: call it from a thread.

    Raises:
        PatchError, OverlayError: as `check_overlay`.
        UnsupportedSourceError: the overlay made a symlink that leaves the source.
    """
    if patch:
        _git_apply(folder, patch)
    for path, text in files.items():
        target = _checked_target(folder, path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise OverlayError(
                f"File '{path}' cannot be written: one of its folders is a file in the source.",
                hint="Choose another path.",
            ) from error
        target.write_bytes(file_bytes(text))  # keeps the mode of a file that was there
    refuse_leaving_links(folder, "the source with its overlay")


def _checked_target(folder: Path, path: str) -> Path:
    target = folder / checked_path(path)
    place = folder
    for part in checked_path(path).parts:
        place = place / part
        if place.is_symlink():
            raise OverlayError(
                f"File '{path}' would be written through the symlink "
                f"'{place.relative_to(folder)}' -> '{os.readlink(place)}'.",  # noqa: PTH115 - only to show it
                hint="Name the file that the link leads to.",
            )
    if target.is_dir():
        raise OverlayError(f"File '{path}' is a folder in the source.", hint="Name a file inside of it.")
    return target


def _git_apply(folder: Path, patch: str, *options: str) -> None:
    place = folder.resolve()
    # The folder is no repository. Without a ceiling git would find one around the home folder and then skip
    # every path of the patch as outside of its current folder, without an error.
    environment = git_environment() | {
        "GIT_CEILING_DIRECTORIES": str(place.parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    try:
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", *options, "-"],
            cwd=place,
            input=patch.encode() if patch.endswith("\n") else patch.encode() + b"\n",
            capture_output=True,
            env=environment,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PatchError(
            f"git apply did not end within {GIT_TIMEOUT_S:.0f} s.", hint="Give whole files instead."
        ) from error
    if done.returncode != 0:
        raise _patch_error(patch, done.stderr.decode(errors="replace"))


def _patch_error(patch: str, stderr: str) -> PatchError:
    lines = [line.removeprefix("error: ").strip() for line in stderr.splitlines() if line.strip()]
    reason = "; ".join(lines)[:800] or "git gave no reason"
    failed = _FAILED_AT.search(stderr)
    hunk = _hunk(patch, failed["path"], int(failed["line"])) if failed else ""
    shown = f" The hunk is:\n{hunk}\n" if hunk else ""
    return PatchError(
        f"The patch does not apply: {reason}.{shown}",
        hint="Make it with git diff against the variant's commit, or give whole files in `files`.",
        hunk=hunk,
    )


def _hunk(patch: str, path: str, line: int) -> str:
    """The text of the hunk of a file that starts at a line of the old file; empty when there is none."""
    lines = patch.splitlines()
    current = ""
    for place, text in enumerate(lines):
        if text.startswith(("--- ", "+++ ")):
            named = text[4:].split("\t")[0]
            current = named.split("/", 1)[-1] if named != "/dev/null" else current
        header = re.match(r"@@ -(\d+)", text)
        if header and current == path and int(header[1]) == line:
            end = next(
                (n for n in range(place + 1, len(lines)) if lines[n].startswith(("@@ ", "diff ", "--- "))),
                len(lines),
            )
            cut = lines[place : min(end, place + _HUNK_LINES_MAX)]
            return "\n".join(cut) + ("\n..." if end > place + _HUNK_LINES_MAX else "")
    return ""
