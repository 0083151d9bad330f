"""What the model may do with the library: search it, and read a window of one file.

A tool never raises at the model's mistakes; it answers with a sentence that says how to do better.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from library_qa.chat import Message, ToolCall
from library_qa.context import document
from library_qa.library import Library

LINE_CHARS_MAX = 160
PATTERN_CHARS_MAX = 200


def _tool(name: str, description: str, **properties: Mapping[str, str]) -> Message:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


TOOLS = (
    _tool(
        "search_files",
        "Lines of the library that match a Python regular expression, as path:line: text.",
        pattern={"type": "string", "description": r"for example: def loads\b"},
    ),
    _tool(
        "read_window",
        "Lines of one file around a line.",
        path={"type": "string", "description": "as search_files names it"},
        line={"type": "integer", "description": "the middle of the window, from 1"},
        radius={"type": "integer", "description": "lines before and after it"},
    ),
)


class ToolBox:
    """Carries out tool calls; searches the files that the question names before all others."""

    def __init__(self, library: Library, question: str, *, hits_max: int, radius_max: int) -> None:
        self._library = library
        named = library.named(question)
        self._search_order = [*named, *(path for path in library.paths if path not in named)]
        self._hits_max = hits_max
        self._radius_max = radius_max

    def carry_out(self, call: ToolCall) -> str:
        match call.name, call.arguments:
            case "search_files", {"pattern": str(pattern)}:
                return self._search_files(pattern)
            case "read_window", {"path": str(path), "line": int(line), "radius": int(radius)}:
                return self._read_window(path, line, radius)
        known = ", ".join(tool["function"]["name"] for tool in TOOLS)
        return f"{call.name}({dict(call.arguments)!r}) is not a call I know; the tools are {known}."

    def _search_files(self, pattern: str) -> str:
        if len(pattern) > PATTERN_CHARS_MAX:
            return f"The pattern has {len(pattern)} characters; at most {PATTERN_CHARS_MAX} are searched for."
        try:
            compiled = re.compile(pattern, re.MULTILINE)
        except re.error as error:
            return f"The pattern is not a regular expression: {error}."
        hits = self._library.search(compiled, self._search_order, self._hits_max)
        if not hits:
            return "No line matches."
        return "\n".join(f"{hit.path}:{hit.line}: {hit.text[:LINE_CHARS_MAX]}" for hit in hits)

    def _read_window(self, path: str, line: int, radius: int) -> str:
        try:
            lines = self._library.read(path).split("\n")
        except KeyError:
            return f"There is no file {path}; take a path from a search."
        if not 1 <= line <= len(lines):
            return f"{path} has lines 1 to {len(lines)}."
        radius = max(0, min(radius, self._radius_max))
        first = max(1, line - radius)
        return document(path, lines[first - 1 : line + radius], first=first, total=len(lines))
