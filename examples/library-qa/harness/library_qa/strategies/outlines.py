"""Send outlines of the likeliest files and ask once.

Knobs: `files_max` files, `line_chars_max` characters a line, `context_chars_max` characters of all outlines.
"""

from __future__ import annotations

from library_qa.chat import Chat
from library_qa.compaction import outline
from library_qa.context import conversation, document
from library_qa.library import Library
from library_qa.task import Task


def answer(task: Task, library: Library, chat: Chat) -> str:
    documents: list[str] = []
    left = task.int_param("context_chars_max", 6_000)
    for path in library.candidates(task.question, task.int_param("files_max", 2)):
        lines = outline(library.read(path), line_chars_max=task.int_param("line_chars_max", 60))
        text = document(path, lines, first=1, total=len(lines))
        documents.append(text[: max(left, 0)])
        left -= len(text)
    return chat.complete(conversation(task.question, documents)).text
