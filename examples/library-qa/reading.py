"""How the stand-in model reads: small procedures that find an answer in the snippets it was sent, or not.

It knows Python's layout (a definition starts at the margin, its body is indented) and nothing about any
library. When the decisive lines were cut or dropped it answers from what is left, which may be wrong.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise

from questions import Kind, Question

HEADER = re.compile(r"^=== (\S+) lines (\d+)-(\d+) of (\d+) ===$", re.MULTILINE)
SIGNATURE_LINES_MAX = 60


@dataclass(frozen=True)
class Snippet:
    """Consecutive lines of a file, as shown; `offset` is its place in the whole context, in characters."""

    path: str
    first: int
    total: int
    lines: Sequence[str]
    offset: int

    @property
    def last(self) -> int:
        return self.first + len(self.lines) - 1


@dataclass(frozen=True)
class Found:
    """An answer, and where in the context its decisive line stands, in characters."""

    answer: str
    offset: int


@dataclass(frozen=True)
class ReadOn:
    """The snippet breaks off before the answer; the next line to read."""

    path: str
    line: int


def snippets(context: str) -> list[Snippet]:
    """The documents of a context; neighbouring windows of one file become one snippet."""
    headers = list(HEADER.finditer(context))
    ends = [match.start() for match in headers[1:]] + [len(context)] * bool(headers)
    found = []
    for match, end in zip(headers, ends, strict=True):
        path, first, last, total = match[1], int(match[2]), int(match[3]), int(match[4])
        # The header says how many lines are the document's; whatever follows them is not.
        lines = context[match.end() + 1 : end].split("\n")[: last - first + 1]
        found.append(Snippet(path, first, total, lines, match.end() + 1))
    return _joined(found)


def read(question: Question, shown: Iterable[Snippet]) -> Found | ReadOn | None:
    """Reads the snippets of the module that the question names; None when none of them tells."""
    stem = question.module.replace(".", "/")
    read_on: ReadOn | None = None
    for snippet in shown:
        if snippet.path not in (f"{stem}.py", f"{stem}/__init__.py"):
            continue
        found = _read_snippet(question, snippet)
        if isinstance(found, Found):
            return found
        read_on = read_on or found
    return read_on


def pattern(question: Question) -> str:
    """The regular expression that a search for the question's name starts with."""
    match question.kind:
        case Kind.BASES:
            return rf"class {question.name}\b"
        case Kind.CONSTANT:
            return rf"{question.name}\s*[:=]"
        case _:
            return rf"def {question.name}\b"


def defines(question: Question, line: str) -> bool:
    """Whether a line, as a search shows it, starts the definition that is asked for."""
    return re.match(rf"(?:async )?{pattern(question)}", line) is not None


def _joined(found: Sequence[Snippet]) -> list[Snippet]:
    ordered = sorted(found, key=lambda snippet: (snippet.path, snippet.first))
    joined = ordered[:1]
    for before, snippet in pairwise(ordered):
        previous = joined[-1]
        if before.path == snippet.path and snippet.first <= previous.last + 1:
            new = snippet.lines[max(0, previous.last + 1 - snippet.first) :]
            joined[-1] = Snippet(
                previous.path, previous.first, previous.total, [*previous.lines, *new], previous.offset
            )
        else:
            joined.append(snippet)
    return joined


def _read_snippet(question: Question, snippet: Snippet) -> Found | ReadOn | None:
    for index, line in enumerate(snippet.lines):
        if not defines(question, line):
            continue
        answer = _answer(question, snippet, index)
        if isinstance(answer, ReadOn) or answer is None:
            return answer
        offset = snippet.offset + sum(len(before) + 1 for before in snippet.lines[:index])
        return Found(answer, offset)
    return None


def _answer(question: Question, snippet: Snippet, index: int) -> str | ReadOn | None:
    lines = snippet.lines[index:]
    match question.kind:
        case Kind.CONSTANT:
            return _assigned_value(lines[0])
        case Kind.BASES:
            return _bases(lines)
        case Kind.PARAMETERS:
            return str(len(_parameters(lines)))
        case Kind.DEFAULT:
            return _parameters(lines).get(question.detail)
        case Kind.SUMMARY:
            return _first_docstring_line(lines[_header_length(lines) :])
        case Kind.RAISES:
            return _raised(snippet, index)


def _header(lines: Sequence[str]) -> tuple[ast.stmt | None, int]:
    """A definition parsed from its first lines without its body, and how many lines it takes."""
    for count in range(1, min(len(lines), SIGNATURE_LINES_MAX) + 1):
        source = "\n".join(lines[:count])
        for body in ("", "\n pass"):
            try:
                return ast.parse(source + body).body[0], count
            except (SyntaxError, IndexError):
                continue
    return None, 1


def _header_length(lines: Sequence[str]) -> int:
    return _header(lines)[1]


def _parameters(lines: Sequence[str]) -> dict[str, str | None]:
    """Parameter names with the source of their defaults, guessed from the first line if it is cut there."""
    node, _ = _header(lines)
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return _visible_parameters(lines[0])
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    pairs: list[tuple[ast.arg, ast.expr | None]] = [(arg, None) for arg in positional[:without]]
    pairs += zip(positional[without:], arguments.defaults, strict=True)
    pairs += [(arguments.vararg, None)] if arguments.vararg else []
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    pairs += [(arguments.kwarg, None)] if arguments.kwarg else []
    return {arg.arg: None if default is None else ast.unparse(default) for arg, default in pairs}


def _visible_parameters(line: str) -> dict[str, str | None]:
    inside = line.partition("(")[2].rstrip(":").rstrip(")")
    parts = [part.strip() for part in inside.split(",") if part.strip(" *./")]
    visible: dict[str, str | None] = {}
    for part in parts:
        name, _, default = part.partition("=")
        visible[name.partition(":")[0].strip(" *")] = default.strip() or None
    return visible


def _bases(lines: Sequence[str]) -> str:
    node, _ = _header(lines)
    if isinstance(node, ast.ClassDef):
        names = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    else:
        inside = lines[0].partition("(")[2].rstrip(":").rstrip(")")
        names = [name.strip().rpartition(".")[2] for name in inside.split(",") if name.strip()]
    return json.dumps({"bases": names or ["object"]})


def _assigned_value(line: str) -> str | None:
    source = line.partition("=")[2].strip()
    try:
        return repr(ast.literal_eval(source))
    except (SyntaxError, ValueError):
        return source or None


def _first_docstring_line(lines: Sequence[str]) -> str | None:
    body = list(dropwhile(lambda line: not line.strip(), lines))
    opening = re.compile(r"\s+[rRuU]?(\"\"\"|'''|\"|')(.*)")
    if not body or not (match := opening.match(body[0])):
        return None
    text = match[2].split(match[1])[0].rstrip("\\").strip()
    if not text and len(body) > 1:
        text = body[1].split(match[1])[0].strip()
    return text or None


def _raised(snippet: Snippet, index: int) -> str | ReadOn | None:
    start = index + _header_length(snippet.lines[index:])
    for line in snippet.lines[start:]:
        if line and not line[0].isspace() and line[0] not in ")#":
            return None
        if match := re.match(r"\s+raise ((?:\w+\.)*[A-Z]\w*)", line):
            return match[1].rpartition(".")[2]
    if snippet.last < snippet.total:
        return ReadOn(snippet.path, snippet.last + 1)
    return None
