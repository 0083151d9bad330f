"""Secrets are taken out of what is captured, in the forms in which programs print them; nothing else is."""

from __future__ import annotations

import base64
import json
import re
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalpurse.runs.sandboxes.redaction import SHORTEST_BYTES, Redactor

KEY = "sk-live/9+Zq=ab cd?"
QUOTED = urllib.parse.quote(KEY, safe="")
FORMS = {
    "plain": KEY.encode(),
    "quoted": urllib.parse.quote(KEY).encode(),
    "quoted whole": QUOTED.encode(),
    "quoted as a form": urllib.parse.quote_plus(KEY).encode(),
    "quoted in lower case": re.sub("%..", lambda found: found[0].lower(), QUOTED).encode(),
    "json": json.dumps(KEY).encode(),
    "base64": base64.b64encode(KEY.encode()),
    "base64 for URLs": base64.urlsafe_b64encode(KEY.encode()),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_secret_is_found_in_each_form(form: bytes) -> None:
    redacted = Redactor({"API_KEY": KEY}).redact(b"before " + form + b" after")
    assert b"[secret API_KEY]" in redacted
    assert redacted.startswith(b"before ")
    assert redacted.endswith(b" after")
    assert not any(part in redacted for part in (b"sk-live", b"c2stbGl2"))


@pytest.mark.parametrize("before", [b"", b"u", b"us", b"user:"])
@pytest.mark.parametrize("after", [b"", b"x", b"xy", b":pass"])
def test_a_secret_inside_base64_is_found_in_every_alignment(before: bytes, after: bytes) -> None:
    encoded = base64.b64encode(before + KEY.encode() + after)
    assert b"[secret API_KEY]" in Redactor({"API_KEY": KEY}).redact(encoded)


@given(
    secret=st.text(st.characters(codec="utf-8"), min_size=6, max_size=40),
    before=st.binary(max_size=50),
    after=st.binary(max_size=50),
)
def test_whatever_a_secret_is_made_of_it_is_not_left(secret: str, before: bytes, after: bytes) -> None:
    redactor = Redactor({"K": secret})
    redacted = redactor.redact(before + secret.encode() + after)
    assert b"[secret K]" in redacted
    outside = redacted.replace(b"[secret K]", b"\x00")
    assert secret.encode() not in outside
    encoded = redactor.redact(base64.b64encode(before + secret.encode() + after))
    assert b"[secret K]" in encoded


@given(content=st.binary(max_size=300))
def test_content_without_secrets_is_left_as_it_is(content: bytes) -> None:
    assert Redactor({"K": "a-value-that-does-not-occur"}).redact(content) == content
    assert Redactor({}).redact(content) == content


def test_short_values_are_left_alone() -> None:
    short = "x" * (SHORTEST_BYTES - 1)
    assert Redactor({"K": short}).redact(short.encode()) == short.encode()


def test_the_longer_of_two_overlapping_secrets_goes_first() -> None:
    redactor = Redactor({"SHORT": "abcdef", "LONG": "abcdefghijkl"})
    assert redactor.redact(b"abcdefghijkl abcdef") == b"[secret LONG] [secret SHORT]"


def test_text_is_redacted_as_bytes_are() -> None:
    redactor = Redactor({"K": "schl\u00fcssel"})
    assert redactor.redact_text("der schl\u00fcssel ist da") == "der [secret K] ist da"


def test_the_margin_holds_the_longest_form() -> None:
    assert Redactor({}).margin_bytes == 0
    assert Redactor({"K": KEY}).margin_bytes >= max(len(form) - 2 for form in FORMS.values())
