"""The fake Modal, driven by the real client: what our backend's tests stand on."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import pytest

modal: Any = pytest.importorskip("modal")

from tests.fake_modal import (  # noqa: E402 - needs the client that is asked for above
    FakeApi,
    FakeModal,
    FakeModalProcess,
    RemoteFake,
    client_environment,
)

pytestmark = pytest.mark.anyio
MODES = ("plain", "bwrap")


@dataclass
class Bed:
    """A fake, a client of it and a built image."""

    fake: FakeApi
    client: Any
    app: Any
    image: Any

    async def sandbox(self, *args: str, **options: Any) -> Any:
        options.setdefault("timeout", 60)
        return await modal.Sandbox.create.aio(
            *args, app=self.app, image=self.image, client=self.client, **options
        )

    async def sh(self, sandbox: Any, script: str, **options: Any) -> tuple[str, str, int]:
        process = await sandbox.exec.aio("sh", "-c", script, **options)
        return await process.stdout.read.aio(), await process.stderr.read.aio(), await process.wait.aio()


@pytest.fixture(autouse=True)
def _client_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what a backend of an earlier test has tuned in this process."""
    for name in ("MODAL_MAX_THROTTLE_WAIT", "MODAL_SANDBOX_CHANNEL_IDLE_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


async def connect(fake: FakeApi) -> Any:
    with client_environment(fake):
        return await modal.Client.from_credentials.aio(
            fake.env["MODAL_TOKEN_ID"], fake.env["MODAL_TOKEN_SECRET"]
        )


async def close(client: Any) -> None:
    await client.close.aio()


@asynccontextmanager
async def connected(fake: FakeApi) -> AsyncIterator[Bed]:
    with client_environment(fake):
        client = await connect(fake)
        app = await modal.App.lookup.aio("exp_test", client=client, create_if_missing=True)
        image = modal.Image.from_registry("python:3.11")
        await image.build.aio(app)
        try:
            yield Bed(fake, client, app, image)
        finally:
            await close(client)


@asynccontextmanager
async def laid(mode: str = "auto", **settings: Any) -> AsyncIterator[Bed]:
    try:
        fake = await FakeModal(mode=mode, **settings).__aenter__()
    except RuntimeError as error:
        pytest.skip(str(error))
    try:
        with anyio.fail_after(30):
            async with connected(fake) as bed:
                yield bed
    finally:
        await fake.__aexit__(None, None, None)


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    async with laid() as bed:
        yield bed


@pytest.fixture(params=MODES)
async def each_mode(request: pytest.FixtureRequest) -> AsyncIterator[Bed]:
    async with laid(request.param) as bed:
        yield bed


def alive(marker: str) -> list[int]:
    """Pids whose command line has this text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def gone(marker: str) -> None:
    with anyio.fail_after(5):
        while alive(marker):  # noqa: ASYNC110 - the kernel offers no event for somebody else's process
            await anyio.sleep(0.02)


async def test_a_command_runs_and_its_streams_and_exit_code_come_back(each_mode: Bed) -> None:
    sandbox = await each_mode.sandbox(workdir="/srv", env={"GREETING": "hi"})
    out, err, code = await each_mode.sh(
        sandbox, "echo $GREETING $EXTRA; pwd; echo bad >&2; exit 3", env={"EXTRA": "there"}
    )
    assert (out.splitlines()[0], err, code) == ("hi there", "bad\n", 3)
    assert out.splitlines()[1].endswith("/srv")
    killed = await sandbox.exec.aio("sh", "-c", "kill -9 $$")
    assert await killed.wait.aio() == 137
    assert await killed.poll.aio() == 137


async def test_absolute_paths_are_the_sandboxes_own(each_mode: Bed) -> None:
    first, second = await each_mode.sandbox(), await each_mode.sandbox()
    assert await each_mode.sh(
        first, "mkdir -p /evalpurse/out && echo 1 > /evalpurse/out/a && ls /evalpurse/out"
    ) == (
        "a\n",
        "",
        0,
    )
    assert await first.filesystem.read_text.aio("/evalpurse/out/a") == "1\n"
    assert (await each_mode.sh(second, "ls /evalpurse/out"))[2] != 0


async def test_large_binary_output_arrives_unchanged(each_mode: Bed) -> None:
    sandbox = await each_mode.sandbox()
    process = await sandbox.exec.aio(
        "python3", "-c", "import os; os.write(1, bytes(range(256)) * 8192)", text=False
    )
    assert await process.stdout.read.aio() == bytes(range(256)) * 8192
    assert await process.wait.aio() == 0


async def test_output_and_input_stream_while_the_command_runs(bed: Bed) -> None:
    sandbox = await bed.sandbox()
    process = await sandbox.exec.aio("sh", "-c", "echo ready; read a; echo got $a; cat; exit 5", bufsize=1)
    lines = process.stdout.__aiter__()
    assert await anext(lines) == "ready\n"
    assert await process.poll.aio() is None
    process.stdin.write(b"one\n")
    await process.stdin.drain.aio()
    assert await anext(lines) == "got one\n"
    process.stdin.write(b"rest")
    process.stdin.write_eof()
    await process.stdin.drain.aio()
    assert await anext(lines) == "rest"
    assert await process.wait.aio() == 5


async def test_an_exec_timeout_keeps_what_arrived(bed: Bed) -> None:
    sandbox = await bed.sandbox()
    process = await sandbox.exec.aio("sh", "-c", "echo early; sleep 70.125", timeout=1)
    assert await process.stdout.read.aio() == "early\n"
    assert await process.wait.aio() in {-1, 137}
    await gone("70.125")


async def test_terminate_ends_detached_processes_too(each_mode: Bed) -> None:
    sandbox = await each_mode.sandbox()
    seconds = f"7{os.getpid()}.5"
    assert (await each_mode.sh(sandbox, f"setsid nohup sleep {seconds} >/dev/null 2>&1 & echo on"))[
        0
    ] == "on\n"
    assert alive(seconds)
    await sandbox.terminate.aio(wait=True)
    await gone(seconds)
    assert await sandbox.poll.aio() == 137


async def test_a_sandbox_ends_at_its_timeout(bed: Bed) -> None:
    sandbox = await bed.sandbox(timeout=1)
    with pytest.raises(modal.exception.SandboxTimeoutError):
        await sandbox.wait.aio()
    assert sandbox.returncode == 124
    with pytest.raises(modal.exception.NotFoundError):
        await sandbox.exec.aio("true")


async def test_an_idle_sandbox_ends_by_itself(bed: Bed) -> None:
    sandbox = await bed.sandbox(idle_timeout=1)
    process = await sandbox.exec.aio("sleep", "1.5")
    assert await process.wait.aio() == 0
    await sandbox.wait.aio(raise_on_termination=False)
    facts = bed.fake.sandbox(sandbox.object_id)
    assert facts["status"] == "IDLE_TIMEOUT"
    assert facts["ended_at"] - facts["created_at"] > 2.4


async def test_an_entrypoint_that_exits_ends_the_sandbox_and_leaves_its_output(bed: Bed) -> None:
    sandbox = await bed.sandbox("sh", "-c", "echo out; echo err >&2; exit 4")
    await sandbox.wait.aio()
    assert sandbox.returncode == 4
    assert await sandbox.stdout.read.aio() == "out\n"
    assert [entry.message async for entry in sandbox.logs.tail.aio(5)] == ["out\n", "err\n"]


async def test_another_client_finds_a_sandbox_by_name_and_by_id(bed: Bed) -> None:
    made = await bed.sandbox(name="exp_test.00001.1", tags={"home": "h1"})
    await bed.sh(made, "echo kept > /evalpurse/state")
    process = await made.exec.aio("sleep", "30")
    other = await connect(bed.fake)
    by_name = await modal.Sandbox.from_name.aio("exp_test", "exp_test.00001.1", client=other)
    by_id = await modal.Sandbox.from_id.aio(made.object_id, client=other)
    assert by_name.object_id == by_id.object_id == made.object_id
    assert await by_name.get_tags.aio() == {"home": "h1"}
    assert (await bed.sh(by_id, "cat /evalpurse/state"))[0] == "kept\n"
    assert await process.poll.aio() is None
    await made.terminate.aio()
    with pytest.raises(modal.exception.NotFoundError):
        await modal.Sandbox.from_name.aio("exp_test", "exp_test.00001.1", client=other)
    gone = await modal.Sandbox.from_name.aio(
        "exp_test", "exp_test.00001.1", client=other, include_terminated=True
    )
    assert await gone.poll.aio() == 137
    with pytest.raises(modal.exception.NotFoundError):
        await modal.Sandbox.from_id.aio("sb-v2-000099-nothing", client=other)
    await close(other)


async def test_a_name_is_taken_only_while_its_sandbox_runs(bed: Bed) -> None:
    first = await bed.sandbox(name="n")
    with pytest.raises(modal.exception.AlreadyExistsError):
        await bed.sandbox(name="n")
    await first.terminate.aio()
    assert (await bed.sandbox(name="n")).object_id != first.object_id


async def test_lists_show_running_sandboxes_by_app_and_all_given_tags(bed: Bed) -> None:
    bed.fake.set(page_size=2)
    made = [await bed.sandbox(tags={"exp": "a", "n": str(number % 2)}) for number in range(5)]
    await made[0].terminate.aio()

    async def listed(tags: dict[str, str]) -> set[str]:
        found = modal.Sandbox.list.aio(app_id=bed.app.app_id, tags=tags, client=bed.client)
        return {sandbox.object_id async for sandbox in found}

    assert await listed({"exp": "a"}) == {sandbox.object_id for sandbox in made[1:]}
    assert await listed({"exp": "a", "n": "0"}) == {made[2].object_id, made[4].object_id}
    await made[2].set_tags.aio({"other": "x"})
    assert await listed({"exp": "a", "n": "0"}) == {made[4].object_id}


async def test_stopping_the_app_ends_all_its_sandboxes(bed: Bed) -> None:
    made = [await bed.sandbox() for _ in range(3)]
    await bed.app.set_tags.aio({"experiment": "exp_test"})
    assert await bed.app.get_tags.aio() == {"experiment": "exp_test"}
    await bed.app.stop.aio()
    assert [await sandbox.poll.aio() for sandbox in made] == [137] * 3
    with pytest.raises(modal.exception.InvalidError):
        await bed.sandbox()
    again = await modal.App.lookup.aio("exp_test", client=bed.client, create_if_missing=True)
    assert again.app_id != bed.app.app_id


async def test_files_go_in_and_out(each_mode: Bed, tmp_path: Path) -> None:
    sandbox = await each_mode.sandbox()
    files = sandbox.filesystem  # holds its sandbox weakly
    content = os.urandom(3 << 20)
    (tmp_path / "a.bin").write_bytes(content)
    await files.copy_from_local.aio(tmp_path / "a.bin", "/evalpurse/in/a.bin")
    await files.copy_to_local.aio("/evalpurse/in/a.bin", tmp_path / "b.bin")
    assert (tmp_path / "b.bin").read_bytes() == content
    await files.write_text.aio("x", "/evalpurse/in/b.txt")
    assert [(e.name, e.size) for e in await files.list_files.aio("/evalpurse/in")] == [
        ("a.bin", 3 << 20),
        ("b.txt", 1),
    ]
    assert (await files.stat.aio("/evalpurse/in")).type.value == "directory"
    await files.make_directory.aio("/evalpurse/d/e")
    await files.remove.aio("/evalpurse/d", recursive=True)
    errors = modal.exception
    for call, error in (
        (files.read_bytes.aio("/evalpurse/none"), errors.SandboxFilesystemNotFoundError),
        (files.read_bytes.aio("/evalpurse/in"), errors.SandboxFilesystemIsADirectoryError),
        (files.write_text.aio("x", "/evalpurse/in/b.txt/c"), errors.SandboxFilesystemNotADirectoryError),
        (files.remove.aio("/evalpurse/in"), errors.SandboxFilesystemDirectoryNotEmptyError),
        (
            files.make_directory.aio("/evalpurse/in", create_parents=False),
            errors.SandboxFilesystemPathAlreadyExistsError,
        ),
        (files.write_text.aio("x", "/usr/bin/y"), errors.SandboxFilesystemPermissionError),
        (files.list_files.aio("/evalpurse/in/b.txt"), errors.SandboxFilesystemNotADirectoryError),
    ):
        with pytest.raises(error):
            await call


async def test_links_do_not_lead_file_operations_out_of_the_sandbox(bed: Bed) -> None:
    sandbox = await bed.sandbox()
    await bed.sh(
        sandbox, "mkdir -p /srv; ln -s /evalpurse/real /srv/link; ln -s ../../../../../evalpurse /srv/up"
    )
    await sandbox.filesystem.write_text.aio("here", "/srv/link")
    assert (await bed.sh(sandbox, "cat /evalpurse/real"))[0] == "here"
    assert await sandbox.filesystem.read_text.aio("/srv/up/real") == "here"


async def test_streams_resume_exactly_after_a_lost_connection(bed: Bed) -> None:
    sandbox, fake = await bed.sandbox(), bed.fake
    content = os.urandom(2 << 20)
    fake.break_stream("TaskExecStdinWriteStream", 700_001, disconnect=True)
    await sandbox.filesystem.write_bytes.aio(content, "/evalpurse/up")
    fake.break_stream("TaskExecStdioRead", 300_001, disconnect=True)
    assert await sandbox.filesystem.read_bytes.aio("/evalpurse/up") == content
    fake.break_stream("TaskExecStdioRead", 1, status="UNAVAILABLE", times=2)
    assert (await bed.sh(sandbox, "echo abc"))[0] == "abc\n"
    assert fake.statuses("TaskExecStdioRead")["UNAVAILABLE"] >= 2
    assert fake.counts()["TaskExecStdinStatus"] == 1


async def test_a_half_dead_stream_stays_silent_until_the_client_gives_up(bed: Bed) -> None:
    sandbox = await bed.sandbox()
    bed.fake.break_stream("TaskExecStdioRead", 3)
    process = await sandbox.exec.aio("sh", "-c", "echo abcdef", timeout=1, text=False)
    began = time.monotonic()
    assert await process.stdout.read.aio() == b"abc"
    assert time.monotonic() - began > 0.8


async def test_secrets_are_found_by_name_and_reach_the_commands(bed: Bed) -> None:
    await modal.Secret.objects.create.aio("keys", {"API_KEY": "v1", "OTHER": "o"}, client=bed.client)
    with pytest.raises(modal.exception.AlreadyExistsError):
        await modal.Secret.objects.create.aio("keys", {"API_KEY": "v2"}, client=bed.client)
    secret = modal.Secret.from_name("keys", client=bed.client, required_keys=["API_KEY"])
    sandbox = await bed.sandbox(secrets=[secret], env={"OTHER": "mine"})
    assert (await bed.sh(sandbox, "echo $API_KEY $OTHER"))[0] == "v1 mine\n"
    await secret.update.aio({"API_KEY": "v2"})
    assert (await bed.sh(sandbox, "echo $API_KEY"))[0] == "v1\n"
    assert (await bed.sh(await bed.sandbox(secrets=[secret]), "echo $API_KEY"))[0] == "v2\n"
    assert bed.fake.secrets() == {"keys": {"API_KEY": "v2", "OTHER": "o"}}
    for broken in (
        modal.Secret.from_name("none", client=bed.client),
        modal.Secret.from_name("keys", client=bed.client, required_keys=["ABSENT"]),
    ):
        with pytest.raises(modal.exception.NotFoundError):
            await bed.sandbox(secrets=[broken])


async def volume_with_files(bed: Bed, tmp_path: Path) -> Any:
    (tmp_path / "w" / "sub").mkdir(parents=True)
    for number in range(6):
        (tmp_path / "w" / f"{number}.txt").write_bytes(b"same" if number % 2 else b"%d" % number)
    (tmp_path / "w" / "sub" / "big.bin").write_bytes(b"\0" * (9 << 20) + b"end")
    volume = modal.Volume.from_name("world", create_if_missing=True, version=2, client=bed.client)
    async with volume.batch_upload.aio() as batch:
        batch.put_directory(tmp_path / "w", "/w1")
    return volume


async def test_a_volume_is_uploaded_once_per_content_and_read_back(bed: Bed, tmp_path: Path) -> None:
    volume = await volume_with_files(bed, tmp_path)
    sent = bed.fake.counts()["BlockPut"]
    assert sent == 5 + 1  # three numbers, "same" once, and the two blocks of the big file
    assert sorted(entry.path for entry in await volume.listdir.aio("/w1")) == [
        *(f"w1/{number}.txt" for number in range(6)),
        "w1/sub",
    ]
    big = b"".join([chunk async for chunk in volume.read_file.aio("/w1/sub/big.bin")])
    assert big == b"\0" * (9 << 20) + b"end"
    async with volume.batch_upload.aio() as batch:
        batch.put_directory(tmp_path / "w", "/w2")
    assert bed.fake.counts()["BlockPut"] == sent
    with pytest.raises(FileExistsError):
        async with volume.batch_upload.aio() as batch:
            batch.put_file(tmp_path / "w" / "0.txt", "/w1/0.txt")
    with pytest.raises(modal.exception.NotFoundError):
        await modal.Volume.from_name("none", client=bed.client).hydrate.aio()


async def test_a_volume_is_mounted_read_only_at_a_part_of_it(each_mode: Bed, tmp_path: Path) -> None:
    volume = await volume_with_files(each_mode, tmp_path)
    mounted = volume.with_mount_options(read_only=True, sub_path="/w1")
    sandbox = await each_mode.sandbox(volumes={"/world": mounted})
    assert (await each_mode.sh(sandbox, "cat /world/1.txt; ls /world/sub"))[0] == "samebig.bin\n"
    assert await sandbox.filesystem.read_text.aio("/world/2.txt") == "2"
    with pytest.raises(modal.exception.SandboxFilesystemPermissionError):
        await sandbox.filesystem.write_text.aio("x", "/world/new")
    if each_mode.fake.mode == "bwrap":
        assert "Read-only" in (await each_mode.sh(sandbox, "echo x > /world/new"))[1]


async def test_a_block_upload_that_fails_is_tried_again(bed: Bed, tmp_path: Path) -> None:
    bed.fake.fail("BlockPut", "UNAVAILABLE", times=1)
    volume = await volume_with_files(bed, tmp_path)
    assert bed.fake.counts()["BlockPut"] == 7
    assert len(await volume.listdir.aio("/w1", recursive=True)) == 8


async def test_images_run_their_steps_once_and_name_the_step_that_fails(
    each_mode: Bed, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "run.sh").write_text("echo ran")
    built = (
        modal.Image.debian_slim()
        .env({"FLAVOUR": "plum"})
        .workdir("/srv/app")
        .add_local_dir(tmp_path / "src", "/srv/app", copy=True)
        .run_commands("sh run.sh > /evalpurse/result && echo $FLAVOUR >> /evalpurse/result")
        .add_local_file(tmp_path / "src" / "run.sh", "/evalpurse/late.sh")
    )
    await built.build.aio(each_mode.app)
    sandbox = await modal.Sandbox.create.aio(app=each_mode.app, image=built, client=each_mode.client)
    assert (
        await each_mode.sh(sandbox, "cat /evalpurse/result; sh /evalpurse/late.sh; sh run.sh; echo $FLAVOUR")
    )[0] == "ran\nplum\nran\nran\nplum\n"
    before = sum(image["builds"] for image in each_mode.fake.images())
    await modal.Image.debian_slim().env({"FLAVOUR": "plum"}).build.aio(each_mode.app)
    assert sum(image["builds"] for image in each_mode.fake.images()) == before
    broken = built_on = modal.Image.from_registry("ubuntu:24.04").run_commands(
        "echo fine", "echo oops >&2; exit 7"
    )
    with pytest.raises(modal.exception.ImageBuildError) as failure:
        await broken.build.aio(each_mode.app)
    log = "".join([entry.message async for entry in built_on.logs.tail.aio(50)])
    assert "oops" in log
    assert 'failed to run builder command "echo oops >&2; exit 7": container exit status: 7' in log
    assert failure.value.image_id in {
        image["id"] for image in each_mode.fake.images() if image["status"] == "FAILURE"
    }


async def test_a_dockerfile_is_followed(bed: Bed, tmp_path: Path) -> None:
    bed.fake.set(missing_tags=("nowhere/*",))
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "a.txt").write_text("A")
    (tmp_path / "Dockerfile").write_text(
        "FROM debian:12\n# a comment\nENV X=1 \\\n  Y=two\nWORKDIR /srv/app\nRUN apt-get install -y git\n"
        "COPY conf conf\nCOPY conf/a.txt /srv/b.txt\nCOPY conf/a.txt /srv\n"
        "RUN cat conf/a.txt /srv/b.txt /srv/a.txt > c.txt && \\\n  echo $Y >> c.txt\n"
    )
    image = modal.Image.from_dockerfile(tmp_path / "Dockerfile", context_dir=tmp_path)
    await image.build.aio(bed.app)
    sandbox = await modal.Sandbox.create.aio(app=bed.app, image=image, client=bed.client)
    assert (await bed.sh(sandbox, "pwd; cat c.txt"))[0].endswith("/srv/app\nAAAtwo\n")
    assert any("apt-get install -y git" in step for facts in bed.fake.images() for step in facts["skipped"])
    with pytest.raises(modal.exception.ImageBuildError):
        await modal.Image.from_registry("nowhere/x:1").build.aio(bed.app)


async def test_a_snapshot_is_an_image_for_later_sandboxes(each_mode: Bed) -> None:
    sandbox = await each_mode.sandbox(workdir="/srv")
    await each_mode.sh(
        sandbox, "echo warm > /evalpurse/state; mkdir /srv/d; chmod 700 /srv/d; ln -s d /srv/l"
    )
    image = await sandbox.snapshot_filesystem.aio()
    await each_mode.sh(sandbox, "echo later > /evalpurse/state")
    warm = await modal.Sandbox.create.aio(app=each_mode.app, image=image, client=each_mode.client)
    assert (await each_mode.sh(warm, "cat /evalpurse/state; stat -c %a /srv/d; readlink /srv/l"))[
        0
    ] == "warm\n700\nd\n"
    folder = await warm.snapshot_directory.aio("/srv")
    await sandbox.mount_image.aio("/evalpurse/mounted", folder)
    assert (await each_mode.sh(sandbox, "ls /evalpurse/mounted"))[0] == "d\nl\n"
    again = modal.Image.from_id(image.object_id, client=each_mode.client)
    await modal.Sandbox.create.aio(app=each_mode.app, image=again, client=each_mode.client)


async def test_a_sandbox_says_when_it_is_ready(bed: Bed) -> None:
    probe = modal.Probe.with_exec("test", "-e", "/evalpurse/up", interval_ms=20)
    sandbox = await bed.sandbox("sh", "-c", "sleep 0.3; touch /evalpurse/up; sleep 60", readiness_probe=probe)
    await sandbox.wait_until_ready.aio(timeout=10)
    assert bed.fake.sandbox(sandbox.object_id)["ready_at"] > 0
    never = await bed.sandbox(readiness_probe=probe)
    with pytest.raises(modal.exception.TimeoutError):
        await never.wait_until_ready.aio(timeout=1)


async def test_transient_failures_are_tried_again_and_hard_ones_are_raised(bed: Bed) -> None:
    fake = bed.fake
    fake.fail("SandboxCreateV2", "UNAVAILABLE", times=3)
    await bed.sandbox()
    assert fake.statuses("SandboxCreateV2") == {"UNAVAILABLE": 3, "OK": 1}
    for status, error in (
        ("RESOURCE_EXHAUSTED", modal.exception.ResourceExhaustedError),
        ("NOT_FOUND", modal.exception.NotFoundError),
        ("PERMISSION_DENIED", modal.exception.PermissionDeniedError),
    ):
        fake.fail("SandboxCreateV2", status, message="no more")
        with pytest.raises(error, match="no more"):
            await bed.sandbox()
    fake.fail("SandboxCreateV2", "INTERNAL", times=None)
    with pytest.raises(modal.exception.InternalError):
        await bed.sandbox()
    fake.clear_faults()
    fake.fail("SandboxCreateV2", "RESOURCE_EXHAUSTED", times=2, retry_after_s=0.1)
    await bed.sandbox()
    assert fake.live == 2


async def test_a_fault_can_single_out_one_sandbox(bed: Bed) -> None:
    bed.fake.fail("SandboxCreateV2", "NOT_FOUND", only="b", times=None)
    first = await bed.sandbox(name="a")
    with pytest.raises(modal.exception.NotFoundError):
        await bed.sandbox(name="b")
    bed.fake.fail("TaskExecStart", "NOT_FOUND", only="a", skip=1)
    await first.exec.aio("true")
    with pytest.raises(modal.exception.NotFoundError):
        await first.exec.aio("true")
    assert {call["status"] for call in bed.fake.calls("TaskExecStart", about="a")} == {"OK", "NOT_FOUND"}


async def test_an_answer_lost_after_the_effect_leaves_a_sandbox_to_be_found_by_name(bed: Bed) -> None:
    bed.fake.cut("SandboxCreateV2", when="after")
    with pytest.raises(modal.exception.AlreadyExistsError):
        await bed.sandbox(name="once")
    found = await modal.Sandbox.from_name.aio("exp_test", "once", client=bed.client)
    assert bed.fake.live == 1
    assert (await bed.sh(found, "echo mine"))[0] == "mine\n"
    keys = {call["metadata"]["x-idempotency-key"] for call in bed.fake.calls("SandboxCreateV2")}
    assert len(keys) == 1
    bed.fake.set(dedupe_creates=True)
    bed.fake.fail("SandboxCreateV2", "UNAVAILABLE", when="after")
    await bed.sandbox(name="twice")
    assert bed.fake.live == 2


async def test_a_call_hangs_until_it_is_released(bed: Bed) -> None:
    bed.fake.hang("SandboxTerminateV2")
    sandbox = await bed.sandbox()
    ending = asyncio.create_task(sandbox.terminate.aio())
    await bed.fake.calls_came("SandboxTerminateV2", in_flight=True)
    assert bed.fake.live == 1
    bed.fake.release("SandboxTerminateV2")
    await ending
    assert bed.fake.live == 0
    with pytest.raises(TimeoutError, match="0 of 5"):
        await bed.fake.calls_came("SandboxListV2", 5, timeout_s=0.05)


async def test_creates_are_limited_by_rate_and_by_live_sandboxes(bed: Bed) -> None:
    bed.fake.set(create_rate=20.0, create_burst=5)
    began = time.monotonic()
    await asyncio.gather(*(bed.sandbox() for _ in range(15)))
    assert time.monotonic() - began > 0.4
    assert bed.fake.statuses("SandboxCreateV2")["RESOURCE_EXHAUSTED"] >= 10
    bed.fake.set(create_rate=None, live_limit=16)
    last = await bed.sandbox()
    with pytest.raises(modal.exception.ResourceExhaustedError):
        await bed.sandbox()
    await last.terminate.aio()
    await bed.sandbox()
    assert bed.fake.peak_live == 16


async def test_an_expired_token_is_refused_and_revoked_ones_are_fetched_anew(bed: Bed) -> None:
    bed.fake.set(router_token_s=20.0)
    sandbox = await bed.sandbox()
    assert (await bed.sh(sandbox, "echo 1"))[2] == 0
    bed.fake.revoke_tokens()
    with pytest.raises(modal.exception.AuthError):
        await bed.sandbox()  # its auth token is worthless too, and looks fresh to the client
    bed.fake.expire_token()
    with pytest.raises(modal.exception.AuthError):
        await modal.App.lookup.aio("exp_test", client=bed.client)
    bed.fake.expire_token(expired=False)
    other = await connect(bed.fake)
    again = await modal.Sandbox.from_id.aio(sandbox.object_id, client=other)
    assert (await bed.sh(again, "echo 2"))[0] == "2\n"
    await close(other)


async def test_lost_and_evicted_sandboxes_look_as_they_do_in_the_cloud(bed: Bed) -> None:
    lost, evicted, starved = await bed.sandbox(name="lost"), await bed.sandbox(), await bed.sandbox()
    process = await lost.exec.aio("sleep", "50")
    bed.fake.vanish("lost")
    with pytest.raises(modal.exception.NotFoundError):
        await modal.Sandbox.from_id.aio(lost.object_id, client=bed.client)
    with pytest.raises(modal.exception.NotFoundError):
        await lost.exec.aio("true")
    with pytest.raises(modal.exception.NotFoundError):
        await process.poll.aio()
    bed.fake.end(evicted.object_id, "MEMORY_MANAGER_EVICTION", 1)
    await evicted.wait.aio()
    assert evicted.returncode == 1
    command = await starved.exec.aio("sleep", "50")
    assert bed.fake.kill_execs(starved.object_id) == 1
    assert await command.wait.aio() == 137
    assert await starved.poll.aio() is None
    assert lost.object_id in bed.fake.bill()["sandboxes"]


async def test_what_was_asked_for_is_recorded(bed: Bed) -> None:
    await bed.sandbox(
        name="asked",
        cpu=(0.5, 2),
        memory=(512, 2048),
        outbound_domain_allowlist=["pypi.org"],
        region="eu",
        runtime="vm",
        timeout=77,
    )
    facts = bed.fake.sandbox("asked")
    assert (facts["cores"], facts["gib"], facts["timeout_s"]) == ([0.5, 2.0], [0.5, 2.0], 77)
    assert facts["network"] == {"type": "ALLOWLIST", "cidrs": [], "domains": ["pypi.org"]}
    assert (facts["runtime"], facts["regions"]) == ("vm", ["eu"])
    for wrong in (
        {"timeout": 90_000},
        {
            "volumes": {
                "/usr/x": modal.Volume.from_name("v", create_if_missing=True, version=2, client=bed.client)
            }
        },
    ):
        with pytest.raises(modal.exception.InvalidError):
            await bed.sandbox(**wrong)


async def test_a_blocked_network_has_only_itself(bed: Bed) -> None:
    if bed.fake.mode != "bwrap":
        pytest.skip("only bubblewrap enforces it")
    blocked, opened = await bed.sandbox(block_network=True), await bed.sandbox()
    assert (await bed.sh(blocked, "ls /proc/1/root/sys 2>/dev/null; cat /proc/net/dev | tail -n +3 | wc -l"))[
        0
    ] == "1\n"
    port = bed.fake.url.rpartition(":")[2]
    reach = f"exec 3<>/dev/tcp/127.0.0.1/{port}"
    assert await (await opened.exec.aio("bash", "-c", reach)).wait.aio() == 0
    assert await (await blocked.exec.aio("bash", "-c", reach)).wait.aio() != 0


async def test_costs_agree_with_the_fakes_own_bill(bed: Bed) -> None:
    bed.fake.set(usage_share=0.5)
    for variant in ("a", "a", "b"):
        sandbox = await bed.sandbox(cpu=(1, 3), memory=(1024, 2048), tags={"variant": variant})
        await sandbox.terminate.aio()
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    groups = {
        group.tags["variant"]: group.cost
        async for group in bed.app.sandboxes.stats.aio(
            since=hour - timedelta(hours=1), group_by_tags=["variant"]
        )
    }
    bill = bed.fake.bill()
    assert sum(groups.values()) == Decimal(bill["cost_usd"])
    assert set(groups) == {"a", "b"}
    line = bill["sandboxes"][sandbox.object_id]
    seconds = Decimal(repr(line["seconds"]))
    assert abs(
        Decimal(line["cost_usd"])
        - seconds * (2 * Decimal("0.1419") + Decimal("1.5") * Decimal("0.024")) / 3600
    ) < Decimal("1e-9")
    assert abs(
        Decimal(line["ceiling_usd"]) - seconds * (3 * Decimal("0.1419") + 2 * Decimal("0.024")) / 3600
    ) < Decimal("1e-9")
    stats = await sandbox._experimental_stats.aio()
    assert stats.cost == Decimal(line["cost_usd"])


async def test_credentials_and_environments_must_be_known(bed: Bed) -> None:
    with client_environment(bed.fake):
        stranger = await modal.Client.from_credentials.aio("ak-other", "as-other")
    with pytest.raises(modal.exception.AuthError):
        await modal.App.lookup.aio("exp_test", client=stranger)
    with pytest.raises(modal.exception.NotFoundError):
        await modal.App.lookup.aio(
            "exp_test", client=bed.client, environment_name="nowhere", create_if_missing=True
        )
    with pytest.raises(modal.exception.NotFoundError):
        await modal.App.lookup.aio("no_such_app", client=bed.client)
    await close(stranger)


async def test_named_things_are_listed_renamed_and_removed(bed: Bed, tmp_path: Path) -> None:
    for name in ("one", "two"):
        await modal.Secret.objects.create.aio(name, {"K": "v"}, client=bed.client)
    await modal.Secret.objects.delete.aio("one", client=bed.client)
    assert [secret.name for secret in await modal.Secret.objects.list.aio(client=bed.client)] == ["two"]
    volume = await volume_with_files(bed, tmp_path)
    await volume.copy_files.aio(["/w1/0.txt"], "/copied.txt")
    await volume.remove_file.aio("/w1", recursive=True)
    assert [entry.path for entry in await volume.listdir.aio("/", recursive=True)] == ["copied.txt"]
    await modal.Volume.rename.aio("world", "globe", client=bed.client)
    assert bed.fake.volumes()["names"] == ["globe"]
    await modal.Volume.objects.delete.aio("globe", client=bed.client)
    assert bed.fake.volumes()["names"] == []
    await bed.image.publish.aio("warm:v1", client=bed.client)
    again = modal.Image.from_name("warm:v1", client=bed.client)
    sandbox = await modal.Sandbox.create.aio(
        app=bed.app, image=again, client=bed.client, unencrypted_ports=[8123]
    )
    assert (await sandbox.tunnels.aio())[8123].tcp_socket == ("127.0.0.1", 8123)


async def test_unknown_rpcs_answer_and_are_counted(bed: Bed) -> None:
    with pytest.raises(modal.exception.Error):
        await modal.Queue.from_name("q", create_if_missing=True, client=bed.client).put.aio(1)
    assert bed.fake.statuses("QueueGetOrCreate")["UNIMPLEMENTED"] >= 1


async def test_many_sandboxes_live_at_once_without_threads_of_their_own(bed: Bed) -> None:
    made = await asyncio.gather(*(bed.sandbox() for _ in range(60)))
    before = threading.active_count()
    processes = await asyncio.gather(*(sandbox.exec.aio("sleep", "40") for sandbox in made))
    assert bed.fake.live == 60
    assert threading.active_count() - before < 10
    assert {await process.poll.aio() for process in processes} == {None}
    await asyncio.gather(*(sandbox.terminate.aio() for sandbox in made))
    assert bed.fake.live == 0


def test_the_fake_in_a_process_of_its_own_outlives_its_clients() -> None:
    async def first(fake: FakeApi) -> str:
        async with connected(fake) as bed:
            return str((await bed.sandbox(name="kept", timeout=300)).object_id)

    async def second(fake: FakeApi) -> tuple[str, str]:
        with client_environment(fake):
            client = await connect(fake)
            found = await modal.Sandbox.from_name.aio("exp_test", "kept", client=client)
            process = await found.exec.aio("echo", "still here")
            return found.object_id, await process.stdout.read.aio()

    with FakeModalProcess(create_rate=100.0) as fake:
        made = asyncio.run(first(fake))
        again = RemoteFake(fake.describe()["http_url"])
        assert asyncio.run(second(again)) == (made, "still here\n")
        assert again.sandbox("kept")["status"] == "RUNNING"
        with pytest.raises(ValueError, match="no setting"):
            again.set(nonsense=1)
        assert again.crashes() == []
