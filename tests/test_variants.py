"""Variants: identity by digest, overlays that stay inside their source, and one preparation each."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from pydantic import ValidationError

from evalpurse.home import Home
from evalpurse.runs.errors import (
    DirtyTreeError,
    NotARepositoryError,
    OverlayError,
    PatchError,
    SecretRefusedError,
    SetupFailedError,
    UnknownCommitError,
    UnknownSecretError,
    UnknownVariantError,
    UnsupportedSourceError,
    VariantExistsError,
)
from evalpurse.runs.sandboxes.protocol import Backend, Machine, Prepared
from evalpurse.runs.variants import Variants, VariantSpec
from evalpurse.store.database import Store
from tests.test_sources import commit_files, git, make_repo

pytestmark = pytest.mark.anyio

PATCH = """\
diff --git a/main.py b/main.py
--- a/main.py
+++ b/main.py
@@ -1,3 +1,3 @@
 import sys
-print("hello")
+print("patched")
 sys.exit(0)
"""


class SetupRecorder:
    """Stands in for a backend: its setup writes a file, waits for `go`, and fails or ends when it is told.

    As a real one, it does nothing when setup was `done` by an earlier process.
    """

    name = "recorder"

    def __init__(self, *, fails: bool = False) -> None:
        self.calls: list[tuple[Path, Sequence[str], Mapping[str, str]]] = []
        self.machines: list[Machine] = []
        self.started = anyio.Event()
        self.go = anyio.Event()
        self.fails = fails

    async def prepare(
        self,
        prepared: Prepared,
        setup: Sequence[str],
        env: Mapping[str, str],
        machine: Machine,
        *,
        done: bool,
    ) -> None:
        self.machines.append(machine)
        if done:
            return
        self.calls.append((prepared.folder, setup, env))
        made = prepared.folder / "made" / "by-setup"
        await anyio.to_thread.run_sync(lambda: made.parent.mkdir(exist_ok=True))
        await anyio.to_thread.run_sync(made.touch)
        await anyio.to_thread.run_sync(lambda: made.parent.chmod(0o500))
        self.started.set()
        await self.go.wait()
        if self.fails:
            raise SetupFailedError("make failed")

    @property
    def backend(self) -> Backend:
        return cast("Backend", self)


def ready_backend(*, fails: bool = False) -> SetupRecorder:
    recorder = SetupRecorder(fails=fails)
    recorder.go.set()
    return recorder


@pytest.fixture
async def store(home: Home) -> AsyncIterator[Store]:
    opened = await Store.open(home)
    yield opened
    await opened.close()


@pytest.fixture
def variants(store: Store, home: Home) -> Variants:
    return Variants(store, home)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "harness"
    make_repo(folder, {"main.py": 'import sys\nprint("hello")\nsys.exit(0)\n', "docs/a.md": "a\n"})
    (folder / "docs" / "link").symlink_to("a.md")
    (folder / "linked").symlink_to("docs")
    commit_files(folder, {})
    return folder


def spec(repo: Path, name: str = "base", **fields: Any) -> VariantSpec:
    return VariantSpec(name=name, repo=str(repo), run=fields.pop("run", "python3 main.py"), **fields)


async def test_a_variant_is_pinned_to_the_full_commit_and_found_again(
    variants: Variants, store: Store, home: Home, repo: Path
) -> None:
    made = await variants.create(
        spec(repo, params={"k": [1, None]}, env={"MODE": "fast"}, description="first", model="m-1")
    )
    assert (made.existing, made.same_as) == (False, "")
    assert made.commit.sha == git(repo, "rev-parse", "HEAD")
    commit_files(repo, {"main.py": "later\n"})
    again = await Variants(store, home).get("base")
    assert (again.digest, again.commit, again.spec) == (made.digest, made.commit, made.spec)
    assert again.spec.command == ["sh", "-c", "python3 main.py"]
    [row] = await variants.list()
    assert (row.variant, row.variant_digest, row.commit_sha) == ("base", made.digest, made.commit.sha)
    assert (row.model, json.loads(row.params)) == ("m-1", {"k": [1, None]})


async def test_creating_the_same_variant_again_changes_nothing(variants: Variants, repo: Path) -> None:
    first = await variants.create(spec(repo))
    second = await variants.create(spec(repo, description="other words", commit="main"))
    assert (second.existing, second.digest) == (True, first.digest)
    assert second.spec.description == ""
    assert len(await variants.list()) == 1


async def test_many_creating_one_variant_at_once_store_it_once(variants: Variants, repo: Path) -> None:
    made: list[bool] = []

    async def create() -> None:
        made.append((await variants.create(spec(repo))).existing)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(create)
    assert sorted(made) == [False] + [True] * 7
    assert len(await variants.list()) == 1


async def test_a_name_never_gets_a_second_meaning(variants: Variants, repo: Path) -> None:
    first = await variants.create(spec(repo))
    with pytest.raises(VariantExistsError) as caught:
        await variants.create(spec(repo, params={"k": 2}))
    assert first.digest[:12] in caught.value.message
    assert caught.value.facts["existing_digest"] == first.digest
    assert caught.value.facts["given_digest"] != first.digest
    assert "another name" in caught.value.hint


async def test_the_same_digest_under_another_name_is_answered_with_the_first(
    variants: Variants, repo: Path
) -> None:
    first = await variants.create(spec(repo))
    same = await variants.create(spec(repo, "again"))
    assert (same.same_as, same.name, same.digest) == ("base", "base", first.digest)
    with pytest.raises(UnknownVariantError):
        await variants.get("again")


async def test_whatever_changes_a_run_changes_the_digest(variants: Variants, home: Home, repo: Path) -> None:
    (home.secrets / "API_KEY").write_text("a-secret-value", encoding="utf-8")
    digests = {(await variants.create(spec(repo))).digest}
    changes: list[dict[str, Any]] = [
        {"run": "python3 main.py --fast"},
        {"run": ["python3", "main.py"]},
        {"setup": ["make"]},
        {"patch": PATCH},
        {"files": {"new.txt": "x"}},
        {"params": {"k": 1}},
        {"env": {"A": "b"}},
        {"secrets": ["API_KEY"]},
        {"model": "m"},
        {"network": "open"},
        {"timeout_s": 30},
    ]
    for number, change in enumerate(changes):
        digests.add((await variants.create(spec(repo, f"v{number}", **change))).digest)
    digests.add((await variants.create(spec(repo, "later", commit=commit_files(repo, {"x": "y"})))).digest)
    assert len(digests) == len(changes) + 2
    names = [row.variant for row in await variants.list()]
    assert names == ["base", *(f"v{number}" for number in range(len(changes))), "later"], "oldest first"


async def test_an_unknown_variant_or_parent_is_answered_with_the_nearest(
    variants: Variants, repo: Path
) -> None:
    with pytest.raises(UnknownVariantError, match="no variants yet"):
        await variants.get("base")
    await variants.create(spec(repo, "windowed"))
    with pytest.raises(UnknownVariantError, match="Did you mean windowed"):
        await variants.get("windowd")
    with pytest.raises(UnknownVariantError, match="windowed"):
        await variants.create(spec(repo, "child", parent="windowe", params={"k": 1}))


async def test_a_source_that_cannot_be_used_is_refused_and_nothing_is_stored(
    variants: Variants, repo: Path, tmp_path: Path
) -> None:
    with pytest.raises(NotARepositoryError):
        await variants.create(spec(tmp_path / "missing"))
    with pytest.raises(UnknownCommitError):
        await variants.create(spec(repo, commit="nope"))
    (repo / "main.py").write_text("changed", encoding="utf-8")
    with pytest.raises(DirtyTreeError):
        await variants.create(spec(repo))
    assert await variants.list() == []


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("this is no patch", "No valid patches"),
        (PATCH.replace("@@ -1,3 +1,3 @@", "@@ -1,9 +1,3 @@"), "corrupt patch"),
        (PATCH.replace("main.py", "missing.py"), "No such file"),
        ("--- /dev/null\n+++ b/../outside.py\n@@ -0,0 +1 @@\n+x\n", "invalid path"),
        (PATCH.replace("main.py", "../../results.py"), "invalid path"),
        ("--- /dev/null\n+++ b/.git/config\n@@ -0,0 +1 @@\n+x\n", "invalid path"),
        ("--- /dev/null\n+++ b/linked/new.md\n@@ -0,0 +1 @@\n+x\n", "beyond a symbolic link"),
    ],
)
async def test_a_bad_patch_is_refused_with_the_reason_of_git(
    variants: Variants, home: Home, repo: Path, patch: str, words: str
) -> None:
    (home.sources / "results.py").write_bytes((repo / "main.py").read_bytes())
    with pytest.raises(PatchError, match=words):
        await variants.create(spec(repo, patch=patch))
    assert await variants.list() == []


async def test_a_hunk_that_does_not_apply_is_shown(variants: Variants, repo: Path) -> None:
    with pytest.raises(PatchError) as caught:
        await variants.create(spec(repo, patch=PATCH.replace('-print("hello")', '-print("bye")')))
    assert "patch failed: main.py:1" in caught.value.message
    assert '-print("bye")' in caught.value.facts["hunk"]
    assert caught.value.facts["hunk"].startswith("@@ -1,3")


@pytest.mark.parametrize(
    "path",
    ["/etc/x", "../x", "a/../../x", ".git/config", "sub/.GIT/x", "a//b", "", "a\0b", "a\\b", "x" * 300],
)
def test_a_file_path_that_could_leave_the_source_is_refused(repo: Path, path: str) -> None:
    with pytest.raises(ValidationError, match="path"):
        spec(repo, files={path: "x"})


async def test_a_file_is_never_written_through_a_link(variants: Variants, repo: Path) -> None:
    for path in ("linked/a.md", "docs/link"):
        with pytest.raises(OverlayError, match="symlink"):
            await variants.create(spec(repo, files={path: "x"}))
    with pytest.raises(OverlayError, match="is a folder"):
        await variants.create(spec(repo, files={"docs": "x"}))


async def test_an_overlay_without_the_final_newline_or_with_binary_files_is_prepared(
    variants: Variants, home: Home, repo: Path
) -> None:
    git(home.path.parent, "init", "-q")  # a repository around the home must not catch the patch
    made = await variants.create(
        spec(
            repo,
            patch=PATCH.rstrip("\n"),
            files={"main2.py": "x = 1\n", "data/b.bin": "base64:AAEC\n/w=="},
            setup=["make"],
            env={"A": "b"},
        )
    )
    backend = ready_backend()
    prepared = await variants.prepare(made, backend.backend)
    assert (prepared.folder / "main.py").read_text(encoding="utf-8").splitlines()[1] == 'print("patched")'
    assert (prepared.folder / "data" / "b.bin").read_bytes() == b"\x00\x01\x02\xff"
    assert (prepared.folder / "main2.py").read_text(encoding="utf-8") == "x = 1\n"
    assert (prepared.folder / "linked").is_symlink()
    assert backend.calls == [(prepared.folder, ["make"], {"A": "b"})]
    assert prepared.variant_digest == made.digest


async def test_a_patch_that_makes_a_leaving_link_leaves_nothing(
    variants: Variants, home: Home, repo: Path
) -> None:
    patch = (
        "diff --git a/out b/out\nnew file mode 120000\n--- /dev/null\n+++ b/out\n@@ -0,0 +1 @@\n"
        "+/etc\n\\ No newline at end of file\n"
    )
    made = await variants.create(spec(repo, patch=patch))
    with pytest.raises(UnsupportedSourceError, match="'out'"):
        await variants.prepare(made, ready_backend().backend)
    assert list((home.sources / "prepared" / "recorder").iterdir()) == []


async def test_a_source_is_prepared_once_and_needs_its_repository_no_more(
    variants: Variants, store: Store, home: Home, repo: Path
) -> None:
    made = await variants.create(spec(repo))
    backend = ready_backend()
    first = await variants.prepare(made, backend.backend)
    shutil.rmtree(repo)
    assert await Variants(store, home).prepare(made, backend.backend) == first
    assert len(backend.calls) == 1
    assert len(backend.machines) == 2, "each process tells its backend, which may keep something in memory"


async def test_each_backend_has_a_preparation_of_its_own(variants: Variants, repo: Path) -> None:
    made = await variants.create(spec(repo, setup=["make"], cpu=2.0, image="python:3.12"))
    here, there = ready_backend(), ready_backend()
    there.name = "elsewhere"
    first, second = [await variants.prepare(made, one.backend) for one in (here, there)]
    assert first.folder != second.folder
    assert [len(one.calls) for one in (here, there)] == [1, 1]
    assert there.machines == [made.spec.machine]
    assert (there.machines[0].cpu, there.machines[0].image) == (2.0, "python:3.12")


async def test_concurrent_callers_share_one_preparation(variants: Variants, repo: Path) -> None:
    made = await variants.create(spec(repo))
    backend = SetupRecorder()
    folders: list[Path] = []

    async def prepare() -> None:
        folders.append((await variants.prepare(made, backend.backend)).folder)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(prepare)
            await backend.started.wait()
            assert folders == [], "a preparation under way must not be used"
            backend.go.set()
    assert len(folders) == 5
    assert len(backend.calls) == 1


async def test_a_failed_preparation_is_told_to_all_who_wait_and_leaves_nothing(
    variants: Variants, home: Home, repo: Path
) -> None:
    made = await variants.create(spec(repo))
    backend = SetupRecorder(fails=True)
    failures: list[str] = []

    async def prepare() -> None:
        with pytest.raises(SetupFailedError) as caught:
            await variants.prepare(made, backend.backend)
        failures.append(caught.value.message)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(prepare)
            await backend.started.wait()
            backend.go.set()
    assert failures == ["make failed"] * 3
    assert len(backend.calls) == 1
    assert list((home.sources / "prepared" / "recorder").iterdir()) == []
    assert (await variants.prepare(made, ready_backend().backend)).folder.is_dir()


async def test_a_cancelled_preparation_leaves_nothing_and_the_next_caller_does_it(
    variants: Variants, home: Home, repo: Path
) -> None:
    made = await variants.create(spec(repo))
    stuck, next_one = SetupRecorder(), ready_backend()
    folders: list[Path] = []

    async def wait_for_it() -> None:
        folders.append((await variants.prepare(made, next_one.backend)).folder)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as waiting, anyio.create_task_group() as first:
            first.start_soon(variants.prepare, made, stuck.backend)
            await stuck.started.wait()
            waiting.start_soon(wait_for_it)
            await anyio.wait_all_tasks_blocked()
            first.cancel_scope.cancel()
    assert len(folders) == len(next_one.calls) == 1
    assert folders[0].is_dir()


async def test_a_half_made_preparation_of_a_killed_daemon_is_made_anew(
    variants: Variants, home: Home, repo: Path
) -> None:
    made = await variants.create(spec(repo))
    leftover = home.sources / "prepared" / "recorder" / made.digest / "source"
    leftover.mkdir(parents=True)
    (leftover / "half.txt").touch()
    prepared = await variants.prepare(made, ready_backend().backend)
    assert not (prepared.folder / "half.txt").exists()
    assert (prepared.folder / "main.py").exists()


async def test_secrets_are_given_by_name_and_never_by_value(
    variants: Variants, home: Home, repo: Path
) -> None:
    (home.secrets / "API_KEY").write_text("very-secret-value\n", encoding="utf-8")
    made = await variants.create(spec(repo, secrets=["API_KEY"]))
    assert made.spec.secrets == ["API_KEY"]
    with pytest.raises(UnknownSecretError, match="Did you mean API_KEY"):
        await variants.create(spec(repo, "other", secrets=["API_KEYS"]))
    with pytest.raises(SecretRefusedError, match="API_KEY"):
        await variants.create(spec(repo, "other", env={"API_KEY": "x"}))
    for field in (
        {"env": {"OTHER": "very-secret-value"}},
        {"params": {"deep": [{"key": "x very-secret-value"}]}},
        {"run": "KEY=very-secret-value python3 main.py"},
        {"files": {"cfg": "very-secret-value"}},
    ):
        with pytest.raises(SecretRefusedError, match="API_KEY") as caught:
            await variants.create(spec(repo, "other", **field))
        assert "very-secret-value" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"env": {"KEY": "sk-" + "a1B2" * 8}}, "looks like a secret"),
        ({"env": {"EVALPURSE_OUT": "x"}}, "reserved"),
        ({"env": {"A B": "x"}}, "not a variable name"),
        ({"secrets": ["A", "A"]}, "distinct"),
        ({"env": {"A": "x"}, "secrets": ["A"]}, "cannot be in"),
        ({"run": " "}, "empty"),
        ({"run": []}, "empty"),
        ({"setup": [""]}, "empty"),
        ({"params": {"x": float("nan")}}, "NaN"),
        ({"files": {"a": "base64:!!"}}, "not base64"),
        ({"files": {"a": "1", "a/b": "2"}}, "is a file and also the folder"),
        ({"files": {"a": "x" * 20_000_001}}, "20,000,001 bytes; at most 20,000,000"),
        ({"name": "bad name"}, "pattern"),
        ({"network": "half"}, "blocked"),
        ({"surprise": 1}, "Extra inputs"),
        ({"timeout_s": float("inf")}, "finite"),
    ],
)
def test_bad_fields_are_refused_when_the_variant_is_written(
    repo: Path, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        spec(repo, **fields)
    assert "a1B2a1B2" not in str(caught.value), "an error must not repeat a secret"


def test_the_schema_of_a_variant_is_flat() -> None:
    text = json.dumps(VariantSpec.model_json_schema())
    assert "$ref" not in text
    assert "anyOf" not in text
