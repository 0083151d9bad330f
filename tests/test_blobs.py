"""Blobs: the same bytes come back, or an error that says which and where."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evalpurse.store.blobs import Blobs
from evalpurse.store.errors import (
    BlobDamagedError,
    BlobMissingError,
    NewerSchemaError,
    StoreClosedError,
    StoreError,
)

BIG = os.urandom(300_000)  # does not compress: a file of its own


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[Blobs]:
    blobs = Blobs(tmp_path / "blobs")
    yield blobs
    blobs.close()


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_of(tmp_path: Path, digest: str) -> Path:
    return tmp_path / "blobs" / digest[:2] / digest[2:4] / f"{digest}.zst"


@pytest.mark.parametrize(
    "content",
    [b"", b"x", "gr\u00fc\u00df".encode(), b"\0" * 5_000_000, BIG],
    ids=["empty", "one byte", "text", "compressible", "large"],
)
def test_content_comes_back_under_its_own_digest(blobs: Blobs, content: bytes) -> None:
    assert not blobs.has(sha(content))
    assert blobs.put(content) == sha(content)
    assert blobs.has(sha(content))
    assert blobs.get(sha(content)) == content


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(st.binary(max_size=2_000), max_size=8))
def test_any_contents_come_back_in_the_order_given(blobs: Blobs, contents: list[bytes]) -> None:
    digests = blobs.put_many(contents)
    assert [blobs.get(digest) for digest in digests] == contents


def test_the_same_content_is_stored_once(blobs: Blobs, tmp_path: Path) -> None:
    for _ in range(3):
        blobs.put(BIG)
        blobs.put(b"small")
    assert len(list((tmp_path / "blobs").rglob("*.zst"))) == 1
    with sqlite3.connect(tmp_path / "blobs" / "pack.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM blobs").fetchone() == (1,)
    connection.close()


def test_large_content_is_a_file_in_a_folder_of_a_folder_and_nothing_is_left_over(
    blobs: Blobs, tmp_path: Path
) -> None:
    digest = blobs.put(BIG)
    assert file_of(tmp_path, digest).stat().st_size >= len(BIG)
    assert not list((tmp_path / "blobs").glob("unfinished-*"))


def test_blobs_are_there_after_reopening(tmp_path: Path) -> None:
    first = Blobs(tmp_path / "blobs")
    digests = first.put_many([b"small", BIG])
    first.close()
    second = Blobs(tmp_path / "blobs")
    assert [second.get(digest) for digest in digests] == [b"small", BIG]
    second.close()


def test_a_missing_blob_is_named_with_the_places_that_were_looked_at(blobs: Blobs, tmp_path: Path) -> None:
    digest = sha(b"never stored")
    with pytest.raises(BlobMissingError) as missing:
        blobs.get(digest)
    assert digest in str(missing.value)
    assert str(file_of(tmp_path, digest)) in str(missing.value)
    assert "pack.sqlite" in str(missing.value)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "AB" * 32, "ab" * 31, "zz" * 32])
def test_what_is_no_digest_is_never_made_into_a_path(blobs: Blobs, digest: str) -> None:
    with pytest.raises(BlobMissingError, match="is not a digest"):
        blobs.get(digest)
    with pytest.raises(BlobMissingError, match="is not a digest"):
        blobs.has(digest)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "other content", "huge announcement"])
def test_a_damaged_file_is_named_and_never_returned(blobs: Blobs, tmp_path: Path, damage: str) -> None:
    digest = blobs.put(BIG)
    path = file_of(tmp_path, digest)
    data = path.read_bytes()
    other = file_of(tmp_path, blobs.put(os.urandom(100_000))).read_bytes()
    damaged = {
        "flip": data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
        "truncate": data[:-10],
        "empty": b"",
        "other content": other,
        # A zstd header with an eight byte size, nearly all ones.
        "huge announcement": data[:4] + b"\xe0" + b"\xfe" * 8 + data[9:],
    }[damage]
    path.write_bytes(damaged)
    with pytest.raises(BlobDamagedError) as error:
        blobs.get(digest)
    assert digest in str(error.value)
    assert str(path) in str(error.value)


def test_a_damaged_row_of_the_pack_is_named_and_its_neighbours_are_fine(blobs: Blobs, tmp_path: Path) -> None:
    damaged, fine = blobs.put_many([b"one" * 100, b"two" * 100])
    connection = sqlite3.connect(tmp_path / "blobs" / "pack.sqlite")
    with connection:
        connection.execute(
            "UPDATE blobs SET content = (SELECT content FROM blobs WHERE digest = ?) WHERE digest = ?",
            (bytes.fromhex(fine), bytes.fromhex(damaged)),
        )
    connection.close()
    with pytest.raises(BlobDamagedError, match=rf"{damaged} in .*pack\.sqlite is damaged: .*{fine}"):
        blobs.get(damaged)
    assert blobs.get(fine) == b"two" * 100


def test_many_threads_put_and_get_the_same_and_different_contents(blobs: Blobs) -> None:
    together = threading.Barrier(8)

    def work(worker: int) -> None:
        together.wait(timeout=10)
        for number in range(60):
            for content in (b"shared %d" % number, b"own %d %d" % (worker, number)):
                assert blobs.get(blobs.put(content)) == content
        assert blobs.get(blobs.put(BIG)) == BIG

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, worker) for worker in range(8)]:
            done.result(timeout=30)


@pytest.mark.anyio
async def test_the_event_loop_can_put_many_at_once(blobs: Blobs) -> None:
    contents = [[b"answer %d" % number, b"log %d" % number] for number in range(200)]
    with anyio.fail_after(20):
        digests = await asyncio.gather(*map(blobs.put_async, contents))
        large = await blobs.put_async([BIG, b"small"])
    assert [[blobs.get(digest) for digest in some] for some in digests] == contents
    assert [blobs.get(digest) for digest in large] == [BIG, b"small"]


@pytest.mark.anyio
async def test_a_cancelled_put_harms_nobody_else(blobs: Blobs) -> None:
    blobs.put(b"opened")
    tasks = [asyncio.ensure_future(blobs.put_async([b"content %d" % number])) for number in range(50)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    with anyio.fail_after(20):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for number, result in enumerate(results[1::2]):
        assert result == [sha(b"content %d" % (2 * number + 1))]
    assert blobs.get(blobs.put(b"after")) == b"after"


def test_what_a_killed_process_left_unfinished_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "blobs"
    folder.mkdir()
    (folder / "unfinished-abc").write_bytes(b"half")
    blobs = Blobs(folder)
    blobs.put(b"x")
    blobs.close()
    assert not (folder / "unfinished-abc").exists()


def test_a_pack_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs")
    blobs.put(b"x")
    blobs.close()
    path = tmp_path / "blobs" / "pack.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    before = path.read_bytes()
    newer = Blobs(tmp_path / "blobs")
    with pytest.raises(NewerSchemaError, match="has version 2"):
        newer.put(b"y")
    newer.close()
    assert path.read_bytes() == before


def test_closed_blobs_say_so(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs")
    blobs.put(b"x")
    blobs.close()
    blobs.close()
    with pytest.raises(StoreClosedError):
        blobs.put(b"y")
    with pytest.raises(StoreClosedError):
        blobs.get(sha(b"x"))


def test_too_large_a_blob_is_refused_with_the_limit(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalpurse.store.blobs.CONTENT_BYTES_MAX", 1000)
    with pytest.raises(StoreError, match="1001 bytes is too large; at most 1000"):
        blobs.put(b"x" * 1001)
    blobs.put(b"x" * 1000)
