"""Harness sources: the exact files of one commit of a local git repository.

What is written out are the blobs that the commit names, byte for byte: no filter, no line-ending
conversion, no hook, no submodule and nothing from the working tree takes part, so a full commit id and
nothing else decides what a harness is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from evalpurse.runs.errors import (
    DirtyTreeError,
    NotARepositoryError,
    SourceError,
    UnknownCommitError,
    UnsupportedSourceError,
    nearest,
)
from evalpurse.runs.git import BlobReader, MissingBlobError, reason_of, run_git

_LFS_FIRST_LINE = b"version https://git-lfs.github.com/spec/v1\n"
_LFS_BYTES_MAX = 1024  # git-lfs itself reads no more of a file to tell whether it is a pointer
_FULL_SHA = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHORT_SHA = re.compile(r"[0-9a-f]{4,64}", re.IGNORECASE)


@dataclass(frozen=True)
class Commit:
    """A commit of a local repository, by full ids."""

    sha: str
    tree_sha: str
    repo: Path


@dataclass(frozen=True)
class _Entry:
    """One line of a commit's tree; `size` is in bytes, -1 for what is not a blob."""

    mode: str
    sha: str
    size: int
    path: str


def resolve(repo: Path | str, commit: str = "HEAD") -> Commit:
    """Finds a commit and checks that it holds a whole source. Blocking: call it from a thread.

    `commit` is anything git resolves to one (a full or short id, a branch, a tag). HEAD, the default, needs
    a working tree without changes, since runs would not see them.

    Raises:
        NotARepositoryError: not the top folder of a readable local repository.
        UnknownCommitError: no such commit, or an ambiguous one; names the nearest.
        DirtyTreeError: HEAD with uncommitted changes; names up to five files.
        UnsupportedSourceError: a submodule or a Git LFS pointer; names it.
    """
    top = _repository(repo)
    name = commit.strip() or "HEAD"
    sha = _full_sha(top, name)
    if name in ("HEAD", "@"):
        _refuse_changes(top, sha)
    tree_sha = run_git(top, "rev-parse", "--verify", f"{sha}^{{tree}}").stdout.decode().strip()
    found = Commit(sha=sha, tree_sha=tree_sha, repo=top)
    _check_entries(found, _entries(found))
    return found


def _repository(repo: Path | str) -> Path:
    text = os.fspath(repo)
    if "://" in text or re.match(r"[\w.-]+@[\w.-]+:", text):
        raise NotARepositoryError(
            f"'{text}' is an address; a harness is read from a repository on this machine.",
            hint="Clone it and give the folder's absolute path.",
        )
    if not text or "\0" in text:
        raise NotARepositoryError("The repository path is empty.", hint="Give an absolute path.")
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise NotARepositoryError(
            f"There is no user whose home folder '{text}' could be in.", hint="Give an absolute path."
        ) from error
    if not path.is_absolute():
        raise NotARepositoryError(
            f"Repository path '{text}' is relative, and the daemon has another working folder than you.",
            hint="Give an absolute path.",
        )
    if not _is_folder(path):
        raise NotARepositoryError(f"{path} is not a folder.", hint="Give the path of a git repository.")
    path = path.resolve()
    kind = run_git(path, "rev-parse", "--is-bare-repository", "--absolute-git-dir")
    if kind.returncode != 0:
        raise _no_repository(path, kind)
    bare, git_dir = kind.stdout.decode(errors="surrogateescape").rstrip("\n").split("\n", 1)
    if bare == "true":
        top = Path(git_dir)
    else:
        shown = run_git(path, "rev-parse", "--show-toplevel")
        if shown.returncode != 0:
            raise _no_repository(path, shown)
        top = Path(os.fsdecode(shown.stdout.rstrip(b"\n")))
    if top.resolve() != path:
        raise NotARepositoryError(
            f"{path} is not a repository itself but a folder inside of {top}.",
            hint=f"Name {top}, and let the run command change into the subfolder.",
        )
    return path


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, a folder that may not be entered
        return False


def _no_repository(path: Path, done: subprocess.CompletedProcess[bytes]) -> NotARepositoryError:
    reason = reason_of(done)
    if "dubious ownership" in reason:
        return NotARepositoryError(
            f"{path} belongs to another user, so git refuses to read it.",
            hint=f"If you trust it: git config --global --add safe.directory {path}",
        )
    if "not a git repository" in reason:
        return NotARepositoryError(
            f"{path} is not a git repository.", hint="Run git init there and commit, or name another folder."
        )
    return NotARepositoryError(f"git cannot read {path}: {reason}.", hint="Name the top folder.")


def _full_sha(repo: Path, name: str) -> str:
    # git allows no reference to begin with '-': what does would be taken as an option.
    if not name.startswith("-") and name.isprintable():
        done = run_git(repo, "rev-parse", "--verify", f"{name}^{{commit}}")
        sha = done.stdout.decode(errors="replace").strip()
        if done.returncode == 0 and _FULL_SHA.fullmatch(sha):
            return sha
    raise _unknown_commit(repo, name)


def _unknown_commit(repo: Path, name: str) -> UnknownCommitError:
    if _SHORT_SHA.fullmatch(name):
        fitting = _commits_like(repo, name)
        if len(fitting) > 1:
            return UnknownCommitError(
                f"Commit '{name}' is ambiguous in {repo}: it fits {', '.join(fitting[:5])}.",
                hint="Give the full id.",
            )
    refs = run_git(
        repo, "for-each-ref", "--format=%(refname:short)", "refs/heads", "refs/tags", "refs/remotes"
    )
    names = set(refs.stdout.decode(errors="replace").split())
    head = run_git(repo, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    if head.returncode != 0 and not names:
        return UnknownCommitError(f"{repo} has no commits yet.", hint="Commit the harness first.")
    known = f" HEAD is {head.stdout.decode().strip()}." if head.returncode == 0 else ""
    shallow = run_git(repo, "rev-parse", "--is-shallow-repository").stdout.strip() == b"true"
    if shallow:
        known += " This is a shallow clone: older commits may be missing; git fetch --unshallow brings them."
    return UnknownCommitError(
        f"There is no commit '{name[:200]}' in {repo}.",
        hint=nearest(name, names, what="branches and tags") + known,
    )


def _commits_like(repo: Path, prefix: str) -> list[str]:
    fitting = run_git(repo, "rev-parse", f"--disambiguate={prefix}").stdout
    kinds = run_git(repo, "cat-file", "--batch-check=%(objecttype) %(objectname)", sent=fitting).stdout
    return [line.split()[1] for line in kinds.decode().splitlines() if line.startswith("commit ")]


def _refuse_changes(repo: Path, sha: str) -> None:
    if run_git(repo, "rev-parse", "--is-bare-repository").stdout.strip() == b"true":
        return
    done = run_git(
        repo, "status", "--porcelain=v1", "-z", "--untracked-files=normal", "--ignore-submodules=none"
    )
    if done.returncode != 0:
        raise SourceError(f"git status in {repo} failed: {reason_of(done)}.", hint="Try it by hand.")
    changed: list[str] = []
    fields = iter(os.fsdecode(done.stdout).split("\0"))
    for field in fields:
        if field:
            changed.append(f"{field[3:]} (new)" if field.startswith("??") else field[3:])
            if field[0] in "RC":
                next(fields, None)  # the name it had before
    if changed:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise DirtyTreeError(
            f"{repo} has {len(changed)} uncommitted changes, which a run would not see: "
            f"{', '.join(changed[:5])}{more}.",
            hint=f"Commit or ignore them, or name the full id to run without them: {sha}",
            files=changed[:5],
        )


def _entries(commit: Commit) -> list[_Entry]:
    done = run_git(commit.repo, "ls-tree", "-r", "-l", "-z", "--full-tree", commit.sha)
    if done.returncode != 0:
        raise _incomplete(commit, reason_of(done))
    entries = []
    for line in done.stdout.split(b"\0")[:-1]:
        meta, path = line.split(b"\t", 1)
        mode, kind, sha, size = meta.decode().split()
        if kind == "blob" and not size.isdigit():  # git says BAD for a blob that it does not have
            raise _incomplete(commit, f"blob {sha} is missing ('{os.fsdecode(path)}')")
        entries.append(_Entry(mode, sha, int(size) if kind == "blob" else -1, os.fsdecode(path)))
    return entries


def _incomplete(commit: Commit, reason: str) -> UnsupportedSourceError:
    return UnsupportedSourceError(
        f"{commit.repo} does not hold all of commit {commit.sha}: {reason}.",
        hint="It may be a partial or damaged clone; clone it fully.",
    )


def _check_entries(commit: Commit, entries: list[_Entry]) -> None:
    for entry in entries:
        if entry.mode == "160000":
            raise UnsupportedSourceError(
                f"Commit {commit.sha} has a submodule at '{entry.path}'; a commit does not hold its files.",
                hint="Copy the submodule's files into the repository, or fetch them in setup commands.",
                path=entry.path,
            )
        if any(part.lower() in ("", ".", "..", ".git") for part in entry.path.split("/")):
            raise UnsupportedSourceError(
                f"Commit {commit.sha} has a file at '{entry.path}', which is not safe to write out.",
                hint="Remove it from the repository.",
                path=entry.path,
            )
    small = [e for e in entries if e.mode != "120000" and len(_LFS_FIRST_LINE) < e.size <= _LFS_BYTES_MAX]
    with BlobReader(commit.repo) as blobs:
        for entry, pieces in zip(small, blobs.read([e.sha for e in small]), strict=True):
            content = _whole(commit, entry, pieces)
            if content.startswith(_LFS_FIRST_LINE) and b"\noid sha256:" in content:
                raise UnsupportedSourceError(
                    f"'{entry.path}' in commit {commit.sha} is a Git LFS pointer; the commit does not hold "
                    "the file itself.",
                    hint="Store the file in git directly, or fetch it in setup commands.",
                    path=entry.path,
                )


def _whole(commit: Commit, entry: _Entry, pieces: Iterable[bytes]) -> bytes:
    try:
        return b"".join(pieces)
    except MissingBlobError as error:
        raise _incomplete(commit, f"{error} ('{entry.path}')") from error


def materialise(commit: Commit, dest: Path) -> Path:
    """Writes the tree of a commit to a folder, which appears complete or not at all; returns it.

    A folder that exists is taken as done: name it after `commit.tree_sha`. Blocking: call it from a thread.

    Raises:
        UnsupportedSourceError: a symlink that leaves the tree, two names that this file system cannot tell
            apart, or content that the repository lacks.
    """
    if dest.is_dir():
        return dest
    dest.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    building = dest.parent / f".{dest.name}.{uuid.uuid4().hex[:8]}"
    building.mkdir(mode=0o700)
    try:
        _write_tree(commit, building)
        try:
            building.rename(dest)
        except OSError:
            if not dest.is_dir():  # else another writer of the same tree was first
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return dest


def _write_tree(commit: Commit, folder: Path) -> None:
    entries = _entries(commit)
    links = []
    made: set[str] = set()
    with BlobReader(commit.repo) as blobs:
        for entry, pieces in zip(entries, blobs.read([e.sha for e in entries]), strict=True):
            target = folder / entry.path
            try:
                parent = entry.path.rpartition("/")[0]
                if parent not in made:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    made.add(parent)
                if entry.mode == "120000":
                    links.append((target, os.fsdecode(b"".join(pieces))))
                else:
                    _write_file(target, 0o755 if entry.mode == "100755" else 0o644, pieces)
            except MissingBlobError as error:
                raise _incomplete(commit, f"{error} ('{entry.path}')") from error
            except (FileExistsError, NotADirectoryError) as error:
                raise UnsupportedSourceError(
                    f"'{entry.path}' in commit {commit.sha} collides with another name on this file system.",
                    hint="Rename one of them; they may differ only in upper and lower case.",
                    path=entry.path,
                ) from error
    # Last, so that no file above was written through a link.
    for target, text in links:
        target.symlink_to(text)
    refuse_leaving_links(folder, f"commit {commit.sha}")


def _write_file(target: Path, mode: int, pieces: Iterable[bytes]) -> None:
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.writelines(pieces)


def refuse_leaving_links(folder: Path, of: str) -> None:
    """Checks that every symlink below a folder is relative and ends inside of it.

    Raises:
        UnsupportedSourceError: names the link and where it leads.
    """
    root = os.path.realpath(folder)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(parent, name)  # noqa: PTH118 - tens of thousands of paths
            if not os.path.islink(path):  # noqa: PTH114 - as above
                continue
            target = os.readlink(path)  # noqa: PTH115 - as above
            # Resolved, not read: a link may pass through another link.
            inside = os.path.realpath(path)
            if target.startswith("/") or not (inside == root or inside.startswith(root + os.sep)):
                raise UnsupportedSourceError(
                    f"'{os.path.relpath(path, folder)}' in {of} is a symlink to '{target}', which leaves it.",
                    hint="Replace it by a relative link to a file of the repository, or by the file.",
                )
