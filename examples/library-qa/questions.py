"""The forms of question of this example, one kind each, shared by the cases and by the stand-in model.

The cases put names into a form; the model reads them back out. Neither learns an answer here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What is asked about a name of a module. The value is the form of the question."""

    DEFAULT = (
        "What is the default value of the parameter '{detail}' of the function '{name}' in the module "
        "'{module}'? Answer as a Python literal."
    )
    PARAMETERS = (
        "How many parameters does the function '{name}' in the module '{module}' take? Answer as a number."
    )
    RAISES = (
        "Which exception does the function '{name}' in the module '{module}' raise? Answer with its name."
    )
    BASES = (
        "Which classes does the class '{name}' in the module '{module}' inherit from directly? "
        'Answer as JSON, for example {{"bases": ["A", "B"]}}.'
    )
    CONSTANT = (
        "What is the value of the constant '{name}' in the module '{module}'? Answer as a Python literal."
    )
    SUMMARY = "What is the first line of the docstring of the function '{name}' in the module '{module}'?"


@dataclass(frozen=True)
class Question:
    """`detail` is the parameter's name for DEFAULT, else empty."""

    kind: Kind
    module: str
    name: str
    detail: str = ""

    @property
    def text(self) -> str:
        return self.kind.value.format(module=self.module, name=self.name, detail=self.detail)

    @classmethod
    def parse(cls, text: str) -> Question | None:
        """The last question found in a text; None when there is none of a known form."""
        found = [
            (match.start(), cls(kind, **match.groupdict()))
            for kind, form in _FORMS.items()
            for match in form.finditer(text)
        ]
        return max(found, key=lambda pair: pair[0])[1] if found else None


def _form(kind: Kind) -> re.Pattern[str]:
    escaped = re.escape(kind.value.replace("{{", "{").replace("}}", "}"))
    for field, names in (("module", r"[\w.]+"), ("name", r"\w+"), ("detail", r"\w+")):
        escaped = escaped.replace(re.escape(f"{{{field}}}"), f"(?P<{field}>{names})")
    return re.compile(escaped)


_FORMS = {kind: _form(kind) for kind in Kind}
