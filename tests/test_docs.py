"""Documents cannot drift: what they name exists, and what exists is documented."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import pytest

import evalpurse
from evalpurse.server.cli import parser
from evalpurse.server.verbs import VERBS
from evalpurse.tools.app import build_server
from tests.command_pages import commands_of, page

ROOT = Path(evalpurse.__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("skill/**/*.md")]
)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")


async def no_services() -> None:
    raise AssertionError("documents need no services")


def tool_names() -> set[str]:
    return set(build_server(no_services).toolbox.tools)  # type: ignore[arg-type]


def test_the_page_of_commands_is_what_the_program_says_of_itself() -> None:
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == page(), "run: python -m tests.command_pages"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_named_in_a_page_exists(path: Path) -> None:
    known = commands_of(parser(VERBS))
    text = path.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"(?s)```.*?```", text) + re.findall(r"`[^`\n]+`", text))
    shown = re.findall(r"(?m)(?:^|`|-- )evalpurse ((?:[a-z]+ ?)+)", code)
    for words in shown:
        name = words.split()
        assert any(tuple(name[:depth]) in known for depth in (1, 2)), (
            f"there is no command: evalpurse {words}"
        )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(path: Path) -> None:
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_readme_names_every_tool_and_no_other() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("### Tools")[1].split("##")[0]
    assert set(re.findall(r"`([a-z]+_[a-z]+)`", table)) - {"dry_run"} == tool_names()


def test_the_newest_version_of_the_change_log_is_the_packages() -> None:
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"(?m)^## \[([^\]]+)\]", log)
    assert versions[0] == evalpurse.__version__


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_no_committed_file_names_a_package_index_or_a_place_of_one_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    index = re.compile(
        r"https?://[^\s\"']*(?:/simple/?[\s\"']|/packages/[0-9a-f]{2}/|registry\.)|--(?:extra-)?index-url"
    )
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".png", ".svg") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path != Path(__file__):
            assert not index.search(text.replace("--no-emit-index-url", "")), name


def test_every_benchmark_is_recorded() -> None:
    recorded = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    scripts = [
        path.stem for path in (ROOT / "bench").glob("*.py") if 'if __name__ == "__main__"' in path.read_text()
    ]
    for name in scripts:
        assert f"bench/{name}.py" in recorded, name


def test_the_parser_describes_every_verb() -> None:
    described = commands_of(parser(VERBS))
    assert {verb.words for verb in VERBS} <= set(described)
    assert all(isinstance(command, argparse.ArgumentParser) for command in described.values())
