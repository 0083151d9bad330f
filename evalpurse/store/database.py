"""The results store: rows that are appended and never edited, and the blobs that they point to.

One process owns one store. Every write goes through one thread and is durable when its call returns; every
read has a cursor and a worker thread of its own and sees all writes that were acknowledged before it began.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread

from evalpurse.home import Home
from evalpurse.store.blobs import Blobs
from evalpurse.store.disk import BALLAST_BYTES, BALLAST_ONLY_ABOVE_FREE_BYTES, Ballast
from evalpurse.store.errors import StatementError
from evalpurse.store.lock import DataLock
from evalpurse.store.records import Record
from evalpurse.store.statements import Statement, load

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa  # type: ignore[import-untyped]

    from evalpurse.store.engine import Engine
    from evalpurse.store.migrations import Migration
    from evalpurse.store.writer import Call, Writer

log = logging.getLogger(__name__)

T = TypeVar("T")

READERS_MAX = 4


@dataclass(frozen=True)
class Options:
    """What tests and benchmarks change. `migrations` None means those of this version."""

    ballast_bytes: int = BALLAST_BYTES
    ballast_only_above_free_bytes: int = BALLAST_ONLY_ABOVE_FREE_BYTES
    migrations: Sequence[Migration] | None = None


class Store:
    """Use `await Store.open(home)`, then `close()`; all methods from the event loop that opened it."""

    def __init__(
        self, home: Home, lock: DataLock, engine: Engine, writer: Writer, notices: tuple[str, ...]
    ) -> None:
        self.home = home
        self.blobs = Blobs(home.blobs)
        self.notices = notices
        """What people should know about how the store was opened: a migration, a damaged log."""
        self._lock = lock
        self._engine = engine
        self._writer = writer
        self._statements: Mapping[str, Statement] = load("evalpurse.store.queries")
        self._readers = anyio.CapacityLimiter(READERS_MAX)

    @classmethod
    async def open(cls, home: Home, options: Options | None = None) -> Store:
        """Takes the data lock, opens the database (creating or migrating it) and starts the writer.

        Raises:
            StoreLockedError: another process has it; the pid is named.
            NewerSchemaError, ForeignDatabaseError, StoreUnreadableError: the file was left as it is.
            MigrationError: the change was rolled back; a backup is named.
            DiskFullError: there is no room to create or migrate.
        """
        options = options or Options()
        lock = DataLock(home.data_lock)
        try:
            with anyio.CancelScope(shield=True):  # or an engine that nobody knows of would stay open
                engine, notices = await anyio.to_thread.run_sync(_open_engine, home, options.migrations)
        except BaseException:
            lock.release()
            raise
        from evalpurse.store.writer import Writer

        ballast = Ballast(
            home.path / "ballast",
            size_bytes=options.ballast_bytes,
            only_above_free_bytes=options.ballast_only_above_free_bytes,
        )
        return cls(home, lock, engine, Writer(engine, ballast, asyncio.get_running_loop()), notices)

    async def append(self, rows: Iterable[Record]) -> None:
        """Stores rows in one transaction; durable when it returns.

        A caller that is cancelled while it waits is too late: the rows are stored all the same.

        Raises:
            RowsRefusedError: a row does not fit its table. As with every StoreError: none was stored.
            DiskFullError, StoreBrokenError: may be tried again.
            StoreClosedError: the store is closed.
        """
        many = tuple(rows)
        if many:
            await self._write(rows=many)

    async def replace(self, record: type[Record], rows: Iterable[Record]) -> None:
        """Replaces all rows of a table that mirrors something else (accounts), in one transaction.

        Raises:
            As `append`.
        """
        await self._write(rows=tuple(rows), replaces=record)

    async def execute(self, query: str, **params: Any) -> None:
        """Runs a named statement that writes; in one transaction, durable when it returns.

        Raises:
            StatementError: there is no such statement, a parameter is missing or unknown, or it failed.
            DiskFullError, StoreBrokenError, StoreClosedError: as `append`.
        """
        await self._write(statement=self._named(query, params), parameters=params)

    async def fetch(self, query: str, **params: Any) -> list[dict[str, Any]]:
        """The rows of a named query, each a dictionary by column; times are in UTC.

        Raises:
            StatementError: there is no such query, a parameter is missing or unknown, or it failed.
        """
        statement = self._named(query, params)
        return await self._read(statement.name, partial(_rows, statement.sql, params))

    async def fetch_arrow(self, query: str, **params: Any) -> pa.Table:
        """The rows of a named query as an Arrow table: for thousands of rows and more.

        Raises:
            StatementError: as `fetch`.
        """
        statement = self._named(query, params)
        return await self._read(statement.name, partial(_arrow, statement.sql, params))

    async def snapshot(self, statements: Mapping[str, str]) -> dict[str, pa.Table]:
        """The results of several SELECTs of our own making, all read in one read-only transaction.

        Raises:
            StatementError: one of them failed.
        """
        return await self._read("snapshot", partial(_snapshot, statements))

    @property
    def data_version(self) -> int:
        """Another number after every commit of this process; read before the rows it is a lower bound."""
        return self._writer.commits

    async def close(self) -> None:
        """Writes what is queued, checkpoints, closes everything and gives the data to the next process."""
        self._writer.stop()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        try:
            self._writer.join()
            self._engine.close()
            self.blobs.close()
        finally:
            self._lock.release()

    async def _write(self, **what: Any) -> None:
        call = _call(**what)
        self._writer.submit(call)
        await call.done

    def _named(self, query: str, params: Mapping[str, Any]) -> Statement:
        statement = self._statements.get(query)
        if statement is None:
            raise StatementError(f"There is no statement '{query}'.", known=sorted(self._statements))
        if params.keys() != statement.parameters:
            raise StatementError(
                f"Statement '{query}' takes {sorted(statement.parameters)}, not {sorted(params)}.", name=query
            )
        return statement

    async def _read(self, name: str, function: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
        import duckdb

        try:
            return await anyio.to_thread.run_sync(self._engine.read, function, limiter=self._readers)
        except duckdb.Error as error:
            raise StatementError(f"Query '{name}' failed: {error}", name=name) from error


def _open_engine(home: Home, steps: Sequence[Migration] | None) -> tuple[Engine, tuple[str, ...]]:
    # In this thread and not at the top: DuckDB and Arrow take long to import, and the loop must not wait.
    from evalpurse.store.migrations import all_migrations
    from evalpurse.store.recovery import open_database

    return open_database(home, all_migrations() if steps is None else steps)


def _call(**what: Any) -> Call:
    from evalpurse.store.writer import Call

    return Call(asyncio.get_running_loop().create_future(), **what)


def _rows(sql: str, params: Mapping[str, Any], cursor: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    found = cursor.execute(sql, dict(params) or None)
    columns = [column[0] for column in found.description]
    return [dict(zip(columns, row, strict=True)) for row in found.fetchall()]


def _arrow(sql: str, params: Mapping[str, Any], cursor: duckdb.DuckDBPyConnection) -> pa.Table:
    return cursor.sql(sql, params=dict(params) or None).to_arrow_table()


def _snapshot(statements: Mapping[str, str], cursor: duckdb.DuckDBPyConnection) -> dict[str, pa.Table]:
    cursor.execute("BEGIN TRANSACTION READ ONLY")
    try:
        return {name: cursor.sql(sql).to_arrow_table() for name, sql in statements.items()}
    finally:
        cursor.execute("ROLLBACK")
