"""`metrics.json`: free numbers are kept, and what is said about money is exact or not taken at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalpurse.runs.graders.metrics import parse_metrics


def parse(content: Any) -> Any:
    return parse_metrics(json.dumps(content).encode())


def test_numbers_at_the_top_are_metrics_and_the_rest_is_told() -> None:
    found = parse({"recall": 0.5, "steps": 12, "note": "x", "ok": True, "nested": {"a": 1}, "x" * 81: 1})
    assert found.numbers == {"recall": 0.5, "steps": 12.0}
    assert found.problem == ""
    assert "'note', 'ok', 'nested'" in found.ignored
    assert found.usage is None


def test_usage_is_read_with_its_optional_fields() -> None:
    found = parse(
        {
            "usage": [
                {"model": "gpt-5-mini", "input_tokens": 1200, "output_tokens": 30},
                {
                    "model": "claude-sonnet-4-5",
                    "provider": "anthropic",
                    "input_tokens": 10.0,
                    "output_tokens": 0,
                    "cached_tokens": 4,
                    "requests": 3,
                },
            ]
        }
    )
    first, second = found.usage
    assert (first.model, first.provider, first.input_tokens, first.output_tokens) == (
        "gpt-5-mini",
        "",
        1200,
        30,
    )
    assert (first.cached_tokens, first.requests) == (0, 1)
    assert (second.provider, second.input_tokens, second.cached_tokens, second.requests) == (
        "anthropic",
        10,
        4,
        3,
    )
    assert isinstance(second.input_tokens, int)


def test_saying_nothing_about_usage_differs_from_no_model_calls() -> None:
    assert parse_metrics(None).usage is None
    assert parse({}).usage is None
    assert parse({"usage": []}).usage == []


def test_over_allowance_is_read_also_beside_a_broken_usage() -> None:
    assert parse({"over_allowance": True}).over_allowance
    assert not parse({"over_allowance": False}).over_allowance
    found = parse({"over_allowance": True, "usage": "none"})
    assert found.over_allowance
    assert found.problem
    assert "true or false" in parse({"over_allowance": "yes"}).problem


@pytest.mark.parametrize(
    "usage",
    [
        {"model": "m"},
        "x",
        ["x"],
        [{"input_tokens": 1, "output_tokens": 1}],
        [{"model": " ", "input_tokens": 1, "output_tokens": 1}],
        [{"model": "m", "input_tokens": 1}],
        [{"model": "m", "input_tokens": -1, "output_tokens": 1}],
        [{"model": "m", "input_tokens": 1.5, "output_tokens": 1}],
        [{"model": "m", "input_tokens": True, "output_tokens": 1}],
        [{"model": "m", "input_tokens": "12", "output_tokens": 1}],
        [{"model": "m", "input_tokens": 10**13, "output_tokens": 1}],
        [{"model": "m", "input_tokens": 1, "output_tokens": 1, "cached_tokens": 2}],
        [{"model": "m", "input_tokens": 3, "output_tokens": 1, "cached_tokens": 2, "cache_write_tokens": 2}],
        [{"model": "m", "input_tokens": 1, "output_tokens": 1, "total": 2}],
        [{"model": "m", "input_tokens": 1, "output_tokens": 1}] * 101,
    ],
)
def test_usage_that_is_no_bill_is_a_problem_and_not_a_guess(usage: Any) -> None:
    found = parse({"score": 1, "usage": usage})
    assert found.usage is None
    assert "usage" in found.problem
    assert found.numbers == {"score": 1.0}, "numbers do not depend on it"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5_000 + b"}", b" " * (1 << 21)],
)
def test_a_file_that_cannot_be_read_is_a_problem(content: bytes) -> None:
    found = parse_metrics(content)
    assert found.problem
    assert (found.numbers, found.usage) == ({}, None)


def test_numbers_that_are_not_finite_or_too_many_are_left_out() -> None:
    assert parse_metrics(b'{"a": NaN, "b": Infinity, "c": 1e999, "d": 2}').numbers == {"d": 2.0}
    many = parse({f"m{n}": n for n in range(500)})
    assert len(many.numbers) == 200
    assert "and 295 more" in many.ignored


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["usage", "over_allowance", "model", "input_tokens", "x"]), inner, max_size=4
            )
        ),
        max_leaves=10,
    ).map(lambda value: json.dumps(value).encode())
)
def test_whatever_a_harness_writes_is_answered(content: bytes) -> None:
    found = parse_metrics(content)
    assert all(isinstance(number, float) for number in found.numbers.values())
    assert found.usage is None or not found.problem
