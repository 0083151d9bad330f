"""The cases: questions about the standard library of the running interpreter, with computed answers.

Nothing expected is typed in. A fact is read from a module's source (`ast`) and becomes a case only when
the imported module says the same (`inspect`). The selection is the same on every run of one interpreter.

    python make_cases.py        prints the cases as JSON lines
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from questions import Kind, Question

SUITE = "library-qa"
CASES_PER_KIND = 9
CASES_PER_MODULE = 2
PACKAGES_PER_KIND = 2  # so that code that forgets about packages is found out
ANSWER_CHARS_MAX = 90
TIMEOUT_S = 120.0

# Modules and packages that import anywhere without side effects; those without source here are left out.
MODULES = """
argparse ast asyncio.base_events asyncio.queues base64 bdb calendar cmd code codecs collections
concurrent.futures._base configparser contextlib copy csv ctypes ctypes.util dataclasses datetime dbm
decimal difflib dis doctest email email.message email.utils encodings enum filecmp fileinput fractions
ftplib functools getopt gettext glob gzip heapq html html.parser http http.client http.cookiejar http.server
imaplib importlib importlib.metadata inspect ipaddress json json.decoder json.encoder linecache locale
logging logging.config logging.handlers lzma mailbox mimetypes multiprocessing multiprocessing.pool netrc
numbers optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib pprint profile pstats
pyclbr queue quopri random re reprlib runpy sched shelve shlex shutil smtplib socket socketserver sqlite3
ssl statistics string subprocess sysconfig tarfile tempfile textwrap threading timeit tokenize tomllib trace
traceback types typing unittest unittest.case unittest.mock urllib.parse urllib.request urllib.robotparser
uuid venv warnings wave weakref webbrowser wsgiref.util xml.dom.minidom xml.sax xml.sax.saxutils zipapp
zipfile zoneinfo
""".split()  # noqa: SIM905 - a hundred names read better as words


@dataclass(frozen=True)
class Fact:
    """A question, its true answer as JSON can hold it, and whether its module is a package."""

    question: Question
    answer: Any
    is_package: bool


@dataclass(frozen=True)
class Source:
    """A module as text and as it is when imported."""

    module: ModuleType
    tree: ast.Module
    is_package: bool

    @property
    def name(self) -> str:
        return self.module.__name__


def build_cases() -> list[dict[str, Any]]:
    """The cases of the suite, in the form that the tool `create_cases` takes."""
    return [_case(fact) for fact in choose(facts())]


def facts() -> list[Fact]:
    """Every fact of every kind that the modules offer."""
    found: list[Fact] = []
    for source in filter(None, map(_source, MODULES)):
        found += _function_facts(source)
        found += _class_facts(source)
        found += _constant_facts(source)
    return found


def choose(available: list[Fact]) -> list[Fact]:
    """`CASES_PER_KIND` of each kind, in an order that only the questions' text decides.

    At most `CASES_PER_MODULE` of a module, and the first `PACKAGES_PER_KIND` of each kind are of packages.
    """
    order = sorted(available, key=lambda fact: hashlib.sha256(fact.question.text.encode()).digest())
    per_kind: Counter[Kind] = Counter()
    per_module: Counter[str] = Counter()
    chosen: list[Fact] = []
    for packages_only, kind_max in ((True, PACKAGES_PER_KIND), (False, CASES_PER_KIND)):
        for fact in order:
            kind, module = fact.question.kind, fact.question.module
            if packages_only > fact.is_package or fact in chosen:
                continue
            if per_kind[kind] < kind_max and per_module[module] < CASES_PER_MODULE:
                per_kind[kind] += 1
                per_module[module] += 1
                chosen.append(fact)
    return [fact for fact in order if fact in chosen]


def _source(name: str) -> Source | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a module will go away some day is no fact about it
            module = importlib.import_module(name)
    except ImportError:
        return None
    file = getattr(module, "__file__", None) or ""
    if not file.endswith(".py") or not Path(file).is_relative_to(Path(sysconfig.get_path("stdlib"))):
        return None
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    return Source(module, ast.parse(text), Path(file).name == "__init__.py")


def _function_facts(source: Source) -> Iterator[Fact]:
    for node in source.tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.decorator_list:
            continue
        function = getattr(source.module, node.name, None)
        # The live object must be this very definition: not a faster one in C, not one of another branch.
        if not inspect.isfunction(function) or function.__code__.co_firstlineno != node.lineno:
            continue
        parameters = inspect.signature(function).parameters
        if len(parameters) >= 2:
            yield _fact(source, Kind.PARAMETERS, node.name, len(parameters))
        for name, default in _literal_defaults(node.args):
            if parameters[name].default == default and len(repr(default)) <= 30:
                yield _fact(source, Kind.DEFAULT, node.name, default, name)
        summary = (inspect.getdoc(function) or "").split("\n")[0].strip()
        if 15 <= len(summary) <= ANSWER_CHARS_MAX and "\\" not in summary:
            yield _fact(source, Kind.SUMMARY, node.name, summary)
        if exception := _only_exception(node):
            yield _fact(source, Kind.RAISES, node.name, exception)


def _class_facts(source: Source) -> Iterator[Fact]:
    for node in source.tree.body:
        if not isinstance(node, ast.ClassDef) or node.decorator_list or node.keywords or not node.bases:
            continue
        live = getattr(source.module, node.name, None)
        written = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        if isinstance(live, type) and [base.__name__ for base in live.__bases__] == written:
            yield _fact(source, Kind.BASES, node.name, {"bases": written})


def _constant_facts(source: Source) -> Iterator[Fact]:
    assigned = [
        (node.targets[0].id, node.value)
        for node in source.tree.body
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    ]
    times = Counter(name for name, _ in assigned)
    for name, node in assigned:
        if times[name] > 1 or not isinstance(node, ast.Constant) or node.lineno != node.end_lineno:
            continue
        value = node.value
        if (
            type(value) in (int, str)
            and 2 <= len(repr(value)) <= 40
            and getattr(source.module, name, None) == value
        ):
            yield _fact(source, Kind.CONSTANT, name, value)


def _literal_defaults(arguments: ast.arguments) -> Iterator[tuple[str, Any]]:
    """Parameters whose default is written as a literal other than None."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    for parameter, default in zip(
        [*positional, *arguments.kwonlyargs], [*defaults, *arguments.kw_defaults], strict=True
    ):
        if isinstance(default, ast.Constant) and default.value is not None:
            yield parameter.arg, default.value


def _only_exception(node: ast.AST) -> str | None:
    """The one exception class that a function raises by name; None when there is none or more than one."""
    names = set()
    for step in ast.walk(node):
        if isinstance(step, ast.Raise) and step.exc is not None:
            raised = step.exc.func if isinstance(step.exc, ast.Call) else step.exc
            names.add(ast.unparse(raised).rpartition(".")[2])
    name = names.pop() if len(names) == 1 else ""
    return name if name[:1].isupper() and name.isidentifier() else None


def _fact(source: Source, kind: Kind, name: str, answer: Any, detail: str = "") -> Fact:
    return Fact(Question(kind, source.name, name, detail), answer, source.is_package)


def _case(fact: Fact) -> dict[str, Any]:
    question = fact.question
    words = [question.kind.name.lower(), question.module.replace(".", "-"), question.name, question.detail]
    return {
        "id": "-".join(word for word in words if word),
        "input": question.text,
        "graders": [_grader(fact)],
        "tags": [question.kind.name.lower(), "package" if fact.is_package else "module"],
        "timeout_s": TIMEOUT_S,
    }


def _grader(fact: Fact) -> dict[str, Any]:
    match fact.question.kind:
        case Kind.PARAMETERS:
            return {"type": "numeric", "expected": fact.answer}
        case Kind.BASES:
            return {"type": "json", "expected": fact.answer, "exact": True}
        case Kind.SUMMARY | Kind.RAISES:
            return {"type": "contains", "expected": fact.answer}
        case Kind.CONSTANT | Kind.DEFAULT:
            return {"type": "exact", "expected": repr(fact.answer)}


def main() -> int:
    for case in build_cases():
        print(json.dumps(case, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
