"""What an attempt cost: sandbox time at the backend's rate, plus model usage on evidence.

Until model calls pass a meter, the evidence is what the harness reports in `metrics.json`. Usage that is
missing, unreadable or has no price is charged as the whole allowance, never as nothing: a missing number
must not make money free that a provider may still bill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from evalpurse.budget.errors import InvalidUsageError, UnknownModelError, UnpricedUnitError
from evalpurse.budget.money import format_usd
from evalpurse.budget.prices import ModelUsage, PricedUsage, Prices
from evalpurse.runs.graders.metrics import HarnessMetrics


class CostSource(StrEnum):
    """Where a run's model cost comes from; shown wherever the cost is shown."""

    NONE = "none"
    """No model could be called: the allowance is zero, or nothing ever ran."""
    REPORTED = "reported"
    """The harness's own report, priced by our price list."""
    ASSUMED = "assumed"
    """No usable report: the whole allowance was charged."""


@dataclass(frozen=True)
class Charge:
    """The cost of one attempt in nano-dollars, and why. `over` is the model cost above the allowance."""

    model_nusd: int
    sandbox_nusd: int
    source: CostSource
    usage: Sequence[tuple[ModelUsage, PricedUsage]] = ()
    over_allowance: bool = False
    note: str = ""

    @property
    def total_nusd(self) -> int:
        return self.model_nusd + self.sandbox_nusd

    @property
    def input_tokens(self) -> int:
        return sum(usage.input_tokens for usage, _ in self.usage)

    @property
    def output_tokens(self) -> int:
        return sum(usage.output_tokens for usage, _ in self.usage)


NOTHING_RAN = Charge(0, 0, CostSource.NONE)


def sandbox_cost_nusd(seconds: float, nusd_per_second: int) -> int:
    """Sandbox time at the backend's rate, rounded up to a whole nano-dollar: what a hold takes for it."""
    return math.ceil(max(0.0, seconds) * nusd_per_second)


def sandbox_share_nusd(seconds: float, *, held_s: float, held_nusd: int) -> int:
    """The part of a hold for sandbox time that was used: in proportion, rounded up, never more than it.

    The hold pins the rate: a price that changes later does not change what was agreed.
    """
    if held_s <= 0:
        return 0
    return min(held_nusd, math.ceil(held_nusd * max(0.0, seconds) / held_s))


def charge_for(
    metrics: HarnessMetrics | None, *, allowance_nusd: int, sandbox_nusd: int, prices: Prices, at: datetime
) -> Charge:
    """Prices what a harness reported; `metrics` is None when nothing could be read from the sandbox."""
    if metrics is None or metrics.usage is None:
        why = metrics.problem if metrics and metrics.problem else "no usage was reported in metrics.json"
        return _without_evidence(allowance_nusd, sandbox_nusd, why)
    if metrics.problem:
        return _without_evidence(allowance_nusd, sandbox_nusd, metrics.problem)
    try:
        usage = [(reported, prices.cost(reported, at)) for reported in metrics.usage]
    except (UnknownModelError, UnpricedUnitError, InvalidUsageError) as error:
        if allowance_nusd > 0 or not any(r.input_tokens + r.output_tokens for r in metrics.usage):
            return _without_evidence(allowance_nusd, sandbox_nusd, str(error))
        note = f"The harness reported model calls that have no known cost; its allowance was $0.00. {error}"
        return Charge(0, sandbox_nusd, CostSource.ASSUMED, over_allowance=True, note=note)
    model_nusd = sum(priced.cost_nusd for _, priced in usage)
    over = model_nusd > allowance_nusd
    note = (
        f"The harness reported model calls for {format_usd(model_nusd)}; its allowance was "
        f"{format_usd(allowance_nusd)}."
        if over
        else ""
    )
    return Charge(
        model_nusd,
        sandbox_nusd,
        CostSource.REPORTED,
        usage=usage,
        over_allowance=over or metrics.over_allowance,
        note=note,
    )


def _without_evidence(allowance_nusd: int, sandbox_nusd: int, why: str) -> Charge:
    if allowance_nusd == 0:
        return Charge(0, sandbox_nusd, CostSource.NONE)
    note = f"Charged the whole allowance of {format_usd(allowance_nusd)}: {why}"
    return Charge(allowance_nusd, sandbox_nusd, CostSource.ASSUMED, note=note)
