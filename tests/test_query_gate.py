"""What agent SQL may and may not do, asked of the whole service: gate, worker and real store."""

# ruff: noqa: S608 - the names in these queries are our own

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from evalpurse.store import gate
from evalpurse.store.errors import QueryFailedError, QueryRefusedError, QueryTimeoutError, StoreError
from evalpurse.store.gate_functions import FUNCTIONS, OPERATORS, WINDOWS
from evalpurse.store.policy import HIDDEN, PUBLIC, TABLES
from evalpurse.store.records import Record
from tests.hostile_sql import HIDDEN as HIDDEN_VALUE
from tests.hostile_sql import KINDS, ONLY_GATE
from tests.query_home import CANARY, DEV, Guarded, guarded

REFUSED = (QueryRefusedError, QueryFailedError)
LEGITIMATE: list[tuple[str, list[list[Any]]]] = [
    (
        "SELECT variant, count(*), sum(score) FROM runs WHERE counted GROUP BY variant ORDER BY variant",
        [["base", 6, 2.0], ["fast", 6, 4.5]],
    ),
    (
        (
            "WITH a AS (SELECT variant, score FROM runs), b AS (SELECT variant, max(score) FROM a GROUP BY 1)"
            " SELECT * FROM b ORDER BY 1"
        ),
        [["base", 1.0], ["fast", 1.0]],
    ),
    ("WITH value AS (SELECT 1 AS key), key AS (SELECT key AS value FROM value) SELECT value FROM key", [[1]]),
    (
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 5) SELECT sum(n) FROM r",
        [[15]],
    ),
    (
        (
            "SELECT run_id, rank() OVER (PARTITION BY variant ORDER BY cost_usd DESC) AS k FROM runs"
            " QUALIFY k = 1 ORDER BY run_id"
        ),
        [[f"{DEV}.00011", 1], [f"{DEV}.00012", 1]],
    ),
    (
        "PIVOT runs ON variant IN ('base', 'fast') USING avg(score) GROUP BY case_id ORDER BY case_id",
        [["a", 0.5, 0.75], ["b", 0.5, 0.75], ["c", 0.0, 0.75]],
    ),
    (
        (
            "SELECT * FROM runs PIVOT (max(cost_nusd) FOR variant IN ('base', 'fast') GROUP BY case_id)"
            " ORDER BY case_id"
        ),
        [["a", 3_000_000, 4_000_000], ["b", 7_000_000, 8_000_000], ["c", 11_000_000, 12_000_000]],
    ),
    (
        (
            "FROM (UNPIVOT (SELECT input_tokens, output_tokens FROM runs) ON input_tokens, output_tokens"
            " INTO NAME kind VALUE n) SELECT kind, max(n) GROUP BY ALL ORDER BY ALL"
        ),
        [["input_tokens", 1200], ["output_tokens", 120]],
    ),
    (
        "SELECT list_transform([1, 2, 3], lambda x: x * 2), [x + 1 FOR x IN [1, 2, 3] IF x > 1]",
        [[[2, 4, 6], [3, 4]]],
    ),
    ("SELECT list_reduce([1, 2, 3], lambda a, b: a + b), list_filter([1, 2], lambda x: x > 1)", [[6, [2]]]),
    (
        "SELECT params->>'$.top_k', json_extract(params, '$.windows')::BOOLEAN FROM variants LIMIT 1",
        [["3", True]],
    ),
    (
        "SELECT case_id, tag FROM cases, unnest(tags) AS t(tag) WHERE tag <> 'easy' ORDER BY 1",
        [["a", "tag-a"], ["b", "tag-b"], ["c", "tag-c"]],
    ),
    (
        (
            "SELECT c.case_id, t.tag FROM cases c, LATERAL (SELECT unnest(c.tags) AS tag) t"
            " WHERE t.tag LIKE 'tag-%' ORDER BY ALL LIMIT 1"
        ),
        [["a", "tag-a"]],
    ),
    ("SELECT quantile_cont(score, [0.25, 0.5]), median(duration_s) FROM runs", [[[0.375, 0.5], 6.5]]),
    ("SELECT mode(suite), quantile_disc(repeat, 0.5), mad(score) FROM runs", [["arith", 1, 0.5]]),
    (
        "SELECT variant, count(*) FILTER (WHERE score = 1) FROM runs GROUP BY ALL ORDER BY ALL",
        [["base", 1], ["fast", 3]],
    ),
    (
        "SELECT DISTINCT ON (variant) variant, run_id FROM runs ORDER BY variant, cost_nusd",
        [["base", f"{DEV}.00001"], ["fast", f"{DEV}.00002"]],
    ),
    ("SELECT v.a + v.b FROM (VALUES (1, 2), (3, 4)) AS v(a, b) ORDER BY 1", [[3], [7]]),
    ("VALUES (1, 'x'), (2, 'y')", [[1, "x"], [2, "y"]]),
    ("SELECT #1, #8 FROM runs ORDER BY #1 LIMIT 1", [[f"{DEV}.00001", "base"]]),
    (
        (
            "SELECT date_trunc('hour', min(ended_at)), date_diff('second', min(ended_at), max(ended_at)),"
            " extract(year FROM min(ended_at)) FROM runs"
        ),
        [["2026-03-01T12:00:00+00:00", 110, 2026]],
    ),
    (
        (
            "SELECT now() > max(ended_at), strftime(min(ended_at) + INTERVAL 1 MONTH, '%Y-%m'),"
            " min(ended_at)::DATE FROM runs"
        ),
        [[True, "2026-04", "2026-03-01"]],
    ),
    (
        "SELECT strptime('2026', '%Y'), time_bucket(INTERVAL 1 DAY, '2026-01-02 10:00'::TIMESTAMP)",
        [["2026-01-01T00:00:00", "2026-01-02T00:00:00"]],
    ),
    ("SELECT string_agg(DISTINCT case_id, ',' ORDER BY case_id) FROM runs", [["a,b,c"]]),
    ("SELECT {'a': 1, 'b': [1, 2]}.b[2], struct_pack(x := 5).x, map {'k': 1}['k']", [[2, 5, 1]]),
    (
        "SELECT coalesce(NULL, 3), nullif(1, 1), if(true, 1, 2), CASE 2 WHEN 2 THEN 'b' END",
        [[3, None, 1, "b"]],
    ),
    (
        (
            "SELECT a.case_id, avg(a.score - b.score) FROM runs a JOIN runs b USING (case_id, repeat)"
            " WHERE a.variant = 'fast' AND b.variant = 'base' GROUP BY 1 ORDER BY 1"
        ),
        [["a", 0.25], ["b", 0.25], ["c", 0.75]],
    ),
    ("SELECT count(*) FROM runs ANTI JOIN scores USING (run_id)", [[0]]),
    (
        "SELECT case_id FROM cases EXCEPT SELECT case_id FROM runs WHERE variant = 'x' ORDER BY 1",
        [["a"], ["b"], ["c"]],
    ),
    ("SELECT 1 AS a UNION ALL BY NAME SELECT 2 AS b, 3 AS a ORDER BY a", [[1, None], [3, 2]]),
    (
        (
            "SELECT variant, case_id, count(*) FROM runs GROUP BY GROUPING SETS ((variant), ()) , case_id"
            " HAVING grouping(variant) = 1 ORDER BY ALL"
        ),
        [[None, "a", 4], [None, "b", 4], [None, "c", 4]],
    ),
    (
        "SELECT variant, count(*) FROM runs GROUP BY CUBE (variant) ORDER BY ALL",
        [["base", 6], ["fast", 6], [None, 12]],
    ),
    ("SELECT COLUMNS('.*_tokens') FROM runs ORDER BY ALL LIMIT 1", [[100, 10]]),
    ("SELECT COLUMNS(lambda c: c LIKE 'input%') FROM runs ORDER BY ALL LIMIT 1", [[100]]),
    ("SELECT * EXCLUDE (created_at) REPLACE (upper(suite) AS suite) FROM suites", [["ARITH"]]),
    (
        (
            "SELECT count(*) FROM runs WHERE case_id IN (SELECT case_id FROM cases WHERE 'tag-b' IN tags)"
            " AND EXISTS (SELECT 1 FROM scores s WHERE s.run_id = runs.run_id)"
        ),
        [[4]],
    ),
    ("SELECT count(*) FROM runs USING SAMPLE 100 PERCENT", [[12]]),
    (
        "SELECT regexp_extract(run_id, '[0-9]+$'), run_id[1:3], upper('b') FROM runs ORDER BY 1 LIMIT 1",
        [["00001", "exp", "B"]],
    ),
    (
        (
            "SELECT sum(score) OVER (ORDER BY run_id ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) FROM runs"
            " ORDER BY run_id LIMIT 3"
        ),
        [[1.0], [2.0], [1.0]],
    ),
    (
        "SELECT lag(repeat) OVER w FROM runs WINDOW w AS (ORDER BY run_id) ORDER BY run_id LIMIT 2",
        [[None], [1]],
    ),
    (
        "FROM range(2) UNION ALL SELECT n FROM generate_series(10, 11) AS g(n) ORDER BY 1",
        [[0], [1], [10], [11]],
    ),
    ('SELECT key, value FROM json_each(\'{"a": 1, "b": 2}\') ORDER BY key', [["a", "1"], ["b", "2"]]),
    (
        "SELECT corr(input_tokens, output_tokens), arg_max(run_id, cost_nusd) FROM runs",
        [[1.0, f"{DEV}.00012"]],
    ),
    ("SELECT list(case_id ORDER BY case_id)[1:2], list_sort([3, 1, 2])[-1] FROM cases", [[["a", "b"], 3]]),
    (
        (
            "SELECT count(*) FROM runs r ASOF JOIN (SELECT ended_at FROM runs WHERE run_id LIKE '%5') e"
            " ON r.ended_at >= e.ended_at"
        ),
        [[8]],
    ),
    ("SELECT variant FROM runs ORDER BY cost_nusd DESC NULLS LAST LIMIT 10 PERCENT", [["fast"]]),
    ("FROM experiments SELECT experiment_id, cap_usd, variants[1] ORDER BY 1 LIMIT 1", [[DEV, 5.0, "base"]]),
    ("SELECT status, reason FROM experiment_status", [["finished", "all runs ended"]]),
    (
        "SELECT account, limit_usd, held_nusd FROM accounts ORDER BY 1 DESC",
        [["workspace", 10.0, 0], ["team", 5.0, 500_000_000]],
    ),
    ("SELECT try_cast('x' AS INT), TRY(1 / 0), 5 // 2, 5 % 2, 7 & 3", [[None, None, 2, 1, 3]]),
    (
        "SELECT 'abc' ILIKE 'A%', 'abc' SIMILAR TO 'a.c', 2 BETWEEN 1 AND 3, 1 IS DISTINCT FROM NULL",
        [[True] * 4],
    ),
    ('SELECT "Runs".run_id FROM RUNS AS "Runs" ORDER BY 1 LIMIT 1', [[f"{DEV}.00001"]]),
]


def node(text: str) -> str:
    """A syntax tree with one statement."""
    return f'{{"error": false, "statements": [{{"node": {text}}}]}}'


@pytest.fixture(scope="module")
def readable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that any user of the machine may read."""
    folder = tmp_path_factory.mktemp("readable")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(parent.stat().st_mode | 0o055)
    file = folder / "canary.csv"
    file.write_text(f"{CANARY}-file\n")
    file.chmod(0o644)
    return file


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    os.environ["EVALPURSE_TEST_CANARY"] = f"{CANARY}-environment"
    with guarded(tmp_path_factory.mktemp("gate")) as found:
        before = found.rows("SELECT count(*), sum(score) FROM runs")
        yield found
        assert found.rows("SELECT count(*), sum(score) FROM runs") == before
    del os.environ["EVALPURSE_TEST_CANARY"]


def fill(sql: str, service: Guarded, readable: Path) -> str:
    out = readable.with_name("out.csv")
    names = {"{file}": readable, "{db}": service.home.results_file, "{out}": out, "{hidden}": HIDDEN_VALUE}
    for name, value in names.items():
        sql = sql.replace(name, str(value))
    return sql


def ids(sql: str) -> str:
    return sql.encode("ascii", "replace").decode().replace("\0", "NUL")[:60]


@pytest.mark.parametrize("sql", [sql for kind in KINDS.values() for sql in kind], ids=ids)
def test_hostile_statement_is_refused_before_it_runs_and_tells_nothing(
    sql: str, service: Guarded, readable: Path
) -> None:
    with pytest.raises(REFUSED) as caught:
        service.query(fill(sql, service, readable))
    assert CANARY not in f"{caught.value} {caught.value.facts}"
    assert not readable.with_name("out.csv").exists()
    assert len(str(caught.value)) < 1_000


def test_all_kinds_of_attack_are_tried() -> None:
    assert all(len(statements) >= 10 for statements in KINDS.values())
    assert sum(map(len, KINDS.values())) >= 120


@pytest.mark.parametrize(
    "sql", [sql for kind in KINDS.values() for sql in kind if sql not in ONLY_GATE], ids=ids
)
def test_hostile_statement_that_got_past_the_gate_finds_nothing_in_the_worker(
    sql: str, service: Guarded, readable: Path
) -> None:
    filled = fill(sql, service, readable)

    async def run() -> dict[str, Any]:
        request = {"op": "run", "sql": filled, "rows_max": 1_000, "bytes_max": 1_000_000, "timeout_s": 2.0}
        async with (
            service.service._pool.borrow() as worker,
            service.service._publisher.publish(frozenset({"cases", "runs"})) as published,
        ):
            return await worker.ask({**request, "tables": published.paths}, time.monotonic() + 5)

    answer = service.portal.call(run)
    assert CANARY not in json.dumps({key: answer.get(key) for key in ("rows", "columns")})
    # An engine's error repeats the statement, and with it the name of the file: not what is in it.
    assert f"{CANARY}-" not in answer.get("error", "")
    assert not readable.with_name("out.csv").exists()


@pytest.mark.parametrize(("sql", "expected"), LEGITIMATE, ids=lambda value: ids(str(value)))
def test_legitimate_query_passes_with_the_right_rows(
    sql: str, expected: list[list[Any]], service: Guarded
) -> None:
    found = service.query(sql)
    assert found.rows == expected
    assert not found.truncated
    assert len(found.columns) == len(found.types) == len(expected[0])


def test_there_are_thirty_legitimate_shapes() -> None:
    assert len(LEGITIMATE) >= 30


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_table_has_exactly_its_declared_columns_and_no_canary(name: str, service: Guarded) -> None:
    table = PUBLIC[name]
    found = service.query(f"SELECT * FROM {name}", limit=1_000)
    spelled = [column.type.replace("TIMESTAMPTZ", "TIMESTAMP WITH TIME ZONE") for column in table.columns]
    assert found.columns == [column.name for column in table.columns]
    assert found.types == spelled
    assert CANARY not in json.dumps(found.rows)
    assert found.rows
    unquoted = ", ".join(column.name for column in table.columns)
    assert service.rows(f"SELECT {unquoted} FROM {name} ORDER BY ALL LIMIT 1")


def test_rows_of_holdout_cases_are_in_no_table_but_the_experiment_and_its_payments_are(
    service: Guarded,
) -> None:
    for table in ("planned_runs", "runs", "attempts", "scores", "usage", "events"):
        counted = service.rows(f"SELECT count(*), count(DISTINCT experiment_id) FROM {table}")
        assert counted == [[12, 1]], table
    assert service.rows("SELECT count(*) FROM cases") == [[3]]
    assert service.rows("SELECT split FROM experiments ORDER BY 1") == [["dev"], ["holdout"]]
    assert service.rows("SELECT hold_id, amount_nusd FROM journal ORDER BY seq") == [
        [f"{DEV}.00001.1", 2_000_000],
        ["holdout", 2_000_000],
    ]


def test_every_field_of_every_record_is_public_or_hidden_on_purpose() -> None:
    shown = {
        f"{table.source.split()[0]}.{'at' if column.name == 'happened_at' else column.name}"
        for table in TABLES
        for column in table.columns
    }
    stored = {
        f"{record.TABLE}.{field}" for record in Record.__subclasses__() for field in record.__annotations__
    } - {f"{record.TABLE}.TABLE" for record in Record.__subclasses__()}
    assert stored - shown == HIDDEN
    assert {name for name in shown if name.endswith("_blob")} == set()
    added = {name for name in shown - stored if not name.endswith("_usd")}
    assert added == set()


def test_every_allowed_function_exists_in_the_engine() -> None:
    with duckdb.connect() as engine:
        found = engine.execute("SELECT DISTINCT function_name FROM duckdb_functions()").fetchall()
    known = {row[0] for row in found}
    spelled_by_the_parser = {"!", "!~", "!~~~", "->", "<>", "==", "coalesce", "ifnull"}
    assert (FUNCTIONS | OPERATORS | WINDOWS) - known == spelled_by_the_parser


@pytest.mark.parametrize(
    ("sql", "said", "hinted"),
    [
        ("SELECT * FROM run", "'run'", "Did you mean runs?"),
        ("SELECT * FROM main.runs", "'main.runs'", "Did you mean runs?"),
        ("SELECT avgg(score) FROM runs", "'avgg'", "avg"),
        ("SELECT range(3)", "'range'", "FROM range"),
        ("SELECT * FROM read_csv('x')", "'read_csv'", "Files cannot be read"),
        ("SELECT 1::intt", "'intt'", "int"),
        ("DESCRIBE runs", "DESCRIBE", "schema"),
        ("SELECT * FROM (SUMMARIZE runs)", "SUMMARIZE", "schema"),
        ("PIVOT runs ON variant USING avg(score)", "PIVOT", "IN ('a', 'b')"),
        ("SELECT 1; SELECT 2", "2 statements", ""),
        ("DELETE FROM runs", "DELETE", "changed"),
        ("SELECT main.sum(score) FROM runs", "'main.sum'", "sum(...)"),
        ("SELECT rank(1)", "'rank'", ""),
        ("SELECT $1", "Parameters", "values"),
        ("SELECT " + "x" * 30_000, "30,007 characters", "smaller"),
    ],
    ids=ids,
)
def test_refusal_names_the_part_and_what_is_allowed_instead(
    sql: str, said: str, hinted: str, service: Guarded
) -> None:
    with pytest.raises(QueryRefusedError) as caught:
        service.query(sql)
    assert said in caught.value.message
    assert hinted in caught.value.hint
    assert caught.value.code == "query_refused"


def test_error_of_a_wrong_column_lists_the_right_ones(service: Guarded) -> None:
    with pytest.raises(QueryFailedError, match=r"(?s)Candidate bindings.*score") as caught:
        service.query("SELECT scor FROM runs")
    assert caught.value.code == "query_failed"


@pytest.mark.parametrize(
    "tree",
    [
        "[]",
        "{}",
        '{"error": false, "statements": []}',
        node('{"type": "INSERT_QUERY_NODE"}'),
        node('{"type": {"id": 1}}'),
        node('{"type": "SELECT_NODE", "new_key": []}'),
        node('{"type": "SELECT_NODE", "alias": {"class": "PARAMETER"}}'),
        node('{"type": "SELECT_NODE", "select_list": [{"class": "NEW"}]}'),
        node('{"type": "SELECT_NODE", "cte_map": {"map": [{}]}}'),
        node('{"type": "BASE_TABLE", "table_name": "meta"}'),
        '{"error": false, "statements": [{"named_param_map": [1]}]}',
        '{"error": false, "statements": ' + "[" * 2_000 + "]" * 2_000 + "}",
        "not json",
    ],
    ids=lambda tree: str(tree)[:70],
)
def test_tree_of_an_unknown_shape_is_refused(tree: str) -> None:
    with pytest.raises(QueryRefusedError):
        gate.check({"kinds": ["SELECT"], "parameters": False, "tree": tree}, PUBLIC)


def test_brackets_that_choke_the_parser_are_stopped_by_the_clock(service: Guarded) -> None:
    started = time.monotonic()
    with pytest.raises(QueryTimeoutError):
        service.query("SELECT " + "(" * 15_000, timeout_s=0.5)
    assert time.monotonic() - started < 4
    assert issubclass(QueryTimeoutError, StoreError)
    assert service.rows("SELECT 1") == [[1]]
