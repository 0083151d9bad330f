"""The official conformance suite against the HTTP door, in both protocol eras.

What it can say about a server without the suite's own tools is in PASSES; the rest is in
outside/expected_failures.yml with its reason. The suite counts some scenarios as passed that call a tool we
do not have and take the refusal for an answer: those are not in PASSES.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalpurse.home import Home
from evalpurse.server.tokens import read_token
from tests.outside.clients import LEGACY, MODERN, http_url, run_cli
from tests.outside.node import FOLDER, PACKAGES, needs_node, node

pytestmark = needs_node

PASSES = {
    LEGACY: {
        *(
            "server-initialize",
            "server-session-lifecycle",
            "ping",
            "tools-list",
            "resources-list",
            "prompts-list",
        ),
        *("server-sse-multiple-streams", "dns-rebinding-protection"),
    },
    MODERN: {
        *("tools-list", "resources-list", "prompts-list", "sep-2164-resource-not-found", "caching"),
        *("server-sse-multiple-streams", "dns-rebinding-protection", "http-header-validation"),
        "input-required-result-unsupported-methods",
    },
}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The HTTP door of a daemon, behind a proxy that adds the token: the suite cannot send a header."""
    home = Home(tmp_path_factory.mktemp("conformance") / "home")
    run_cli(home, "daemon", "start")
    with subprocess.Popen(
        [node(), FOLDER / "bearer_proxy.mjs", http_url(home)],
        env={**os.environ, "EVALPURSE_TOKEN": read_token(home, "agent")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as proxy:
        assert proxy.stdout is not None
        yield proxy.stdout.readline().strip()
    run_cli(home, "daemon", "stop")


@pytest.mark.parametrize("version", [LEGACY, MODERN])
def test_the_conformance_suite_finds_what_is_expected_and_nothing_else(
    door: str, tmp_path: Path, version: str
) -> None:
    suite = str(PACKAGES / "conformance" / "dist" / "index.js")
    expected = str(FOLDER / "expected_failures.yml")
    which = ("--url", door, "--suite", "all", "--spec-version", version)
    more = ("--expected-failures", expected, "--output-dir", str(tmp_path), "--timeout", "20000")
    done = subprocess.run(
        [node(), suite, "server", *which, *more],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[done.stdout.find("=== SUMMARY") :] + done.stderr
    checks = _checks(tmp_path)
    failed = {name for name, found in checks.items() if _with_status(found, "FAILURE")}
    assert checks.keys() - failed >= PASSES[version]
    if version == MODERN:
        assert len(_with_status(checks["server-stateless"], "SUCCESS")) >= 24
    # Also of scenarios that are expected to fail, every message on the wire fits the specification's schema.
    wire = [check for found in checks.values() for check in found if check["id"] == "wire-schema-valid"]
    assert len(wire) >= 25
    assert _with_status(wire, "SUCCESS") == wire


def _with_status(checks: list[dict[str, Any]], status: str) -> list[dict[str, Any]]:
    return [check for check in checks if check["status"] == status]


def _checks(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What was checked, by scenario."""
    return {
        file.parent.name.removeprefix("server-").rsplit("-", 6)[0]: json.loads(file.read_text())
        for file in folder.glob("*/checks.json")
    }
