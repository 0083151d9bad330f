"""The life of a local sandbox: what a harness sees, what is taken from it, what is left of it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.errors import SandboxError, SetupFailedError
from evalpurse.runs.sandboxes.local import LocalBackend
from evalpurse.runs.sandboxes.protocol import EndReason, Machine
from tests.sandbox_kit import ISOLATIONS, MIB, Bench, bench_in, running, tight

pytestmark = pytest.mark.anyio


@pytest.fixture(params=ISOLATIONS)
async def bench(request: pytest.FixtureRequest, home: Home) -> AsyncIterator[Bench]:
    async with bench_in(home, request.param) as bench:
        yield bench


async def test_a_harness_reads_its_case_and_its_output_is_taken(bench: Bench) -> None:
    program = """
import json, os, pathlib
case, out = (pathlib.Path(os.environ[name]) for name in ("EVALPURSE_CASE", "EVALPURSE_OUT"))
params = json.loads(pathlib.Path(os.environ["EVALPURSE_PARAMS"]).read_text())
question = (case / "input.txt").read_text() + (case / "files/a/b.bin").read_bytes().decode("latin-1")
(out / "answer.txt").write_text(f"{question} {params['k']} {pathlib.Path('harness.txt').read_text()}")
(out / "metrics.json").write_text('{"steps": 3}')
(out / "transcript.jsonl").write_text('{"role": "user"}\\n')
(out / "artifacts/deep").mkdir(parents=True)
(out / "artifacts/deep/plot.bin").write_bytes(bytes(range(256)))
print("to stdout", flush=True)
os.write(2, b"to stderr\\n")
"""
    files = {"input.txt": b"why", "files/a/b.bin": bytes([0xE9])}
    with anyio.fail_after(20):
        ended, output = await bench.run(program, case_files=files, params={"k": 7})
    assert (ended.reason, ended.exit_code) == (EndReason.EXITED, 0)
    assert ended.started_at <= ended.ended_at <= datetime.now(UTC)
    assert output.answer == b"why\xc3\xa9 7 pinned"
    assert not output.answer_is_json
    assert output.metrics == b'{"steps": 3}'
    assert output.transcript == b'{"role": "user"}\n'
    assert output.log == b"to stdout\nto stderr\n"
    assert output.truncated == frozenset()
    assert output.artifacts is not None
    with tarfile.open(fileobj=io.BytesIO(output.artifacts)) as tar:
        assert tar.getnames() == ["deep/plot.bin"]
        content = tar.extractfile("deep/plot.bin")
        assert content is not None
        assert content.read() == bytes(range(256))


async def test_the_environment_of_a_harness_is_exactly_the_table(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAEMON_SECRET", "must not leak")
    program = ["/bin/sh", "-c", 'env -0 > "$EVALPURSE_OUT/answer.txt"; pwd; cat']
    with anyio.fail_after(20):
        sandbox = await bench.start(
            program, env={"MODEL": "m-1", "EMPTY": ""}, secrets={"API_KEY": "k-123456"}
        )
        await sandbox.wait()
        answer = (bench.home.work / sandbox.name / "out" / "answer.txt").read_bytes()
        output = await sandbox.get()
    seen = dict(entry.split("=", 1) for entry in answer.decode().split("\0") if entry)
    for added_by_some_shells in ("_", "SHLVL", "OLDPWD"):
        seen.pop(added_by_some_shells, None)
    root = bench.home.work / sandbox.name
    assert output.log.decode() == f"{root}/source\n", "standard input is empty"
    deadline = datetime.fromisoformat(seen.pop("EVALPURSE_DEADLINE"))
    assert timedelta(0) < deadline - datetime.now(UTC) < timedelta(seconds=20)
    assert deadline.utcoffset() == timedelta(0)
    assert "/usr/bin" in seen.pop("PATH").split(":")
    assert seen == {
        "API_KEY": "k-123456",
        "EMPTY": "",
        "EVALPURSE_ALLOWANCE_USD": "0.10",
        "EVALPURSE_CASE": f"{root}/case",
        "EVALPURSE_OUT": f"{root}/out",
        "EVALPURSE_PARAMS": f"{root}/params.json",
        "EVALPURSE_RUN": sandbox.name,
        "HOME": str(root / "tmp"),
        "LANG": "C.UTF-8",
        "MODEL": "m-1",
        "PWD": f"{root}/source",
        "TMPDIR": str(root / "tmp"),
    }


async def test_no_file_handle_of_the_daemon_reaches_a_harness(bench: Bench) -> None:
    handle = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(handle, True)
    program = "import os; print(sorted(f for f in range(256) if os.path.exists(f'/dev/fd/{f}')))"
    try:
        with anyio.fail_after(20):
            _, output = await bench.run(program)
    finally:
        os.close(handle)
    assert output.log in (b"[0, 1, 2]\n", b"[0, 1, 2, 3]\n"), "3 may be the listing's own"


async def test_the_source_is_copied_with_permissions_times_and_links(bench: Bench) -> None:
    source = bench.prepared.folder
    (source / "bin").mkdir(mode=0o755)
    tool = source / "bin" / "tool"
    tool.write_text("#!/bin/sh\necho ran\n")
    tool.chmod(0o775)
    os.utime(tool, ns=(10**18, 10**18))
    (source / "dangling").symlink_to("nowhere")
    (source / "alias").symlink_to("bin/tool")
    (source / "closed").mkdir(mode=0o555)
    big = os.urandom(2 * MIB)
    with anyio.fail_after(20):
        small = await bench.start(["./alias"])
        assert (await small.wait()).exit_code == 0
        assert (await small.get()).log == b"ran\n"
        copy = bench.home.work / small.name / "source"
        assert stat.S_IMODE((copy / "bin/tool").stat().st_mode) == 0o775
        assert stat.S_IMODE((copy / "closed").stat().st_mode) == 0o755, "its owner can always write"
        assert (copy / "bin/tool").stat().st_mtime_ns == 10**18
        assert (copy / "dangling").readlink() == Path("nowhere")
        (source / "big.bin").write_bytes(big)
        await bench.prepare([])
        large = await bench.start(["./bin/tool"])
        assert (await large.wait()).exit_code == 0
        assert (bench.home.work / large.name / "source" / "big.bin").read_bytes() == big
        assert (bench.home.work / large.name / "source" / "bin/tool").stat().st_mtime_ns == 10**18


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["/bin/sh", "-c", "exit 7"], 7),
        (["/bin/sh", "-c", "kill -9 $$"], -signal.SIGKILL),
        (["/bin/sh", "-c", "kill -SEGV $$"], -signal.SIGSEGV),
        (["no-such-program"], 127),
        (["exit", "0"], 127),
        (["/bin/sh", "-c", "trap '' TERM; kill 0; exit 3"], 3),
        (["/bin/sh", "-c", "kill 0; sleep 30"], -signal.SIGTERM),
    ],
)
async def test_exit_codes_and_signals_are_told_apart(bench: Bench, command: list[str], code: int) -> None:
    with anyio.fail_after(20):
        ended, _ = await bench.run(command)
    assert (ended.reason, ended.exit_code) == (EndReason.EXITED, code)


async def test_start_runs_a_harness_at_most_once(bench: Bench) -> None:
    with anyio.fail_after(20):
        sandbox = await bench.create(["/bin/sh", "-c", "echo once >> counted"])
        await sandbox.start()
        await sandbox.start()
        later = bench.another_backend()
        found = await later.find(sandbox.name)
        assert found is not None
        await found.start()
        await sandbox.wait()
        await found.start()
        await found.wait()
        await later.close()
    assert (bench.home.work / sandbox.name / "source" / "counted").read_text() == "once\n"


async def test_steps_out_of_order_are_refused(bench: Bench) -> None:
    with anyio.fail_after(20):
        sandbox = await bench.create(["/bin/sleep", "30"])
        with pytest.raises(SandboxError, match="was not started"):
            await sandbox.wait()
        assert await sandbox.stop() is None
        await sandbox.start()
        with pytest.raises(SandboxError, match="before its harness is gone"):
            await sandbox.get()
        with pytest.raises(SandboxError, match="before its harness is gone"):
            await sandbox.exec(["true"], files={}, timeout_s=5)
        with pytest.raises(SandboxError, match="already"):
            await bench.backend.create(bench.spec(["true"], name=sandbox.name))
        assert (bench.home.work / sandbox.name / "sandbox.json").exists(), "the refusal did no harm"


@pytest.mark.parametrize("name", ["../x", ".", "a/b", "", ".hidden", "a\0b", "x" * 200])
async def test_names_that_are_paths_are_refused(bench: Bench, name: str) -> None:
    spec = bench.spec(["true"])
    with pytest.raises(SandboxError, match="cannot be the name"):
        await bench.backend.create(type(spec)(**{**spec.__dict__, "name": name}))


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "a\0b", ".", "a//../../b"])
async def test_case_files_stay_in_their_folder_and_nothing_is_left(bench: Bench, path: str) -> None:
    with pytest.raises(SandboxError, match="not a relative path"):
        await bench.create(["true"], case_files={"input.txt": b"", path: b"evil"})
    assert await bench.backend.list({}) == []
    assert [entry.name for entry in bench.home.work.iterdir()] == [".spare"]


async def test_variables_that_would_hide_a_process_are_refused(bench: Bench) -> None:
    for env in ({"EVALPURSE_RUN": "other"}, {"A-B": "x"}, {"": "x"}, {"A": "x\0y"}):
        with pytest.raises(SandboxError, match="environment variable"):
            await bench.create(["true"], env=env)


async def test_stop_ends_a_harness_and_keeps_what_it_wrote(bench: Bench) -> None:
    program = [
        "/bin/sh",
        "-c",
        "echo partial > $EVALPURSE_OUT/answer.txt; mkfifo up; echo > up & exec sleep 60",
    ]
    with anyio.fail_after(20):
        sandbox = await bench.start(program)
        await until_exists(bench, sandbox.name, "source/up")
        ended = await sandbox.stop()
        assert ended is not None
        assert ended.reason is EndReason.STOPPED
        assert running(sandbox.name) == []
        assert (await sandbox.get()).answer == b"partial\n"
        assert await sandbox.stop() == ended
        assert await sandbox.wait() == ended


async def until_exists(bench: Bench, name: str, path: str) -> None:
    """Polls: a file system has no event that works everywhere."""
    file = bench.home.work / name / path
    while not file.exists():  # noqa: ASYNC110
        await anyio.sleep(0.005)


async def test_cancelling_a_wait_leaves_the_harness_running(bench: Bench) -> None:
    program = ["/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.01; done; echo done"]
    with anyio.fail_after(20):
        sandbox = await bench.start(program)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sandbox.wait)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert running(sandbox.name) != []
        (bench.home.work / sandbox.name / "source" / "go").touch()
        ended = await sandbox.wait()
    assert (ended.reason, ended.exit_code) == (EndReason.EXITED, 0)


async def test_terminate_removes_everything_and_can_be_repeated(bench: Bench) -> None:
    program = """
import os
os.makedirs("closed/inner"); open("closed/inner/file", "w").write("x")
os.chmod("closed/inner", 0o000); os.chmod("closed", 0o500); os.chmod(os.environ["EVALPURSE_OUT"], 0o000)
os.chdir(os.environ["TMPDIR"])
for _ in range(250):
    os.mkdir("d" * 20); os.chdir("d" * 20)
"""
    with anyio.fail_after(30):
        sandbox = await bench.start(program)
        ended = await sandbox.wait()
        assert ended.exit_code == 0
        await sandbox.terminate()
        await sandbox.terminate()
        assert not (bench.home.work / sandbox.name).exists()
        assert await bench.backend.find(sandbox.name) is None


async def test_what_python_cannot_remove_the_systems_tools_do(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_deep(_: str) -> None:
        raise RecursionError

    with anyio.fail_after(20):
        sandbox = await bench.start(
            ["/bin/sh", "-c", "mkdir closed; touch closed/x; chmod 0 closed; mknod p p"]
        )
        await sandbox.wait()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", too_deep)
            patch.setattr("evalpurse.runs.sandboxes.folders.QUICK_ENTRIES_MAX", 0)
            await sandbox.terminate()
    assert not (bench.home.work / sandbox.name).exists()


async def test_terminate_ends_a_running_harness_even_when_cancelled(bench: Bench) -> None:
    with anyio.fail_after(20):
        sandbox = await bench.start(["/bin/sh", "-c", "trap '' TERM; (setsid sleep 60 &); sleep 60"])
        with anyio.CancelScope() as scope:
            scope.cancel()
            await sandbox.terminate()
    assert running(sandbox.name) == []
    assert not (bench.home.work / sandbox.name).exists()


async def test_a_reused_folder_is_as_if_new(bench: Bench) -> None:
    with anyio.fail_after(20):
        first = await bench.start(
            ["/bin/sh", "-c", "echo x > left; echo y > $EVALPURSE_OUT/answer.txt; umask 0"]
        )
        await first.wait()
        await first.terminate()
        altered = await bench.start(["/bin/sh", "-c", "chmod 777 $TMPDIR"])
        await altered.wait()
        await altered.terminate()
        for _ in range(2):
            await bench.create(["true"])
    for sandbox in bench.made[2:]:
        root = bench.home.work / sandbox.name
        assert sorted(path.name for path in (root / "source").iterdir()) == ["harness.txt"]
        for folder in ("out", "tmp"):
            assert list((root / folder).iterdir()) == []
            assert stat.S_IMODE((root / folder).stat().st_mode) == 0o700


async def test_list_finds_by_tags_and_ignores_what_was_never_finished(bench: Bench) -> None:
    await bench.create(["true"], name="a.1", tags={"experiment": "e1", "run": "r1"})
    await bench.create(["true"], name="a.2", tags={"experiment": "e1", "run": "r2"})
    await bench.create(["true"], name="b.1", tags={"experiment": "e2"})
    half_made = bench.home.work / "c.1"
    half_made.mkdir()
    (half_made / "sandbox.json").write_text('{"schema_version": 1, "na')
    assert await bench.backend.list({"experiment": "e1"}) == ["a.1", "a.2"]
    assert await bench.backend.list({"experiment": "e1", "run": "r2"}) == ["a.2"]
    assert await bench.backend.list({}) == ["a.1", "a.2", "b.1"]
    later = bench.another_backend()
    assert await later.find("c.1") is None
    assert not half_made.exists()
    assert await later.find("d.1") is None
    await later.close()


async def test_a_half_made_folder_is_replaced(bench: Bench) -> None:
    half_made = bench.home.work / "a.1"
    half_made.mkdir()
    (half_made / "junk").write_text("x")
    with anyio.fail_after(20):
        ended, _ = await bench.run(["/bin/sh", "-c", "test ! -e ../junk"], name="a.1")
    assert ended.exit_code == 0


async def test_a_disk_that_refuses_is_told_and_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    await bench.create(["true"], name="before.1")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SandboxError, match="No space left"):
        await bench.create(["true"], name="full.1")
    monkeypatch.undo()
    assert not (bench.home.work / "full.1").exists()


# Output


async def test_two_hundred_megabytes_of_output_are_cut_to_head_and_tail(bench: Bench) -> None:
    program = """
import os, sys
print("the head"); sys.stdout.flush()
for _ in range(200): os.write(1, b"x" * (1 << 20))
print("the tail")
with open(os.environ["EVALPURSE_OUT"] + "/answer.txt", "wb") as f: f.write(b"a" * 5_000_000)
with open(os.environ["EVALPURSE_OUT"] + "/transcript.jsonl", "wb") as f: f.truncate(3 << 30)
"""
    with anyio.fail_after(30):
        ended, output = await bench.run(program, limits=tight(disk_bytes=4 << 30, transcript_bytes=1000))
    assert ended.exit_code == 0
    assert output.log.startswith(b"the head\n")
    assert output.log.endswith(b"the tail\n")
    assert len(output.log) <= 8 * MIB
    assert b"bytes cut" in output.log
    assert output.answer == b"a" * (4 * MIB)
    assert output.transcript == bytes(1000)
    assert output.truncated == {"log", "answer", "transcript"}


async def test_binary_output_is_taken_as_it_is(bench: Bench) -> None:
    program = """
import os
os.write(1, bytes(range(256)))
with open(os.environ["EVALPURSE_OUT"] + "/answer.json", "wb") as f: f.write(bytes(range(255, -1, -1)))
"""
    with anyio.fail_after(20):
        _, output = await bench.run(program)
    assert output.log == bytes(range(256))
    assert output.answer == bytes(range(255, -1, -1))
    assert output.answer_is_json


async def test_links_pipes_sockets_and_folders_are_not_opened_as_output(bench: Bench, home: Home) -> None:
    (home.tokens / "owner").write_text("the owner's token")
    program = f"""
import os, socket
os.chdir(os.environ["EVALPURSE_OUT"])
os.symlink("{home.tokens}/owner", "answer.txt")
os.mkfifo("transcript.jsonl")
os.mkdir("metrics.json")
s = socket.socket(socket.AF_UNIX); s.bind("answer.json")
os.mkdir("artifacts")
os.symlink("{home.tokens}", "artifacts/folder")
os.symlink("{home.tokens}/owner", "artifacts/file")
os.symlink("/dev/zero", "artifacts/zero")
os.mkfifo("artifacts/pipe")
open("artifacts/real", "w").write("real")
"""
    with anyio.fail_after(20):
        ended, output = await bench.run(program)
    assert ended.exit_code == 0
    assert (output.answer, output.metrics, output.transcript) == (None, None, None)
    assert output.artifacts is not None
    with tarfile.open(fileobj=io.BytesIO(output.artifacts)) as tar:
        assert tar.getnames() == ["real"]


async def test_an_output_folder_that_became_a_link_is_no_output(bench: Bench, home: Home) -> None:
    (home.tokens / "answer.txt").write_text("not an answer")
    command = ["/bin/sh", "-c", f'rmdir "$EVALPURSE_OUT" && ln -s {home.tokens} "$EVALPURSE_OUT"; exit 0']
    with anyio.fail_after(20):
        ended, output = await bench.run(command)
    assert ended.exit_code == 0
    assert output.answer is None


async def test_artifacts_are_bounded_and_large_ones_left_out_whole(bench: Bench) -> None:
    program = """
import os
os.makedirs(os.environ["EVALPURSE_OUT"] + "/artifacts"); os.chdir(os.environ["EVALPURSE_OUT"] + "/artifacts")
open("a", "wb").write(b"a" * 1000)
with open("b", "wb") as f: f.truncate(1 << 40)
open("c", "wb").write(b"c" * 1000)
"""
    with anyio.fail_after(20):
        _, output = await bench.run(program, limits=tight(artifacts_bytes=64 << 10, disk_bytes=1 << 42))
    assert output.artifacts is not None
    assert len(output.artifacts) <= 64 << 10
    with tarfile.open(fileobj=io.BytesIO(output.artifacts)) as tar:
        assert tar.getnames() == ["a", "c"]
    assert output.truncated == {"artifacts"}


async def test_secrets_are_taken_out_of_all_that_is_captured(bench: Bench) -> None:
    value = "s3cr3t/value+with=signs"
    program = """
import base64, os, urllib.parse
key = os.environ["API_KEY"]
out = os.environ["EVALPURSE_OUT"]
print("plain", key, "url", urllib.parse.quote(key, safe=""))
print("b64", base64.b64encode(b"x" + key.encode()).decode())
for name in ("answer.txt", "metrics.json", "transcript.jsonl"):
    open(f"{out}/{name}", "w").write("<" + key + ">")
os.mkdir(f"{out}/artifacts"); open(f"{out}/artifacts/file", "w").write("<" + key + ">")
"""
    with anyio.fail_after(20):
        sandbox = await bench.start(program, secrets={"API_KEY": value})
        ended = await sandbox.wait()
        output = await sandbox.get()
        graded = await sandbox.exec(
            ["/bin/sh", "-c", "cat $EVALPURSE_OUT/answer.txt | tee copy"],
            files={},
            timeout_s=10,
            fetch=["copy"],
        )
    assert ended.exit_code == 0
    assert output.answer == output.metrics == output.transcript == b"<[secret API_KEY]>"
    assert output.log.count(b"[secret API_KEY]") == 3
    assert output.artifacts is not None
    assert graded.log == graded.files["copy"] == b"<[secret API_KEY]>"
    record = (bench.home.work / sandbox.name / "sandbox.json").read_text()
    for captured in (output.log, output.artifacts, record.encode()):
        assert b"s3cr3t" not in captured
    assert json.loads(record)["secret_names"] == ["API_KEY"]


async def test_a_secret_at_a_cut_is_taken_out_too(bench: Bench) -> None:
    value = "abcdefghijklmnopqrstuvwxyz"
    program = """
import os
key = os.environ["API_KEY"].encode()
os.write(1, b"x" * 490 + key + b"y" * 5000 + key + b"z" * 490)
open(os.environ["EVALPURSE_OUT"] + "/answer.txt", "wb").write(b"x" * 90 + key + b"y" * 500)
"""
    with anyio.fail_after(20):
        _, output = await bench.run(
            program, secrets={"API_KEY": value}, limits=tight(log_bytes=1024, answer_bytes=100)
        )
    assert output.answer is not None
    assert len(output.answer) == 100
    for captured in (output.log, output.answer):
        assert not any(value[i : i + 4].encode() in captured for i in range(len(value) - 3))


# Graders


async def test_a_grader_sees_source_output_and_case_and_its_files_come_late(bench: Bench) -> None:
    program = """
import os, pathlib
root = pathlib.Path(os.environ["EVALPURSE_OUT"]).parent
found = [str(p) for p in root.rglob("*") if "expected" in p.name or "grader" in p.name]
pathlib.Path(os.environ["EVALPURSE_OUT"], "answer.txt").write_text(repr(found))
pathlib.Path(os.environ["HOME"], ".profile").write_text("exit 9")
"""
    grader = """
import json, os, pathlib
env = os.environ
assert os.getcwd() == env["EVALPURSE_GRADER"], os.getcwd()
assert not list(pathlib.Path(env["HOME"]).iterdir()), "a home that the harness did not touch"
assert "API_KEY" not in env and "MODEL" not in env
answer = pathlib.Path(env["EVALPURSE_OUT"], "answer.txt").read_text()
source = pathlib.Path(env["EVALPURSE_SOURCE"], "harness.txt").read_text()
case = pathlib.Path(env["EVALPURSE_CASE"], "input.txt").read_text()
json.dump([answer, source, case, pathlib.Path("sub/expected.txt").read_text()], open("reward.json", "w"))
print("graded")
"""
    with anyio.fail_after(20):
        sandbox = await bench.start(program, env={"MODEL": "m"}, secrets={"API_KEY": "k-123456"})
        assert (await sandbox.wait()).exit_code == 0
        result = await sandbox.exec(
            [sys.executable, "grade.py"],
            files={"grade.py": grader.encode(), "sub/expected.txt": b"42"},
            timeout_s=10,
            fetch=["reward.json", "missing", "../../sandbox.json", "/etc/passwd"],
        )
    assert (result.exit_code, result.log) == (0, b"graded\n")
    assert list(result.files) == ["reward.json"]
    assert json.loads(result.files["reward.json"]) == ["[]", "pinned", "a question", "42"]
    assert [path.name for path in (bench.home.work / sandbox.name).glob("grader-*")] == []


async def test_a_grader_that_hangs_is_ended_with_all_its_processes(bench: Bench) -> None:
    with anyio.fail_after(20):
        sandbox = await bench.start(["true"])
        await sandbox.wait()
        result = await sandbox.exec(
            ["/bin/sh", "-c", "trap '' TERM; echo started; (setsid sleep 60 &); sleep 60"],
            files={},
            timeout_s=0.5,
        )
        assert result.exit_code is None
        assert result.log == b"started\nIt was ended after 0.5 s.\n"
        assert running(sandbox.name) == []
        again = await sandbox.exec(["/bin/sh", "-c", "exit 4"], files={}, timeout_s=5)
        assert again.exit_code == 4


async def test_a_cancelled_grader_leaves_nothing(bench: Bench) -> None:
    with anyio.fail_after(20):
        sandbox = await bench.start(["true"])
        await sandbox.wait()
        async with anyio.create_task_group() as tasks:

            async def grade() -> None:
                await sandbox.exec(["/bin/sleep", "60"], files={}, timeout_s=60)

            tasks.start_soon(grade)
            while not running(sandbox.name):  # noqa: ASYNC110 - a process has no event for its start
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    assert running(sandbox.name) == []
    assert list((bench.home.work / sandbox.name).glob("grader-*")) == []


# Preparing


async def test_setup_runs_once_in_the_prepared_folder_and_sandboxes_get_its_result(bench: Bench) -> None:
    folder = bench.prepared.folder
    with anyio.fail_after(20):
        await bench.prepare(["echo $GREETING > made", "cat made >> made2; pwd >> made2"], GREETING="hi")
        ended, output = await bench.run(["cat", "made2"])
    assert ended.exit_code == 0
    assert output.log.decode() == f"hi\n{folder}\n"
    assert [entry.name for entry in bench.home.work.glob("setup*")] == []


async def test_a_failed_setup_names_the_command_its_code_and_its_last_words(bench: Bench) -> None:
    commands = ["true", "echo first; echo no such package >&2; (setsid sleep 60 &) ; exit 3", "touch never"]
    with anyio.fail_after(20), pytest.raises(SetupFailedError) as caught:
        await bench.prepare(commands)
    assert "exit 3" in str(caught.value)
    assert "ended with exit code 3" in str(caught.value)
    assert "no such package" in str(caught.value)
    assert not (bench.prepared.folder / "never").exists()
    assert [entry.name for entry in bench.home.work.glob("setup*")] == []


async def test_a_cancelled_setup_ends_its_processes(bench: Bench) -> None:
    marker = bench.prepared.folder / "began"
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.prepare, ["touch began; exec sleep 61.5"])
            while not marker.exists():  # noqa: ASYNC110
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    assert "sleep 61.5" not in await anyio.to_thread.run_sync(all_commands)


def all_commands() -> str:
    return subprocess.run(["ps", "-A", "-oargs="], check=True, capture_output=True, text=True).stdout


# Money


@pytest.mark.parametrize(("usd_per_hour", "nusd"), [(0.0, 0), (0.36, 100_000), (0.1, 27_778), (1e-9, 1)])
async def test_a_second_costs_the_hourly_rate_rounded_up(home: Home, usd_per_hour: float, nusd: int) -> None:
    backend = LocalBackend(home, Settings(local_usd_per_hour=usd_per_hour))
    assert backend.nusd_per_second(Machine()) == nusd
    await backend.close()
