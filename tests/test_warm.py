"""Runs start from a warm image when they may, from their own when they must, and always from their source."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

pytest.importorskip("modal")

from evalpurse.home import Home
from evalpurse.runs.errors import SetupFailedError
from evalpurse.runs.services import Services
from evalpurse.runs.setup_inputs import setup_input
from evalpurse.runs.variants import VariantSpec
from evalpurse.runs.warm import WarmBases
from tests.fake_modal import FakeApi
from tests.lab_fixtures import make_repository
from tests.modal_lab import fake_modal, furnish, modal_services, rows_of, run_all

SETUP = ["mkdir made"]
RUN = (
    "test -d made && grep -q commit new.txt && test ! -e gone.txt && "
    'printf 42 > "$EVALPURSE_OUT/answer.txt"; '
    'printf \'{"usage": [], "steps": 1}\' > "$EVALPURSE_OUT/metrics.json"'
)


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    async with fake_modal() as fake:
        yield fake


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").create()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    repo = make_repository(tmp_path / "repo", {"gone.txt": "old\n", "run.sh": "echo\n", "sub/a.txt": "a\n"})
    (repo / "link").symlink_to("sub/a.txt")
    commit(repo)
    return repo


def commit(repo: Path) -> None:
    for words in (["add", "-A"], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(repo), *words], check=True, capture_output=True)


def newest(repo: Path) -> str:
    words = ["git", "-C", str(repo), "rev-parse", "HEAD"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def change(repo: Path) -> None:
    (repo / "gone.txt").unlink()
    (repo / "new.txt").write_text("from the new commit\n")
    commit(repo)


async def keep_warm(services: Services, repository: Path, setup: list[str] = SETUP) -> None:
    variant = await services.variants.create(
        VariantSpec(name="warm", repo=str(repository), run="true", setup=setup)
    )
    await services.warmer.add(variant)


def images_built(fake: FakeApi) -> int:
    return fake.counts().get("ImageGetOrCreate", 0)


@pytest.mark.anyio
async def test_a_run_of_a_later_commit_starts_warm_with_exactly_its_source(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    async with modal_services(home) as services:
        await keep_warm(services, repository)
        change(repository)
        (repository / "untracked.txt").write_text("must not travel")
        (repository / ".git" / "info" / "exclude").write_text("untracked.txt\n")
        await furnish(
            services,
            repository,
            cases=1,
            variants=("new",),
            setup=SETUP,
            run=f"test ! -e untracked.txt && test ! -e .git && {RUN}",
        )
        built = images_built(fake)
        status = await run_all(services, variants=["new"])
        (row,) = await rows_of(services, status.experiment_id)
        assert row["outcome"] == "scored", row["error"]
        assert row["score"] == 1.0
        (kind,) = await services.store.fetch("start_latency_by_kind")
        assert (kind["kind"], kind["runs"]) == ("warm", 1)
        assert 0 < kind["p50_s"] <= kind["p95_s"]
        assert images_built(fake) == built  # a handle by id, and no build


@pytest.mark.anyio
async def test_the_registry_outlives_the_daemon(fake: FakeApi, home: Home, repository: Path) -> None:
    async with modal_services(home) as services:
        await keep_warm(services, repository)
        before = services.warmer.bases.all()
    assert before[0].base is not None
    assert WarmBases(home).all() == before
    async with modal_services(home) as services:
        change(repository)
        await furnish(services, repository, cases=1, variants=("new",), setup=SETUP, run=RUN)
        built = images_built(fake)
        status = await run_all(services, variants=["new"])
        assert [row["outcome"] for row in await rows_of(services, status.experiment_id)] == ["scored"]
        assert images_built(fake) == built


@pytest.mark.anyio
async def test_a_registry_that_cannot_be_read_means_cold_and_is_no_obstacle(home: Home) -> None:
    (home.path / "warm.json").write_text("{")
    assert WarmBases(home).all() == []


@pytest.mark.anyio
async def test_the_old_image_stays_until_the_new_one_is_ready(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    async with modal_services(home) as services:
        await keep_warm(services, repository)
        (before,) = services.warmer.bases.all()
        (repository / "new.txt").write_text("1")
        commit(repository)
        fake.fail("ImageGetOrCreate", "INVALID_ARGUMENT", times=1)
        (failed,) = await services.warmer.refresh()
        assert failed.base == before.base
        assert failed.error
        (renewed,) = await services.warmer.refresh()
        assert renewed.base is not None
        assert before.base is not None
        assert (renewed.error, renewed.base.image_id != before.base.image_id) == ("", True)
        built = images_built(fake)
        assert await services.warmer.refresh()
        assert images_built(fake) == built  # nothing new, nothing built


@pytest.mark.anyio
async def test_the_schedule_brings_it_to_the_newest_commit(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    async with modal_services(home) as services:
        await keep_warm(services, repository)
        change(repository)
        head = newest(repository)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(services.warmer.keep_warm, 0.01)
                await services.warmer.until_renewed()
                tasks.cancel_scope.cancel()
        (renewed,) = services.warmer.bases.all()
        assert renewed.base is not None
        assert renewed.base.commit_sha == head


@pytest.mark.anyio
async def test_setup_that_changes_the_source_cannot_be_warm(
    fake: FakeApi, home: Home, repository: Path
) -> None:
    async with modal_services(home) as services:
        with pytest.raises(SetupFailedError, match="check of the source after setup"):
            await keep_warm(services, repository, ["echo more >> run.sh"])
        assert services.warmer.bases.all() == []


@pytest.mark.anyio
async def test_values_of_env_are_not_shown(fake: FakeApi, home: Home, repository: Path) -> None:
    async with modal_services(home) as services:
        await keep_warm(services, repository)
        facts = json.dumps([each.facts() for each in services.warmer.bases.all()])
        assert '"env"' not in facts


@pytest.mark.parametrize(
    ("setup", "changed", "dockerfile", "reason"),
    [
        ([], ["src/a.py"], None, None),
        (["pip install -r requirements.txt"], ["src/a.py"], None, None),
        (["pip install -r requirements.txt"], ["requirements.txt"], None, "installers read"),
        (["pip install -r requirements.txt"], ["requirements/dev.txt"], None, "installers read"),
        (["pip install -r deps/all.txt"], ["deps/other.txt"], None, "names deps/all.txt"),
        (["pip install ."], ["src/a.py"], None, "installs the source"),
        (["pip install ./libs/x"], ["libs/x/a.py"], None, "names ./libs/x"),
        (["pip install ./libs/x"], ["src/a.py"], None, None),
        (["pip install -e ."], ["src/a.py"], None, None),
        (["pip install -e ."], ["src/a.pyx"], None, "may compile"),
        (["pip install -e .", "make"], ["src/a.py"], None, "may read any file"),
        (["apt-get update && pip install -r requirements.txt"], ["a.py"], None, None),
        (["pip install $(cat list)"], ["a.py"], None, "may read any file"),
        (["uv sync"], ["src/a.py"], None, None),
        (["uv sync"], ["uv.lock"], None, "installers read"),
        (["npm ci"], ["src/index.ts"], None, None),
        (["npm ci && npm run build"], ["src/index.ts"], None, "may read any file"),
        (["make"], [], None, None),
        ([], ["a.py"], "FROM x\nRUN true\n", None),
        ([], ["a.py"], "FROM x\nCOPY . .\n", "the Dockerfile takes files"),
    ],
)
def test_what_setup_may_have_read_makes_a_cold_start(
    setup: list[str], changed: list[str], dockerfile: str | None, reason: str | None
) -> None:
    found = setup_input(setup, changed, [], dockerfile)
    assert found is None if reason is None else reason in (found or "")


def test_a_new_file_is_seen_by_an_editable_install() -> None:
    assert setup_input(["pip install -e ."], ["pkg/a.py"], ["pkg/a.py"], None)
    assert setup_input(["pip install -r requirements.txt"], ["a.py"], ["a.py"], None) is None
