"""The gate in front of agent SQL: a query passes only if every part of its syntax tree is known to be safe.

Nothing is bound or run to decide. The text is parsed in the worker process, because a parser can be made to
run for a minute by 9,000 open brackets and only a process can be ended; the decision is made here, on the
tree. What is not on a list is refused, so a new feature of the engine is shut until someone opens it.
The answer is exactly the published tables that the query reads: only those are shipped to the worker.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

from evalpurse.store.errors import QueryFailedError, QueryRefusedError
from evalpurse.store.gate_functions import (
    FUNCTIONS,
    INSTEAD,
    OPERATORS,
    TABLE_FUNCTIONS,
    TYPES,
    WINDOWS,
    names,
)

SQL_CHARACTERS_MAX: Final = 20_000
VALUES_MAX: Final = 4_000
DEPTH_MAX: Final = 60

_EXPRESSIONS: Final = names(
    """
    BETWEEN CASE CAST COLLATE COLUMN_REF COMPARISON CONJUNCTION CONSTANT FUNCTION LAMBDA LAMBDA_REF
    OPERATOR POSITIONAL_REFERENCE STAR SUBQUERY TYPE WINDOW
    """
)
_QUERIES: Final = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "CTE_NODE", "RECURSIVE_CTE_NODE"})
_PARTS: Final = _QUERIES | names(
    """
    BASE_TABLE SUBQUERY JOIN TABLE_FUNCTION EXPRESSION_LIST EMPTY PIVOT ORDER_MODIFIER LIMIT_MODIFIER
    LIMIT_PERCENT_MODIFIER DISTINCT_MODIFIER ASCENDING DESCENDING ORDER_DEFAULT INVALID
    """
)
_OPERATORS: Final = names(
    """
    ARRAY_CONSTRUCTOR ARRAY_EXTRACT ARRAY_SLICE COMPARE_IN COMPARE_NOT_IN GROUPING_FUNCTION
    OPERATOR_COALESCE OPERATOR_IS_NOT_NULL OPERATOR_IS_NULL OPERATOR_NOT OPERATOR_TRY OPERATOR_UNPACK
    STRUCT_EXTRACT
    """
)

# Keys that hold names, flags and positions: plain values, or lists of them, never objects.
_PLAIN: Final = names(
    """
    aggregate_handling alias aliases catalog catalog_name class collation column column_name_alias
    column_names columns comparison_type cte_name delim_flipped distinct duplicate_eliminated_columns
    end exclude_clause exclude_list expected_names export_state function_name group_sets groups
    has_ignore_nulls ignore_nulls include_nulls index is_implicit is_legacy_function_call is_operator
    join_type limit_type materialized name nearest_approx nearest_count nearest_order_type null_order
    path query_location query_location_length ref_type relation_name schema schema_name setop_all
    setop_type start subquery_type syntax_type table table_name try_cast type type_name union_all
    unpivot_names using_columns with_ordinality
    """
)
# Keys that hold parts of the query: each is walked. `key` and `value` may also hold a name.
_WALKED: Final = names(
    """
    aggregates arg_orders arguments case_checks child children condition default_expr
    distinct_on_targets else_expr end_expr entries expr expression filter filter_expr from_table
    function group_expressions having input key key_targets left lhs limit lower map modifiers node
    offset offset_expr order_bys orders partitions payload_aggregates pivot_expressions pivots
    qualified_exclude_list qualified_name qualify query query_node ranking_expression rename_list
    replace_list right select_list source star_expr start_expr subquery then_expr type_expr upper value
    values when_expr where_clause
    """
)
# Keys that must be empty: a parameter, a snapshot of the past, the values of an enum type.
_EMPTY: Final = frozenset({"named_param_map", "at_clause", "pivot_enum", "expected_types"})
_SAMPLE: Final = names(
    """
    sample_size is_percentage method seed repeatable sample_rate
    """
)

_ASCII_LOWER: Final = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


def lower(name: str) -> str:
    """A name as the engine compares it: only ASCII letters are folded.

    Python's own folding maps the Kelvin sign to `k`, which the engine keeps apart: a CTE of that name would
    hide a table `k` from the gate and not from the engine.
    """
    return name.translate(_ASCII_LOWER)


def refuse_text(sql: str) -> None:
    """Refuses what need not even be parsed.

    Raises:
        QueryRefusedError: says what is wrong with the text.
    """
    if not sql.strip():
        raise QueryRefusedError("The query is empty.", hint="Write one SELECT, such as SELECT * FROM runs.")
    if len(sql) > SQL_CHARACTERS_MAX:
        raise QueryRefusedError(
            f"The query has {len(sql):,} characters; {SQL_CHARACTERS_MAX:,} are allowed.",
            hint="Ask in smaller steps.",
            characters=len(sql),
        )
    if "\0" in sql or any("\ud800" <= character <= "\udfff" for character in sql):
        raise QueryRefusedError("The query contains a NUL or a broken character.", hint="Send plain text.")


def check(parsed: Mapping[str, Any], published: Iterable[str]) -> frozenset[str]:
    """The published tables that a parsed query reads.

    `parsed` is what the worker's parser said: `error` (text), or `kinds` (one per statement), `parameters`
    (whether any) and `tree` (JSON text of the syntax tree).

    Raises:
        QueryFailedError: the text is not valid SQL.
        QueryRefusedError: names the first part that is not allowed, and what is.
    """
    if parsed.get("error"):
        raise QueryFailedError(str(parsed["error"]), hint="The query was not run.")
    kinds = parsed["kinds"]
    if kinds == ["MULTI"]:
        raise QueryRefusedError(
            "PIVOT without a list of values is not allowed.",
            hint="Name the values: PIVOT runs ON variant IN ('a', 'b') USING avg(score).",
        )
    if kinds != ["SELECT"]:
        found = f"{len(kinds)} statements" if len(kinds) != 1 else f"a statement of kind {kinds[0]}"
        raise QueryRefusedError(
            f"This is {found}; exactly one SELECT is allowed.",
            hint="Nothing can be changed here, and the schema is part of this tool's answer.",
        )
    if parsed["parameters"]:
        raise QueryRefusedError("Parameters are not allowed.", hint="Write the values into the query.")
    walk = _Walk(published)
    try:
        tree = json.loads(parsed["tree"])
        if tree["error"] is not False or len(tree["statements"]) != 1:
            reason = str(tree.get("error_message", "it has no syntax tree"))
            raise QueryRefusedError(
                f"This statement is not allowed: {reason}", hint="Write one plain SELECT."
            )
        walk.value(tree["statements"], frozenset(), 0)
    except RecursionError:
        _too_deep()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise QueryRefusedError(
            f"The query's syntax tree has a shape that is not known: {error!r}.",
            hint="Write it more plainly.",
        ) from error
    return frozenset(walk.tables)


def _too_deep() -> NoReturn:
    raise QueryRefusedError(
        f"The query is nested too deeply; {DEPTH_MAX} levels are allowed.", hint="Ask in smaller steps."
    )


class _Walk:
    """Visits every value of one syntax tree, and collects the base tables."""

    def __init__(self, published: Iterable[str]) -> None:
        self.published = frozenset(published)
        self.tables: set[str] = set()
        self.visited = 0

    def value(self, value: Any, ctes: frozenset[str], depth: int) -> None:
        if isinstance(value, dict):
            self._object(value, ctes, depth)
        elif isinstance(value, list):
            for item in value:
                self.value(item, ctes, depth)

    def _object(self, part: dict[str, Any], ctes: frozenset[str], depth: int) -> None:
        self.visited += 1
        if self.visited > VALUES_MAX:
            raise QueryRefusedError(
                f"The query has more than {VALUES_MAX:,} parts.", hint="Ask in smaller steps."
            )
        if "class" in part or "type" in part:
            depth += 1
        if depth > DEPTH_MAX:
            _too_deep()
        if "class" in part:
            self._expression(part, ctes, depth)
        elif "type" in part:
            self._part(part, ctes, depth)
        else:
            self._keys(part, ctes, depth)

    def _keys(self, part: dict[str, Any], ctes: frozenset[str], depth: int, *, but: str = "") -> None:
        """Walks the values of one object; an unknown key, or an object where none belongs, is refused."""
        for key, value in part.items():
            if key == but:
                continue
            if key in _WALKED:
                self.value(value, ctes, depth)
            elif key == "sample":
                _check_sample(value)
            elif key in _EMPTY:
                if value:
                    _refuse(f"'{key}'", "Write a plain SELECT.")
            elif key not in _PLAIN or not _is_plain(value):
                _refuse(f"'{key}'", "Write a plain SELECT.")

    def _expression(self, part: dict[str, Any], ctes: frozenset[str], depth: int) -> None:
        kind = part["class"]
        if kind not in _EXPRESSIONS:
            _refuse(f"An expression of kind {kind}", "Plain values, columns, functions and subqueries are.")
        if kind == "CONSTANT":
            return
        if kind in ("FUNCTION", "WINDOW"):
            _check_function(part, kind)
        elif kind == "TYPE":
            _check_type(part)
        elif kind == "OPERATOR" and part.get("type") not in _OPERATORS:
            _refuse(f"The operator {part.get('type')}", "Use a function instead.")
        self._keys(part, ctes, depth)

    def _part(self, part: dict[str, Any], ctes: frozenset[str], depth: int) -> None:
        kind = part["type"]
        if kind == "SHOW_REF":
            _refuse("SHOW, DESCRIBE or SUMMARIZE", "The schema lists tables, columns and meanings.")
        if not isinstance(kind, str) or kind not in _PARTS:
            _refuse(f"A part of kind {kind}", "Write one plain SELECT: nothing can be changed here.")
        if kind in _QUERIES:
            self._query(part, ctes, depth)
        elif kind == "TABLE_FUNCTION":
            self._table_function(part, ctes, depth)
        else:
            if kind == "BASE_TABLE":
                self._table(part, ctes)
            self._keys(part, ctes, depth)

    def _table(self, part: dict[str, Any], ctes: frozenset[str]) -> None:
        path = (part.get("qualified_name") or {}).get("path") or [
            name for key in ("catalog_name", "schema_name", "table_name") if (name := part.get(key))
        ]
        name = ".".join(lower(piece) for piece in path)
        if len(path) == 1 and name in ctes and not part.get("at_clause"):
            return
        if name not in self.published or len(path) != 1:
            near = difflib.get_close_matches(name.rpartition(".")[2], sorted(self.published), n=1)
            raise QueryRefusedError(
                f"There is no published table '{'.'.join(path)[:100]}'.",
                hint=(f"Did you mean {near[0]}? " if near else "")
                + f"Published, without a schema: {', '.join(sorted(self.published))}.",
                table=".".join(path)[:100],
            )
        self.tables.add(name)

    def _table_function(self, part: dict[str, Any], ctes: frozenset[str], depth: int) -> None:
        function = part.get("function")
        if not isinstance(function, dict) or function.get("class") != "FUNCTION":
            _refuse("This table function", f"{', '.join(sorted(TABLE_FUNCTIONS))} are.")
        name = _plain_name(function)
        if name not in TABLE_FUNCTIONS:
            raise QueryRefusedError(
                f"The table function '{name[:100]}' is not allowed.",
                hint=INSTEAD.get(name, f"These are: {', '.join(sorted(TABLE_FUNCTIONS))}."),
                function=name[:100],
            )
        self._keys(function, ctes, depth)
        self._keys(part, ctes, depth, but="function")

    def _query(self, part: dict[str, Any], ctes: frozenset[str], depth: int) -> None:
        """A CTE sees outer names and earlier siblings; itself only where it is recursive."""
        for entry in (part.get("cte_map") or {}).get("map", ()):
            info = entry["value"]
            if set(entry) != {"key", "value"}:
                _refuse("This CTE", "Write WITH name AS (SELECT ...).")
            bodies = [key for key in ("query_node", "query") if isinstance(info.get(key), dict)]
            if len(bodies) != 1:
                _refuse("A CTE without a body", "Write WITH name AS (SELECT ...).")
            self._keys(info, ctes, depth)
            ctes = ctes | {lower(entry["key"])}
        kind = part["type"]
        if kind == "RECURSIVE_CTE_NODE":
            self.value(part.get("right"), ctes | {lower(part["cte_name"])}, depth)
            part = {key: value for key, value in part.items() if key != "right"}
        elif kind == "CTE_NODE":
            self.value(part.get("query"), ctes, depth)
            ctes = ctes | {lower(part["cte_name"])}
            part = {key: value for key, value in part.items() if key != "query"}
        self._keys(part, ctes, depth, but="cte_map")


def _refuse(what: str, allowed: str) -> NoReturn:
    raise QueryRefusedError(f"{what} is not allowed.", hint=allowed)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return not isinstance(value, dict)


def _check_sample(sample: Any) -> None:
    if sample is None:
        return
    size = sample.get("sample_size") if isinstance(sample, dict) else None
    plain = isinstance(size, dict) and _is_plain(size.get("value"))
    if not plain or not set(sample) <= _SAMPLE:
        _refuse("This SAMPLE", "USING SAMPLE 10 ROWS, or 10 PERCENT, is.")


def _plain_name(part: dict[str, Any]) -> str:
    path = (part.get("qualified_name") or {}).get("path") or [part.get("function_name", "")]
    if len(path) != 1 or part.get("schema") or part.get("catalog"):
        _refuse(
            f"The function '{'.'.join(path)[:100]}'",
            f"Call it without a prefix, with its arguments in brackets: {str(path[-1])[:100]}(...).",
        )
    return lower(path[0])


def _check_function(part: dict[str, Any], kind: str) -> None:
    name = _plain_name(part)
    if part.get("export_state"):
        _refuse("EXPORT_STATE", "Aggregate in one query.")
    allowed = WINDOWS if kind == "WINDOW" else FUNCTIONS
    if name in allowed or (kind == "FUNCTION" and name in OPERATORS):
        return
    near = difflib.get_close_matches(name, sorted(allowed), n=3, cutoff=0.6)
    raise QueryRefusedError(
        f"The function '{name[:100]}' is not allowed{' as a window' if kind == 'WINDOW' else ''}.",
        hint=INSTEAD.get(name)
        or (f"Nearest allowed: {', '.join(near)}." if near else "Nothing replaces it."),
        function=name[:100],
    )


def _check_type(part: dict[str, Any]) -> None:
    path = (part.get("qualified_name") or {}).get("path") or [part.get("type_name", "")]
    name = ".".join(path)
    if len(path) == 1 and not part.get("schema") and not part.get("catalog") and lower(name) in TYPES:
        return
    near = difflib.get_close_matches(lower(name), sorted(TYPES), n=3)
    raise QueryRefusedError(
        f"The type '{name[:100]}' is not allowed.",
        hint=f"Nearest allowed: {', '.join(near)}." if near else "Numbers, text, times, JSON and lists are.",
        type=name[:100],
    )
