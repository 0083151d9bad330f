"""What bubblewrap keeps a harness away from, and what is said where there is none."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import anyio
import pytest

from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.errors import IsolationMissingError
from evalpurse.runs.sandboxes.isolation import Interpreters, Isolator
from evalpurse.runs.sandboxes.local import LocalBackend
from evalpurse.runs.sandboxes.protocol import EndReason
from tests.sandbox_kit import Bench, bench_in

pytestmark = pytest.mark.anyio


@pytest.fixture
async def bench(home: Home) -> AsyncIterator[Bench]:
    async with bench_in(home, "require") as bench:
        yield bench


@pytest.fixture
def listener() -> Iterator[int]:
    """A port of this machine that takes one connection after the other."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            try:
                while True:
                    server.accept()[0].close()
            except OSError:
                return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


SCRATCH = ("/tmp", "/dev/shm")  # noqa: S108 - of the sandbox

TRY = """
import os, sys
for path in {paths!r}:
    try:
        {attempt}
    except OSError as error:
        print(type(error).__name__, path)
    else:
        print("done", path)
"""


async def possible(bench: Bench, attempt: str, paths: Sequence[str | Path]) -> list[str]:
    """The paths on which an attempt succeeds inside a sandbox."""
    program = TRY.format(paths=[str(path) for path in paths], attempt=attempt)
    with anyio.fail_after(20):
        ended, output = await bench.run(program)
    assert ended.exit_code == 0, output.log
    lines = output.log.decode().splitlines()
    assert len(lines) == len(paths), lines
    return [line.removeprefix("done ") for line in lines if line.startswith("done ")]


async def test_only_the_own_sandbox_can_be_written(bench: Bench) -> None:
    other = await bench.create(["true"], name="other.1")
    work = bench.home.work
    own = f"{work}/exp_test.00001.1"
    elsewhere = [
        work / other.name / "source" / "planted",
        work / other.name / "out" / "answer.txt",
        work / "planted",
        bench.home.path / "planted",
        bench.prepared.folder / "planted",
        Path("/etc/planted"),
        Path("/usr/planted"),
        Path("/dev/planted"),
        Path("/sys/planted"),
        Path(f"{own}/planted"),
        Path(f"{own}/case/planted"),
        Path(f"{own}/params.json"),
        Path(f"{own}/sandbox.json"),
        Path(f"{own}/run"),
        Path(f"{own}/verdict"),
    ]
    assert await possible(bench, "open(path, 'a').write('x')", elsewhere) == []
    assert not (work / other.name / "source" / "planted").exists()
    mine = [f"{work}/exp_test.00002.1/{part}/new" for part in ("source", "out", "tmp")]
    mine += [f"{scratch}/new" for scratch in SCRATCH]
    assert await possible(bench, "open(path, 'a').write('x')", mine) == mine
    assert not await anyio.Path(f"{SCRATCH[0]}/new").exists()  # its own /tmp


async def test_switches_of_the_kernel_cannot_be_touched(bench: Bench) -> None:
    # Opened and not written: should this ever fail, the machine must not suffer.
    switches = ["/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger"]
    switches += ["/proc/mtrr", "/sys/power/state", "/sys/kernel/uevent_helper"]
    there = [path for path in switches if await anyio.Path(path).exists()]
    assert await possible(bench, "os.close(os.open(path, os.O_WRONLY))", there) == []


async def test_home_tokens_secrets_and_other_runs_cannot_be_read(bench: Bench) -> None:
    home = bench.home
    for file in (home.tokens / "owner", home.secrets / "API_KEY", home.ledger_file, home.results_file):
        file.write_text("private")
    other = await bench.create(["true"], name="other.1")
    hidden = [home.tokens / "owner", home.secrets / "API_KEY", home.ledger_file, home.results_file]
    hidden += [home.work / other.name / "case" / "input.txt", home.work / other.name]
    assert await possible(bench, "os.stat(path)", hidden) == []


async def test_credentials_of_the_user_are_hidden(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = tmp_path / "user"
    (user / ".ssh").mkdir(parents=True)
    (user / ".ssh" / "id").write_text("private")
    (user / ".netrc").write_text("private")
    monkeypatch.setenv("HOME", str(user))
    async with bench_in(home, "require") as bench:
        program = f"""
for name in (".ssh/id", ".netrc"):
    try: print(open("{user}/" + name).read())
    except OSError: print("not there")
"""
        with anyio.fail_after(20):
            _, output = await bench.run(program)
    assert b"private" not in output.log
    assert len(output.log.splitlines()) == 2


async def test_a_harness_sees_and_signals_no_process_but_its_own(bench: Bench) -> None:
    program = f"""
import os
print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit())[-1] < 20)
try: os.kill({os.getpid()}, 0)
except ProcessLookupError: print("not there")
"""
    with anyio.fail_after(20):
        _, output = await bench.run(program)
    assert output.log == b"True\nnot there\n"


async def test_nothing_of_the_harness_reaches_its_supervisor(bench: Bench) -> None:
    program = """
import os, signal
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGTERM):
    os.kill(1, number)
os.kill(0, signal.SIGKILL)
"""
    with anyio.fail_after(20):
        ended, _ = await bench.run(program)
    assert (ended.reason, ended.exit_code) == (EndReason.EXITED, -9)


async def test_privileges_are_gone_even_for_root(bench: Bench) -> None:
    program = """
import ctypes, os, re
print(re.search("CapEff:\\t(\\w+)", open("/proc/self/status").read())[1].strip("0") or "none")
libc = ctypes.CDLL(None, use_errno=True)
print(libc.mount(b"none", b"/dev", b"tmpfs", 0, b""))
"""
    with anyio.fail_after(20):
        ended, output = await bench.run(program)
    assert ended.exit_code == 0, output.log
    assert output.log == b"none\n-1\n"


@pytest.mark.parametrize(("network", "reached"), [("blocked", False), ("open", True)])
async def test_the_network_is_blocked_unless_it_is_asked_for(
    bench: Bench, listener: int, network: str, reached: bool
) -> None:
    program = f"""
import socket
try: socket.create_connection(("127.0.0.1", {listener}), timeout=5); print("reached")
except OSError: print("blocked")
own = socket.create_server(("127.0.0.1", 0))
socket.create_connection(own.getsockname(), timeout=5); print("own loopback")
"""
    with anyio.fail_after(20):
        ended, output = await bench.run(program, network=network)
    assert ended.exit_code == 0, output.log
    assert output.log == (b"reached\n" if reached else b"blocked\n") + b"own loopback\n"


async def test_a_grader_has_no_network_and_cannot_change_what_it_grades(bench: Bench, listener: int) -> None:
    script = f"""
import os, socket
for name in ("EVALPURSE_SOURCE", "EVALPURSE_OUT", "EVALPURSE_CASE"):
    try: open(os.environ[name] + "/planted", "w"); print("wrote")
    except OSError: print("refused")
try: socket.create_connection(("127.0.0.1", {listener}), timeout=5); print("reached")
except OSError: print("blocked")
"""
    with anyio.fail_after(20):
        sandbox = await bench.start(["true"], network="open")
        await sandbox.wait()
        files = {"s.py": script.encode()}
        result = await sandbox.exec([sys.executable, "s.py"], files=files, timeout_s=10)
    assert result.log == b"refused\nrefused\nrefused\nblocked\n"


async def test_the_prepared_source_stays_readable_where_its_setup_ran(bench: Bench) -> None:
    folder = bench.prepared.folder
    make = "mkdir bin; printf '#!/bin/sh\\necho tool' > bin/tool; chmod +x bin/tool"
    with anyio.fail_after(20):
        await bench.prepare([make, f"ln -s {folder}/bin/tool t"])
        ended, output = await bench.run(["./t"])
    assert (ended.exit_code, output.log) == (0, b"tool\n")


async def test_setup_cannot_write_outside_of_the_source(bench: Bench) -> None:
    with anyio.fail_after(20):
        await bench.prepare([f"! touch {bench.home.work}/planted", "touch $HOME/ok $TMPDIR/ok inside"])
    assert not (bench.home.work / "planted").exists()
    assert (bench.prepared.folder / "inside").exists()


async def test_a_jail_that_cannot_be_made_is_an_infrastructure_failure(bench: Bench) -> None:
    with anyio.fail_after(20):
        sandbox = await bench.create(["true"])
        moved = bench.prepared.folder.rename(bench.prepared.folder.with_name("moved"))
        await sandbox.start()
        ended = await sandbox.wait()
        moved.rename(bench.prepared.folder)
    assert ended.reason is EndReason.LOST
    assert "bwrap" in ended.detail


# Without bubblewrap


async def test_missing_isolation_is_said_and_not_pretended(home: Home) -> None:
    backend = LocalBackend(home, Settings(local_isolation="off"))
    isolation = backend.isolation
    assert (isolation.kind, isolation.network_blocked) == ("none", False)
    assert "switched off" in isolation.limits
    assert "network cannot be blocked" in isolation.limits
    await backend.close()


def test_automatic_isolation_does_without_a_program_that_is_missing_or_broken(
    home: Home, tmp_path: Path
) -> None:
    missing = Isolator(home.path, "auto", program="no-such-bwrap").isolation
    assert missing.kind == "none"
    assert "not installed" in missing.limits
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create a new namespace' >&2; exit 1\n")
    broken.chmod(0o755)
    denied = Isolator(home.path, "auto", program=str(broken)).isolation
    assert denied.kind == "none"
    assert "No permissions to create a new namespace" in denied.limits
    with pytest.raises(IsolationMissingError, match="No permissions"):
        Isolator(home.path, "require", program=str(broken))


async def test_required_isolation_that_is_missing_stops_a_launch_with_the_way_out(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    backend = LocalBackend(home, Settings(local_isolation="require"))
    with pytest.raises(IsolationMissingError, match="Install bubblewrap"):
        _ = backend.isolation
    await backend.close()


def test_our_own_python_is_seen_where_scratch_folders_are_hidden() -> None:
    scratch = Path(SCRATCH[0])
    home = scratch / "venv" / "home"
    found = Interpreters.of(str(home), {str(scratch / "venv"), str(home / "python"), "/usr"})
    # The one around the home comes first: the home is hidden after it.
    assert found == ([str(scratch / "venv")], [str(home / "python")])
