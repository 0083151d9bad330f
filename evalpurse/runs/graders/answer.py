"""The answer of a run as graders see it: text, and JSON when it is some."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from evalpurse.runs.content import check_depth
from evalpurse.runs.sandboxes.protocol import Output

_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(.*)\n[ \t]*```\s*", re.DOTALL | re.IGNORECASE)


class NotJsonError(ValueError):
    """The answer is not JSON."""


class MissingPathError(ValueError):
    """The JSON answer has nothing at the path."""


@dataclass(frozen=True)
class Answer:
    """What the harness left in `answer.txt` or `answer.json`; bytes that are not UTF-8 are replaced."""

    content: bytes
    is_json: bool
    is_cut: bool

    @classmethod
    def of(cls, output: Output) -> Answer | None:
        """None when there is no answer."""
        if output.answer is None:
            return None
        return cls(output.answer, output.answer_is_json, "answer" in output.truncated)

    @cached_property
    def text(self) -> str:
        """The text; for an `answer.json` that holds one string, that string."""
        raw = self.content.decode(errors="replace")
        if self.is_json:
            try:
                value = self.json
            except NotJsonError:
                return raw
            return value if isinstance(value, str) else raw
        return raw

    @cached_property
    def json(self) -> Any:
        """The JSON value; one code fence around it is allowed, as models like to write it.

        Raises:
            NotJsonError: says where it stops being JSON.
        """
        raw = self.content.decode(errors="replace")
        fenced = None if self.is_json else _FENCED.fullmatch(raw)
        try:
            value = json.loads(fenced[1] if fenced else raw, parse_constant=_refuse_constant)
            check_depth(value)
        except (ValueError, RecursionError) as error:
            raise NotJsonError(f"the answer is not JSON: {error}") from error
        return value

    def at(self, path: str) -> Any:
        """The value at a path of the JSON answer: `a.b.0`, or `/a/b/0` as in RFC 6901; all of it for ''.

        Raises:
            NotJsonError, MissingPathError: say what is missing.
        """
        value = self.json
        for part in _parts(path):
            if isinstance(value, dict) and part in value:
                value = value[part]
            elif isinstance(value, list) and re.fullmatch(r"[0-9]{1,9}", part) and int(part) < len(value):
                value = value[int(part)]
            else:
                raise MissingPathError(f"the answer has nothing at '{path}' (stopped at '{part}')")
        return value


def _parts(path: str) -> list[str]:
    if not path:
        return []
    if path.startswith("/"):
        return [part.replace("~1", "/").replace("~0", "~") for part in path[1:].split("/")]
    return path.split(".")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
