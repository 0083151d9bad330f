"""Send the likeliest files whole, again and again, until the model has said the same often enough.

Knobs: `agreements` answers that must be equal, `files_max` files, `context_chars_max` characters of them.
"""

from __future__ import annotations

from collections import Counter

from library_qa.chat import Chat
from library_qa.context import conversation, whole_files
from library_qa.library import Library
from library_qa.task import Task


def answer(task: Task, library: Library, chat: Chat) -> str:
    agreements = task.int_param("agreements", 3)
    heard: Counter[str] = Counter()
    paths = library.candidates(task.question, task.int_param("files_max", 3))
    while True:
        documents = whole_files(library, paths, task.int_param("context_chars_max", 100_000))
        said = chat.complete(conversation(task.question, documents)).text
        heard[said] += 1
        if heard[said] >= agreements:
            return said
