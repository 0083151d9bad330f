"""The variants of the demo: one that works, one that is better, and three that each fail in their own way."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness_history import History

BASELINE = "baseline"
KEY_NAME = "OPENAI_API_KEY"
PATCHES = Path(__file__).parent / "patches"

REQUEST_BYTES_MAX = 130_000  # a little more than the baseline's largest request, 100,000 characters as JSON
OUTPUT_TOKENS_MAX = 400


@dataclass(frozen=True)
class Model:
    """What answers: where it is and what it costs, in US dollars a million tokens.

    The prices of the stand-in are those of a small hosted model at the time of writing.
    """

    base_url: str
    name: str = "library-qa-small"
    usd_per_million_input: float = 0.15
    usd_per_million_output: float = 0.60

    @property
    def allowance_usd(self) -> float:
        """The most that one call of the baseline can cost: a token is at least a byte of the request."""
        input_usd = REQUEST_BYTES_MAX * self.usd_per_million_input / 1e6
        return round(input_usd + OUTPUT_TOKENS_MAX * self.usd_per_million_output / 1e6, 6)


def build_variants(history: History, model: Model) -> list[dict[str, Any]]:
    """The variants, in the form that the tool `create_variant` takes."""
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
    return [_completed(variant, history, model) for variant in variants]


def _completed(variant: dict[str, Any], history: History, model: Model) -> dict[str, Any]:
    shared = {
        "model": model.name,
        "usd_per_million_input": model.usd_per_million_input,
        "usd_per_million_output": model.usd_per_million_output,
        "output_tokens_max": OUTPUT_TOKENS_MAX,
    }
    return variant | {
        "repo": str(history.repo),
        # Without site packages the interpreter starts in half the time, and the harness needs none.
        "run": f"exec {shlex.quote(sys.executable)} -S -m library_qa",
        "params": shared | variant["params"],
        "env": {"OPENAI_BASE_URL": model.base_url},
        "secrets": [KEY_NAME],
        "network": "open",
        "model": model.name,
    }
