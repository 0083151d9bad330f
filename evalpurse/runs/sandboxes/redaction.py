"""Takes the values of secrets out of everything that is captured from a sandbox.

A value is found as it is and in the forms in which programs usually print it (base64 in its three
alignments, URL encoding, JSON escapes). What is encrypted, compressed or spelled otherwise is not found: a
harness that means to leak a secret can. This protects against the accidents.
"""

from __future__ import annotations

import base64
import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

SHORTEST_BYTES = 6
"""Shorter values are left alone: they occur by chance, and replacing them would damage honest output."""


class Redactor:
    """Replaces each form of each secret with `[secret NAME]`; one that was changed has several values."""

    def __init__(self, secrets: Mapping[str, str | Sequence[str]]) -> None:
        forms: dict[bytes, bytes] = {}
        for name, given in secrets.items():
            for value in [given] if isinstance(given, str) else given:
                plain = value.encode("utf-8", "surrogateescape")
                if len(plain) < SHORTEST_BYTES:
                    continue
                for form in _forms(value, plain):
                    forms.setdefault(form, b"[secret %s]" % name.encode())
        # Longest first: one secret may be part of another, and a form part of a longer form.
        self._forms = sorted(forms.items(), key=lambda item: len(item[0]), reverse=True)
        self.margin_bytes = len(self._forms[0][0]) if self._forms else 0
        """How much more must be read where a piece is cut, to find every secret in it."""

    def redact(self, content: bytes) -> bytes:
        """The content without secrets; its length may change."""
        for form, label in self._forms:
            if form in content:
                content = content.replace(form, label)
        return content

    def redact_text(self, text: str) -> str:
        """As `redact`, for messages."""
        if not self._forms:
            return text
        return self.redact(text.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")


def _forms(value: str, plain: bytes) -> Iterator[bytes]:
    yield plain
    for ascii_only in (True, False):
        yield json.dumps(value, ensure_ascii=ascii_only)[1:-1].encode("utf-8", "surrogateescape")
    for quoted in (
        urllib.parse.quote(plain, safe=""),
        urllib.parse.quote(plain),
        urllib.parse.quote_plus(plain),
    ):
        yield quoted.encode()
        yield _lower_escapes(quoted).encode()
    for offset in range(3):
        core = _base64_core(plain, offset)
        yield core
        yield core.translate(bytes.maketrans(b"+/", b"-_"))


def _lower_escapes(quoted: str) -> str:
    """`%2F` and `%2f` are the same character; both are in use."""
    head, *rest = quoted.split("%")
    return head + "".join(f"%{piece[:2].lower()}{piece[2:]}" for piece in rest)


def _base64_core(plain: bytes, offset: int) -> bytes:
    """The characters of base64 that depend on `plain` alone when `offset` bytes of something precede it.

    A character carries 6 bits: those that share bits with the bytes before or after are cut off.
    """
    encoded = base64.b64encode(bytes(offset) + plain)
    first = -(-offset * 8 // 6)
    return encoded[first : (offset + len(plain)) * 8 // 6]
