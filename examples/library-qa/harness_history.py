"""The harness's own little git history, made by the demo: each commit adds one way to answer.

Authors and dates are fixed and no configuration of the machine takes part, so the commit ids are the same
wherever the files are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HARNESS = Path(__file__).parent / "harness"

# Files of a later commit; everything else is there from the first.
_WINDOWS = ("library_qa/tools.py", "library_qa/strategies/tool_windows.py")
_OUTLINES = ("library_qa/compaction.py", "library_qa/strategies/outlines.py")
_RECHECK = ("library_qa/strategies/recheck.py",)


@dataclass(frozen=True)
class History:
    """The repository, and the full commit ids by what each of them added."""

    repo: Path
    whole_files: str
    windows: str
    outlines: str
    recheck: str


def make_history(repo: Path) -> History:
    """Makes the repository in a folder that does not exist yet.

    Raises:
        FileExistsError: the folder is there.
        subprocess.CalledProcessError: git failed; its output is in the error.
    """
    repo.mkdir(parents=True)
    _git(repo, 0, "init", "--quiet", "--initial-branch=main")
    later = {*_WINDOWS, *_OUTLINES, *_RECHECK}
    first = [path for path in _files() if path not in later]
    return History(
        repo=repo,
        whole_files=_commit(repo, 1, "Answer from whole files", first),
        windows=_commit(repo, 2, "Let the model search, and read windows", _WINDOWS),
        outlines=_commit(repo, 3, "Send outlines instead of files", _OUTLINES),
        recheck=_commit(repo, 4, "Ask until the answers agree", _RECHECK),
    )


def _files() -> list[str]:
    found = (path for path in HARNESS.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path.relative_to(HARNESS).as_posix() for path in found)


def _commit(repo: Path, day: int, subject: str, paths: list[str] | tuple[str, ...]) -> str:
    for path in paths:
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HARNESS / path, repo / path)
    _git(repo, day, "add", "--all")
    _git(repo, day, "commit", "--quiet", "--message", subject)
    return _git(repo, day, "rev-parse", "HEAD").strip()


def _git(repo: Path, day: int, *arguments: str) -> str:
    who = {
        f"GIT_{role}_{field}": value
        for role in ("AUTHOR", "COMMITTER")
        for field, value in (
            ("NAME", "Library QA"),
            ("EMAIL", "library-qa@example.invalid"),
            ("DATE", f"2026-01-{day + 1:02}T09:00:00+00:00"),
        )
    }
    environment = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        **who,
    }
    return subprocess.run(
        ["git", *arguments], cwd=repo, env=environment, check=True, capture_output=True, text=True
    ).stdout
