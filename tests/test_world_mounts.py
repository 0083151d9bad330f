"""A run sees its world as it was added, and cannot change it: on this machine and on Modal."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from evalpurse.budget.accounts import Role
from evalpurse.config import Settings
from evalpurse.home import Home
from evalpurse.runs.errors import BackendRefusedError, SandboxError, SetupFailedError
from evalpurse.runs.outcomes import Outcome, outcome_of_end
from evalpurse.runs.sandboxes.protocol import EndReason, Machine
from evalpurse.runs.sandboxes.world_files import WorldFiles
from evalpurse.runs.services import Services
from evalpurse.runs.variants import VariantSpec
from tests.lab_fixtures import furnish, make_repository, request
from tests.sandbox_kit import ISOLATIONS, Bench, bench_in, tight, write_in

pytestmark = pytest.mark.anyio


def a_world(home: Home, folder: Path, files: dict[str, str] | None = None) -> str:
    """Adds a world; its digest."""
    write_in(folder, files or {"docs/a.txt": "alpha", "docs/b.txt": "beta", "dump.sql": "create table t;"})
    (folder / "docs" / "link.txt").symlink_to("a.txt")
    (folder / "docs" / "b.txt").chmod(0o640)
    return WorldFiles(home.worlds).add(folder).manifest.digest


@pytest.fixture(params=ISOLATIONS)
async def bench(request: pytest.FixtureRequest, home: Home) -> AsyncIterator[Bench]:
    async with bench_in(home, request.param) as made:
        yield made


SHOW = """
import os, pathlib
world = pathlib.Path(os.environ["EVALPURSE_WORLD"])
seen = sorted(p.relative_to(world).as_posix() for p in world.rglob("*"))
text = (world / "docs/link.txt").read_text()
mode = oct((world / "docs/b.txt").stat().st_mode & 0o777)
pathlib.Path(os.environ["EVALPURSE_OUT"], "answer.txt").write_text(f"{seen} {text} {mode}")
"""


async def test_a_run_sees_the_files_of_its_world(bench: Bench, tmp_path: Path) -> None:
    digest = a_world(bench.home, tmp_path / "w")
    shutil.rmtree(tmp_path / "w")  # the source is no longer needed
    with anyio.fail_after(20):
        ended, output = await bench.run(SHOW, machine=Machine(world=digest))
    assert (ended.reason, ended.exit_code) == (EndReason.EXITED, 0), output.log
    expected = ["docs", "docs/a.txt", "docs/b.txt", "docs/link.txt", "dump.sql"]
    assert output.answer == f"{expected} alpha 0o440".encode()


async def test_a_run_without_a_world_has_no_variable_for_it(bench: Bench) -> None:
    program = "import os; print('EVALPURSE_WORLD' in os.environ)"
    with anyio.fail_after(20):
        _, output = await bench.run(program)
    assert output.log == b"False\n"


async def test_in_a_jail_a_world_cannot_be_written_to_even_by_root(home: Home, tmp_path: Path) -> None:
    digest = a_world(home, tmp_path / "w")
    script = (
        'cd "$EVALPURSE_WORLD"; chmod u+w . docs docs/a.txt; echo x >docs/a.txt; rm -f dump.sql; touch new;'
        ' rm -rf docs; ls "$EVALPURSE_WORLD/.."; exit 0'
    )
    async with bench_in(home, "require") as bench:
        with anyio.fail_after(20):
            _, output = await bench.run(["/bin/sh", "-c", script], machine=Machine(world=digest))
    assert output.log.count(b"Read-only file system") >= 5, output.log
    assert output.log.splitlines()[-1].decode() == digest  # nothing of other worlds is seen beside it
    WorldFiles(home.worlds).check(digest)
    assert WorldFiles(home.worlds).verify(digest) == []


@pytest.mark.parametrize(
    "harm",
    ["echo x >>dump.sql", "rm -f docs/a.txt", "touch new", "ln -sf /etc/passwd docs/link.txt"],
)
async def test_without_a_jail_a_world_that_was_changed_is_not_mounted_again(
    home: Home, tmp_path: Path, harm: str
) -> None:
    digest = a_world(home, tmp_path / "w")
    script = f'cd "$EVALPURSE_WORLD"; chmod u+w . docs dump.sql; {harm}; chmod u-w . docs dump.sql'
    async with bench_in(home, "off") as bench:
        with anyio.fail_after(20):
            await bench.run(["/bin/sh", "-c", script], machine=Machine(world=digest))
            with pytest.raises(SandboxError, match="is not what it was"):
                await bench.create("print()", machine=Machine(world=digest))
            with pytest.raises(SetupFailedError, match="is not what it was"):
                await bench.backend.prepare(bench.prepared, [], {}, Machine(world=digest), done=True)
            # The source puts it right.
            assert WorldFiles(home.worlds).add(tmp_path / "w").manifest.digest == digest
            ended, _ = await bench.run(SHOW, machine=Machine(world=digest))
            assert ended.exit_code == 0


async def test_a_grader_sees_the_world_too(bench: Bench, tmp_path: Path) -> None:
    digest = a_world(bench.home, tmp_path / "w")
    with anyio.fail_after(20):
        sandbox = await bench.start("print('ran')", machine=Machine(world=digest))
        await sandbox.wait()
        result = await sandbox.exec(
            ["/bin/sh", "-c", 'cat "$EVALPURSE_WORLD/docs/b.txt"'], files={}, timeout_s=10
        )
    assert (result.exit_code, result.log) == (0, b"beta")


async def test_restore_commands_run_first_in_the_source_folder_and_into_the_log(
    bench: Bench, tmp_path: Path
) -> None:
    digest = a_world(bench.home, tmp_path / "w")
    restore = ('cp "$EVALPURSE_WORLD/dump.sql" restored.sql && cat restored.sql', "sleep 0.3; echo second")
    program = "import os; print('harness', open('restored.sql').read(), os.path.exists('harness.txt'))"
    with anyio.fail_after(20):
        ended, output = await bench.run(program, machine=Machine(world=digest, restore=restore))
    assert ended.exit_code == 0
    lines = output.log.decode().splitlines()
    assert lines == [
        f"evalpurse: restore command 1 of 2: {restore[0]}",
        "create table t;" + f"evalpurse: restore command 2 of 2: {restore[1]}",
        "second",
        "harness create table t; True",
    ]
    # What restoring takes belongs to the start of the run.
    assert (ended.started_at - bench.made[-1].created_at).total_seconds() >= 0.3
    assert (ended.ended_at - ended.started_at).total_seconds() < 5


@pytest.mark.parametrize(
    ("restore", "detail"),
    [
        (("true", "echo no such table >&2; exit 3"), "Restore command 2 of 2"),
        (("kill -9 $$",), "signal 9"),
        (("no-such-program",), "exit code 127"),
    ],
)
async def test_a_restore_that_fails_is_an_infrastructure_failure(
    bench: Bench, restore: tuple[str, ...], detail: str
) -> None:
    with anyio.fail_after(20):
        sandbox = await bench.start("open('ran', 'w')", machine=Machine(restore=restore))
        ended = await sandbox.wait()
    assert ended.reason is EndReason.LOST
    assert outcome_of_end(ended, over_allowance=False) is Outcome.INFRA_ERROR
    assert detail in ended.detail
    if "table" in restore[-1]:
        assert ended.detail.endswith("no such table\nevalpurse: restore command 2 ended with exit code 3")
    assert not ran_in(bench.home.work / sandbox.name / "source")


async def test_a_restore_that_hangs_is_ended_at_the_deadline_and_is_no_timeout_of_the_harness(
    bench: Bench,
) -> None:
    machine = Machine(restore=("sleep 60",))
    with anyio.fail_after(20):
        ended, _ = await _wait(bench, "print()", machine=machine, limits=tight(timeout_s=0.5))
    assert ended.reason is EndReason.LOST
    assert "The restore did not come to its end. It was ended at its deadline" in ended.detail


async def test_a_deadline_after_the_restore_is_a_timeout_of_the_harness(bench: Bench) -> None:
    machine = Machine(restore=("true",))
    with anyio.fail_after(20):
        ended, _ = await _wait(
            bench, "import time; time.sleep(60)", machine=machine, limits=tight(timeout_s=2)
        )
    assert ended.reason is EndReason.TIMEOUT


async def test_a_harness_cannot_pretend_that_its_restore_failed(bench: Bench) -> None:
    program = "import os\nfor fd in (1, 2): os.write(fd, b'unrestored 1\\n')\nraise SystemExit(1)"
    with anyio.fail_after(20):
        ended, _ = await bench.run(program, machine=Machine(restore=("true",)))
    assert (ended.reason, ended.exit_code) == (EndReason.EXITED, 1)


async def test_a_stop_during_the_restore_is_a_stop(bench: Bench) -> None:
    with anyio.fail_after(20):
        sandbox = await bench.start("print()", machine=Machine(restore=("sleep 60",)))
        ended = await sandbox.stop()
    assert ended is not None
    assert ended.reason is EndReason.STOPPED


async def test_another_daemon_follows_a_run_that_is_being_restored(bench: Bench, tmp_path: Path) -> None:
    digest = a_world(bench.home, tmp_path / "w")
    machine = Machine(world=digest, restore=("while [ ! -e go ]; do sleep 0.02; done",))
    with anyio.fail_after(20):
        sandbox = await bench.start(SHOW, machine=machine)
        later = await bench.another_backend().find(sandbox.name)
        assert later is not None
        write_in(bench.home.work / sandbox.name / "source", {"go": ""})
        ended = await later.wait()
        assert (ended.reason, ended.exit_code) == (EndReason.EXITED, 0)
        assert b"alpha" in ((await later.get()).answer or b"")


def ran_in(source: Path) -> bool:
    assert (source / "harness.txt").exists()
    return (source / "ran").exists()


async def test_an_experiment_runs_in_its_world_and_retries_a_failed_restore(
    home: Home, tmp_path: Path
) -> None:
    write_in(tmp_path / "w", {"answer": "42"})
    flag = tmp_path / "failed-once"
    repository = make_repository(tmp_path / "repo")
    settings = replace(Settings(), local_isolation="off", infra_retry_delay_s=0.0)
    with anyio.fail_after(30):
        async with Services.open(home, settings) as services:
            await services.worlds.add(tmp_path / "w", "answers")
            await furnish(services, repository, cases=2, variants=())
            for name, restore in (
                ("base", ['cp "$EVALPURSE_WORLD/answer" restored']),
                ("new", [f"mkdir {flag} || cp $EVALPURSE_WORLD/answer restored; [ -e restored ]"]),
            ):
                run = 'cp restored "$EVALPURSE_OUT/answer.txt"'
                spec = VariantSpec(name=name, repo=str(repository), run=run, world="answers", restore=restore)
                await services.variants.create(spec)
            launched = await services.experiments.launch(request(repeats=1, allowance_nusd=0), by=Role.AGENT)
            experiment_id = launched.status.experiment_id
            assert (await services.experiments.wait(experiment_id, 25)).over
            runs = await services.store.fetch("runs_of", experiment_id=experiment_id)
    assert [run["outcome"] for run in runs] == ["scored"] * 4
    assert [run["score"] for run in runs] == [1.0] * 4
    assert sorted(run["attempts"] for run in runs) == [1, 1, 1, 2]


async def _wait(bench: Bench, command: str, **settings: Any) -> tuple[Any, Any]:
    sandbox = await bench.start(command, **settings)
    return await sandbox.wait(), sandbox


# Modal


@asynccontextmanager
async def fake_modal(home: Home) -> AsyncIterator[tuple[Any, Any, Any]]:
    """A fake Modal, a client of it, and the worlds of a home on it."""
    modal = pytest.importorskip("modal")
    from evalpurse.runs.sandboxes.modal_world import ModalWorlds
    from tests.fake_modal import FakeModal, client_environment

    async with FakeModal() as fake:
        with client_environment(fake):
            client = await modal.Client.from_credentials.aio("ak-fake", "as-fake")
            try:
                with anyio.fail_after(30):
                    yield fake, client, ModalWorlds(WorldFiles(home.worlds), "h1", lambda: client)
            finally:
                await client.close.aio()


def uploaded(fake: Any) -> int:
    return int(fake.counts().get("BlockPut", 0))


async def test_a_world_is_uploaded_once_with_each_content_once(home: Home, tmp_path: Path) -> None:
    files = {f"f{number}.txt": f"content {number % 5}" for number in range(20)}
    digest = a_world(home, tmp_path / "w", files | {"docs/a.txt": "alpha", "docs/b.txt": "beta"})
    async with fake_modal(home) as (fake, client, worlds):
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(worlds.volume, digest)
        assert await worlds.upload(digest) is await worlds.upload(digest)
        upload = await worlds.upload(digest)
        assert (upload.sent_files, upload.found_files) == (23, 0)  # the link is a file there
        assert uploaded(fake) == 5 + 2 + 2  # contents, two documents; manifest and mark
        # A next daemon sends nothing.
        again = type(worlds)(WorldFiles(home.worlds), "h1", lambda: client)
        assert (await again.upload(digest)).sent_files == 0
        assert uploaded(fake) == 9


async def test_a_second_world_sends_only_what_is_new(home: Home, tmp_path: Path) -> None:
    first = a_world(home, tmp_path / "w")
    async with fake_modal(home) as (fake, _, worlds):
        await worlds.volume(first)
        before = uploaded(fake)
        second = a_world(home, tmp_path / "v", {"docs/a.txt": "alpha", "docs/b.txt": "beta", "new": "gamma"})
        await worlds.volume(second)
        assert uploaded(fake) - before == 1 + 2
        assert len(fake.volumes()["names"]) == 1


async def test_a_sandbox_on_modal_sees_the_world_and_cannot_change_it(home: Home, tmp_path: Path) -> None:
    modal = pytest.importorskip("modal")
    digest = a_world(home, tmp_path / "w")
    async with fake_modal(home) as (fake, client, worlds):
        app = await modal.App.lookup.aio("exp_w", client=client, create_if_missing=True)
        image = modal.Image.from_registry("python:3.11")
        await image.build.aio(app)
        volumes = {"/evalpurse/world": await worlds.volume(digest)}
        sandbox = await modal.Sandbox.create.aio(
            app=app, image=image, client=client, timeout=60, volumes=volumes
        )
        script = "cd $1; find . -type f | sort; cat docs/link.txt; stat -c %a docs/b.txt; echo x >new"
        process = await sandbox.exec.aio("sh", "-c", script, "sh", "/evalpurse/world")
        said = await process.stdout.read.aio()
        assert said.splitlines() == [
            "./docs/a.txt",
            "./docs/b.txt",
            "./docs/link.txt",
            "./dump.sql",
            "alpha440",
        ]
        if fake.mode == "bwrap":
            assert "Read-only" in await process.stderr.read.aio()
        await sandbox.terminate.aio()
        await sandbox.detach.aio()


async def test_an_experiment_on_modal_runs_and_is_graded_in_its_world(home: Home, tmp_path: Path) -> None:
    pytest.importorskip("modal")
    from tests import modal_lab

    write_in(tmp_path / "w", {"answer": "42", "deep/er/note": "kept"})
    grader = {"type": "command", "command": 'diff "$EVALPURSE_WORLD/answer" "$EVALPURSE_OUT/answer.txt"'}
    run = 'cat restored; echo x >"$EVALPURSE_WORLD/answer"; cp restored "$EVALPURSE_OUT/answer.txt"'
    with anyio.fail_after(60):
        async with modal_lab.fake_modal() as fake, modal_lab.modal_services(home) as services:
            await services.worlds.add(tmp_path / "w", "answers")
            await modal_lab.furnish(
                services,
                make_repository(tmp_path / "repo"),
                run=run,
                case_changes={"graders": [grader]},
                world="answers",
                restore=['cp "$EVALPURSE_WORLD/answer" restored', "ls $EVALPURSE_WORLD/deep/er"],
            )
            status = await modal_lab.run_all(services)
            rows = await modal_lab.rows_of(services, status.experiment_id)
            log = services.store.blobs.get(rows[0]["log_blob"])
            assert fake.volumes()["names"] == [f"evalpurse-worlds-{home.identity()}"]
    assert [(row["outcome"], row["score"]) for row in rows] == [("scored", 1.0)] * 4, rows[0]["error"]
    assert b"note" in log
    assert b"Read-only file system" in log


async def test_a_restore_that_fails_on_modal_is_an_infrastructure_failure(home: Home, tmp_path: Path) -> None:
    pytest.importorskip("modal")
    from tests import modal_lab

    with anyio.fail_after(60):
        async with modal_lab.fake_modal(), modal_lab.modal_services(home, infra_retries=1) as services:
            await modal_lab.furnish(
                services, make_repository(tmp_path / "repo"), cases=1, restore=["echo no table; exit 3"]
            )
            status = await modal_lab.run_all(services)
            rows = await modal_lab.rows_of(services, status.experiment_id)
    assert [(row["outcome"], row["attempts"], row["counted"]) for row in rows] == [
        ("infra_error", 2, False)
    ] * 2
    assert "no table" in rows[0]["error"]


async def test_an_upload_that_failed_goes_on_where_it_was(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("modal")
    monkeypatch.setattr("evalpurse.runs.sandboxes.modal_world.BATCH_FILES", 2)
    monkeypatch.setattr("evalpurse.runs.sandboxes.modal_world.TRIES", 1)
    # The client alone would repeat a block for eight minutes.
    monkeypatch.setattr("modal._utils.async_utils.RETRY_N_ATTEMPTS_OVERRIDE", 1)
    digest = a_world(
        home, tmp_path / "w", {"a": "1", "b": "2", "c": "3", "d": "4", "docs/a.txt": "5", "docs/b.txt": "6"}
    )
    async with fake_modal(home) as (fake, _, worlds):
        fake.fail("BlockPut", "UNAVAILABLE", skip=3)
        with pytest.raises(SandboxError, match="Modal failed the upload of world"):
            await worlds.volume(digest)
        before = uploaded(fake)
        upload = await worlds.upload(digest)
        assert (upload.sent_files, upload.found_files) == (5, 2)
        assert uploaded(fake) - before <= 5 + 2
        assert fake.volumes()["blocks_wanted"] > 0


async def test_a_failure_in_between_is_repeated(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("modal")
    monkeypatch.setattr("modal._utils.async_utils.RETRY_N_ATTEMPTS_OVERRIDE", 1)
    digest = a_world(home, tmp_path / "w")
    async with fake_modal(home) as (fake, _, worlds):
        fake.fail("BlockPut", "UNAVAILABLE")
        assert (await worlds.upload(digest)).sent_files == 4


async def test_a_world_that_arrived_otherwise_is_not_mounted(home: Home, tmp_path: Path) -> None:
    digest = a_world(home, tmp_path / "w")
    async with fake_modal(home) as (_, _client, worlds):
        volume = await worlds._open()
        stray = tmp_path / "stray"
        stray.write_text("from elsewhere")
        async with volume.batch_upload.aio() as upload:
            upload.put_file(stray, f"/{digest}/files/stray")
        with pytest.raises(SandboxError, match="differs from the one here in 1 files: stray"):
            await worlds.volume(digest)


async def test_what_modal_cannot_hold_is_refused_before_anything_is_sent(home: Home, tmp_path: Path) -> None:
    write_in(tmp_path / "w", {"docs/a.txt": "alpha"})
    (tmp_path / "w" / "docs" / "up").symlink_to("..")
    digest = WorldFiles(home.worlds).add(tmp_path / "w").manifest.digest
    async with fake_modal(home) as (fake, _, worlds):
        with pytest.raises(BackendRefusedError, match="docs/up leads to a folder that contains it"):
            await worlds.volume(digest)
        assert uploaded(fake) == 0


async def test_a_damaged_world_is_not_uploaded(home: Home, tmp_path: Path) -> None:
    digest = a_world(home, tmp_path / "w")
    os.utime(WorldFiles(home.worlds).tree(digest) / "dump.sql")
    async with fake_modal(home) as (fake, _, worlds):
        with pytest.raises(BackendRefusedError, match=r"dump\.sql: was written to"):
            await worlds.volume(digest)
        assert uploaded(fake) == 0
