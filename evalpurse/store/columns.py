"""From rows in memory to Arrow columns, one table a record type.

The columns of a table are the fields of its record. Values are taken by one `attrgetter` a row and checked
by Arrow a column, so that a batch costs microseconds a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import datetime
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import pyarrow as pa  # type: ignore[import-untyped]

from evalpurse.store.errors import RowsRefusedError
from evalpurse.store.records import Record

_ARROW: dict[Any, pa.DataType] = {
    bool: pa.bool_(),
    datetime: pa.timestamp("us", tz="UTC"),
    float: pa.float64(),
    int: pa.int64(),
    list[str]: pa.list_(pa.string()),
    str: pa.string(),
}


class Column(NamedTuple):
    """One field of a record; `optional` columns may hold None."""

    name: str
    kind: type
    type: pa.DataType
    optional: bool


class Layout(NamedTuple):
    """How a record type lies in its table. `names` is the quoted list of columns for SQL."""

    table: str
    columns: tuple[Column, ...]
    values: Callable[[Record], tuple[Any, ...]]
    schema: pa.Schema
    names: str


_layouts: dict[type[Record], Layout] = {}


def layout_of(record: type[Record]) -> Layout:
    """The layout of a record type, worked out once from its annotations.

    Raises:
        RowsRefusedError: it is not a record type.
    """
    if record not in _layouts:
        if not hasattr(record, "TABLE"):
            raise RowsRefusedError(f"{record!r} is not a record of the store.", hint="See store/records.py.")
        _layouts[record] = _layout(record)
    return _layouts[record]


def _layout(record: type[Record]) -> Layout:
    hints = get_type_hints(record)
    columns = tuple(_column(field.name, hints[field.name]) for field in fields(record))  # type: ignore[arg-type]
    return Layout(
        table=record.TABLE,
        columns=columns,
        values=attrgetter(*(column.name for column in columns)),
        schema=pa.schema([pa.field(column.name, column.type) for column in columns]),
        names=", ".join(f'"{column.name}"' for column in columns),
    )


def _column(name: str, hint: Any) -> Column:
    choices = get_args(hint)
    optional = NoneType in choices
    kind = next(choice for choice in choices if choice is not NoneType) if optional else hint
    return Column(name, get_origin(kind) or kind, _ARROW[kind], optional)


def arrow_table(layout: Layout, rows: Sequence[Record]) -> pa.Table:
    """Rows of one record type as an Arrow table, in the order given.

    Raises:
        RowsRefusedError: a value is missing or of another type than its column; names the column.
    """
    by_column = zip(*map(layout.values, rows), strict=True)
    arrays = [
        _array(layout, column, values) for column, values in zip(layout.columns, by_column, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=layout.schema)


def _array(layout: Layout, column: Column, values: tuple[Any, ...]) -> pa.Array:
    """One column. Arrow alone would cut 1.9 to 1, take bytes for text and a number for a time."""
    for kind in set(map(type, values)) - {column.kind, NoneType}:
        integer_for_float = column.kind is float and kind is int
        if kind is bool or not (issubclass(kind, column.kind) or integer_for_float):
            raise RowsRefusedError(f"{layout.table}.{column.name} takes {column.type}, not {kind.__name__}.")
    try:
        array = pa.array(values, column.type)
    except UnicodeEncodeError:
        array = pa.array(map(_valid_text, values), column.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise RowsRefusedError(f"{layout.table}.{column.name} takes {column.type}: {error}") from error
    if array.null_count and not column.optional:
        raise RowsRefusedError(
            f"{layout.table}.{column.name} is None in {array.null_count} of {len(values)} rows."
        )
    if column.kind is datetime and any(at is not None and at.tzinfo is None for at in values):
        raise RowsRefusedError(f"{layout.table}.{column.name} has a time without a time zone; use UTC.")
    return array


def _valid_text(value: Any) -> Any:
    """Half of a surrogate pair (a file name in an error's text) becomes U+FFFD: better than no row."""
    if isinstance(value, list):
        return [_valid_text(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return value
