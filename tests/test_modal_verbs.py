"""The verbs about Modal and secrets, from the command line through a real daemon to the fake account."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("modal")

from evalpurse.home import Home
from evalpurse.runs.sandboxes.secret_values import modal_secret_name
from evalpurse.server import show_modal
from tests.daemons import environment, kill
from tests.fake_modal import FakeModal

VAULT = """\
vault_command = "cat {file}"
synced_secrets = ["API_KEY"]
"""


@dataclass
class Bed:
    """A home whose daemon finds a fake account as it finds a real one: in `~/.modal.toml`."""

    home: Home
    fake: FakeModal

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "evalpurse.server.cli", *words, "--home", str(self.home.path)],
            capture_output=True,
            text=True,
            check=False,
            env=environment(HOME=str(self.home.path.parent)),
            timeout=90,
            stdin=subprocess.DEVNULL,
        )

    def answer(self, *words: str) -> Any:
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def bed(home: Home) -> Iterator[Bed]:
    with FakeModal() as fake:
        profile = {
            "token_id": fake.env["MODAL_TOKEN_ID"],
            "token_secret": fake.env["MODAL_TOKEN_SECRET"],
            "server_url": fake.url,
            "disable_api_proxy": "1",
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in profile.items()]
        (home.path.parent / ".modal.toml").write_text("\n".join(["[default]", *lines, ""]))
        try:
            yield Bed(home, fake)
        finally:
            kill(home)


def test_secrets_smoke_and_sandboxes_by_hand(bed: Bed) -> None:
    vault = bed.home.path / "vault.json"
    vault.write_text(json.dumps({"API_KEY": "sk-value-of-the-key", "OTHER": "not wanted"}))
    bed.home.config_file.write_text(VAULT.format(file=vault))

    assert bed.answer("secrets", "sync")["in_modal"] == ["API_KEY"]
    name = modal_secret_name(bed.home.identity(), "API_KEY")
    assert bed.fake.secrets() == {name: {"API_KEY": "sk-value-of-the-key"}}
    assert "API_KEY copied to the home folder and Modal" in bed.run("secrets", "sync").stdout
    assert "secrets_synced" in bed.run("secrets", "history").stdout
    assert bed.answer("secrets", "list")["names"] == ["API_KEY"]

    refused = bed.run("smoke", "--modal")
    assert (refused.returncode, "exceeds_limit" in refused.stderr) == (4, True)
    assert bed.fake.sandboxes() == []
    bed.answer("budget", "grant", "workspace", "1", "--yes")
    done = bed.run("smoke", "--modal", "--max-usd", "0.50")
    assert done.returncode == (0 if bed.fake.mode == "bwrap" else 1), done.stdout + done.stderr
    assert "create to first output: p50" in done.stdout
    assert "charged of" in done.stdout
    assert bed.fake.sandboxes(running=True) == []
    assert bed.answer("sandboxes", "list") == {"sandboxes": []}
    assert bed.answer("sandboxes", "sweep") == {"ended": [], "kept": 0}

    vault.write_text("sk-value-of-the-key is not JSON")
    failed = bed.run("secrets", "sync")
    assert failed.returncode == 1
    assert "not one JSON object" in failed.stderr
    log = bed.home.log_file.read_text()
    assert not any("sk-value" in text for text in (failed.stderr, log, bed.run("secrets", "history").stdout))


def test_a_smoke_that_fails_says_what_and_ends_with_exit_code_1(bed: Bed) -> None:
    bed.answer("budget", "grant", "workspace", "1", "--yes")
    bed.fake.fail("SandboxCreateV2", "RESOURCE_EXHAUSTED", message="spend limit reached", times=None)
    done = bed.run("smoke", "--modal", "--json")
    assert done.returncode == 1
    facts = json.loads(done.stdout)
    text = show_modal.smoke(facts)
    assert "FAIL  create" in text
    assert "spend limit reached" in text
    assert text.splitlines()[-1].startswith("Not working after")
