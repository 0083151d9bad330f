"""Worlds through the command line and a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalpurse.home import Home
from evalpurse.server.client import control
from evalpurse.server.errors import RefusedError
from tests.daemons import environment, kill
from tests.sandbox_kit import write_in


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home with a real daemon, which these tests share."""
    home = Home(tmp_path_factory.mktemp("worlds") / "home").create()
    yield home
    kill(home)


def evalpurse(*words: str, home: Home, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evalpurse.server.cli", *words, "--home", str(home.path)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        cwd=cwd,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def answered(*words: str, home: Home, cwd: Path) -> dict[str, Any]:
    done = evalpurse(*words, "--json", home=home, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_folder_becomes_a_world_is_listed_shown_and_verified(own: Home, tmp_path: Path) -> None:
    write_in(tmp_path, {"docs/a.txt": "alpha", "docs/b.txt": "beta"})
    (tmp_path / "docs" / "a.txt").chmod(0o644)
    (tmp_path / "docs" / "link").symlink_to("a.txt")
    added = answered("world", "add", "docs", "--name", "manuals", home=own, cwd=tmp_path)
    assert (added["world"]["files"], added["world"]["bytes"], added["stored_files"]) == (2, 9, 2)
    again = evalpurse("world", "add", "./docs", "--name", "manuals", home=own, cwd=tmp_path)
    assert "was added before; nothing has changed" in again.stdout
    digest = added["world"]["digest"]

    assert answered("world", "list", home=own, cwd=tmp_path)["worlds"] == [added["world"]]
    shown = evalpurse("world", "show", digest[:8], home=own, cwd=tmp_path)
    assert f"World manuals ({digest[:12]}): 2 files, 9 bytes." in shown.stdout
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["0644", f"{os.getuid()}:{os.getgid()}", "5", "a.txt"] in lines
    assert "link -> a.txt" in shown.stdout
    intact = evalpurse("world", "verify", "manuals", home=own, cwd=tmp_path)
    assert (intact.returncode, intact.stdout.strip()) == (
        0,
        f"World manuals ({digest[:12]}) is intact: 2 files, 9 bytes.",
    )
    tables = answered("query", "SELECT world, files, bytes FROM worlds", home=own, cwd=tmp_path)
    assert tables["rows"] == [["manuals", 2, 9]]

    damaged = own.worlds / "trees" / digest / "a.txt"
    damaged.chmod(0o600)
    damaged.write_text("ALPHA")
    found = evalpurse("world", "verify", "manuals", home=own, cwd=tmp_path)
    assert found.returncode == 1
    assert "NOT intact" in found.stdout
    assert "a.txt: its content has changed" in found.stdout
    evalpurse("world", "add", "docs", "--name", "manuals", home=own, cwd=tmp_path)
    assert evalpurse("world", "verify", "manuals", home=own, cwd=tmp_path).returncode == 0


def test_what_cannot_be_added_says_why_and_what_to_do(own: Home, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "out").symlink_to("../elsewhere")
    refused = evalpurse("world", "add", "w", "--name", "bad", home=own, cwd=tmp_path)
    assert refused.returncode == 1
    assert "out: the link to ../elsewhere leaves the world" in refused.stderr
    assert "Nothing was added." in refused.stderr
    unknown = evalpurse("world", "verify", "bda", home=own, cwd=tmp_path)
    assert "There is no world 'bda'" in unknown.stderr


def test_only_the_owner_adds_worlds(own: Home, tmp_path: Path) -> None:
    write_in(tmp_path, {"docs/a.txt": "alpha"})
    given = {"folder": str(tmp_path / "docs"), "name": "mine"}
    answered("world", "list", home=own, cwd=tmp_path)
    with pytest.raises(RefusedError, match="needs the owner token"):
        control(own, "world.add", given, role="agent")
    with pytest.raises(RefusedError, match="must be an absolute path"):
        control(own, "world.add", {**given, "folder": "docs"})
    with pytest.raises(RefusedError, match="folder is None"):
        control(own, "world.add", {"name": "x"})
