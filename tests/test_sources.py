"""Harness sources: what a commit holds is what is written out, and what it does not hold is refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from evalpurse.runs.errors import (
    DirtyTreeError,
    NotARepositoryError,
    UnknownCommitError,
    UnsupportedSourceError,
)
from evalpurse.runs.sources import Commit, materialise, resolve

LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def git(repo: Path, *args: str, sent: str = "") -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    identity = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "tester"), ("EMAIL", "tester@example.org"))
    }
    done = subprocess.run(
        ["git", "-c", "commit.gpgsign=false", "-C", str(repo), *args],
        input=sent,
        capture_output=True,
        text=True,
        check=True,
        env=environment | identity | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
    )
    return done.stdout.strip()


def make_repo(folder: Path, files: Mapping[str, str]) -> str:
    """A repository with one commit of the files; returns the full id."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    return commit_files(folder, files)


def commit_files(repo: Path, files: Mapping[str, str]) -> str:
    for name, text in files.items():
        path = repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    git(repo, "add", "-A", "-f")
    git(repo, "commit", "-q", "--no-verify", "--allow-empty", "-m", "change")
    return git(repo, "rev-parse", "HEAD")


def commit_tree(repo: Path, *lines: str) -> str:
    """A commit of a tree written by hand: lines of `git mktree`."""
    tree = git(repo, "mktree", "--missing", sent="\n".join(lines) + "\n")
    return git(repo, "commit-tree", "-m", "by hand", tree)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "harness"
    make_repo(folder, {"main.py": "print('hello')\n", "lib/tool.py": "x = 1\n"})
    return folder


def test_every_way_to_name_a_commit_gives_its_full_id(repo: Path) -> None:
    sha = git(repo, "rev-parse", "HEAD")
    git(repo, "tag", "-a", "v1", "-m", "first")
    for name in ("HEAD", "", "@", "main", "v1", sha, sha[:8], "HEAD~0"):
        found = resolve(repo, name)
        assert (found.sha, found.repo) == (sha, repo.resolve())
        assert found.tree_sha == git(repo, "rev-parse", "HEAD^{tree}")


def test_an_earlier_commit_is_written_out_whatever_the_working_tree_has(repo: Path, tmp_path: Path) -> None:
    first = git(repo, "rev-parse", "HEAD")
    commit_files(repo, {"main.py": "print('changed')\n"})
    (repo / "main.py").write_text("half-done", encoding="utf-8")
    written = materialise(resolve(repo, first), tmp_path / "out")
    assert (written / "main.py").read_text(encoding="utf-8") == "print('hello')\n"
    assert sorted(path.name for path in written.iterdir()) == ["lib", "main.py"]


def test_head_with_changes_is_refused_with_the_files_and_the_way_out(repo: Path) -> None:
    sha = git(repo, "rev-parse", "HEAD")
    for number in range(6):
        (repo / f"new {number}.py").write_text("x", encoding="utf-8")
    (repo / "main.py").write_text("changed", encoding="utf-8")
    with pytest.raises(DirtyTreeError) as caught:
        resolve(repo)
    assert "7 uncommitted changes" in caught.value.message
    assert "main.py" in caught.value.message
    assert "and 2 more" in caught.value.message
    assert sha in caught.value.hint
    assert len(caught.value.facts["files"]) == 5
    assert resolve(repo, sha).sha == sha


def test_ignored_files_do_not_make_a_tree_dirty(repo: Path) -> None:
    sha = commit_files(repo, {".gitignore": "*.log\n"})
    (repo / "debug.log").write_text("noise", encoding="utf-8")
    assert resolve(repo).sha == sha


def test_a_folder_that_is_no_repository_is_named(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    for path, words in (
        (tmp_path / "plain", "is not a git repository"),
        (tmp_path / "missing", "is not a folder"),
        ("relative/path", "is relative"),
        ("https://example.org/x.git", "is an address"),
        ("git@example.org:x.git", "is an address"),
        ("", "is empty"),
        ("--upload-pack=touch x", "is relative"),
    ):
        with pytest.raises(NotARepositoryError, match=words):
            resolve(path)


def test_a_subfolder_is_refused_and_its_repository_named(repo: Path) -> None:
    with pytest.raises(NotARepositoryError) as caught:
        resolve(repo / "lib")
    assert str(repo.resolve()) in caught.value.hint


def test_a_bare_repository_is_a_source(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--bare", str(repo), "bare.git")
    assert resolve(tmp_path / "bare.git").sha == git(repo, "rev-parse", "HEAD")


def test_a_missing_commit_names_the_nearest_branch_and_head(repo: Path) -> None:
    git(repo, "branch", "feature-cache")
    with pytest.raises(UnknownCommitError) as caught:
        resolve(repo, "feature-cach")
    assert "feature-cache" in caught.value.hint
    assert git(repo, "rev-parse", "HEAD") in caught.value.hint
    with pytest.raises(UnknownCommitError):
        resolve(repo, "0" * 40)


def test_a_shallow_clone_says_that_older_commits_may_be_missing(repo: Path, tmp_path: Path) -> None:
    first = git(repo, "rev-parse", "HEAD")
    commit_files(repo, {"main.py": "2"})
    git(tmp_path, "clone", "-q", "--depth", "1", repo.as_uri(), "shallow")
    with pytest.raises(UnknownCommitError, match="--unshallow"):
        resolve(tmp_path / "shallow", first)


def test_an_ambiguous_short_id_names_what_it_fits(repo: Path) -> None:
    tree = git(repo, "rev-parse", "HEAD^{tree}")
    seen: dict[str, str] = {}
    for number in range(5_000):  # four digits meet again after some 300 commits (birthdays)
        text = _commit_text(tree, number)
        sha = hashlib.sha1(f"commit {len(text)}\0{text}".encode(), usedforsecurity=False).hexdigest()
        twin = seen.setdefault(sha[:4], text)
        if twin != text:
            break
    for one in (text, twin):
        git(repo, "hash-object", "-w", "-t", "commit", "--stdin", sent=one)
    with pytest.raises(UnknownCommitError, match="is ambiguous") as caught:
        resolve(repo, sha[:4])
    assert sha in caught.value.message
    assert resolve(repo, sha).sha == sha


def _commit_text(tree: str, number: int) -> str:
    who = f"tester <tester@example.org> {number} +0000"
    return f"tree {tree}\nauthor {who}\ncommitter {who}\n\nnumber {number}\n"


def test_names_that_look_like_options_or_have_control_characters_are_unknown(repo: Path) -> None:
    for name in ("--all", "-h", "--git-dir=/tmp", "HEAD\nHEAD", "a b"):
        with pytest.raises(UnknownCommitError):
            resolve(repo, name)


def test_a_repository_without_commits_says_so(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "empty")
    with pytest.raises(UnknownCommitError, match="no commits yet"):
        resolve(tmp_path / "empty")


def test_a_submodule_is_named(repo: Path) -> None:
    sha = git(repo, "rev-parse", "HEAD")
    git(repo, "update-index", "--add", "--cacheinfo", f"160000,{sha},vendor/dep")
    git(repo, "commit", "-q", "-m", "add submodule")
    with pytest.raises(UnsupportedSourceError, match="submodule at 'vendor/dep'"):
        resolve(repo, "main")


def test_an_lfs_pointer_is_named(repo: Path) -> None:
    commit_files(repo, {"data/model.bin": LFS_POINTER})
    with pytest.raises(UnsupportedSourceError, match=r"'data/model\.bin' .* Git LFS pointer"):
        resolve(repo)


def test_modes_links_binary_content_and_odd_names_are_kept(repo: Path, tmp_path: Path) -> None:
    (repo / "run.sh").write_text("#!/bin/sh\n", encoding="utf-8")
    (repo / "run.sh").chmod(0o755)
    (repo / "link").symlink_to("lib/tool.py")
    (repo / "bin.dat").write_bytes(bytes(range(256)) * 5_000)
    (repo / 'ünï "q"\tname').write_bytes(b"one\n")
    commit_files(repo, {"empty": "", ".gitattributes": "* text=auto eol=crlf\nlib export-ignore\n"})
    written = materialise(resolve(repo, git(repo, "rev-parse", "HEAD")), tmp_path / "out")
    assert os.access(written / "run.sh", os.X_OK)
    assert not os.access(written / "main.py", os.X_OK)
    assert (written / "link").readlink() == Path("lib/tool.py")
    assert (written / "bin.dat").read_bytes() == bytes(range(256)) * 5_000
    assert (written / 'ünï "q"\tname').read_bytes() == b"one\n"
    assert (written / "empty").read_bytes() == b""
    assert (written / "main.py").read_bytes() == b"print('hello')\n", "attributes must not change content"
    assert not (written / ".git").exists()


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "lib/../../outside"])
def test_a_symlink_that_leaves_the_tree_is_refused_and_leaves_nothing(
    repo: Path, tmp_path: Path, target: str
) -> None:
    (repo / "lib" / "escape").symlink_to(target if target.startswith("/") else f"../{target}")
    commit = resolve(repo, commit_files(repo, {}))
    place = tmp_path / "trees"
    with pytest.raises(UnsupportedSourceError, match="lib/escape"):
        materialise(commit, place / "out")
    assert list(place.iterdir()) == []


def test_a_link_that_leaves_through_another_link_is_refused(repo: Path, tmp_path: Path) -> None:
    (repo / "a" / "b").mkdir(parents=True)
    (repo / "a" / "b" / "top").symlink_to("../..")
    (repo / "escape").symlink_to("a/b/top/..")
    commit = resolve(repo, commit_files(repo, {}))
    with pytest.raises(UnsupportedSourceError, match="'escape'"):
        materialise(commit, tmp_path / "out")


def test_a_tree_with_a_git_folder_inside_is_refused(repo: Path) -> None:
    blob = git(repo, "rev-parse", "HEAD:main.py")
    inner = git(repo, "mktree", sent=f"100644 blob {blob}\tconfig\n")
    sha = commit_tree(repo, f"040000 tree {inner}\t.GIT")
    with pytest.raises(UnsupportedSourceError, match="not safe to write out"):
        resolve(repo, sha)


def test_content_that_a_clone_lacks_is_told(repo: Path, tmp_path: Path) -> None:
    commit = resolve(repo)
    blob = git(repo, "rev-parse", "HEAD:main.py")
    (repo / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(UnsupportedSourceError, match="does not hold all of commit"):
        materialise(commit, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_taken_as_done(repo: Path, tmp_path: Path) -> None:
    commit = resolve(repo)
    written = materialise(commit, tmp_path / "out")
    gone = Commit(commit.sha, commit.tree_sha, tmp_path / "no-such-repository")
    assert materialise(gone, tmp_path / "out") == written


def test_hooks_filters_and_the_environment_of_git_take_no_part(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {mark}\n", encoding="utf-8")
    hook.chmod(0o755)
    git(repo, "config", "core.fsmonitor", str(hook))
    git(repo, "config", "filter.evil.smudge", str(hook))
    commit_files(repo, {".gitattributes": "*.py filter=evil\n"})
    mark.unlink(missing_ok=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(hook))
    written = materialise(resolve(repo), tmp_path / "out")
    assert (written / "main.py").read_text(encoding="utf-8") == "print('hello')\n"
    assert not mark.exists()
