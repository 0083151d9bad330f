"""What one run is asked to do and what it may use, read once from the environment that the runner sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any


class TaskError(Exception):
    """The environment or the params cannot be understood; the message names the variable or the param."""


@dataclass(frozen=True)
class Task:
    """A question, the variant's params, and the limits of this run.

    `allowance_usd` is all that the run may spend on model calls; `deadline` is when it will be ended;
    `run_name` tells repeats apart, and is empty outside a runner.
    """

    question: str
    params: Mapping[str, Any]
    out: Path
    allowance_usd: Decimal
    deadline: datetime
    run_name: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Task:
        """Reads `EVALPURSE_CASE`, `_PARAMS`, `_OUT`, `_ALLOWANCE_USD` and `_DEADLINE`.

        Raises:
            TaskError: one of them is missing or malformed.
        """
        try:
            return cls(
                question=(Path(environ["EVALPURSE_CASE"]) / "input.txt").read_text(encoding="utf-8").strip(),
                params=json.loads(Path(environ["EVALPURSE_PARAMS"]).read_text(encoding="utf-8")),
                out=Path(environ["EVALPURSE_OUT"]),
                allowance_usd=Decimal(environ["EVALPURSE_ALLOWANCE_USD"]),
                deadline=datetime.fromisoformat(environ["EVALPURSE_DEADLINE"]),
                run_name=environ.get("EVALPURSE_RUN", ""),
            )
        except KeyError as missing:
            raise TaskError(f"environment variable {missing.args[0]} is not set") from missing
        except InvalidOperation as error:
            raise TaskError("EVALPURSE_ALLOWANCE_USD is not a number of US dollars") from error
        except (OSError, ValueError) as error:
            raise TaskError(str(error)) from error

    def seconds_left(self) -> float:
        return (self.deadline - datetime.now(UTC)).total_seconds()

    def text_param(self, name: str) -> str:
        """A param that must be text.

        Raises:
            TaskError: it is missing or not text.
        """
        value = self.params.get(name)
        if not isinstance(value, str):
            raise TaskError(f"param '{name}' is {value!r}; it must be text")
        return value

    def int_param(self, name: str, default: int) -> int:
        """A knob: a whole number with a default.

        Raises:
            TaskError: it is given and not a whole number.
        """
        value = self.params.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TaskError(f"param '{name}' is {value!r}; it must be a whole number")
        return value

    def price_param(self, name: str) -> Decimal:
        """A price in US dollars a million tokens.

        Raises:
            TaskError: it is missing or not a number from 0 up: spending without a price is refused.
        """
        value = self.params.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
            raise TaskError(f"param '{name}' is {value!r}; it must be US dollars a million tokens")
        return Decimal(str(value))
