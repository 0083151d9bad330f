"""The life of the daemon, seen from outside: start, status, failing data, drain, leave."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalpurse import __version__
from evalpurse.home import Home
from evalpurse.server import cli, verbs
from evalpurse.server.client import Client, call_tool, control
from evalpurse.server.errors import AbsentError, RefusedError, UnreachableError
from evalpurse.server.link import Address, open_link
from evalpurse.server.locks import is_locked, try_lock
from evalpurse.server.spawn import Launch, request
from evalpurse.server.verbs import Option, Verb
from tests.daemons import MODULE, environment, kill, pid_of, run, start_daemon, wait_until

LAUNCH = Launch(MODULE)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home whose daemon no test ends."""
    home = Home(tmp_path_factory.mktemp("shared") / "home").create()
    start_daemon(home)
    yield home
    kill(home)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Home]:
    """A home of one test, whose daemon it may end."""
    home = Home(tmp_path / "home").create()
    yield home
    kill(home)


class Child:
    """A daemon that is a child of this test, so that its exit code is seen."""

    def __init__(self, home: Home) -> None:
        ready, tell = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE, "--home", str(home.path), "--ready-fd", str(tell)],
            env=environment(),
            pass_fds=(tell,),
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(tell)
        with os.fdopen(ready) as said:
            self.said: dict[str, Any] = json.loads(said.read())

    def leave(self) -> tuple[int, str]:
        """The exit code and the log."""
        _, log = self.process.communicate(timeout=20)
        return self.process.returncode, log


def test_status_says_who_serves_what_and_how_it_is(shared: Home) -> None:
    done = run("daemon", "status", "--json", home=shared)
    said = json.loads(done.stdout)
    assert done.returncode == 0
    assert (said["running"], said["version"], said["home"]) == (True, __version__, str(shared.path))
    assert said["pid"] == pid_of(shared)
    assert said["http"]["url"].startswith("http://127.0.0.1:")
    assert [guest["role"] for guest in said["connections"]] == ["viewer"]
    text = run("daemon", "status", home=shared).stdout
    assert f"pid {said['pid']}, version {__version__}" in text


def test_starting_twice_is_one_daemon(shared: Home) -> None:
    before = pid_of(shared)
    said = json.loads(run("daemon", "start", "--json", home=shared).stdout)
    assert said["pid"] == before == pid_of(shared)


def test_a_second_daemon_on_the_same_home_leaves_with_the_pid_of_the_first(shared: Home) -> None:
    child = Child(shared)
    code, log = child.leave()
    assert code == 1
    assert f"is served by another daemon (pid {pid_of(shared)})" in log
    assert child.said["error"]["code"] == "home_in_use"
    assert control(shared, "daemon.status")["pid"] == pid_of(shared)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_closes_and_leaves_nothing_behind(own: Home, number: signal.Signals) -> None:
    child = Child(own)
    assert call_tool(own, "echo", {"text": "open"}).error is None
    assert child.said == {"pid": child.process.pid}
    child.process.send_signal(number)
    code, log = child.leave()
    assert (code, "Traceback" in log) == (0, False)
    assert (own.path / "drained").exists()
    assert (own.path / "closed").exists()
    assert not own.daemon_file.exists()
    assert not own.socket_file.exists()
    assert not is_locked(own.daemon_alive_lock)


def test_a_draining_daemon_finishes_calls_and_a_second_signal_ends_the_wait(own: Home) -> None:
    (own.path / "drain_s").write_text("60")
    child = Child(own)
    with open_link(own, door="mcp", role="agent") as link:
        client = Client(link)
        client.call("echo", {"text": "open"})
        child.process.send_signal(signal.SIGTERM)
        wait_until((own.path / "drained").exists)
        assert client.call("echo", {"text": "still served"}).facts["text"] == "still served"
        with pytest.raises(AbsentError):
            open_link(own, door="mcp", role="agent")
        assert child.process.poll() is None
        child.process.send_signal(signal.SIGTERM)
        code, log = child.leave()
    assert code == 0
    assert (own.path / "closed").exists()
    assert "Traceback" not in log


def test_stop_waits_no_longer_for_what_runs_than_it_is_told(own: Home) -> None:
    (own.path / "drain_s").write_text("60")
    child = Child(own)
    call_tool(own, "echo", {"text": "open"})
    done = run("daemon", "stop", "--timeout", "0.2", "--json", home=own)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"stopped": True, "pid": child.process.pid})
    code, log = child.leave()
    assert code == 0
    assert "not drained within 0.2 s" in log
    assert json.loads(run("daemon", "stop", "--json", home=own).stdout)["stopped"] is False


def test_data_that_cannot_be_opened_is_told_by_every_call_and_by_status(own: Home) -> None:
    (own.path / "fail_open").touch()
    start_daemon(own)
    for _ in range(2):
        result = call_tool(own, "echo", {"text": "x"})
        assert result.error is not None
        assert result.error["code"] == "open_failed"
        assert result.error["facts"]["cause"] == "schema_too_new"
        assert "The store has schema 9, this version knows 1." in result.text
    with open_link(own, door="mcp", role="agent") as link:
        assert len(Client(link).list_tools()) == 7
    services = control(own, "daemon.status")["services"]
    assert services["state"] == "failed"
    assert services["error"]["hint"] == "Update evalpurse."
    done = run("daemon", "status", home=own)
    assert "The store has schema 9" in done.stdout
    assert run("doctor", home=own).returncode == 1
    assert run("daemon", "stop", home=own).returncode == 0


def test_a_taken_http_port_costs_the_http_door_only(own: Home) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        own.config_file.write_text(f"http_port = {other.getsockname()[1]}\n")
        start_daemon(own)
        said = control(own, "daemon.status")
    assert said["http"]["open"] is False
    assert "Address already in use" in said["http"]["reason"]
    assert call_tool(own, "echo", {"text": "x"}).error is None


def test_a_defect_is_masked_for_the_caller_and_whole_in_the_log(shared: Home) -> None:
    result = call_tool(shared, "fail", {})
    assert result.error is not None
    assert result.error["code"] == "internal"
    assert "1234" not in result.text
    reference = result.error["facts"]["ref"]
    assert reference in result.text
    log = run("daemon", "logs", "-n", "200", home=shared).stdout
    assert f"tool fail failed, ref {reference}" in log
    assert "RuntimeError: the secret is 1234" in log


def test_logs_follow_what_is_written(shared: Home) -> None:
    following = subprocess.Popen(
        [*_cli("daemon", "logs", "-f", "-n", "1", "--json"), "--home", str(shared.path)],
        stdout=subprocess.PIPE,
        env=environment(PYTHONUNBUFFERED="1"),
        text=True,
    )
    try:
        assert following.stdout is not None
        following.stdout.readline()
        reference = (call_tool(shared, "fail", {}).error or {})["facts"]["ref"]
        while reference not in (line := following.stdout.readline()):
            assert line, "it ended"
        assert json.loads(line)["line"].endswith(f"ref {reference}")
    finally:
        following.kill()
        following.communicate()


def test_the_control_door_says_what_it_does_not_take(shared: Home) -> None:
    with open_link(shared, door="control", role="viewer") as link:
        with pytest.raises(RefusedError, match=r"Did you mean 'daemon\.status'") as refused:
            request(link, "daemon.statu", {})
        assert refused.value.answered == "unknown_method"
        with pytest.raises(RefusedError, match="needs the agent token; this client came with the viewer"):
            request(link, "daemon.stop", {})
        link.send({"id": 2, "method": ["daemon.status"]})
        assert json.loads(link.reader.readline())["error"]["code"] == "bad_parameters"
        link.socket.sendall(b"no JSON\n")
        assert "not JSON" in json.loads(link.reader.readline())["error"]["message"]
        assert request(link, "daemon.status", {})["version"] == __version__
    with open_link(shared, door="control", role="agent") as link:
        for wrong in ("ten", -1, True, float("inf")):
            with pytest.raises(RefusedError, match="must be a number from 0 to 3600"):
                request(link, "daemon.drain", {"timeout_s": wrong})


def test_without_a_daemon_status_and_logs_say_so_and_start_none(home: Home) -> None:
    done = run("daemon", "status", home=home)
    assert (done.returncode, "No daemon runs" in done.stdout) == (3, True)
    assert json.loads(run("daemon", "status", "--json", home=home).stdout)["running"] is False
    logs = run("daemon", "logs", home=home)
    assert (logs.returncode, logs.stdout) == (3, "")
    assert "[code: daemon_unreachable]" in logs.stderr
    assert Address.read(home) is None


def test_exit_codes_tell_usage_unreachable_failed_and_refused_apart(
    shared: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = (
        Verb(
            ("say",),
            "echo",
            (Option(("text",)),),
            tool="echo",
            arguments=lambda options: {"text": options.text},
            show=lambda facts: f"it said {facts['text']}",
        ),
        Verb(("break", "it"), "fails", tool="fail"),
        Verb(("daemon-info",), "status", method="daemon.status", role="viewer"),
        Verb(
            ("ask",),
            "asks first",
            (Option(("--yes",), {"action": "store_true"}),),
            method="daemon.status",
            confirm=lambda _: "Really?",
        ),
    )
    monkeypatch.setattr(verbs, "VERBS", table)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    at = ("--home", str(shared.path), "--daemon-module", MODULE)
    assert cli.main(["say", "hello", *at]) == 0
    assert capsys.readouterr().out == "it said hello\n"
    assert cli.main(["say", "hello", "--json", *at]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "hello"
    assert cli.main(["daemon-info", "--json", *at]) == 0
    assert json.loads(capsys.readouterr().out)["pid"] == pid_of(shared)
    assert cli.main(["break", "it", *at]) == 1
    assert "[code: internal]" in capsys.readouterr().err
    assert cli.main(["break", "it", "--json", *at]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "internal"
    assert cli.main(["ask", *at]) == 1
    assert "An agent asks with request_budget. [code: not_confirmed]" in capsys.readouterr().err
    assert cli.main(["ask", "--yes", *at]) == 0
    with pytest.raises(SystemExit) as usage:
        cli.main(["nonsense"])
    assert usage.value.code == 2
    monkeypatch.setattr("evalpurse.server.ask.ensure", _unreachable)
    assert cli.main(["say", "hello", *at]) == 3
    monkeypatch.setattr("evalpurse.server.ask.ensure", _over_budget)
    assert cli.main(["say", "hello", *at]) == 4


def test_a_verb_that_waits_calls_again_until_it_is_over_and_shows_progress(
    shared: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []

    def until(facts: dict[str, Any]) -> bool:
        seen.append(facts)
        return len(seen) == 2

    verb = Verb(("wait",), "waits", tool="count", arguments=lambda _: {"to": 2}, until=until)
    monkeypatch.setattr(verbs, "VERBS", (verb,))
    assert cli.main(["wait", "--home", str(shared.path)]) == 0
    captured = capsys.readouterr()
    assert seen == [{"ok": True}, {"ok": True}]
    assert captured.err.splitlines() == 2 * [
        "[############............] 1/2 step 1",
        "[########################] 2/2 step 2",
    ]


def test_a_client_waits_its_turn_and_says_when_it_never_comes(
    own: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalpurse.server.spawn.TURN_TIMEOUT_S", 0.05)
    lock = try_lock(own.daemon_lock)
    assert lock is not None
    try:
        with pytest.raises(UnreachableError, match="Another client has been starting the daemon"):
            call_tool(own, "echo", {"text": "x"}, launch=LAUNCH)
    finally:
        os.close(lock)


def _unreachable(*_: object, **__: object) -> None:
    raise UnreachableError("Nobody there.")


def _over_budget(*_: object, **__: object) -> None:
    raise RefusedError("exceeds_limit", "Too much.")


def _cli(*words: str) -> list[str]:
    return [sys.executable, "-m", "evalpurse.server.cli", *words]
