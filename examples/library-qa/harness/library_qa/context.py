"""What the model is shown: the instructions, and documents under a header that says what they are.

Every document starts with a line `=== path lines first-last of total ===`, so that the model can tell
which file it reads and whether it sees all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from library_qa.chat import Message
from library_qa.library import Library

INSTRUCTIONS = (
    "You answer questions about the Python standard library, only from the files you are shown. "
    "Answer with the value alone, without explanation. "
    "If the files do not contain the answer, say: I don't know"
)


def conversation(question: str, documents: Sequence[str] = ()) -> list[Message]:
    """The opening messages: instructions, then the documents with the question after them."""
    shown = "\n\n".join([*documents, f"Question: {question}"])
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": shown}]


def document(path: str, lines: Sequence[str], *, first: int, total: int) -> str:
    """Lines of a file, the first of them being line `first` (from 1) of `total`."""
    last = first + len(lines) - 1
    return "\n".join([f"=== {path} lines {first}-{last} of {total} ===", *lines])


def whole_files(library: Library, paths: Sequence[str], chars_max: int) -> list[str]:
    """Files one after the other until the characters are used up; the last may be cut short."""
    documents: list[str] = []
    left = chars_max
    for path in paths:
        text = library.read(path)
        lines = text.split("\n")
        shown = text[:left].split("\n") if len(text) > left else lines
        documents.append(document(path, shown, first=1, total=len(lines)))
        left -= len(text)
        if left <= 0:
            break
    return documents
