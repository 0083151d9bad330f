"""The variants of the demo: one that works, one that is better, and three that each fail in their own way."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from harness_history import History

MODEL = "library-qa-small"
# What a small hosted model costs at the time of writing; the same numbers are in the demo's price file.
USD_PER_MILLION_INPUT = 0.15
USD_PER_MILLION_OUTPUT = 0.60

BASELINE = "baseline"
KEY_NAME = "OPENAI_API_KEY"
PATCHES = Path(__file__).parent / "patches"


def build_variants(history: History, base_url: str, *, model: str = MODEL) -> list[dict[str, Any]]:
    """The variants, in the form that the tool `create_variant` takes; `base_url` is the model's address."""
    variants = [
        {
            "name": BASELINE,
            "commit": history.whole_files,
            "params": {"strategy": "whole_files"},
            "description": "Sends the three likeliest files whole.",
        },
        {
            "name": "windows",
            "commit": history.windows,
            "parent": BASELINE,
            "params": {"strategy": "tool_windows"},
            "description": "Lets the model search, and sends windows of what it found.",
        },
        {
            "name": "compact",
            "commit": history.outlines,
            "parent": BASELINE,
            "params": {"strategy": "outlines"},
            "description": "Sends outlines of the two likeliest files, at most 6,000 characters.",
        },
        {
            "name": "crashy",
            "commit": history.windows,
            "parent": "windows",
            "patch": (PATCHES / "name_is_path.patch").read_text(encoding="utf-8"),
            "params": {"strategy": "tool_windows"},
            "description": "As windows, but takes a module's name for its path without looking.",
        },
        {
            "name": "burner",
            "commit": history.recheck,
            "parent": BASELINE,
            "params": {"strategy": "recheck", "agreements": 1_000},
            "description": "Sends whole files again and again until a thousand answers agree.",
        },
    ]
    return [_completed(variant, history, base_url, model) for variant in variants]


def _completed(variant: dict[str, Any], history: History, base_url: str, model: str) -> dict[str, Any]:
    prices = {
        "model": model,
        "usd_per_million_input": USD_PER_MILLION_INPUT,
        "usd_per_million_output": USD_PER_MILLION_OUTPUT,
    }
    return variant | {
        "repo": str(history.repo),
        # Without site packages the interpreter starts in half the time, and the harness needs none.
        "run": f"exec {shlex.quote(sys.executable)} -S -m library_qa",
        "params": prices | variant["params"],
        "env": {"OPENAI_BASE_URL": base_url},
        "secrets": [KEY_NAME],
        "network": "open",
        "model": model,
    }
