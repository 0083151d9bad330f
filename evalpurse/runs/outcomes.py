"""How the end of a run is treated: one table, from which every other module derives.

Retry, grading, counting, score: a rule that is not a row here does not exist. An attempt's charge is always
what it really used; a hold shrinks only on evidence (`charge.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from evalpurse.runs.sandboxes.protocol import Ended, EndReason


class Outcome(Enum):
    """How a run ended. Every run ends in exactly one of these."""

    SCORED = "scored"
    """The harness ended well and every grader gave a score."""
    AGENT_ERROR = "agent_error"
    """The harness ended with a non-zero exit code or signal, or went over a limit of its sandbox."""
    TIMEOUT = "timeout"
    """The harness was ended at its deadline."""
    OVER_ALLOWANCE = "over_allowance"
    """The run used up its own allowance for model calls, which is equal for all variants."""
    INFRA_ERROR = "infra_error"
    """The sandbox failed, not the agent."""
    GRADER_ERROR = "grader_error"
    """The harness ended well, but a grader could not give a score."""
    UNFUNDED = "unfunded"
    """The purse above ran out, or was frozen, before the run could start."""
    CANCELLED = "cancelled"
    """Someone cancelled the experiment."""


@dataclass(frozen=True)
class Treatment:
    """What follows from an outcome. `fixed_score` stands where graders have no say."""

    retried: bool
    graded: bool
    counted: bool
    fixed_score: float | None


TREATMENTS: dict[Outcome, Treatment] = {
    Outcome.SCORED: Treatment(retried=False, graded=True, counted=True, fixed_score=None),
    Outcome.AGENT_ERROR: Treatment(retried=False, graded=False, counted=True, fixed_score=0.0),
    Outcome.TIMEOUT: Treatment(retried=False, graded=False, counted=True, fixed_score=0.0),
    Outcome.OVER_ALLOWANCE: Treatment(retried=False, graded=False, counted=True, fixed_score=0.0),
    Outcome.INFRA_ERROR: Treatment(retried=True, graded=False, counted=False, fixed_score=None),
    Outcome.GRADER_ERROR: Treatment(retried=False, graded=True, counted=False, fixed_score=None),
    Outcome.UNFUNDED: Treatment(retried=False, graded=False, counted=False, fixed_score=None),
    Outcome.CANCELLED: Treatment(retried=False, graded=False, counted=False, fixed_score=None),
}

_AGENT_LIMITS = {EndReason.CPU, EndReason.MEMORY, EndReason.PROCESSES, EndReason.DISK}


def outcome_of_end(ended: Ended, *, over_allowance: bool) -> Outcome:
    """The outcome that a harness's end leads to; `SCORED` means that the graders come next."""
    if ended.reason is EndReason.LOST:
        return Outcome.INFRA_ERROR
    if ended.reason is EndReason.STOPPED:
        return Outcome.CANCELLED
    if over_allowance:
        return Outcome.OVER_ALLOWANCE
    if ended.reason is EndReason.TIMEOUT:
        return Outcome.TIMEOUT
    if ended.reason in _AGENT_LIMITS or ended.exit_code != 0:
        return Outcome.AGENT_ERROR
    return Outcome.SCORED
