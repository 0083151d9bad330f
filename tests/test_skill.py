"""The skill: valid for every host, true to the program, and installed without harm."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import evalpurse
from evalpurse.runs.cases import CaseSpec
from evalpurse.server import skill
from evalpurse.server.skill import SkillError

SOURCE = Path(evalpurse.__file__).parent.parent / "skill" / "evalpurse"
TOOLS = {
    "create_cases",
    "list_cases",
    "create_variant",
    "list_variants",
    "launch_experiment",
    "wait_experiment",
    "cancel_experiment",
    "compare_variants",
    "read_run",
    "query_results",
    "budget_status",
    "request_budget",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git project in which commands run, under a user folder of its own."""
    folder = tmp_path / "project"
    (folder / ".git").mkdir(parents=True)
    (folder / "deep" / "inside").mkdir(parents=True)
    user = tmp_path / "user"
    user.mkdir()
    monkeypatch.setenv("HOME", str(user))
    monkeypatch.chdir(folder / "deep" / "inside")
    return folder


def command(*words: str) -> int:
    """`evalpurse skill install` as the command line does it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    skill.add_arguments(parser)
    options = parser.parse_args(words)
    facts = skill.carry_out(options)
    print(json.dumps(facts) if options.json else skill.shown(facts))
    return 0


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_skill_passes_the_public_validator() -> None:
    validator = Path(sys.executable).with_name("agentskills")
    done = subprocess.run(
        [str(validator), "validate", str(SOURCE)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_skill_fits_the_limits_and_carries_the_version_of_the_package() -> None:
    text = (SOURCE / "SKILL.md").read_text(encoding="utf-8")
    assert skill.installed_version(SOURCE) == evalpurse.__version__
    assert len(text.split("\n")) < 200
    assert len(text) < 5000 * 4, "about 5,000 tokens"


def test_links_of_the_skill_lead_to_files_of_the_skill() -> None:
    for page in SOURCE.rglob("*.md"):
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).is_file(), f"{page.name} links to {link}"


def test_tools_page_names_every_tool_and_no_other() -> None:
    page = (SOURCE / "references" / "tools.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+_\w+)` \|", page, re.MULTILINE)) == TOOLS
    for other in SOURCE.rglob("*.md"):
        verbs = r"`((?:create|list|launch|wait|cancel|compare|read|query|budget|request)_[a-z]{3,}\w*)`"
        assert set(re.findall(verbs, other.read_text(encoding="utf-8"))) <= TOOLS, other.name


def tool_parameters() -> dict[str, list[str]]:
    """Parameters of every registered tool, read from the source: importing the tools takes a second."""
    found = {}
    for module in (Path(evalpurse.__file__).parent / "tools").glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AsyncFunctionDef) and node.name in TOOLS:
                found[node.name] = [argument.arg for argument in node.args.args if argument.arg != "call"]
    return found


def test_tools_page_names_every_parameter_and_no_other() -> None:
    page = (SOURCE / "references" / "tools.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \| ", page, re.MULTILINE))
    parameters = tool_parameters()
    assert set(parameters) == TOOLS
    for tool, names in parameters.items():
        # What stands in braces are fields of one case.
        written = re.findall(r"`(\w+)`", re.sub(r"\{.*?\}", "", rows[tool]))
        assert sorted(written) == sorted(names), tool
    fields = re.search(r"\{(`id`.*?)\}", rows["create_cases"])
    assert fields
    assert set(re.findall(r"`(\w+)`", fields[1])) == set(CaseSpec.model_fields)


def test_example_calls_are_json() -> None:
    page = (SOURCE / "references" / "tools.md").read_text(encoding="utf-8")
    calls = re.findall(r"^(\w+) (\{.*\})$", page, re.MULTILINE)
    assert len(calls) >= 8
    for tool, arguments in calls:
        assert set(json.loads(arguments)) <= set(tool_parameters()[tool])


def test_install_makes_the_shared_folder_at_the_project_root(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == 0
    target = project / ".agents" / "skills" / "evalpurse"
    assert files_below(target) == files_below(SOURCE)
    assert f"Wrote {target}: version {evalpurse.__version__}, 5 files" in capsys.readouterr().out
    assert not (project / ".claude").exists()


def test_install_fills_every_folder_that_exists_and_makes_no_other(project: Path) -> None:
    (project / ".claude" / "skills").mkdir(parents=True)
    command()
    assert (project / ".claude/skills/evalpurse/SKILL.md").is_file()
    assert not (project / ".agents").exists()
    (project / ".agents" / "skills").mkdir(parents=True)
    command()
    assert (project / ".agents/skills/evalpurse/references/tools.md").is_file()


def test_install_for_an_agent_makes_its_folder(project: Path) -> None:
    command("--agent", "claude", "--agent", "codex", "--agent", "cursor")
    assert (project / ".claude/skills/evalpurse/SKILL.md").is_file()
    assert (project / ".agents/skills/evalpurse/SKILL.md").is_file()


def test_install_for_the_user_and_into_a_folder(project: Path, tmp_path: Path) -> None:
    command("--user")
    assert (tmp_path / "user/.agents/skills/evalpurse/SKILL.md").is_file()
    command("--dir", "here")
    assert (project / "deep/inside/here/evalpurse/SKILL.md").is_file()
    with pytest.raises(SkillError, match="--dir and --agent both name a place"):
        command("--dir", "here", "--agent", "claude")


def test_note_tells_claude_code_users_where_it_reads(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / ".claude").mkdir()
    command("--json")
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["notes"] == ["Claude Code reads only .claude/skills; add --agent claude for it."]
    assert answer["installed"][0]["files"][0] == "SKILL.md"


def test_own_older_copy_is_replaced_and_added_files_stay(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command()
    target = project / ".agents/skills/evalpurse"
    page = target / "SKILL.md"
    page.write_text(page.read_text().replace(evalpurse.__version__, "0.0.1") + "edited")
    (target / "notes.md").write_text("mine")
    command()
    assert page.read_bytes() == (SOURCE / "SKILL.md").read_bytes()
    assert (target / "notes.md").read_text() == "mine"
    assert "(was 0.0.1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        None,
        "---\nname: evalpurse\ndescription: someone else's\n---\nbody",
        "---\nname: other\nmetadata:\n  version: '1'\n  installer: evalpurse\n---\n",
        "no front matter",
    ],
)
def test_foreign_folder_is_refused_and_untouched(project: Path, content: str | None) -> None:
    target = project / ".agents/skills/evalpurse"
    target.mkdir(parents=True)
    (target / ("SKILL.md" if content else "other.txt")).write_text(content or "precious")
    before = files_below(project)
    with pytest.raises(SkillError, match=r"was not installed by evalpurse; nothing was written\. Move it"):
        command()
    assert files_below(project) == before


@pytest.mark.parametrize(
    "link", [".agents", ".agents/skills", ".agents/skills/evalpurse", ".agents/skills/evalpurse/references"]
)
def test_symbolic_link_on_the_way_is_refused_and_nothing_is_written_through_it(
    project: Path, tmp_path: Path, link: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "skills" / "evalpurse").mkdir(parents=True)
    if link.endswith("references"):
        command()
        for page in (project / link).iterdir():
            page.unlink()
        (project / link).rmdir()
    (project / link).parent.mkdir(parents=True, exist_ok=True)
    (project / link).symlink_to(elsewhere, target_is_directory=True)
    before = files_below(elsewhere)
    with pytest.raises(SkillError, match="is a symbolic link; nothing was written"):
        command("--agent", "codex")
    assert files_below(elsewhere) == before


def test_one_refused_folder_keeps_all_untouched(project: Path) -> None:
    (project / ".claude/skills/evalpurse").mkdir(parents=True)
    (project / ".agents/skills").mkdir(parents=True)
    with pytest.raises(SkillError, match="not installed by evalpurse"):
        command()
    assert not (project / ".agents/skills/evalpurse").exists()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission_is_named(project: Path) -> None:
    locked = project / ".agents" / "skills"
    locked.mkdir(parents=True)
    locked.chmod(0o500)
    try:
        with pytest.raises(SkillError, match="cannot be written: Permission denied"):
            command()
    finally:
        locked.chmod(0o700)


def test_place_that_cannot_be_a_folder_is_named(project: Path) -> None:
    (project / "file").write_text("")
    with pytest.raises(SkillError, match="cannot be written: Not a directory"):
        command("--dir", str(project / "file"))


def test_install_loads_only_the_standard_library() -> None:
    code = (
        "import sys, evalpurse.server.skill;"
        "print(sorted({'mcp', 'anyio', 'pydantic', 'duckdb', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
