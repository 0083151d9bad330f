"""Named SQL statements, read once from the `.sql` files of a folder.

A file is a list of `-- name: x` lines, each followed by a sentence in `--` comments and one statement.
Values are always parameters (`$name`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import NamedTuple

from evalpurse.store.errors import StatementError

_HEADER = re.compile(r"^-- name: ([a-z][a-z0-9_]*)\n", re.MULTILINE)


class Statement(NamedTuple):
    """One statement, what it is for, and the parameters that it takes."""

    name: str
    sentence: str
    sql: str
    parameters: frozenset[str]


def load(package: str) -> Mapping[str, Statement]:
    """Every statement of the `.sql` files in a package folder, by name.

    Raises:
        StatementError: a name is used twice, or a statement has no sentence.
    """
    found: dict[str, Statement] = {}
    for file in sorted(files(package).iterdir(), key=lambda entry: entry.name):
        if not file.name.endswith(".sql"):
            continue
        _, *parts = _HEADER.split(file.read_text(encoding="utf-8"))
        for name, body in zip(parts[::2], parts[1::2], strict=True):
            comment = re.match(r"(?:--.*\n)*", body)
            sentence = " ".join(
                line.strip("- ") for line in (comment.group() if comment else "").splitlines()
            )
            sql = body[comment.end() if comment else 0 :].strip().rstrip(";")
            if name in found or not sentence or not sql:
                raise StatementError(
                    f"{file.name}: '{name}' is a duplicate, or lacks its sentence or its SQL."
                )
            found[name] = Statement(name, sentence, sql, frozenset(re.findall(r"\$([a-z_][a-z0-9_]*)", sql)))
    return found
