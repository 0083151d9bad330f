"""What a run leaves behind: answer, metrics and transcript.

Invariant: the usage on disk is never below what a provider may bill. It is written before every model call
with the most that the call may use, and again after it with what it did use, so that a run that is ended
at any moment has not under-reported.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Usage = dict[str, Counter[str]]


class Report:
    """Writes `answer.txt`, `metrics.json` and `transcript.jsonl` into one folder."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._usage: Usage = {}
        self._numbers: dict[str, float | bool] = {"tool_calls": 0, "context_chars": 0}
        self._write_metrics(self._usage)

    def model_call_begins(self, model: str, *, input_tokens_max: int, output_tokens_max: int) -> None:
        """Writes the usage as if the call to come used all that it may."""
        self._write_metrics(self._with_call(model, input_tokens_max, output_tokens_max))

    def model_call_ended(
        self, model: str, *, input_tokens: int, output_tokens: int, context_chars: int
    ) -> None:
        """Counts one paid call; `context_chars` of the run is that of its largest call."""
        self._usage = self._with_call(model, input_tokens, output_tokens)
        self._numbers["context_chars"] = max(self._numbers["context_chars"], context_chars)
        self._write_metrics(self._usage)

    def tool_call(self) -> None:
        self._numbers["tool_calls"] += 1

    def number(self, name: str, value: float) -> None:
        """A number of this run that may be compared between variants, or that helps to replay it."""
        self._numbers[name] = value

    def say(self, event: Mapping[str, Any]) -> None:
        """Appends one line to the transcript."""
        with (self._out / "transcript.jsonl").open("a", encoding="utf-8") as transcript:
            transcript.write(json.dumps(event, ensure_ascii=False) + "\n")

    def answer(self, text: str) -> None:
        (self._out / "answer.txt").write_text(text, encoding="utf-8")
        self._write_metrics(self._usage)

    def over_allowance(self, reason: str) -> None:
        """The run stopped itself before a call that its allowance could not cover."""
        self._numbers["over_allowance"] = True
        self.say({"event": "over_allowance", "reason": reason})
        self._write_metrics(self._usage)

    def _with_call(self, model: str, input_tokens: int, output_tokens: int) -> Usage:
        call = Counter(input_tokens=input_tokens, output_tokens=output_tokens, requests=1)
        return {**self._usage, model: self._usage.get(model, Counter()) + call}

    def _write_metrics(self, calls: Usage) -> None:
        usage = [{"model": model, **counts} for model, counts in calls.items()]
        unfinished = self._out / "metrics.json.part"
        unfinished.write_text(json.dumps({"usage": usage, **self._numbers}), encoding="utf-8")
        unfinished.replace(self._out / "metrics.json")
