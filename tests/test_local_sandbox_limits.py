"""The limits of a local sandbox hold whatever a harness does, and its end says which one it broke.

Every harness that misbehaves here is bounded by its own program too, so that a limit that does not hold
fails a test and not the machine.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from evalpurse.home import Home
from evalpurse.runs.sandboxes.processes import ProcTable, PsTable
from evalpurse.runs.sandboxes.protocol import EndReason
from tests.sandbox_kit import ISOLATIONS, MIB, Bench, bench_in, running, tight

pytestmark = pytest.mark.anyio


@pytest.fixture(params=ISOLATIONS)
async def bench(request: pytest.FixtureRequest, home: Home) -> AsyncIterator[Bench]:
    async with bench_in(home, request.param) as bench:
        yield bench


ESCAPES = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:                      # a child in the same group
    time.sleep(60); os._exit(0)
if os.fork() == 0:                      # a session of its own
    os.setsid(); time.sleep(60); os._exit(0)
if os.fork() == 0:                      # a daemon: forked twice, its parent gone
    os.setsid()
    if os.fork() == 0:
        os.chdir("/"); time.sleep(60)
    os._exit(0)
subprocess.Popen(["sleep", "60"], start_new_session=True)
open(os.environ["EVALPURSE_OUT"] + "/answer.txt", "w").write("escaped")
"""


async def test_a_harness_that_ignores_the_deadline_is_ended_with_all_it_started(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalpurse.runs.sandboxes.local_sandbox.GRACE_S", 0.2)
    with anyio.fail_after(20):
        sandbox = await bench.start(
            f"{ESCAPES}\nprint('up', flush=True)\ntime.sleep(60)", limits=tight(timeout_s=1.0)
        )
        ended = await sandbox.wait()
        assert running(sandbox.name) == []
        assert (await sandbox.get()).log.startswith(b"up\n")
    assert ended.reason is EndReason.TIMEOUT
    assert "1 s after its start" in ended.detail
    assert 1.0 <= (ended.ended_at - ended.started_at).total_seconds() < 10


async def test_a_harness_may_use_the_grace_after_its_deadline_to_save_its_work(bench: Bench) -> None:
    program = """
import os, signal, sys, time
def save(*_):
    open(os.environ["EVALPURSE_OUT"] + "/answer.txt", "w").write("saved")
    sys.exit(5)
signal.signal(signal.SIGTERM, save)
time.sleep(60)
"""
    with anyio.fail_after(20):
        ended, output = await bench.run(program, limits=tight(timeout_s=1.0))
    assert (ended.reason, ended.exit_code) == (EndReason.TIMEOUT, 5)
    assert output.answer == b"saved"


async def test_what_a_harness_leaves_behind_is_gone_before_its_end_is_told(bench: Bench) -> None:
    with anyio.fail_after(20):
        sandbox = await bench.start(ESCAPES)
        ended = await sandbox.wait()
        assert running(sandbox.name) == []
    assert (ended.reason, ended.exit_code) == (EndReason.EXITED, 0)
    assert (await sandbox.get()).answer == b"escaped"


async def test_many_sandboxes_at_once_end_each_with_its_own_leftovers(bench: Bench) -> None:
    program = ["/bin/sh", "-c", "(setsid sleep 60 &) ; (setsid sleep 60 &) ; echo $EVALPURSE_RUN"]
    seen: dict[str, bytes] = {}

    async def one(name: str) -> None:
        sandbox = await bench.start(program, name=name)
        ended = await sandbox.wait()
        assert ended.exit_code == 0
        assert running(name) == []
        seen[name] = (await sandbox.get()).log

    names = [f"exp_many.{number:05d}.1" for number in range(12)]
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(one, name)
    assert seen == {name: f"{name}\n".encode() for name in names}


async def test_processor_time_of_one_process_is_limited(bench: Bench) -> None:
    with anyio.fail_after(20):
        ended, _ = await bench.run("while True: pass", limits=tight(cpu_s=1.0))
    assert ended.reason is EndReason.CPU
    assert "1 s of processor time" in ended.detail


async def test_processor_time_of_several_processes_is_limited_together(bench: Bench) -> None:
    program = """
import os
for _ in range(3): os.fork() or [None for _ in iter(int, 1)]
while True: pass
"""
    with anyio.fail_after(30):
        ended, _ = await bench.run(program, limits=tight(cpu_s=1.0, timeout_s=25))
        assert ended.reason is EndReason.CPU
        assert "processor time" in ended.detail


async def test_memory_is_limited_while_it_grows(bench: Bench) -> None:
    program = """
import time
kept = []
for _ in range(100):
    kept.append(bytearray(b"x") * (16 << 20))
    time.sleep(0.02)
"""
    with anyio.fail_after(20):
        ended, _ = await bench.run(program, limits=tight(memory_bytes=256 * MIB))
    assert ended.reason is EndReason.MEMORY
    assert str(256 * MIB) in ended.detail


async def test_memory_of_several_processes_is_limited_together(bench: Bench) -> None:
    program = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        kept = bytearray(os.urandom(1 << 20)) * 64
        time.sleep(30); os._exit(0)
time.sleep(30)
"""
    with anyio.fail_after(20):
        ended, _ = await bench.run(program, limits=tight(memory_bytes=256 * MIB))
    assert ended.reason is EndReason.MEMORY


async def test_a_short_peak_of_memory_is_noticed_afterwards(bench: Bench) -> None:
    with anyio.fail_after(20):
        ended, _ = await bench.run("bytearray(b'x') * (1000 << 20)", limits=tight(memory_bytes=400 * MIB))
    # Well above what this test process may have used itself, which the kernel would count for its children.
    assert ended.reason is EndReason.MEMORY


async def test_memory_within_the_limit_is_not_held_against_a_harness(bench: Bench) -> None:
    with anyio.fail_after(20):
        ended, _ = await bench.run("bytearray(b'x') * (100 << 20)", limits=tight(memory_bytes=600 * MIB))
    assert (ended.reason, ended.exit_code) == (EndReason.EXITED, 0)


BOMB = """
import os, sys, time
sys.stdout.flush()
for depth in range(8):      # at most 256 processes, whatever happens
    os.fork()
    if {own_sessions}:
        try: os.setsid()
        except PermissionError: pass
time.sleep(60)
"""


@pytest.mark.parametrize("own_sessions", [False, True])
async def test_a_fork_bomb_is_ended_whole(bench: Bench, own_sessions: bool) -> None:
    with anyio.fail_after(30):
        sandbox = await bench.start(
            BOMB.format(own_sessions=own_sessions), limits=tight(processes=40, timeout_s=25)
        )
        ended = await sandbox.wait()
        assert running(sandbox.name) == []
    assert ended.reason is EndReason.PROCESSES
    assert "40 are allowed" in ended.detail


async def test_a_bomb_of_threads_is_ended(bench: Bench) -> None:
    program = """
import threading, time
for _ in range(100): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
time.sleep(60)
"""
    if not isinstance(bench.backend._table, ProcTable):
        pytest.skip("ps does not tell threads")
    with anyio.fail_after(20):
        ended, _ = await bench.run(program, limits=tight(processes=4))
    assert ended.reason is EndReason.PROCESSES
    assert "threads" in ended.detail


async def test_one_large_file_is_stopped_by_its_size(bench: Bench) -> None:
    command = ["/bin/sh", "-c", "head -c 60000000 /dev/zero > big"]
    with anyio.fail_after(20):
        ended, output = await bench.run(command, limits=tight(disk_bytes=20 * MIB))
    assert ended.reason is EndReason.DISK, output.log


async def test_many_files_are_stopped_by_their_sum(bench: Bench) -> None:
    program = """
import os, time
for number in range(60):
    open(f"{os.environ['TMPDIR']}/{number}", "wb").write(os.urandom(1 << 20))
time.sleep(60)
"""
    with anyio.fail_after(20):
        sandbox = await bench.start(program, limits=tight(disk_bytes=40 * MIB))
        ended = await sandbox.wait()
    assert ended.reason is EndReason.DISK
    assert f"{40 * MIB} are allowed" in ended.detail


async def test_a_disk_filled_at_once_is_noticed_afterwards(bench: Bench) -> None:
    program = """
import os
for number in range(6): open(str(number), "wb").write(bytes(8 << 20))
"""
    with anyio.fail_after(20):
        ended, _ = await bench.run(program, limits=tight(disk_bytes=40 * MIB))
    assert ended.reason is EndReason.DISK


async def test_a_large_source_is_not_held_against_a_harness(bench: Bench) -> None:
    for number in range(3):
        (bench.prepared.folder / f"data{number}").write_bytes(os.urandom(8 * MIB))
    with anyio.fail_after(20):
        ended, _ = await bench.run("open('x', 'wb').write(bytes(9 << 20))", limits=tight(disk_bytes=16 * MIB))
    assert (ended.reason, ended.exit_code) == (EndReason.EXITED, 0)


async def test_a_flood_of_output_is_ended(bench: Bench) -> None:
    with anyio.fail_after(20):
        ended, output = await bench.run(["yes"], limits=tight(disk_bytes=30 * MIB, log_bytes=1000))
    assert ended.reason is EndReason.DISK
    assert len(output.log) <= 1000
    assert "log" in output.truncated


async def test_a_grader_is_held_to_limits_too(bench: Bench) -> None:
    with anyio.fail_after(30):
        sandbox = await bench.start(["true"], limits=tight(processes=40))
        await sandbox.wait()
        result = await sandbox.exec(
            [sys.executable, "-c", BOMB.format(own_sessions=False)], files={}, timeout_s=20
        )
        assert running(sandbox.name) == []
    assert result.exit_code is None
    assert b"40 are allowed" in result.log


async def test_the_event_loop_is_not_needed_to_end_what_breaks_a_limit(bench: Bench) -> None:
    with anyio.fail_after(30):
        sandbox = await bench.start(BOMB.format(own_sessions=False), limits=tight(processes=40))
        watch = sandbox._watch
        assert watch is not None
        # Nothing is awaited while the monitor works.
        while running(sandbox.name):
            pass
        ended = await sandbox.wait()
    assert ended.reason is EndReason.PROCESSES


# Where there is no /proc


async def test_processes_are_found_and_ended_by_ps_alone(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.setattr("evalpurse.runs.sandboxes.processes._read", lambda *_, **__: b"")
    monkeypatch.setattr("evalpurse.runs.sandboxes.local_sandbox.GRACE_S", 0.2)
    monkeypatch.setattr("evalpurse.runs.sandboxes.local.system_table", PsTable)
    async with bench_in(home, "off") as bench:
        assert isinstance(bench.backend._table, PsTable)
        with anyio.fail_after(30):
            sandbox = await bench.start(f"{ESCAPES}\ntime.sleep(60)", limits=tight(timeout_s=1.0))
            assert (await sandbox.wait()).reason is EndReason.TIMEOUT
            assert running(sandbox.name) == []
            short = await bench.start(ESCAPES)
            assert (await short.wait()).exit_code == 0
            assert running(short.name) == []
            killed, _ = await bench.run(["/bin/sh", "-c", "kill -9 $$"])
            assert killed.exit_code == -signal.SIGKILL


def test_ps_and_proc_tell_the_same_of_a_process() -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("there is no /proc")
    by_proc, by_ps = ProcTable().one(os.getpid()), PsTable().one(os.getpid())
    assert by_proc is not None
    assert by_ps is not None
    assert (by_proc.pid, by_proc.parent, by_proc.zombie) == (by_ps.pid, by_ps.parent, by_ps.zombie)
    assert by_ps.resident_bytes == pytest.approx(by_proc.resident_bytes, rel=0.2)
    assert 0 <= by_ps.cpu_s <= by_proc.cpu_s + 1, "ps leaves out children that have ended"


async def test_the_end_of_one_sandbox_does_not_reach_the_next_of_the_same_name(bench: Bench) -> None:
    with anyio.fail_after(30):
        for _ in range(3):
            bomb = await bench.start(
                BOMB.format(own_sessions=True), name="same.1", limits=tight(processes=40)
            )
            assert (await bomb.wait()).reason is EndReason.PROCESSES
            await bomb.terminate()
            quiet = await bench.start(["/bin/sh", "-c", "sleep 0.1"], name="same.1")
            ended = await quiet.wait()
            assert (ended.reason, ended.exit_code) == (EndReason.EXITED, 0), ended
            await quiet.terminate()
