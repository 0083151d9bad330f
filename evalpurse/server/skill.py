"""Puts the skill where agents look for skills, and touches nothing that is not its own.

A folder is ours when its SKILL.md says that evalpurse installed it. Anything else under that name, and any
symbolic link on the way, is refused before a single file is written: a copy through a link would end up in
a place that nobody chose. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import evalpurse
from evalpurse.errors import EvalpurseError

NAME = "evalpurse"
SHARED_FOLDER = ".agents/skills"
CLAUDE_FOLDER = ".claude/skills"
AGENTS = {
    "claude": CLAUDE_FOLDER,
    "cline": SHARED_FOLDER,
    "codex": SHARED_FOLDER,
    "copilot": SHARED_FOLDER,
    "cursor": SHARED_FOLDER,
    "gemini": SHARED_FOLDER,
    "opencode": SHARED_FOLDER,
    "vscode": SHARED_FOLDER,
}
"""Where each agent reads skills, below a project or the user's own folder."""


class SkillError(EvalpurseError):
    """The skill cannot be installed there."""

    code: ClassVar[str] = "skill_refused"


@dataclass(frozen=True)
class Installed:
    """One copy that was written. `previous_version` is empty when there was none."""

    path: Path
    version: str
    previous_version: str
    files: tuple[str, ...]


def source_folder() -> Path:
    """The skill that comes with this program: inside an installed package, or in a checkout beside it.

    Raises:
        SkillError: neither is there.
    """
    package = Path(evalpurse.__file__).parent
    for folder in (package / ".agents" / "skills" / NAME, package.parent / "skill" / NAME):
        if (folder / "SKILL.md").is_file():
            return folder
    raise SkillError(
        f"The skill is missing from the installation in {package}.",
        hint="Install evalpurse again from its wheel.",
    )


def project_folder(start: Path) -> Path:
    """The nearest folder upwards that holds `.git`; `start` itself when none does."""
    return next((folder for folder in (start, *start.parents) if (folder / ".git").exists()), start)


def skills_folders(base: Path, agents: Sequence[str]) -> list[Path]:
    """Where to install below `base`: what the named agents read, else every known folder that exists.

    When none exists it is the folder that most agents share.
    """
    if agents:
        return [base / folder for folder in dict.fromkeys(AGENTS[agent] for agent in agents)]
    existing = [base / folder for folder in (SHARED_FOLDER, CLAUDE_FOLDER) if (base / folder).is_dir()]
    return existing or [base / SHARED_FOLDER]


def install(folders: Sequence[Path], *, base: Path | None = None) -> list[Installed]:
    """Copies the skill into each skills folder, replacing our own older copies.

    Every folder is checked before anything is written. With `base` no part of the way below it may be a
    symbolic link. Files that someone added to our folder stay.

    Raises:
        SkillError: a target is a link or not ours, or cannot be written.
    """
    source = source_folder()
    files = {
        path.relative_to(source): path.read_bytes() for path in sorted(source.rglob("*")) if path.is_file()
    }
    previous = [_checked_target(folder, base, files) for folder in folders]
    version = installed_version(source)
    for folder in folders:
        try:
            for relative, content in files.items():
                _write(folder / NAME / relative, content)
        except OSError as error:
            raise SkillError(
                f"{folder / NAME} cannot be written: {error.strerror}.",
                hint="Choose another place with --dir, or mend its permissions.",
            ) from error
    names = tuple(relative.as_posix() for relative in files)
    return [
        Installed(folder / NAME, version, before, names)
        for folder, before in zip(folders, previous, strict=True)
    ]


def installed_version(folder: Path) -> str:
    """The version of a copy that evalpurse installed; empty when the folder is not such a copy."""
    try:
        text = (folder / "SKILL.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    lines = text.split("\n")
    if lines[0] != "---" or "---" not in lines[1:]:
        return ""
    front = lines[1 : lines.index("---", 1)]
    if f"name: {NAME}" not in front or f"  installer: {NAME}" not in front:
        return ""
    versions = [line.split(":", 1)[1].strip().strip('"') for line in front if line.startswith("  version:")]
    return versions[0] if versions else ""


def _checked_target(folder: Path, base: Path | None, files: dict[Path, bytes]) -> str:
    """The version of our copy that is there, or empty when the place is free."""
    target = folder / NAME
    ways = [path for path in (folder, *folder.parents) if base is not None and base in path.parents]
    inside = [target / part for relative in files for part in (relative, *relative.parents)]
    for path in (*ways, target, *inside):
        if path.is_symlink():
            raise SkillError(
                f"{path} is a symbolic link; nothing was written.",
                hint="Remove the link, or choose a place with --dir.",
                path=str(path),
            )
    if not target.exists():
        return ""
    version = installed_version(target)
    if not version:
        raise SkillError(
            f"{target} exists and was not installed by evalpurse; nothing was written.",
            hint="Move it away, or choose another place with --dir.",
            path=str(target),
        )
    return version


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: an agent may be reading the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".evalpurse-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(unfinished).chmod(0o644)
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `evalpurse skill install`."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--project", action="store_true", help="into this project (the default)")
    where.add_argument("--user", action="store_true", help="for all projects of this user")
    where.add_argument("--dir", type=Path, metavar="DIR", help="into this skills folder")
    parser.add_argument(
        "--agent",
        action="append",
        default=[],
        choices=sorted(AGENTS),
        help="where this agent reads skills, made when missing; may be given several times",
    )


def carry_out(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carries out `evalpurse skill install` and returns what was written, and what to know about it.

    Raises:
        SkillError: nothing or not everything could be written.
    """
    if arguments.dir is not None:
        if arguments.agent:
            raise SkillError("--dir and --agent both name a place.", hint="Give one of them.")
        folder: Path = arguments.dir.expanduser()
        written, notes = install([folder if folder.is_absolute() else Path.cwd() / folder]), []
    else:
        base = Path.home() if arguments.user else project_folder(Path.cwd())
        folders = skills_folders(base, arguments.agent)
        written = install(folders, base=base)
        notes = _notes(base, folders)
    return {"installed": [_facts(copy) for copy in written], "notes": notes}


def shown(facts: dict[str, Any]) -> str:
    """What was written, for a person."""
    lines = []
    for copy in facts["installed"]:
        before = f" (was {copy['previous_version']})" if copy["previous_version"] else ""
        lines.append(f"Wrote {copy['path']}: version {copy['version']}{before}, {len(copy['files'])} files")
    return "\n".join(lines + [f"Note: {note}" for note in facts["notes"]])


def _facts(copy: Installed) -> dict[str, Any]:
    return {
        "path": str(copy.path),
        "version": copy.version,
        "previous_version": copy.previous_version,
        "files": list(copy.files),
    }


def _notes(base: Path, folders: Sequence[Path]) -> list[str]:
    if base / CLAUDE_FOLDER not in folders:
        return ["Claude Code reads only .claude/skills; add --agent claude for it."]
    return []
