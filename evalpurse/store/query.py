"""Agent SQL over the public tables: the gate decides, a limited process runs it, the store is never touched.

A query reads exactly the published tables that it names, as they were at one moment; it changes nothing, and
ends within its time however it is written.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any, Final

import anyio.to_thread

from evalpurse.home import Home
from evalpurse.store import gate
from evalpurse.store.errors import QueryFailedError, QueryRefusedError
from evalpurse.store.policy import PUBLIC, TABLES, PublicTable
from evalpurse.store.query_pool import GRACE_S, Worker, WorkerDiedError, WorkerPool, late
from evalpurse.store.query_publish import QUERY_BYTES_MAX, PublishedStore, Publisher

ROWS_MAX: Final = 1_000
BYTES_MAX: Final = 1_000_000
TIMEOUT_S_MAX: Final = 30.0
_SMALLER: Final = "Aggregate or filter earlier: one query gets 700 MB of memory and one processor."


@dataclass(frozen=True)
class QueryResult:
    """Rows as lists of JSON values in column order.

    `truncated` means that there are more rows; `limited_by` says whether `rows` or `bytes` cut them.
    `data_age_s` is 0 when nothing was committed since the data was read, else how long ago that was.
    """

    columns: list[str]
    types: list[str]
    rows: list[list[Any]]
    truncated: bool
    limited_by: str
    elapsed_ms: float
    data_age_s: float


class QueryService:
    """Answers agent SQL. Nothing is started before the first query."""

    def __init__(self, store: PublishedStore, home: Home) -> None:
        self._publisher = Publisher(store, home)
        self._pool = WorkerPool(mapped_bytes_max=QUERY_BYTES_MAX, drop_root=os.geteuid() == 0)
        self.isolation: dict[str, bool] = {}

    @property
    def pids(self) -> list[int]:
        """Worker processes alive now."""
        return self._pool.pids

    async def schema(self) -> list[PublicTable]:
        """Every public table with its columns, types and meanings."""
        return list(TABLES)

    async def query(self, sql: str, *, limit: int = 200, timeout_s: float = 5.0) -> QueryResult:
        """Runs one SELECT over the public tables and returns at most `limit` rows and 1 MB.

        Raises:
            QueryRefusedError: the query, or a limit, is not allowed; nothing was run.
            QueryFailedError: it is not valid SQL, or the engine could not answer it.
            QueryTimeoutError: it did not answer within `timeout_s` seconds.
        """
        started = time.monotonic()
        _check_limits(limit, timeout_s)
        gate.refuse_text(sql)
        request = {"sql": sql, "rows_max": limit, "bytes_max": BYTES_MAX, "timeout_s": timeout_s}
        answer, age_s = await self._answer(request)
        if answer.get("timeout"):
            raise late(timeout_s)
        if "error" in answer:
            hint = "The schema lists tables, columns and types."
            raise QueryFailedError(answer["error"], hint=hint if answer["ordinary"] else _SMALLER)
        return QueryResult(
            columns=answer["columns"],
            types=answer["types"],
            rows=answer["rows"],
            truncated=bool(answer["cut"]),
            limited_by=answer["cut"],
            elapsed_ms=round((time.monotonic() - started) * 1000, 1),
            data_age_s=round(age_s, 3),
        )

    async def _answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], float]:
        for last_try in (False, True):
            async with self._pool.borrow() as worker:
                self.isolation = worker.isolation
                was_used = worker.used
                try:
                    parsed = await _ask(worker, "parse", request)
                except QueryFailedError:
                    # One that died while it was idle is no fault of this query: nothing was run yet.
                    if last_try or not was_used:
                        raise
                    continue
                # In a thread: a query of 20,000 characters has a tree of a megabyte.
                tables = await anyio.to_thread.run_sync(gate.check, parsed, PUBLIC)
                async with self._publisher.publish(tables) as published:
                    answer = await _ask(worker, "run", {**request, "tables": published.paths})
                    return answer, published.age_s
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Ends the workers and removes the published copies."""
        await self._pool.close()
        self._publisher.close()


async def _ask(worker: Worker, op: str, request: dict[str, Any]) -> dict[str, Any]:
    timeout_s = request["timeout_s"]
    try:
        return await worker.ask({"op": op, **request}, time.monotonic() + timeout_s + GRACE_S)
    except TimeoutError as error:
        raise late(timeout_s) from error
    except WorkerDiedError as error:
        raise QueryFailedError(
            f"The process that ran the query ended ({error}); the next query gets a new one.", hint=_SMALLER
        ) from error


def _check_limits(limit: int, timeout_s: float) -> None:
    if isinstance(limit, bool) or not 1 <= limit <= ROWS_MAX:
        raise QueryRefusedError(
            f"limit is {limit}; it can be from 1 to {ROWS_MAX:,}.",
            hint="Aggregate in SQL, or page with ORDER BY and OFFSET.",
        )
    if not (math.isfinite(timeout_s) and 0 < timeout_s <= TIMEOUT_S_MAX):
        raise QueryRefusedError(
            f"timeout_s is {timeout_s:g}; it can be up to {TIMEOUT_S_MAX:g}.", hint="5 is usually enough."
        )
