"""What one attempt has to do, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from evalpurse.budget.prices import Prices
from evalpurse.runs.cases import Case
from evalpurse.runs.charge import Charge
from evalpurse.runs.graders import Graded
from evalpurse.runs.graders.metrics import HarnessMetrics
from evalpurse.runs.outcomes import Outcome
from evalpurse.runs.plan import attempt_id_of
from evalpurse.runs.sandboxes.protocol import Ended, Limits, Output, Prepared
from evalpurse.runs.variants import Variant
from evalpurse.store.records import PlannedRunRow


@dataclass(frozen=True)
class Job:
    """What one attempt has to do: a planned run with all that it needs.

    `hold_nusd` is what the ledger holds for it: the allowance, and `held_s` seconds of sandbox.
    """

    planned: PlannedRunRow
    suite: str
    split: str
    case: Case
    variant: Variant
    prepared: Prepared | None
    limits: Limits
    allowance_nusd: int
    prices: Prices
    hold_nusd: int
    held_s: float
    number: int = 1
    charged_before_nusd: int = 0

    @property
    def attempt_id(self) -> str:
        return attempt_id_of(self.planned.run_id, self.number)


@dataclass(frozen=True)
class Result:
    """How an attempt ended, before it is recorded."""

    outcome: Outcome
    charge: Charge
    ended: Ended | None = None
    output: Output | None = None
    metrics: HarnessMetrics | None = None
    graded: Graded | None = None
    error: str = ""
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
