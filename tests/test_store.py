"""The results store through its public door: what is appended is there, whole, and answers."""

from __future__ import annotations

import asyncio
import math
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, quantiles, stdev
from typing import Any

import anyio
import pytest

from evalpurse.home import Home
from evalpurse.store import records, statements
from evalpurse.store.database import Options, Store
from evalpurse.store.errors import RowsRefusedError, StatementError, StoreClosedError, StoreLockedError
from evalpurse.store.records import (
    AccountRow,
    AttemptRow,
    CaseRow,
    JournalRow,
    PlannedRunRow,
    Record,
    RunRow,
    ScoreRow,
    SuiteRow,
    UsageRow,
    VariantRow,
)
from tests.store_rows import BARE, at, event, experiment, run, sample, score, status

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(home: Home) -> Any:
    store = await Store.open(home, BARE)
    yield store
    await store.close()


async def rows_of(store: Store, table: str) -> list[dict[str, Any]]:
    tables = await store.snapshot({"it": f"SELECT * FROM {table}"})  # noqa: S608 - the tests' own names
    rows: list[dict[str, Any]] = tables["it"].to_pylist()
    return rows


# Rows


@pytest.mark.parametrize("record", Record.__subclasses__(), ids=lambda record: record.TABLE)
async def test_every_record_comes_back_as_it_was_given(store: Store, record: type[Record]) -> None:
    row = sample(record)
    await store.append([row])
    assert await rows_of(store, record.TABLE) == [asdict(row)]  # type: ignore[call-overload]


async def test_rows_are_still_there_in_the_next_process_and_in_order(home: Home) -> None:
    first = await Store.open(home, BARE)
    await asyncio.gather(*(first.append([event(number)]) for number in range(300)))
    await first.close()
    second = await Store.open(home, BARE)
    try:
        found = [row["run_id"] for row in await rows_of(second, "events")]
    finally:
        await second.close()
    assert found == [f"run-{number}" for number in range(300)]


async def test_times_come_back_in_utc_to_the_microsecond(store: Store) -> None:
    await store.append([SuiteRow("s", at(0.000001))])
    (suite,) = await store.fetch("suites")
    assert suite["created_at"] == at(0.000001)
    assert suite["created_at"].isoformat().endswith("+00:00")


async def test_concurrent_appends_share_transactions(store: Store) -> None:
    before = store.data_version
    await asyncio.gather(*(store.append([event(number)]) for number in range(500)))
    assert len(await rows_of(store, "events")) == 500
    assert 1 <= store.data_version - before <= 20


async def test_a_lone_append_does_not_wait_for_company(store: Store) -> None:
    with anyio.fail_after(10):
        for number in range(50):
            await store.append([event(number)])
    assert len(await rows_of(store, "events")) == 50


async def test_appending_nothing_costs_no_transaction(store: Store) -> None:
    before = store.data_version
    await store.append([])
    assert store.data_version == before


async def test_a_bad_row_fails_its_own_call_and_none_of_its_rows_stay(store: Store) -> None:
    bad = [event(1000), replace(event(1001), detail=None)]  # type: ignore[arg-type]
    calls = [store.append([event(number), score(f"run-{number}", "a")]) for number in range(40)]
    calls.insert(17, store.append([*bad, score("run-1000", "a")]))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [number for number, result in enumerate(results) if result is not None] == [17]
    assert isinstance(results[17], RowsRefusedError)
    assert "events.detail is None in 1 of 2 rows" in str(results[17])
    kept = {f"run-{number}" for number in range(40)}
    assert {row["run_id"] for row in await rows_of(store, "events")} == kept
    assert {row["run_id"] for row in await rows_of(store, "scores")} == kept


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (replace(event(1), run_id=7), "events.run_id takes string"),  # type: ignore[arg-type]
        (replace(event(1), at=at(0).replace(tzinfo=None)), "events.at has a time without a time zone"),
        (replace(event(1), run_id=b"x"), "events.run_id takes string, not bytes"),  # type: ignore[arg-type]
        (replace(event(1), at=5), "events.at takes timestamp.*, not int"),  # type: ignore[arg-type]
        (sample(JournalRow, seq=2**63), "journal.seq takes int64"),
        (sample(JournalRow, seq=1.5), "journal.seq takes int64, not float"),
        (sample(JournalRow, seq=True), "journal.seq takes int64, not bool"),
        (sample(CaseRow, tags=[1]), "cases.tags takes list"),
        ("not a row", "is not a record of the store"),
    ],
    ids=[
        "number for text",
        "naive time",
        "bytes for text",
        "number for time",
        "too large",
        "fraction",
        "truth for number",
        "list of numbers",
        "no record",
    ],
)
async def test_a_value_of_the_wrong_type_is_refused_by_name(store: Store, row: Any, words: str) -> None:
    with pytest.raises(RowsRefusedError, match=words):
        await store.append([row])
    await store.append([event(2)])
    assert len(await rows_of(store, "events")) == 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("a\0b", "a\0b"),
        ("caf\udce9", "caf\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("x" * 300_000, "x" * 300_000),
    ],
    ids=["NUL", "half a surrogate", "both halves", "long"],
)
async def test_strange_text_is_kept_as_well_as_it_can_be(store: Store, given: str, kept: str) -> None:
    await store.append([sample(ScoreRow, grader="plain"), sample(ScoreRow, grader=given)])
    assert [row["grader"] for row in await rows_of(store, "scores")] == ["plain", kept]


async def test_an_append_happens_even_if_its_caller_is_cancelled(store: Store) -> None:
    waiting = [asyncio.ensure_future(store.append([event(number)])) for number in range(20)]
    await asyncio.sleep(0)  # each has queued its rows and waits
    for task in waiting:
        task.cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await store.append([event(20)])  # behind them in the queue
    assert len(await rows_of(store, "events")) == 21


async def test_closing_writes_what_was_queued_and_refuses_what_comes_later(home: Home) -> None:
    store = await Store.open(home, BARE)
    waiting = [asyncio.ensure_future(store.append([event(number)])) for number in range(100)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*waiting)
    with pytest.raises(StoreClosedError):
        await store.append([event(100)])
    with pytest.raises(StoreClosedError):
        await store.fetch("suites")
    again = await Store.open(home, BARE)
    try:
        assert len(await rows_of(again, "events")) == 100
    finally:
        await again.close()


async def test_replacing_a_mirror_is_never_seen_half_done(store: Store) -> None:
    def mirror(generation: int) -> list[AccountRow]:
        return [sample(AccountRow, account=f"a{number}", posted_nusd=generation) for number in range(10)]

    async def watch(seen: set[tuple[int, int]]) -> None:
        while True:
            rows = await store.fetch("list_accounts")
            seen.add((len(rows), len({row["posted_nusd"] for row in rows})))

    seen: set[tuple[int, int]] = set()
    await store.replace(AccountRow, mirror(0))
    async with anyio.create_task_group() as group:
        group.start_soon(watch, seen)
        for generation in range(1, 40):
            await store.replace(AccountRow, mirror(generation))
        group.cancel_scope.cancel()
    assert seen == {(10, 1)}
    assert {row["posted_nusd"] for row in await store.fetch("list_accounts")} == {39}


async def test_a_snapshot_sees_all_its_tables_at_one_moment(store: Store) -> None:
    async def write() -> None:
        for number in range(1000):
            await store.append([event(number), score(f"run-{number}", "a")])

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        for _ in range(20):
            before = store.data_version
            found = await store.snapshot(
                {"a": "SELECT count(*) AS n FROM events", "b": "SELECT count(*) AS n FROM scores"}
            )
            counts = {table.column("n")[0].as_py() for table in found.values()}
            assert len(counts) == 1
            assert counts.pop() >= before
        group.cancel_scope.cancel()


# Statements


async def test_a_statement_says_what_is_wrong_with_its_parameters(store: Store) -> None:
    with pytest.raises(StatementError, match="no statement 'nonsense'"):
        await store.fetch("nonsense")
    with pytest.raises(StatementError, match=r"takes \['run_id'\], not \[\]"):
        await store.fetch("run_by_id")
    with pytest.raises(StatementError, match=r"takes \['run_id'\], not \['run_id', 'x'\]"):
        await store.fetch("run_by_id", run_id="a", x=1)
    with pytest.raises(StatementError, match="'paid_runs' failed"):
        await store.fetch(
            "paid_runs",
            variant_digests=["a"],
            case_digests=["b"],
            repeats=["many"],
            allowance_nusd=1,
            backend="local",
        )
    assert await store.fetch("run_by_id", run_id="' OR 1 = 1 --") == []


async def test_a_named_write_goes_through_the_writer(store: Store) -> None:
    await store.append([sample(JournalRow, seq=4), sample(JournalRow, seq=9)])
    assert await store.fetch("journal_max_seq") == [{"seq": 9}]
    clearing = store.execute("clear_journal")
    await asyncio.gather(clearing, store.append([sample(JournalRow, seq=2)]))
    assert await store.fetch("journal_max_seq") == [{"seq": 2}]


async def test_every_named_query_runs_on_an_empty_store(store: Store) -> None:
    queries = {
        name: statement
        for name, statement in statements.load("evalpurse.store.queries").items()
        if not statement.sql.startswith("DELETE")
    }
    assert len(queries) > 15
    for name, statement in queries.items():
        lists = set(re.findall(r"\$(\w+)::\w+\[\]", statement.sql))
        empty: dict[str, Any] = {key: [] if key in lists else "" for key in statement.parameters}
        empty |= {key: 0 for key in empty if key.endswith("_nusd")}
        found = await store.fetch(name, **empty)
        assert found in ([], [{"seq": 0}]), name


@pytest.mark.parametrize(
    "text",
    [
        "-- name: a\n-- Twice.\nSELECT 1;\n-- name: a\n-- Twice.\nSELECT 2",
        "-- name: a\nSELECT 1",
        "-- name: a\n-- No.\n",
    ],
    ids=["duplicate", "no sentence", "no statement"],
)
def test_a_careless_file_of_statements_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "careless.sql").write_text(text)
    monkeypatch.setattr(statements, "files", lambda _package: tmp_path)
    with pytest.raises(StatementError, match=r"careless\.sql: 'a'"):
        statements.load("anything")


# Queries


async def test_the_newest_version_of_each_case_is_listed_by_split(store: Store) -> None:
    def case(case_id: str, version: int, split: str) -> CaseRow:
        return sample(
            CaseRow,
            suite="s",
            case_id=case_id,
            version=version,
            split=split,
            case_digest=f"{case_id}{version}",
        )

    await store.append([SuiteRow("s", at(0)), SuiteRow("empty", at(0))])
    await store.append(
        [case("b", 1, "dev"), case("a", 2, "dev"), case("a", 1, "holdout"), case("c", 1, "holdout")]
    )
    await store.append([sample(CaseRow, suite="other", case_id="z")])

    def found(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
        return [(row["case_id"], row["version"]) for row in rows]

    assert found(await store.fetch("cases_of_suite", suite="s", split="")) == [("a", 2), ("b", 1), ("c", 1)]
    assert found(await store.fetch("cases_of_suite", suite="s", split="dev")) == [("a", 2), ("b", 1)]
    assert found(await store.fetch("cases_of_suite", suite="s", split="holdout")) == [("c", 1)]
    counts = {
        row["suite"]: (row["cases"], row["dev_cases"], row["holdout_cases"])
        for row in await store.fetch("suites")
    }
    assert counts == {"s": (3, 2, 1), "empty": (0, 0, 0)}


async def test_a_label_means_its_newest_specification(store: Store) -> None:
    def variant(name: str, digest: str, seconds: float) -> VariantRow:
        return sample(VariantRow, variant=name, variant_digest=digest, created_at=at(seconds))

    await store.append([variant("base", "d1", 1), variant("base", "d2", 2), variant("same", "d1", 3)])
    assert [row["variant_digest"] for row in await store.fetch("variant_by_name", variant="base")] == ["d2"]
    assert [row["variant"] for row in await store.fetch("variant_by_digest", variant_digest="d1")] == ["same"]
    listed = [(row["variant"], row["variant_digest"]) for row in await store.fetch("list_variants")]
    assert listed == [("base", "d2"), ("same", "d1")]


async def test_an_experiment_has_its_newest_status(store: Store) -> None:
    await store.append(
        [
            experiment("exp_done", created_at=at(1), idempotency_key="key"),
            experiment("exp_open", created_at=at(2), idempotency_key=""),
            experiment("exp_new", created_at=at(3), idempotency_key=""),
            status("exp_done", "finished", 9),
            status("exp_done", "running", 5),
            status("exp_open", "running", 6),
            status("exp_open", "cancelling", 6),  # at the same instant: the later row counts
        ]
    )
    found = [(row["experiment_id"], row["status"]) for row in await store.fetch("experiments")]
    assert found == [("exp_new", None), ("exp_open", "cancelling"), ("exp_done", "finished")]
    unfinished = await store.fetch("unfinished_experiments")
    assert [row["experiment_id"] for row in unfinished] == ["exp_open", "exp_new"]
    (one,) = await store.fetch("experiment_by_id", experiment_id="exp_done")
    assert (one["status"], one["status_reason"], one["status_at"]) == ("finished", "because", at(9))


async def test_planned_runs_come_in_launch_order(store: Store) -> None:
    planned = [
        sample(PlannedRunRow, run_id=f"exp_1.{seq}", experiment_id="exp_1", seq=seq) for seq in (2, 0, 1)
    ]
    await store.append([*planned, sample(PlannedRunRow, experiment_id="exp_2"), run("exp_1.1")])
    assert [row["seq"] for row in await store.fetch("planned_runs_of", experiment_id="exp_1")] == [0, 1, 2]


async def test_a_run_has_its_attempts_scores_usage_and_events(store: Store) -> None:
    await store.append(
        [
            run("exp_1.0"),
            run("exp_1.1"),
            sample(AttemptRow, run_id="exp_1.0", experiment_id="exp_1", number=2),
            sample(AttemptRow, run_id="exp_1.0", experiment_id="exp_1", number=1),
            sample(ScoreRow, run_id="exp_1.0", experiment_id="exp_1", name="turns", weight=0.0),
            sample(ScoreRow, run_id="exp_1.0", experiment_id="exp_1", name="score", weight=1.0),
            sample(UsageRow, run_id="exp_1.0", experiment_id="exp_1"),
            event(3, run_id="exp_1.0", attempt_id="exp_1.0.1", experiment_id="exp_1", step="created"),
            event(1, run_id="exp_1.0", attempt_id="exp_1.0.1", experiment_id="exp_1", step="intent"),
            event(2, run_id="exp_1.1", attempt_id="exp_1.1.1", experiment_id="exp_1", step="intent"),
            event(0, run_id="", attempt_id="", experiment_id="exp_1", step="launched"),
        ]
    )
    assert [row["run_id"] for row in await store.fetch("runs_of", experiment_id="exp_1")] == [
        "exp_1.0",
        "exp_1.1",
    ]
    assert [row["number"] for row in await store.fetch("attempts_of", run_id="exp_1.0")] == [1, 2]
    assert [row["name"] for row in await store.fetch("scores_of", run_id="exp_1.0")] == ["score", "turns"]
    assert len(await store.fetch("attempts_of_experiment", experiment_id="exp_1")) == 2


async def test_a_reusable_run_is_the_newest_that_was_paid_for_and_counted(store: Store) -> None:
    same = {"variant_digest": "v", "case_digest": "c", "repeat": 1}
    await store.append(
        [
            experiment("exp_1", allowance_nusd=7, backend="local"),
            experiment("exp_2", allowance_nusd=8, backend="local"),
            run("old", ended_at=at(1), **same),
            run("with another allowance", ended_at=at(9), experiment_id="exp_2", **same),
            run("newest", ended_at=at(2), **same),
            run("borrowed", ended_at=at(3), reused_from="old", **same),
            run("failed", ended_at=at(4), counted=False, **same),
            run("other repeat", **{**same, "repeat": 2}),
            run("other case", **{**same, "case_digest": "c2"}),
        ]
    )

    async def reusable(*keys: tuple[str, str, int]) -> set[str]:
        variants, cases, repeats = ([key[place] for key in keys] for place in range(3))
        rows = await store.fetch(
            "paid_runs",
            variant_digests=variants,
            case_digests=cases,
            repeats=repeats,
            allowance_nusd=7,
            backend="local",
        )
        return {row["run_id"] for row in rows}

    assert await reusable(("v", "c", 1)) == {"newest"}
    # Keys are whole: the digest of one and the repeat of another is not a match.
    assert await reusable(("v", "c", 1), ("v", "c2", 2), ("w", "c", 1)) == {"newest"}
    assert await reusable(("v", "c", 2), ("v", "c2", 1)) == {"other repeat", "other case"}


async def test_the_leaderboard_counts_cases_not_runs(store: Store) -> None:
    scores = {"c1": [1.0, 0.0, 1.0], "c2": [0.5], "c3": [0.0, 0.25]}
    rows: list[RunRow] = [
        run(
            f"{case}.{number}",
            case_digest=case,
            variant="v",
            variant_digest="d",
            score=value,
            cost_nusd=10,
            duration_s=number,
        )
        for case, values in scores.items()
        for number, value in enumerate(values)
    ]
    rows.append(
        run(
            "lost",
            case_digest="c1",
            variant="v",
            variant_digest="d",
            outcome="infra_error",
            counted=False,
            score=None,
            cost_nusd=4,
        )
    )
    rows.append(
        run(
            "rival",
            case_digest="c1",
            variant="w",
            variant_digest="e",
            score=None,
            outcome="cancelled",
            counted=False,
        )
    )
    rows.append(
        run("elsewhere", experiment_id="exp_2", case_digest="c1", variant="v", variant_digest="d", score=0.0)
    )
    rows.append(
        run(
            "reused",
            experiment_id="exp_3",
            case_digest="c1",
            variant="v",
            variant_digest="d",
            reused_from="c1.0",
        )
    )
    await store.append(rows)
    first, second = await store.fetch("leaderboard", experiment_id="exp_1", suite="", split="")

    means = [mean(values) for values in scores.values()]
    durations = [float(number) for values in scores.values() for number in range(len(values))]
    assert (first["variant"], first["cases"], first["runs"], first["counted_runs"]) == ("v", 3, 7, 6)
    assert first["score"] == pytest.approx(mean(means))
    assert first["score_se"] == pytest.approx(stdev(means) / math.sqrt(3))
    assert (first["cost_nusd"], first["cost_per_run_nusd"]) == (64, 10)
    assert first["duration_p50_s"] == pytest.approx(quantiles(durations, n=2, method="inclusive")[0])
    assert first["duration_p95_s"] == pytest.approx(quantiles(durations, n=20, method="inclusive")[18])
    assert first["outcomes"] == {"scored": 6, "infra_error": 1}
    assert first["infra_share"] == pytest.approx(1 / 7)
    assert (second["variant"], second["cases"], second["score"], second["score_se"]) == ("w", 0, None, None)
    assert second["outcomes"] == {"cancelled": 1}

    whole, _ = await store.fetch("leaderboard", experiment_id="", suite="s", split="dev")
    assert whole["runs"] == 8  # the run of exp_2 too, the reused one not twice
    assert await store.fetch("leaderboard", experiment_id="", suite="s", split="holdout") == []


async def test_large_answers_come_as_arrow(store: Store) -> None:
    await store.append([run(f"exp_1.{number:05d}") for number in range(3000)])
    table = await store.fetch_arrow("runs_of", experiment_id="exp_1")
    assert table.num_rows == 3000
    assert table.column("run_id")[2999].as_py() == "exp_1.02999"


# The lock


async def test_a_second_owner_is_told_which_process_has_the_data(store: Store, home: Home) -> None:
    with pytest.raises(StoreLockedError, match=f"in use by process {os.getpid()} "):
        await Store.open(home, BARE)
    await store.append([event(1)])

    code = f"""
import asyncio
from pathlib import Path
from evalpurse.home import Home
from evalpurse.store.database import Store
asyncio.run(Store.open(Home(Path({str(home.path)!r}))))
"""
    other = await anyio.run_process([sys.executable, "-c", code], check=False)
    assert other.returncode == 1
    assert f"in use by process {os.getpid()} " in other.stderr.decode()
    assert len(await rows_of(store, "events")) == 1


async def test_a_failed_opening_lets_the_data_go(home: Home) -> None:
    home.results_file.write_bytes(b"not a database")
    for _ in range(2):
        with pytest.raises(Exception, match="cannot be opened"):
            await Store.open(home, Options(ballast_bytes=0))


def test_the_tables_of_the_schema_are_the_records() -> None:
    assert {record.TABLE for record in Record.__subclasses__()} == {
        value.TABLE for value in vars(records).values() if isinstance(value, type) and hasattr(value, "TABLE")
    }
