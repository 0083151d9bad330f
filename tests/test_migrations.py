"""Schema changes: in order, each recorded with its outcome, after a backup, or not at all."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from evalpurse.home import Home
from evalpurse.store.columns import layout_of
from evalpurse.store.database import Store
from evalpurse.store.errors import (
    ForeignDatabaseError,
    MigrationError,
    NewerSchemaError,
    StoreError,
    StoreUnreadableError,
)
from evalpurse.store.migrations import Migration, all_migrations, from_sql
from evalpurse.store.records import Record, SuiteRow
from tests.store_rows import BARE, at

pytestmark = pytest.mark.anyio

FIRST = all_migrations()
SECOND = (*FIRST, from_sql(len(FIRST) + 1, "note_on_suites", "ALTER TABLE suites ADD COLUMN note VARCHAR;"))


def with_steps(*steps: Migration) -> Any:
    return replace(BARE, migrations=steps)


async def history(store: Store) -> list[tuple[Any, ...]]:
    table = (await store.snapshot({"it": "SELECT * FROM migrations ORDER BY number"}))["it"]
    return [(row["number"], row["name"], row["outcome"]) for row in table.to_pylist()]


async def make_old_home(home: Home) -> None:
    store = await Store.open(home, with_steps(*FIRST))
    await store.append([SuiteRow(f"suite-{number}", at(number)) for number in range(100)])
    await store.close()


def fingerprint(folder: Path) -> dict[str, tuple[str, int]]:
    """Content and time of every file but the lock."""
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "data.lock"
    }


async def test_a_fresh_home_records_every_step_with_its_outcome(home: Home) -> None:
    store = await Store.open(home, BARE)
    try:
        found = await history(store)
        assert [number for number, *_ in found] == list(range(1, len(FIRST) + 1))
        assert found[0] == (1, "first_tables", f"ran {len(Record.__subclasses__())} statements")
        assert store.notices == ()
        assert list(home.backups.iterdir()) == []
    finally:
        await store.close()


async def test_the_tables_have_exactly_the_columns_of_the_records(home: Home) -> None:
    store = await Store.open(home, BARE)
    try:
        for record in Record.__subclasses__():
            layout = layout_of(record)
            table = (await store.snapshot({"it": f"SELECT * FROM {layout.table}"}))["it"]  # noqa: S608
            assert table.schema.equals(layout.schema), record.TABLE
        described = await store.snapshot(
            {"it": "SELECT table_name, column_name, is_nullable FROM information_schema.columns"}
        )
        nullable = {
            (row["table_name"], row["column_name"])
            for row in described["it"].to_pylist()
            if row["is_nullable"] == "YES"
        }
        optional = {
            (record.TABLE, column.name)
            for record in Record.__subclasses__()
            for column in layout_of(record).columns
            if column.optional
        }
        assert nullable == optional
    finally:
        await store.close()


async def test_an_older_home_is_backed_up_then_migrated(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    await make_old_home(home)
    store = await Store.open(home, with_steps(*SECOND))
    try:
        assert (await history(store))[-1] == (len(SECOND), "note_on_suites", "ran 1 statements")
        await store.append([SuiteRow("after", at(0))])  # rows of the records fit a table with more columns
        assert len(await store.fetch("suites")) == 101
        (notice,) = store.notices
    finally:
        await store.close()
    (backup,) = home.backups.iterdir()
    assert str(backup) in notice
    with duckdb.connect(str(backup), read_only=True) as connection:
        assert connection.execute("SELECT count(*) FROM suites").fetchall() == [(100,)]
        assert connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall() == [
            (str(len(FIRST)),)
        ]


async def test_a_current_home_is_not_backed_up_again(home: Home) -> None:
    await make_old_home(home)
    for _ in range(2):
        await (await Store.open(home, with_steps(*SECOND))).close()
    assert len(list(home.backups.iterdir())) == 1


async def test_a_failing_step_is_rolled_back_and_names_the_backup(home: Home) -> None:
    await make_old_home(home)
    bad = from_sql(
        len(SECOND) + 1, "bad", "ALTER TABLE suites ADD COLUMN more VARCHAR; SELECT * FROM nowhere;"
    )
    with pytest.raises(MigrationError, match=r"\(bad\) failed and was rolled back: .*nowhere") as failure:
        await Store.open(home, with_steps(*SECOND, bad))
    (backup,) = home.backups.iterdir()
    assert str(backup) in str(failure.value)

    # The step before it stays, nothing of the bad one does, and a better one can follow.
    good = from_sql(len(SECOND) + 1, "good", "ALTER TABLE suites ADD COLUMN more VARCHAR")
    store = await Store.open(home, with_steps(*SECOND, good))
    try:
        assert [name for _, name, _ in await history(store)] == ["first_tables", "note_on_suites", "good"]
        assert len(await store.fetch("suites")) == 100
    finally:
        await store.close()


async def test_a_step_can_be_a_function_with_an_outcome_of_its_own(home: Home) -> None:
    def shout(connection: duckdb.DuckDBPyConnection) -> str:
        connection.execute("UPDATE suites SET suite = upper(suite)").fetchall()
        (count,) = connection.execute("SELECT count(*) FROM suites").fetchall()[0]
        return f"renamed {count} suites"

    await make_old_home(home)
    store = await Store.open(home, with_steps(*FIRST, Migration(len(FIRST) + 1, "shout", shout)))
    try:
        assert (await history(store))[-1][2] == "renamed 100 suites"
        assert (await store.fetch("suites"))[0]["suite"] == "SUITE-0"
    finally:
        await store.close()


async def test_a_newer_schema_is_refused_and_left_as_it_is(home: Home) -> None:
    await (await Store.open(home, with_steps(*SECOND))).close()
    before = fingerprint(home.path)
    with pytest.raises(
        NewerSchemaError, match=f"has schema {len(SECOND)}; this evalpurse knows .* {len(FIRST)}"
    ):
        await Store.open(home, with_steps(*FIRST))
    assert fingerprint(home.path) == before
    await (await Store.open(home, with_steps(*SECOND))).close()


async def test_a_database_of_something_else_is_refused_and_left_as_it_is(home: Home) -> None:
    with duckdb.connect(str(home.results_file)) as connection:
        connection.execute("CREATE TABLE theirs (a INTEGER)")
    before = fingerprint(home.path)
    with pytest.raises(ForeignDatabaseError, match="not one of evalpurse's"):
        await Store.open(home, BARE)
    assert fingerprint(home.path) == before


@pytest.mark.parametrize("content", [b"", b"no database at all" * 1000], ids=["empty", "text"])
async def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(home: Home, content: bytes) -> None:
    home.results_file.write_bytes(content)
    with pytest.raises(StoreUnreadableError, match="cannot be opened"):
        await Store.open(home, BARE)
    assert home.results_file.read_bytes() == content


async def test_a_creation_that_was_killed_starts_over(home: Home) -> None:
    for name in ("results.new", "results.new.wal"):
        (home.path / name).write_bytes(b"half of something")
    store = await Store.open(home, BARE)
    try:
        await store.append([SuiteRow("s", at(0))])
    finally:
        await store.close()
    assert not list(home.path.glob("results.new*"))


async def test_no_room_for_a_backup_stops_before_anything_changes(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await make_old_home(home)
    before = fingerprint(home.path)
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr("evalpurse.store.recovery.free_bytes", lambda _folder: 1000)
        with pytest.raises(StoreError, match=r"need \d+ MB; 0 MB are free"):
            await Store.open(home, with_steps(*SECOND))
    after = fingerprint(home.path)
    assert {path: content for path, (content, _) in after.items()} == {
        path: content for path, (content, _) in before.items()
    }
    await (await Store.open(home, with_steps(*SECOND))).close()


def test_numbers_of_migrations_have_no_gap() -> None:
    assert [step.number for step in FIRST] == list(range(1, len(FIRST) + 1))
