"""Images are built once, and a build that fails or hangs names its step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

pytest.importorskip("modal")

from evalpurse.home import Home
from evalpurse.runs.errors import SetupFailedError
from evalpurse.runs.images import Builder, BuiltImage, Images
from evalpurse.runs.sandboxes.protocol import Machine, Prepared
from evalpurse.runs.services import Services
from evalpurse.runs.source_delta import scan, tree_hash
from evalpurse.runs.warm import WarmBases
from tests.fake_modal import FakeApi
from tests.modal_lab import fake_modal, modal_services

pytestmark = pytest.mark.anyio


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    async with fake_modal() as fake:
        yield fake


@pytest.fixture
async def services(fake: FakeApi, tmp_path: Path) -> AsyncIterator[Services]:
    async with modal_services(Home(tmp_path / "home").create()) as services:
        yield services


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "run.sh").write_text("echo hello\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("run.sh")
    return folder


def images_of(services: Services, **builder: float) -> Images:
    async def repo_of(_digest: str) -> str:
        return "a repository"

    home = services.home
    build = Builder(lambda: services.modal, home, services.settings, services.store.blobs, **builder)
    return Images(home, build, WarmBases(home), repo_of)


async def test_many_who_ask_at_once_share_one_build(fake: FakeApi, services: Services, source: Path) -> None:
    images, setup = images_of(services), ("echo built >> made.txt",)
    built: list[BuiltImage] = []

    async def ask(number: int) -> None:
        prepared = Prepared(f"variant-{number}", source)
        built.append(await images.image_for(prepared, setup, {}, Machine()))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(ask, number)
    assert len({id(each.image) for each in built}) == 1
    calls = fake.counts()["ImageGetOrCreate"]
    again = await images.image_for(Prepared("variant-9", source), setup, {}, Machine())
    assert fake.counts()["ImageGetOrCreate"] == calls
    assert (again.started, again.holds_source) == ("cold", True)
    payload = await images.source_payload(Prepared("variant-9", source), again)
    assert (payload.kind, payload.tarball, payload.tree_hash) == ("none", None, tree_hash(scan(source)))


async def test_the_log_of_every_step_is_kept(services: Services, source: Path) -> None:
    built = await images_of(services).image_for(
        Prepared("v", source), ("echo first-step", "echo $FROM_ENV"), {"FROM_ENV": "from-env"}, Machine()
    )
    kept = services.store.blobs.get(built.build_log_blob)
    assert b"first-step" in kept
    assert b"from-env" in kept


async def test_a_setup_command_that_fails_is_named_with_its_log(services: Services, source: Path) -> None:
    with pytest.raises(SetupFailedError, match="setup command 2 of 3, 'echo seen; exit 7'") as caught:
        await images_of(services).image_for(
            Prepared("v", source), ("true", "echo seen; exit 7", "true"), {}, Machine()
        )
    assert "exit status: 7" in str(caught.value)
    assert b"seen" in services.store.blobs.get(caught.value.facts["log_blob"])


async def test_a_setup_command_that_hangs_is_given_up_by_name(services: Services, source: Path) -> None:
    images = images_of(services, step_s=3.0)
    with anyio.fail_after(20), pytest.raises(SetupFailedError, match="'sleep 60', did not end within 3 s"):
        await images.image_for(Prepared("v", source), ("sleep 60",), {}, Machine())


async def test_a_dockerfile_of_the_source_names_its_failing_step(services: Services, source: Path) -> None:
    (source / "Dockerfile").write_text("FROM debian:12\nRUN true\nRUN exit 3\n")
    with pytest.raises(SetupFailedError, match=r"Dockerfile failed: Step \d: RUN exit 3"):
        await images_of(services).image_for(Prepared("v", source), (), {}, Machine(dockerfile="Dockerfile"))


async def test_a_dockerfile_outside_of_the_source_is_refused(services: Services, source: Path) -> None:
    with pytest.raises(SetupFailedError, match="is not in the source"):
        await images_of(services).image_for(
            Prepared("v", source), (), {}, Machine(dockerfile="../Dockerfile")
        )


async def test_variants_without_setup_share_the_base_whatever_their_source(
    services: Services, source: Path
) -> None:
    images = images_of(services)
    first = await images.image_for(Prepared("one", source), (), {}, Machine())
    (source / "run.sh").write_text("echo other\n")
    second = await images.image_for(Prepared("two", source), (), {}, Machine())
    assert first is second
    payload = await images.source_payload(Prepared("two", source), second)
    assert payload.kind == "full"
    assert await images.source_payload(Prepared("two", source), second) is payload
