"""`evalpurse doctor` finds what is broken, says how to mend it, and changes nothing."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path

import pytest

from evalpurse.home import Home
from evalpurse.runs.sandboxes.secret_values import modal_secret_name
from evalpurse.server import cli, doctor, doctor_modal
from evalpurse.server.tokens import make_tokens
from tests.fake_modal import FakeModal, client_environment


def _check(home: Home, name: str) -> doctor.Check:
    return next(check for check in doctor.examine(home) if check.name == name)


def test_a_home_that_does_not_exist_is_fine_and_is_not_made(tmp_path: Path) -> None:
    home = Home(tmp_path / "not" / "yet")
    checks = doctor.examine(home)
    assert [check for check in checks if check.state == "fail"] == []
    assert not home.path.exists()
    assert {check.name for check in checks} == {
        *("python", "git", "bubblewrap", "home", "disk", "config", "tokens", "socket", "daemon", "data"),
        *("modal", "node", "browser"),
    }


def test_json_carries_what_the_text_says(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", "--home", str(home.path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is True
    assert cli.main(["doctor", "--home", str(home.path)]) == 0
    text = capsys.readouterr().out
    assert all(check["found"] in text and check["mend"] in text for check in said["checks"])
    assert text.endswith("evalpurse can work here.\n")


def test_every_check_that_is_not_ok_says_how_to_mend_it(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HOME", str(home.path))
    home.config_file.write_text("nonsense = 1\n")
    make_tokens(home)
    (home.tokens / "owner").chmod(0o644)
    home.path.chmod(0o755)
    home.ledger_file.write_bytes(b"not a database at all" * 100)
    states = {check.name: check for check in doctor.examine(home)}
    expected = {
        "git": "fail",
        "bubblewrap": "warn",
        "home": "warn",
        "config": "fail",
        "tokens": "fail",
        "data": "fail",
        "modal": "warn",
    }
    assert {name: states[name].state for name in expected} == expected
    assert "setting 'nonsense' is not known" in states["config"].found
    assert "can be read by others" in states["tokens"].found
    assert all(states[name].mend for name in expected if name != "data")
    assert cli.main(["doctor", "--home", str(home.path)]) == 1
    assert "Not working: git, config, tokens, data." in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap is for Linux")
def test_bubblewrap_that_is_installed_and_forbidden_is_found_out(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    check = _check(home, "bubblewrap")
    assert check.state == "warn"
    assert "does not work: bwrap: No permissions to create new namespace" in check.found
    assert "kernel.unprivileged_userns_clone=1" in check.mend
    fake.write_text("#!/bin/sh\necho bubblewrap 9.9\n")
    assert _check(home, "bubblewrap").found == "bubblewrap 9.9, works"


def test_little_disk_space_is_told_before_it_is_gone(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state in ((100 << 20, "fail"), (2 << 30, "warn"), (50 << 30, "ok")):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: type("Usage", (), {"free": free}))
        assert _check(home, "disk").state == state


def test_a_sound_ledger_is_told_from_a_damaged_one(home: Home) -> None:
    assert _check(home, "data").found == "none yet"
    with sqlite3.connect(home.ledger_file) as ledger:
        ledger.execute("create table t (x)")
    ledger.close()
    assert _check(home, "data").state == "ok"
    home.ledger_file.write_bytes(b"x" * 5000)
    check = _check(home, "data")
    assert (check.state, "file is not a database" in check.found) == ("fail", True)


def _modal_checks(home: Home) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor_modal.examine(home)}


def _signed_in(home: Home) -> None:
    (home.path / "modal.toml").write_text("token_id = 'ak-fake'\ntoken_secret = 'as-fake'\n")


def test_modal_that_works_is_told_with_its_price(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("modal")
    _signed_in(home)
    with FakeModal() as fake, client_environment(fake):
        checks = _modal_checks(home)
        assert {check.state for check in checks.values()} == {"ok"}
        assert list(checks) == [
            f"modal {what}"
            for what in ("package", "credentials", "token", "environment", "volumes", "rates", "secrets")
        ]
        assert checks["modal credentials"].found == str(home.path / "modal.toml")
        assert checks["modal rates"].found == "1 cores and 2048 MiB cost $0.1899 an hour"
        assert cli.main(["doctor", "--modal", "--json", "--home", str(home.path)]) == 0
        assert "modal token" in capsys.readouterr().out
        assert not (home.path / "identity").exists(), "it changes nothing"


def test_each_thing_that_modal_lacks_is_told_with_its_mending(home: Home) -> None:
    pytest.importorskip("modal")
    _signed_in(home)
    with FakeModal() as fake, client_environment(fake):
        home.config_file.write_text("modal_environment = 'nowhere'\n")
        check = _modal_checks(home)["modal environment"]
        assert (check.state, "modal environment create nowhere" in check.mend) == ("fail", True)
        home.config_file.write_text("synced_secrets = ['API_KEY', 'DB=prod/db']\n")
        fake.put_secret(modal_secret_name(home.identity(), "DB"), {"DB": "x"})
        check = _modal_checks(home)["modal secrets"]
        assert (check.state, check.found) == ("warn", "not in Modal: API_KEY")
        assert check.mend == "evalpurse secrets sync"
        fake.fail("WorkspaceBillingRates", "PERMISSION_DENIED", message="not on this plan")
        check = _modal_checks(home)["modal rates"]
        assert (check.state, "not on this plan" in check.found) == ("warn", True)
        fake.fail("VolumeList", "PERMISSION_DENIED", message="no volumes for you")
        assert _modal_checks(home)["modal volumes"].state == "fail"
        fake.expire_token()
        checks = _modal_checks(home)
        assert (checks["modal token"].state, list(checks)[-1]) == ("fail", "modal token")
        assert checks["modal token"].mend
        (home.path / "modal.toml").write_text("token_id = 'ak-fake'\n")
        assert _modal_checks(home)["modal credentials"].state == "fail"


def test_without_the_package_only_that_is_told(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    [check] = doctor_modal.examine(home)
    assert (check.state, "pip install" in check.mend) == ("fail", True)
