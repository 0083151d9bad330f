"""The command grader: a program of the case's author decides, after the harness and its processes are gone.

A reward file wins over the exit code. What the command cannot decide is the grader's failure, never a score.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from typing import Any

from evalpurse.errors import EvalpurseError
from evalpurse.runs.content import file_bytes
from evalpurse.runs.graders.checks import Verdict
from evalpurse.runs.graders.spec import GraderSpec
from evalpurse.runs.sandboxes.protocol import ExecResult, Sandbox

REWARD_JSON = "reward.json"
REWARD_TXT = "reward.txt"
_SCORE_KEYS = ("reward", "score")
_LOG_CHARS = 600
_NAME_CHARS_MAX = 80
_NUMBERS_MAX = 50


class NoVerdictError(Exception):
    """The command gave nothing that could be taken as a score; the text says what it gave."""


async def run_command(spec: GraderSpec, sandbox: Sandbox) -> tuple[Verdict, dict[str, float]]:
    """Runs the command in the sandbox; returns its verdict and the other numbers of its reward file.

    Raises:
        NoVerdictError: it could not run, ran out of time, or left a reward that is no score.
    """
    files = {path: file_bytes(text) for path, text in spec.files.items()}
    try:
        result = await sandbox.exec(
            ["sh", "-c", spec.command],
            files=files,
            timeout_s=spec.timeout_s,
            fetch=(REWARD_JSON, REWARD_TXT),
        )
    except EvalpurseError as error:
        raise NoVerdictError(f"its command could not run: {error}") from error
    if result.exit_code is None:
        raise NoVerdictError(f"its command did not end within {spec.timeout_s:g} s.{_log(result)}")
    if REWARD_JSON in result.files:
        score, others = _reward_json(result.files[REWARD_JSON])
    elif REWARD_TXT in result.files:
        score, others = _reward_txt(result.files[REWARD_TXT]), {}
    else:
        return _by_exit_code(spec, result), {}
    if not 0.0 <= score <= 1.0:
        raise NoVerdictError(f"its reward is {score:g}; a score must be from 0 to 1")
    return Verdict(score, f"reward {score:g}, exit code {result.exit_code}.{_log(result)}"), others


def _by_exit_code(spec: GraderSpec, result: ExecResult) -> Verdict:
    code = result.exit_code or 0
    if code < 0:
        raise NoVerdictError(f"its command was ended by signal {-code}.{_log(result)}")
    if code == 127 and _program_is_missing(spec.command, result.log):
        raise NoVerdictError(f"its command is not installed in the sandbox.{_log(result)}")
    return Verdict(1.0 if code == 0 else 0.0, f"exit code {code}.{_log(result)}")


def _program_is_missing(command: str, log: bytes) -> bool:
    """Whether the shell itself says that it did not find the command's first word.

    Only a plain name counts: a path may lead to a file that the harness was to make, and that is its failure.
    """
    try:
        first = shlex.split(command, comments=True)[:1]
    except ValueError:
        return False
    if not first or not re.fullmatch(r"[A-Za-z0-9_.+-]+", first[0]):
        return False
    pattern = rf"\b{re.escape(first[0])}: (command )?not found"
    return re.search(pattern, log.decode(errors="replace")) is not None


def _reward_json(content: bytes) -> tuple[float, dict[str, float]]:
    try:
        value: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise NoVerdictError(f"its {REWARD_JSON} is not JSON: {error}") from error
    if not isinstance(value, dict):
        return _number(value, REWARD_JSON), {}
    if not value or len(value) > _NUMBERS_MAX:
        raise NoVerdictError(f"its {REWARD_JSON} has {len(value)} numbers; 1 to {_NUMBERS_MAX} are allowed")
    numbers = {
        str(key)[:_NAME_CHARS_MAX]: _number(item, f"'{str(key)[:_NAME_CHARS_MAX]}' of {REWARD_JSON}")
        for key, item in value.items()
    }
    named = [key for key in _SCORE_KEYS if key in numbers] or list(numbers)
    if len(named) > 1:
        raise NoVerdictError(
            f"its {REWARD_JSON} has {', '.join(sorted(named)[:10])}; name the one that is the score 'reward'"
        )
    return numbers.pop(named[0]), numbers


def _reward_txt(content: bytes) -> float:
    text = content.decode(errors="replace").strip()
    try:
        return _number(float(text), REWARD_TXT)
    except ValueError as error:
        raise NoVerdictError(f"its {REWARD_TXT} is {text[:80]!r}, not a number") from error


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NoVerdictError(f"{where} is {str(value)[:80]!r}, not a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise NoVerdictError(f"{where} is too large") from error
    if not math.isfinite(number):
        raise NoVerdictError(f"{where} is {number}, not a finite number")
    return number


def _log(result: ExecResult) -> str:
    text = result.log.decode(errors="replace").strip()
    return f" Its output ends: {text[-_LOG_CHARS:]}" if text else ""
