"""Worlds: one digest for the same files wherever they lie, whole or not at all, each refusal by name."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evalpurse.home import Home
from evalpurse.runs.errors import (
    UnknownWorldError,
    WorldChangedError,
    WorldDamagedError,
    WorldError,
    WorldExistsError,
)
from evalpurse.runs.sandboxes import world_files
from evalpurse.runs.sandboxes.world_files import WorldFiles
from evalpurse.runs.sandboxes.world_manifest import Manifest, resolved, scan
from evalpurse.runs.variants import Variants, VariantSpec
from evalpurse.runs.worlds import Worlds
from evalpurse.store.database import Store
from tests.lab_fixtures import make_repository
from tests.sandbox_kit import is_root, write_in
from tests.store_rows import BARE

pytestmark = pytest.mark.anyio


@pytest.fixture
def files(tmp_path: Path) -> WorldFiles:
    return WorldFiles(tmp_path / "worlds")


@pytest.fixture
async def store(home: Home) -> AsyncIterator[Store]:
    opened = await Store.open(home, BARE)
    yield opened
    await opened.close()


@pytest.fixture
def worlds(store: Store, home: Home) -> Worlds:
    return Worlds(store, home)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small folder to add."""
    folder = tmp_path / "source"
    write_in(folder, {"a.txt": "alpha", "sub/b.txt": "beta", "sub/same.txt": "alpha"})
    (folder / "sub" / "link").symlink_to("../a.txt")
    (folder / "empty").mkdir()
    return folder


def contents_in(files: WorldFiles) -> int:
    return sum(1 for path in (files.tree("x").parent.parent / "objects").rglob("*") if path.is_file())


def trees_in(home: Home) -> list[str]:
    return [path.name for path in (home.worlds / "trees").iterdir()]


# The digest

NAMES = st.text("abcdeäß ☃.-_'\"\n", min_size=1, max_size=8).filter(lambda name: name not in (".", ".."))
TREES = st.dictionaries(
    st.tuples(NAMES, NAMES),
    st.tuples(st.binary(max_size=50), st.sampled_from([0o600, 0o644, 0o755])),
    min_size=1,
)


def write_tree(folder: Path, tree: dict[tuple[str, str], tuple[bytes, int]], order: random.Random) -> None:
    folder.mkdir()
    items = list(tree.items())
    order.shuffle(items)
    for (inner, name), (content, mode) in items:
        path = folder / f"d{inner}" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES, seed=st.integers(0, 99), data=st.data())
def test_the_same_files_have_one_digest_and_one_bit_more_has_another(
    tmp_path_factory: pytest.TempPathFactory,
    tree: dict[tuple[str, str], tuple[bytes, int]],
    seed: int,
    data: st.DataObject,
) -> None:
    place = tmp_path_factory.mktemp("trees")
    files = WorldFiles(place / "worlds")
    write_tree(place / "one", tree, random.Random(seed))
    write_tree(place / "other place", tree, random.Random(seed + 1))
    first = files.add(place / "one")
    second = files.add(place / "other place")
    assert second.manifest.digest == first.manifest.digest
    assert second.stored_files == 0
    assert files.verify(first.manifest.digest) == []
    for (inner, name), (content, _) in tree.items():
        assert (files.tree(first.manifest.digest) / f"d{inner}" / name).read_bytes() == content

    inner, name = data.draw(st.sampled_from(sorted(tree)))
    content, mode = tree[inner, name]
    change = data.draw(st.sampled_from(["bit", "mode", "name"]))
    if change == "bit":
        tree[inner, name] = (bytes([content[0] ^ 1]) + content[1:] if content else b"\0", mode)
    elif change == "mode":
        tree[inner, name] = (content, mode ^ 0o001)
    else:
        del tree[inner, name]
        tree[inner, name + "x"] = (content, mode)
    write_tree(place / "changed", tree, random.Random(seed))
    assert files.add(place / "changed").manifest.digest != first.manifest.digest


def test_the_digest_of_a_known_folder_is_pinned(files: WorldFiles, tmp_path: Path) -> None:
    write_in(tmp_path / "w", {"b/c.txt": "hello\n", "a.txt": ""})
    for path, mode in (("b", 0o755), ("b/c.txt", 0o640), ("a.txt", 0o600)):
        (tmp_path / "w" / path).chmod(mode)
    manifest = files.add(tmp_path / "w").manifest
    owner = f'"gid":{os.getgid()},"kind":"%s","mode":%d,"path":"%s"'
    expected = (
        '{"entries":['
         "{" + owner % ("file", 0o600, "a.txt")
        + ',"sha256":"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","size":0,"uid":%d},'
        + "{" + owner % ("folder", 0o755, "b") + ',"uid":%d},'
        + "{" + owner % ("file", 0o640, "b/c.txt")
        + ',"sha256":"5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03","size":6,"uid":%d}'
        + '],"format":1}'
    ) % ((os.getuid(),) * 3)  # fmt: skip
    assert manifest.content.decode() == expected
    assert Manifest.parse(manifest.content, manifest.digest) == manifest


def test_times_and_the_name_of_the_folder_are_no_part_of_the_digest(files: WorldFiles, source: Path) -> None:
    first = files.add(source).manifest.digest
    os.utime(source / "a.txt", (1, 1))
    source.chmod(0o700)
    assert files.add(source.rename(source.with_name("renamed"))).manifest.digest == first


# What is kept


def test_a_content_is_stored_once_and_a_second_world_shares_it(files: WorldFiles, source: Path) -> None:
    added = files.add(source)
    assert (len(added.manifest.files), added.stored_files, added.stored_bytes) == (3, 2, 9)
    assert contents_in(files) == 2
    (source / "new.txt").write_text("gamma")
    assert files.add(source).stored_files == 1
    assert contents_in(files) == 3


def test_two_thousand_files_are_added_checked_and_verified(files: WorldFiles, tmp_path: Path) -> None:
    write_in(tmp_path / "w", {f"d{number % 40}/f{number}": f"{number % 700}" for number in range(2_000)})
    (tmp_path / "w" / "large").write_bytes(os.urandom(3 << 20))
    added = files.add(tmp_path / "w")
    digest = added.manifest.digest
    assert (len(added.manifest.files), added.stored_files) == (2_001, 701)
    assert files.check(digest) == WorldFiles(files.tree("x").parent.parent).check(digest)
    assert files.verify(digest) == []
    assert (files.tree(digest) / "large").read_bytes() == (tmp_path / "w" / "large").read_bytes()


def test_what_is_stored_is_closed_to_writes_and_open_to_its_owner(files: WorldFiles, source: Path) -> None:
    (source / "a.txt").chmod(0o4626)
    (source / "sub").chmod(0o750)
    entry = {entry.path: entry for entry in files.add(source).manifest.entries}
    tree = files.tree(files.add(source).manifest.digest)
    assert entry["a.txt"].mode == 0o4626
    assert (tree / "a.txt").stat().st_mode & 0o7777 == 0o404
    assert (tree / "sub").stat().st_mode & 0o7777 == 0o550
    assert (tree / "empty").is_dir()
    assert (tree / "sub" / "link").readlink().as_posix() == "../a.txt"


def test_an_add_that_is_killed_leaves_no_world_and_the_next_goes_on(
    files: WorldFiles, tmp_path: Path
) -> None:
    write_in(tmp_path / "w", {f"f{number:04d}": f"content {number}" for number in range(2_000)})
    child = (
        "import os, sys\nfrom pathlib import Path\nfrom evalpurse.runs.sandboxes import world_files as w\n"
        "store, done = w.WorldFiles._store, []\n"
        "def some(self, *given):\n    done.append(1)\n    len(done) > 900 and os.kill(os.getpid(), 9)\n"
        "    store(self, *given)\n"
        "w.WorldFiles._store = some\nw.WorldFiles(Path(sys.argv[1])).add(Path(sys.argv[2]))\n"
    )
    folder = files.tree("x").parent.parent
    killed = subprocess.run(
        [sys.executable, "-c", child, str(folder), str(tmp_path / "w")], check=False, stdin=subprocess.DEVNULL
    )
    assert killed.returncode == -9
    assert list((folder / "manifests").iterdir()) == []
    assert list((folder / "trees").iterdir()) == []
    added = files.add(tmp_path / "w")
    assert 0 < added.stored_files <= 1_101
    assert files.verify(added.manifest.digest) == []
    files.keep_only([added.manifest.digest])
    assert contents_in(files) == 2_000


@pytest.mark.parametrize("step", ["_fill", "_link"])
def test_an_add_that_fails_while_it_is_put_in_place_leaves_no_world(
    files: WorldFiles, source: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(WorldFiles, step, full)
        with pytest.raises(WorldError, match="No space left"):
            files.add(source)
    assert list((files.tree("x").parent.parent / "manifests").iterdir()) == []
    assert files.verify(files.add(source).manifest.digest) == []


def test_a_stopped_add_says_so(files: WorldFiles, source: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(WorldError, match="stopped before its end"):
        files.add(source, stop)


def test_a_file_system_without_hard_links_gets_copies(
    files: WorldFiles, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    digest = files.add(source).manifest.digest
    assert files.verify(digest) == []


# Damage


@pytest.mark.parametrize("harm", ["bit", "gone", "extra", "mode", "manifest"])
def test_damage_is_found_never_passed_and_put_right_from_the_source(
    files: WorldFiles, source: Path, harm: str
) -> None:
    digest = files.add(source).manifest.digest
    tree, manifest = files.tree(digest), files.manifest_file(digest)
    tree.chmod(0o700)
    path = tree / "a.txt"
    if harm == "bit":  # with its time put back: only reading finds it
        path.chmod(0o600)
        path.write_text("alphb")
        path.chmod(0o444)
        os.utime(path, (world_files.TIME_S, world_files.TIME_S))
        files.check(digest)
    elif harm == "gone":
        path.unlink()
    elif harm == "extra":
        (tree / "more").touch()
    elif harm == "mode":
        path.chmod(0o666)
    else:
        manifest.chmod(0o600)
        manifest.write_bytes(manifest.read_bytes().replace(b"a.txt", b"b.txt"))
    if harm == "manifest":
        with pytest.raises(WorldDamagedError, match="its manifest cannot be read"):
            files.verify(digest)
    else:
        assert len(files.verify(digest)) == (
            2 if harm in ("bit", "mode") else 1
        )  # sub/same.txt is the same content
    with pytest.raises(WorldDamagedError, match="is not what it was"):
        files.check(digest)
    assert files.add(source).manifest.digest == digest
    files.check(digest)
    assert files.verify(digest) == []


# Refusals


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "sub" / "pipe")


def unix_socket(folder: Path) -> None:
    before = Path.cwd()
    os.chdir(folder)  # a socket's path must be short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("sub/sock")
    finally:
        os.chdir(before)


def not_utf8(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/sub/caf\xe9")).touch()


def to(target: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "sub" / "bad").symlink_to(target)


def chain(folder: Path) -> None:
    (folder / "sub" / "one").symlink_to("two")
    (folder / "sub" / "two").symlink_to("one")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (pipe, r"sub/pipe: is a named pipe"),
        (unix_socket, r"sub/sock: is a socket"),
        (not_utf8, r"sub/caf\\xe9: its name is not UTF-8"),
        (to("../../outside"), r"sub/bad: the link to \.\./\.\./outside leaves the world"),
        (to("../../source/a.txt"), r"sub/bad: the link to \.\./\.\./source/a\.txt leaves the world"),
        (to("/etc/passwd"), r"sub/bad: the link leads to the absolute path /etc/passwd"),
        (to("nowhere"), r"sub/bad: the link leads to nowhere, which does not exist"),
        (chain, r"sub/one: the link to two leads round in a circle"),
    ],
    ids=["pipe", "socket", "name", "out", "out and in", "absolute", "nowhere", "circle"],
)
def test_what_a_world_cannot_hold_is_refused_by_name(
    files: WorldFiles, source: Path, prepare: Callable[[Path], None], message: str
) -> None:
    (source.parent / "outside").touch()
    prepare(source)
    with pytest.raises(WorldError, match=message):
        files.add(source)
    assert contents_in(files) == 0


def test_a_device_is_refused(files: WorldFiles, source: Path) -> None:
    if not is_root():
        pytest.skip("only root can make a device")
    try:
        os.mknod(source / "null", 0o020666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no device can be made here")
    with pytest.raises(WorldError, match="null: is a device"):
        files.add(source)


@contextmanager
def as_another_user(*shown: Path) -> Iterator[None]:
    """Root may read everything: gives up that right for a moment."""
    if not is_root():
        yield
        return
    for path in shown:
        os.chown(path, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_files_and_folders_that_cannot_be_read_are_all_named(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "a.txt").chmod(0)
    (source / "empty").chmod(0)
    monkeypatch.chdir(source)
    with as_another_user(), pytest.raises(WorldError) as refused:
        scan(".")
    (source / "empty").chmod(0o700)
    assert "a.txt: this user may not read it" in str(refused.value)
    assert "empty: this user may not read the folder" in str(refused.value)


def test_all_problems_are_counted_and_the_first_are_named(files: WorldFiles, source: Path) -> None:
    for number in range(25):
        os.mkfifo(source / f"pipe-{number:02d}")
    with pytest.raises(WorldError, match=r"pipe-09: is a named pipe; and 15 more\.") as refused:
        files.add(source)
    assert refused.value.facts["problems"] == 25


def test_an_empty_folder_a_file_and_nothing_are_refused(files: WorldFiles, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(WorldError, match="is empty"):
        files.add(tmp_path / "none")
    for name in ("file", "missing"):
        with pytest.raises(WorldError, match="is not a folder"):
            files.add(tmp_path / name)


def test_the_home_itself_is_refused(files: WorldFiles, tmp_path: Path) -> None:
    write_in(tmp_path, {"a": "b"})
    with pytest.raises(WorldError, match="in which worlds are kept"):
        files.add(tmp_path)


def test_too_many_files_are_refused(files: WorldFiles, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalpurse.runs.sandboxes.world_manifest.ENTRIES_MAX", 4)
    with pytest.raises(WorldError, match="more than 4 files"):
        files.add(source)


def change_content(source: Path) -> None:
    (source / "a.txt").write_text("ALPHA")


def change_in_place(source: Path) -> None:
    facts = (source / "a.txt").stat()
    (source / "a.txt").write_text("ALPHA")
    os.utime(source / "a.txt", ns=(facts.st_atime_ns, facts.st_mtime_ns))


def replace_file(source: Path) -> None:
    (source / "new").write_text("alpha")
    (source / "new").replace(source / "a.txt")


def add_file(source: Path) -> None:
    (source / "sub" / "added").touch()


def remove_file(source: Path) -> None:
    (source / "a.txt").unlink()
    (source / "sub" / "link").unlink()


def turn_into_pipe(source: Path) -> None:
    remove_file(source)
    (source / "a.txt").symlink_to("sub/b.txt")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_content, r"a\.txt"),
        (change_in_place, r"a\.txt"),
        (replace_file, r"a\.txt"),
        (add_file, r"sub/added"),
        (remove_file, r"a\.txt"),
        (turn_into_pipe, r"a\.txt"),
    ],
)
def test_files_that_change_while_they_are_added_are_refused(
    files: WorldFiles,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    named: str,
    when: str,
) -> None:
    take = WorldFiles._take
    first = threading.Event()

    def racing(self: WorldFiles, root: str, seen: object) -> object:
        if when == "before" and not first.is_set():
            first.set()
            change(source)
        taken = take(self, root, seen)  # type: ignore[arg-type]
        if when == "after" and not first.is_set():
            first.set()
            change(source)
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(WorldFiles, "_take", racing)
        with pytest.raises(WorldChangedError, match=rf"Changed while it was added: .*{named}"):
            files.add(source)
    folder = files.tree("x").parent.parent
    assert list((folder / "manifests").iterdir()) == []
    assert list((folder / "trees").iterdir()) == []


# Links, for places that have none


def test_links_are_followed_for_a_place_without_links(files: WorldFiles, source: Path) -> None:
    (source / "docs").symlink_to("sub")
    (source / "again").symlink_to("docs/link")
    found = {path: entry.path for path, entry in resolved(files.add(source).manifest)}
    assert found == {
        "a.txt": "a.txt",
        "again": "a.txt",
        "sub/b.txt": "sub/b.txt",
        "sub/link": "a.txt",
        "sub/same.txt": "sub/same.txt",
        "docs/b.txt": "sub/b.txt",
        "docs/link": "a.txt",
        "docs/same.txt": "sub/same.txt",
    }


def test_links_that_multiply_without_end_are_refused(files: WorldFiles, tmp_path: Path) -> None:
    write_in(tmp_path / "w", {"d0/f": "x"})
    for level in range(1, 30):
        (tmp_path / "w" / f"d{level}").mkdir()
        for name in "ab":
            (tmp_path / "w" / f"d{level}" / name).symlink_to(f"../d{level - 1}")
    manifest = files.add(tmp_path / "w").manifest
    with pytest.raises(WorldError, match="more than"):
        list(resolved(manifest))


# By name


async def test_a_world_is_found_by_its_name_and_by_its_digest(worlds: Worlds, source: Path) -> None:
    added = await worlds.add(source, "docs-1")
    row = added.row
    assert (row.world, row.files, row.bytes, added.existing) == ("docs-1", 3, 14, False)
    for name in ("docs-1", row.world_digest, row.world_digest[:8]):
        assert await worlds.get(name) == row
    found, manifest = await worlds.show("docs-1")
    assert (found, len(manifest.entries)) == (row, 6)
    mount = await worlds.mount("docs-1")
    assert (mount.folder / "a.txt").read_text() == "alpha"
    assert list(await worlds.verify("docs-1")) == []
    assert [row.world for row in await worlds.list()] == ["docs-1"]


async def test_the_same_add_again_changes_nothing(worlds: Worlds, source: Path) -> None:
    first = await worlds.add(source, "docs")
    again = await worlds.add(source, "docs")
    assert (again.row, again.existing, again.stored_files) == (first.row, True, 0)
    other = await worlds.add(source, "documents")  # a second name is one more row and no more files
    assert (other.row.world_digest, other.stored_files) == (first.row.world_digest, 0)
    assert len(await worlds.list()) == 2


async def test_a_name_never_stands_for_other_files(worlds: Worlds, home: Home, source: Path) -> None:
    first = await worlds.add(source, "docs")
    (source / "a.txt").write_text("changed")
    with pytest.raises(WorldExistsError, match="exists with digest"):
        await worlds.add(source, "docs")
    assert trees_in(home) == [first.row.world_digest]
    assert contents_in(worlds.files) == 2
    assert (await worlds.get("docs")) == first.row


async def test_an_unknown_world_is_told_with_the_nearest(worlds: Worlds, source: Path) -> None:
    with pytest.raises(UnknownWorldError, match="There are no worlds yet"):
        await worlds.get("docs")
    await worlds.add(source, "documents")
    with pytest.raises(UnknownWorldError, match="Did you mean documents"):
        await worlds.get("document")
    with pytest.raises(UnknownWorldError, match="There is no world 'ffffff'"):
        await worlds.get("ffffff")


@pytest.mark.parametrize("name", ["", "-x", "a/b", "abcdef", "0" * 64, "x" * 101, "ä"])
async def test_a_name_that_no_world_can_have_is_refused(worlds: Worlds, source: Path, name: str) -> None:
    with pytest.raises(WorldError, match="cannot be the name of a world"):
        await worlds.add(source, name)


async def test_a_cancelled_add_leaves_no_world_and_the_next_is_whole(
    worlds: Worlds, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    take = WorldFiles._take

    def slow(self: WorldFiles, root: str, seen: object) -> object:
        reached.set()
        assert go_on.wait(10)
        return take(self, root, seen)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(WorldFiles, "_take", slow)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(worlds.add, source, "docs")
                assert await anyio.to_thread.run_sync(reached.wait, 10)
                tasks.cancel_scope.cancel()
        go_on.set()
        assert await worlds.list() == []
        added = await worlds.add(source, "docs")
    assert added.existing is False
    assert list(await worlds.verify("docs")) == []


async def test_adds_at_the_same_time_all_succeed(worlds: Worlds, tmp_path: Path) -> None:
    for number in range(4):
        write_in(tmp_path / f"w{number}", {"same": "same", "own": f"{number}"})
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(worlds.add, tmp_path / f"w{number}", f"world-{number}")
    assert len({row.world_digest for row in await worlds.list()}) == 4
    for number in range(4):
        assert list(await worlds.verify(f"world-{number}")) == []


# In variants


async def test_a_variant_pins_the_digest_of_its_world(
    store: Store, home: Home, worlds: Worlds, source: Path, tmp_path: Path
) -> None:
    variants = Variants(store, home, worlds)
    repo = str(make_repository(tmp_path / "repo"))
    digest = (await worlds.add(source, "docs")).row.world_digest
    await worlds.add(source, "same-files")
    (source / "a.txt").write_text("changed")
    await worlds.add(source, "later")

    by_name = await variants.create(VariantSpec(name="v1", repo=repo, run="true", world="docs"))
    assert by_name.spec.machine.world == digest
    same = await variants.create(VariantSpec(name="v2", repo=repo, run="true", world="same-files"))
    assert (same.digest, same.same_as) == (by_name.digest, "v1")
    prefix = await variants.create(VariantSpec(name="v1", repo=repo, run="true", world=digest[:10]))
    assert (prefix.digest, prefix.existing) == (by_name.digest, True)
    later = await variants.create(VariantSpec(name="v3", repo=repo, run="true", world="later"))
    none = await variants.create(VariantSpec(name="v4", repo=repo, run="true"))
    assert len({by_name.digest, later.digest, none.digest}) == 3
    assert (await Variants(store, home, worlds).get("v1")).spec.world == digest
    with pytest.raises(UnknownWorldError, match="Did you mean docs"):
        await variants.create(VariantSpec(name="v5", repo=repo, run="true", world="doc"))


def test_restore_commands_are_checked_like_setup_commands() -> None:
    for restore in ([""], ["a\0b"], ["x" * 60_000, "x" * 60_000]):
        with pytest.raises(ValueError, match="restore"):
            VariantSpec(name="v", repo="/r", run="true", restore=restore)


def test_removing_a_source_leaves_the_world(files: WorldFiles, source: Path) -> None:
    digest = files.add(source).manifest.digest
    shutil.rmtree(source)
    assert files.verify(digest) == []
