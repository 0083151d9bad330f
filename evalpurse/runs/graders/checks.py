"""Graders that only look at the answer: pure functions from an answer to a verdict."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from evalpurse.runs.graders.answer import Answer, MissingPathError, NotJsonError
from evalpurse.runs.graders.spec import GraderSpec

_SHOWN_CHARS = 120
# A number may be glued to a unit or a currency ("$42.50", "42km"), but not to a word or number before it:
# the 5 of "utf8-5" or the -3 of "5-3" would be misread. Commas group thousands only where they do it fully.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.])(?:(?<![\w)])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))"
    r"(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
)


class Verdict(NamedTuple):
    """The score in [0, 1] of one grader, and why in one line."""

    value: float
    detail: str


def shown(value: Any) -> str:
    """A value in one short line."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"


def exact(spec: GraderSpec, answer: Answer) -> Verdict:
    """1 when the answer equals the expected text, or as JSON the expected value."""
    if isinstance(spec.expected, str):
        wanted, given = spec.expected, answer.text
        if spec.strip:
            wanted, given = wanted.strip(), given.strip()
        if spec.ignore_case:
            wanted, given = wanted.casefold(), given.casefold()
        if wanted == given:
            return Verdict(1.0, "equal")
        return Verdict(0.0, f"expected {shown(wanted)}, got {shown(given)}")
    return _json_verdict(spec.expected, answer, path="", subset=False)


def contains(spec: GraderSpec, answer: Answer) -> Verdict:
    """1 when all (or any) of the expected texts are in the answer."""
    wanted = spec.expected if isinstance(spec.expected, list) else [spec.expected]
    text = answer.text.casefold() if spec.ignore_case else answer.text
    missing = [part for part in wanted if (part.casefold() if spec.ignore_case else part) not in text]
    if not missing:
        return Verdict(1.0, "all found")
    if spec.match == "any" and len(missing) < len(wanted):
        return Verdict(1.0, f"{len(wanted) - len(missing)} of {len(wanted)} found")
    return Verdict(0.0, f"not found: {', '.join(shown(part) for part in missing[:5])}")


def numeric(spec: GraderSpec, answer: Answer) -> Verdict:
    """1 when |x - expected| <= max(abs_tolerance, rel_tolerance * |expected|).

    x is the number at `path` of a JSON answer, or else the last number of the answer's text.
    """
    found = _number_at(answer, spec.path) if spec.path else _last_number(answer.text)
    if isinstance(found, str):
        return Verdict(0.0, found)
    tolerance = max(spec.abs_tolerance, spec.rel_tolerance * abs(spec.expected))
    distance = abs(found - spec.expected)
    if distance <= tolerance:
        return Verdict(1.0, f"{found:.12g} is within {tolerance:.6g} of {spec.expected:.12g}")
    return Verdict(
        0.0, f"{found:.12g} is {distance:.6g} away from {spec.expected:.12g}; allowed {tolerance:.6g}"
    )


def _last_number(text: str) -> float | str:
    last = None
    for number in _NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")):
        last = number
    return _float(last.group().replace(",", "")) if last else "no number in the answer"


def _number_at(answer: Answer, path: str) -> float | str:
    try:
        value = answer.at(path)
    except (NotJsonError, MissingPathError) as error:
        return str(error)
    if isinstance(value, str) and (number := _NUMBER.fullmatch(value.strip())):
        return _float(number.group().replace(",", ""))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"the answer has {shown(value)} at '{path}', which is not a number"
    return _float(value)


def _float(number: str | float) -> float | str:
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    return value if math.isfinite(value) else f"the number {shown(number)} is too large to compare"


def json_expected(spec: GraderSpec, answer: Answer) -> Verdict:
    """1 when the JSON answer (at `path`) contains the expected value, or with `exact` equals it."""
    return _json_verdict(spec.expected, answer, path=spec.path, subset=not spec.exact)


def _json_verdict(expected: Any, answer: Answer, *, path: str, subset: bool) -> Verdict:
    try:
        value = answer.at(path)
    except (NotJsonError, MissingPathError) as error:
        return Verdict(0.0, str(error))
    difference = difference_of(expected, value, subset=subset)
    return Verdict(0.0, difference) if difference else Verdict(1.0, "contained" if subset else "equal")


def difference_of(expected: Any, value: Any, *, subset: bool, place: str = "") -> str:
    """The first difference between two JSON values; empty when there is none.

    With `subset`, objects may have more keys than expected; lists have the same length either way. Numbers
    are equal by value (1 and 1.0), and true is not 1.
    """
    here = place or "the answer"
    if isinstance(expected, dict) and isinstance(value, dict):
        missing = [key for key in expected if key not in value]
        extra = [] if subset else [key for key in value if key not in expected]
        if missing or extra:
            what = "lacks" if missing else "has the extra"
            return f"{here} {what} {shown((missing or extra)[0])}"
        pairs = [(f"{place}.{key}" if place else str(key), expected[key], value[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(value, list):
        if len(expected) != len(value):
            return f"{here} has {len(value)} items, expected {len(expected)}"
        pairs = [
            (f"{place}.{n}" if place else str(n), *both)
            for n, both in enumerate(zip(expected, value, strict=True))
        ]
    else:
        same = isinstance(expected, bool) == isinstance(value, bool) and expected == value
        return "" if same else f"{here} is {shown(value)}, expected {shown(expected)}"
    for inner, wanted, given in pairs:
        if difference := difference_of(wanted, given, subset=subset, place=inner):
            return difference
    return ""
