"""What a grader is told. One flat model for all kinds, so that its JSON schema needs no references or unions.

Which fields a kind takes is one table, and a field that would have no effect is refused: a case author who
sets it believes in something that will not happen.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from evalpurse.runs.content import canonical_json, checked_files

Kind = Literal["exact", "contains", "regex", "numeric", "json", "command"]

PATTERN_CHARS_MAX = 2_000
SCHEMA_BYTES_MAX = 256_000
NUMBER_MAX = 1e300
BOUNDED_WALL_S = 10.0
"""The longest that one regular expression or JSON schema check may take on a busy machine."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "exact": ("expected", "ignore_case", "strip"),
    "contains": ("expected", "match", "ignore_case"),
    "regex": ("pattern", "flags", "full"),
    "numeric": ("expected", "abs_tolerance", "rel_tolerance", "path"),
    "json": ("expected", "exact", "json_schema", "path"),
    "command": ("command", "files", "timeout_s"),
}
_COMMON = ("type", "name", "weight")


class GraderSpec(BaseModel):
    """One grader of a case."""

    model_config = ConfigDict(extra="forbid")

    type: Annotated[
        Kind,
        Field(
            description="exact: the answer equals `expected`. contains: it contains `expected`. "
            "regex: `pattern` is found in it. numeric: its last number is within the tolerances of "
            "`expected`. json: it matches `expected` or `json_schema`. command: `command` decides by exit "
            "code, reward.json or reward.txt."
        ),
    ]
    name: Annotated[
        str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9._-]{0,79})?$", description="Unique in its case.")
    ] = ""
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False, description="Share in the score.")] = (
        1.0
    )
    expected: Annotated[
        Any,
        Field(
            description="exact: text or JSON; contains: text or list of texts; numeric: number; json: JSON."
        ),
    ] = None
    ignore_case: Annotated[bool, Field(description="exact, contains: ignore upper and lower case.")] = False
    strip: Annotated[bool, Field(description="exact: ignore spaces and line ends around the texts.")] = True
    match: Annotated[
        Literal["all", "any"], Field(description="contains: whether all of a list must be found, or one.")
    ] = "all"
    pattern: Annotated[
        str, Field(max_length=PATTERN_CHARS_MAX, description="regex: a Python regular expression.")
    ] = ""
    flags: Annotated[
        str, Field(pattern=r"^[aimsx]*$", description="regex: any of the letters a i m s x.")
    ] = ""
    full: Annotated[bool, Field(description="regex: the whole answer must match.")] = False
    abs_tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False, description="numeric: absolute.")] = 0.0
    rel_tolerance: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="numeric: as a share of `expected`.")
    ] = 0.0
    path: Annotated[
        str, Field(max_length=500, description="numeric, json: place in a JSON answer, as a.b.0 or /a/b/0.")
    ] = ""
    exact: Annotated[bool, Field(description="json: equal to `expected`, not only containing it.")] = False
    json_schema: Annotated[Any, Field(description="json: a JSON Schema instead of `expected`.")] = None
    command: Annotated[
        str,
        Field(max_length=20_000, description="command: a shell command, run after the harness has ended."),
    ] = ""
    files: Annotated[
        dict[str, str],
        Field(description="command: files for it alone, path to text ('base64:...' for binary)."),
    ] = {}
    timeout_s: Annotated[
        float, Field(gt=0, le=3_600, allow_inf_nan=False, description="command: time limit in seconds.")
    ] = 120.0

    @model_validator(mode="after")
    def _fields_fit_the_type(self) -> GraderSpec:
        taken = FIELDS[self.type]
        fields = type(self).model_fields
        odd = [
            name
            for name, field in fields.items()
            if name not in (*_COMMON, *taken) and getattr(self, name) != field.default
        ]
        if odd:
            raise ValueError(
                f"a grader of type {self.type} does not take {', '.join(odd)}; it takes {', '.join(taken)}, "
                "and name and weight"
            )
        _CHECKS[self.type](self)
        if not self.name:
            self.name = self.type
        return self

    def content(self) -> dict[str, Any]:
        """The fields that have a meaning for this type; equal graders give equal content."""
        names = [*_COMMON, *FIELDS[self.type]]
        if self.type == "json":
            names.remove("json_schema" if self.json_schema is None else "expected")
        return {name: getattr(self, name) for name in names}

    @property
    def time_limit_s(self) -> float:
        """The longest that this grader can take; 0 for those that only look at the answer."""
        if self.type == "command":
            return self.timeout_s
        return BOUNDED_WALL_S if self.type == "regex" or self.json_schema is not None else 0.0


def _check_exact(spec: GraderSpec) -> None:
    _need(spec, "expected")
    if not isinstance(spec.expected, str) and (spec.ignore_case or not spec.strip):
        raise ValueError("ignore_case and strip need an `expected` that is text")


def _check_contains(spec: GraderSpec) -> None:
    _need(spec, "expected")
    wanted = spec.expected if isinstance(spec.expected, list) else [spec.expected]
    if not wanted or not all(isinstance(text, str) and text for text in wanted):
        raise ValueError("`expected` must be a text, or a list of texts, none of them empty")


def _check_regex(spec: GraderSpec) -> None:
    if not spec.pattern:
        raise ValueError("a grader of type regex needs `pattern`")
    flags = 0
    for letter in spec.flags:
        flags |= getattr(re, letter.upper())
    try:
        with warnings.catch_warnings():  # of a meaning that Python may change one day
            warnings.simplefilter("ignore")
            re.compile(spec.pattern, flags)
    except (re.error, ValueError, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"`pattern` is not a valid regular expression: {error}") from error


def _check_numeric(spec: GraderSpec) -> None:
    number = spec.expected
    if number is None:
        raise ValueError("a grader of type numeric needs `expected`")
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number != number:  # noqa: PLR0124 - NaN, also for a huge int
        raise ValueError(f"`expected` must be a number, not {number!r}")
    if abs(number) > NUMBER_MAX:
        raise ValueError(f"`expected` is too large to compare: at most {NUMBER_MAX:g} either way")


def _check_json(spec: GraderSpec) -> None:
    if spec.json_schema is None:
        if "expected" not in spec.model_fields_set:
            raise ValueError("a grader of type json needs `expected` or `json_schema`")
        _check_value(spec.expected)
        return
    if spec.expected is not None or spec.exact:
        raise ValueError("a grader of type json takes `expected` (with `exact`) or `json_schema`, not both")
    _check_schema(spec.json_schema)


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict):
        raise ValueError("`json_schema` must be a JSON object")  # noqa: TRY004 - pydantic reports ValueError
    size_bytes = len(canonical_json(schema))
    if size_bytes > SCHEMA_BYTES_MAX:
        raise ValueError(f"`json_schema` has {size_bytes:,} bytes; at most {SCHEMA_BYTES_MAX:,} are allowed")
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        raise ValueError(
            f"`json_schema` is not a valid JSON Schema at {error.json_path}: {error.message[:300]}"
        ) from error
    except (RecursionError, OverflowError) as error:
        raise ValueError(f"`json_schema` cannot be checked: {error}") from error
    for key, value in _members(schema):
        if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str) and value[:1] != "#":
            raise ValueError(
                f"`json_schema` refers to {value!r}; only references inside it ('#...') are followed"
            )


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield key, child
            yield from _members(child)
    elif isinstance(value, list):
        for child in value:
            yield from _members(child)


def _check_command(spec: GraderSpec) -> None:
    if not spec.command.strip() or "\0" in spec.command:
        raise ValueError("a grader of type command needs `command`, without NUL characters")
    checked_files(spec.files)


def _need(spec: GraderSpec, name: str) -> None:
    if getattr(spec, name) is None:
        raise ValueError(f"a grader of type {spec.type} needs `{name}`")
    _check_value(getattr(spec, name))


def _check_value(value: Any) -> None:
    try:
        canonical_json(value)
    except ValueError as error:
        raise ValueError(f"`expected`: {error}") from error


_CHECKS = {
    "exact": _check_exact,
    "contains": _check_contains,
    "regex": _check_regex,
    "numeric": _check_numeric,
    "json": _check_json,
    "command": _check_command,
}
