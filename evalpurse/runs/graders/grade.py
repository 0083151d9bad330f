"""Grades a finished run: every grader of the case, then one score as their weighted mean.

A missing or wrong answer is a score of 0. A grader that cannot decide is an error of the case, not of the
harness, and gives no score at all: a mean with a hole in it would not be comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio.to_thread

from evalpurse.runs.errors import GraderError
from evalpurse.runs.graders import bounded, checks
from evalpurse.runs.graders.answer import Answer, MissingPathError, NotJsonError
from evalpurse.runs.graders.checks import Verdict
from evalpurse.runs.graders.command import NoVerdictError, run_command
from evalpurse.runs.graders.spec import GraderSpec
from evalpurse.runs.sandboxes.protocol import Output, Sandbox

_INLINE_BYTES_MAX = 64_000
"""Answers up to this size are looked at on the event loop; a thread would cost more than the look."""


class NamedCase(Protocol):
    """What grading needs to know of a case."""

    @property
    def case_id(self) -> str: ...


@dataclass(frozen=True)
class Score:
    """One number of one grader: a score in [0, 1], or with `weight` 0 any number that only informs."""

    grader: str
    name: str
    value: float
    weight: float
    detail: str


@dataclass(frozen=True)
class Graded:
    """The score of a run in [0, 1], and what it is made of."""

    score: float
    scores: Sequence[Score]


async def grade_all(
    graders: Sequence[GraderSpec], output: Output, case: NamedCase, sandbox: Sandbox
) -> Graded:
    """Runs all graders, in their order.

    Raises:
        GraderError: one of them could not decide; names it, the case and the reason.
    """
    answer = Answer.of(output)
    scores: list[Score] = []
    for spec in graders:
        try:
            verdict, others = await _grade(spec, answer, sandbox)
        except (NoVerdictError, bounded.CheckFailedError) as error:
            raise _failed(spec, case, str(error)) from error
        except bounded.CheckTimeoutError as error:
            raise _failed(
                spec,
                case,
                f"it did not end within {bounded.CPU_S:g} s of processor time on an answer of "
                f"{len(output.answer or b''):,} bytes; simplify the expression",
            ) from error
        detail = f"{verdict.detail} (the answer was cut)" if answer and answer.is_cut else verdict.detail
        scores.append(Score(spec.name, "score", verdict.value, spec.weight, detail))
        scores += [Score(spec.name, name, value, 0.0, "") for name, value in others.items()]
    total_weight = sum(score.weight for score in scores)
    mean = sum(score.value * score.weight for score in scores) / total_weight
    return Graded(min(1.0, max(0.0, mean)), scores)  # rounding may leave the interval by one bit


def _failed(spec: GraderSpec, case: NamedCase, reason: str) -> GraderError:
    return GraderError(
        f"Grader '{spec.name}' ({spec.type}) of case '{case.case_id}' could not decide: {reason}.",
        hint="Mend the case with create_cases(replace=true).",
        grader=spec.name,
        case=case.case_id,
    )


async def _grade(
    spec: GraderSpec, answer: Answer | None, sandbox: Sandbox
) -> tuple[Verdict, dict[str, float]]:
    if spec.type == "command":
        return await run_command(spec, sandbox)
    if answer is None:
        return Verdict(0.0, "no answer"), {}
    if spec.type == "regex":
        return await _regex(spec, answer), {}
    if spec.json_schema is not None:
        return await _json_schema(spec, answer), {}
    look = _LOOKS[spec.type]
    if len(answer.content) <= _INLINE_BYTES_MAX:
        return look(spec, answer), {}
    return await anyio.to_thread.run_sync(look, spec, answer), {}


_LOOKS = {
    "exact": checks.exact,
    "contains": checks.contains,
    "numeric": checks.numeric,
    "json": checks.json_expected,
}


async def _regex(spec: GraderSpec, answer: Answer) -> Verdict:
    ok, found = await bounded.check(
        {
            "kind": "regex",
            "pattern": spec.pattern,
            "flags": spec.flags,
            "full": spec.full,
            "text": answer.text,
        }
    )
    return Verdict(1.0, f"matched {found!r}") if ok else Verdict(0.0, "no match")


async def _json_schema(spec: GraderSpec, answer: Answer) -> Verdict:
    try:
        value = answer.at(spec.path)
    except (NotJsonError, MissingPathError) as error:
        return Verdict(0.0, str(error))
    ok, detail = await bounded.check({"kind": "schema", "schema": spec.json_schema, "value": value})
    return Verdict(1.0, "valid") if ok else Verdict(0.0, detail)
