"""Send the likeliest files whole and ask once.

Knobs: `files_max` files, `context_chars_max` characters of them.
"""

from __future__ import annotations

from library_qa.chat import Chat
from library_qa.context import conversation, whole_files
from library_qa.library import Library
from library_qa.task import Task


def answer(task: Task, library: Library, chat: Chat) -> str:
    paths = library.candidates(task.question, task.int_param("files_max", 3))
    documents = whole_files(library, paths, task.int_param("context_chars_max", 100_000))
    return chat.complete(conversation(task.question, documents)).text
