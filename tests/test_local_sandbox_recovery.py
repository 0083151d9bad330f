"""A harness outlives its daemon, and a later daemon finds out how it ended, or ends it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from evalpurse.home import Home
from evalpurse.runs.errors import SandboxError
from evalpurse.runs.sandboxes.layout import Layout, Verdict
from evalpurse.runs.sandboxes.protocol import EndReason
from evalpurse.runs.sandboxes.secret_values import put_in_place
from evalpurse.runs.sandboxes.supervisor import RunRecord
from tests.sandbox_kit import ISOLATIONS, Bench, bench_in, running

pytestmark = pytest.mark.anyio

NAME = "exp_test.00000.1"

# A daemon that starts one harness and never ends by itself.
DAEMON = """
import sys, time
from pathlib import Path
import anyio
from evalpurse.home import Home
from tests.sandbox_kit import bench_in, tight

async def main():
    async with bench_in(Home(Path(sys.argv[1])), sys.argv[2]) as bench:
        sandbox = await bench.create(
            ["/bin/sh", "-c", sys.argv[3]],
            limits=tight(timeout_s=float(sys.argv[4]), processes=40, memory_bytes=256 << 20),
            secrets={"API_KEY": "the-key-value"},
        )
        if sys.argv[5] == "start":
            await sandbox.start()
        print("ready", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.fixture(params=ISOLATIONS)
async def bench(request: pytest.FixtureRequest, home: Home) -> AsyncIterator[Bench]:
    """The later daemon's; the earlier one works in the same home."""
    async with bench_in(home, request.param) as bench:
        shutil.rmtree(bench.prepared.folder.parent)
        (home.secrets / "API_KEY").write_text("the-key-value\n")
        yield bench
        found = await bench.backend.find(NAME)
        if found is not None:
            await found.terminate()
        assert running(NAME) == []


def earlier_daemon(bench: Bench, script: str, *, timeout_s: float = 20, step: str = "start") -> None:
    """Runs a daemon up to the given step, then kills it as `kill -9` does."""
    arguments = [str(bench.home.path), bench.isolation, script, str(timeout_s), step]
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON, *arguments],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    ) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"ready\n"
        daemon.kill()


def folder(bench: Bench) -> Path:
    return bench.home.work / NAME


async def test_a_harness_survives_its_daemon_and_is_taken_up_by_the_next(bench: Bench) -> None:
    earlier_daemon(bench, "while [ ! -e go ]; do sleep 0.01; done; echo $API_KEY; exit 3")
    assert running(NAME) != []
    with anyio.fail_after(20):
        assert await bench.backend.list({"experiment": "exp_test"}) == [NAME]
        sandbox = await bench.backend.find(NAME)
        assert sandbox is not None
        await sandbox.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sandbox.wait)
            await anyio.wait_all_tasks_blocked()
            (folder(bench) / "source" / "go").touch()
        ended = await sandbox.wait()
        output = await sandbox.get()
    assert (ended.reason, ended.exit_code) == (EndReason.EXITED, 3)
    assert ended.started_at < ended.ended_at
    assert output.log == b"[secret API_KEY]\n"


async def test_the_end_of_a_harness_that_no_daemon_saw_is_known(bench: Bench) -> None:
    earlier_daemon(bench, "echo seen by nobody; (setsid sleep 60 &); kill -SEGV $$")
    with anyio.fail_after(20):
        await until_ended(bench)
        before = time.time()
        sandbox = await bench.backend.find(NAME)
        assert sandbox is not None
        ended = await sandbox.wait()
        assert running(NAME) == [], "what it left behind too"
        assert (await sandbox.get()).log.startswith(b"seen by nobody\n")
    assert (ended.reason, ended.exit_code) == (EndReason.EXITED, -signal.SIGSEGV)
    assert ended.ended_at.timestamp() <= before, "the time is that of its end"


async def until_ended(bench: Bench) -> None:
    """Polls the run file: nobody is told when a stranger's child ends."""
    layout = Layout(str(folder(bench)))
    while (record := RunRecord.read(layout.run)) is None or record.exit_code is None:  # noqa: ASYNC110
        await anyio.sleep(0.01)


async def test_a_deadline_holds_over_daemons(bench: Bench) -> None:
    earlier_daemon(bench, "sleep 60", timeout_s=1.0)
    with anyio.fail_after(20):
        sandbox = await bench.backend.find(NAME)
        assert sandbox is not None
        ended = await sandbox.wait()
    assert ended.reason is EndReason.TIMEOUT
    assert (ended.ended_at - ended.started_at).total_seconds() < 10


async def test_limits_hold_for_an_adopted_harness(bench: Bench) -> None:
    earlier_daemon(
        bench, "while [ ! -e go ]; do sleep 0.01; done; for n in $(seq 60); do sleep 50 & done; wait"
    )
    with anyio.fail_after(20):
        sandbox = await bench.backend.find(NAME)
        assert sandbox is not None
        (folder(bench) / "source" / "go").touch()
        ended = await sandbox.wait()
    assert ended.reason is EndReason.PROCESSES


async def test_a_sandbox_that_was_never_started_can_be_started_by_the_next_daemon(bench: Bench) -> None:
    earlier_daemon(bench, "echo $API_KEY | tr a-z A-Z", step="create")
    with anyio.fail_after(20):
        sandbox = await bench.backend.find(NAME)
        assert sandbox is not None
        assert await sandbox.stop() is None
        with pytest.raises(SandboxError, match="was not started"):
            await sandbox.wait()
        await sandbox.start()
        ended = await sandbox.wait()
        assert (await sandbox.get()).log == b"THE-KEY-VALUE\n"
    assert ended.exit_code == 0


async def test_a_start_that_was_cut_short_is_lost_and_never_repeated(bench: Bench) -> None:
    earlier_daemon(bench, "echo ran > ran", step="create")
    (folder(bench) / "run").write_text(f"claimed {time.time()!r} {time.time() + 20!r}\n")
    with anyio.fail_after(20):
        sandbox = await bench.backend.find(NAME)
        assert sandbox is not None
        await sandbox.start()
        ended = await sandbox.wait()
    assert ended.reason is EndReason.LOST
    assert "left no exit status" in ended.detail
    assert not (folder(bench) / "source" / "ran").exists()


async def test_a_verdict_outlives_the_daemon_that_gave_it(bench: Bench) -> None:
    earlier_daemon(bench, "sleep 60")
    Verdict(EndReason.MEMORY, "Too much.").write(Layout(str(folder(bench))))
    with anyio.fail_after(20):
        sandbox = await bench.backend.find(NAME)
        assert sandbox is not None
        ended = await sandbox.stop()
    assert ended is not None
    assert (ended.reason, ended.detail) == (EndReason.MEMORY, "Too much.")


async def test_stop_and_terminate_work_on_an_adopted_harness(bench: Bench) -> None:
    earlier_daemon(bench, "trap '' TERM; (setsid sleep 60 &); while :; do sleep 1; done")
    with anyio.fail_after(20):
        sandbox = await bench.backend.find(NAME)
        assert sandbox is not None
        ended = await sandbox.stop()
        assert ended is not None
        assert ended.reason is EndReason.STOPPED
        assert running(NAME) == []
        await sandbox.terminate()
    assert not folder(bench).exists()


async def test_terminate_alone_ends_an_adopted_harness(bench: Bench) -> None:
    earlier_daemon(bench, "(setsid sleep 60 &); sleep 60")
    with anyio.fail_after(20):
        sandbox = await bench.backend.find(NAME)
        assert sandbox is not None
        await sandbox.terminate()
    assert running(NAME) == []
    assert not folder(bench).exists()


async def test_a_reboot_leaves_a_lost_sandbox(bench: Bench) -> None:
    earlier_daemon(bench, "sleep 60")
    with anyio.fail_after(20):
        while left := running(NAME):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await anyio.sleep(0.01)
        sandbox = await bench.backend.find(NAME)
        assert sandbox is not None
        ended = await sandbox.wait()
    assert ended.reason is EndReason.LOST
    assert ended.exit_code is None


async def test_an_id_that_was_given_to_another_process_is_not_taken_up(bench: Bench) -> None:
    earlier_daemon(bench, "sleep 60", step="create")
    with subprocess.Popen(["sleep", "60"]) as other:  # noqa: ASYNC220 - it only has to be there
        now = time.time()
        (folder(bench) / "run").write_text(f"claimed {now!r} {now + 20!r}\nbegun {other.pid}\n")
        with anyio.fail_after(20):
            sandbox = await bench.backend.find(NAME)
            assert sandbox is not None
            ended = await sandbox.wait()
            await sandbox.terminate()
        assert other.poll() is None, "it was not touched"
        other.kill()
    assert ended.reason is EndReason.LOST


async def test_a_removed_secret_keeps_its_sandbox_closed(bench: Bench) -> None:
    earlier_daemon(bench, "echo $API_KEY")
    (bench.home.secrets / "API_KEY").unlink()
    with anyio.fail_after(20):
        sandbox = await bench.backend.find(NAME)
        assert sandbox is not None
        await sandbox.wait()
        with pytest.raises(SandboxError, match="API_KEY"):
            await sandbox.get()


# Lost without the daemon's death


async def test_a_sandbox_whose_folder_is_removed_is_lost_and_its_harness_ended(bench: Bench) -> None:
    bench.prepared.folder.mkdir(parents=True)
    with anyio.fail_after(20):
        sandbox = await bench.start(["/bin/sleep", "60"])
        shutil.rmtree(folder(bench))
        ended = await sandbox.wait()
        assert running(NAME) == []
        assert ended.reason is EndReason.LOST
        assert "disappeared" in ended.detail
        await sandbox.terminate()


async def test_a_folder_that_disappears_during_the_wait_is_noticed(bench: Bench) -> None:
    bench.prepared.folder.mkdir(parents=True)
    with anyio.fail_after(20):
        sandbox = await bench.start(["/bin/sleep", "60"])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sandbox.wait)
            await anyio.wait_all_tasks_blocked()
            shutil.rmtree(folder(bench))
        assert (await sandbox.wait()).reason is EndReason.LOST
    assert running(NAME) == []


async def test_a_supervisor_that_is_killed_leaves_a_lost_sandbox_and_no_process(bench: Bench) -> None:
    bench.prepared.folder.mkdir(parents=True)
    with anyio.fail_after(20):
        sandbox = await bench.start(["/bin/sh", "-c", "(setsid sleep 60 &); touch up; sleep 60"])
        while not (folder(bench) / "source" / "up").exists():  # noqa: ASYNC110
            await anyio.sleep(0.01)
        assert sandbox._process is not None
        os.kill(sandbox._process.pid, signal.SIGKILL)
        ended = await sandbox.wait()
        assert running(NAME) == []
    assert ended.reason is EndReason.LOST
    assert "signal 9" in ended.detail


async def test_half_a_line_in_the_run_file_was_never_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert RunRecord.read(str(run)) is None
    run.write_text("claimed 1.0 2.0")
    assert RunRecord.read(str(run)) is None
    run.write_text("claimed 1.0 2.0\nbegun 77\nended 1")
    record = RunRecord.read(str(run))
    assert record is not None
    assert (record.started_s, record.deadline_s, record.pid, record.exit_code) == (1.0, 2.0, 77, None)
    run.write_text("claimed 1.0 2.0\nbegun 77\nended 137\n")
    record = RunRecord.read(str(run))
    assert record is not None
    assert record.exit_code == -9


async def test_a_secret_that_was_changed_meanwhile_is_taken_out_all_the_same(bench: Bench) -> None:
    earlier_daemon(bench, "echo $API_KEY; echo the-next-value")
    put_in_place(bench.home, "API_KEY", "the-next-value")
    with anyio.fail_after(20):
        sandbox = await bench.backend.find(NAME)
        assert sandbox is not None
        await sandbox.wait()
        assert (await sandbox.get()).log == b"[secret API_KEY]\n[secret API_KEY]\n"
