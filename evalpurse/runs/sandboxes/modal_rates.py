"""What a second of a Modal sandbox can cost at most: its limits times the rates.

The live rates of the account are used when it can be asked, else the dated table below, which is the
published price list as quoted on its date. Both give an upper bound: a sandbox is billed for the larger of
request and use, and use is bounded by the limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from evalpurse.runs.errors import BadLaunchError, nearest
from evalpurse.runs.sandboxes.protocol import Machine

_NUSD_PER_USD = 10**9
_S_PER_HOUR = 3600
TABLE_DATE = "2026-10-01"
REGION_FACTOR = Decimal("1.75")
"""Quotes for a pinned region differ (1.15 to 1.75 times); the highest one bounds the rest."""

_TABLE_USD_PER_S = {
    "cpu": "0.00003942",
    "memory": "0.00000672",
    "t4": "0.000164",
    "l4": "0.000222",
    "a10": "0.000306",
    "a10g": "0.000306",
    "l40s": "0.000542",
    "a100-40gb": "0.000583",
    "a100": "0.000583",
    "a100-80gb": "0.000694",
    "h100": "0.001097",
    "h200": "0.001261",
    "b200": "0.001736",
    "b300": "0.001972",
}


@dataclass(frozen=True)
class Rates:
    """Dollars a second: of a physical core, of a GiB of memory, and of one GPU of each type."""

    cpu_usd: Decimal
    memory_usd: Decimal
    gpu_usd: Mapping[str, Decimal] = field(default_factory=dict)
    source: str = f"price list of {TABLE_DATE}"

    @classmethod
    def table(cls) -> Rates:
        """The dated price list."""
        table = {name: Decimal(usd) for name, usd in _TABLE_USD_PER_S.items()}
        return cls(table.pop("cpu"), table.pop("memory"), table)

    @classmethod
    def live(cls, hourly: Mapping[str, Decimal]) -> Rates:
        """From `billing.rates()`: dollars an hour by name. What it lacks comes from the table."""
        table = cls.table()
        prefix = "gpu_hour_cost_"
        gpus = {
            name.removeprefix(prefix).replace("_", "-"): Decimal(usd) / _S_PER_HOUR
            for name, usd in hourly.items()
            if name.startswith(prefix)
        }

        def rate(name: str, otherwise: Decimal) -> Decimal:
            return Decimal(hourly[name]) / _S_PER_HOUR if name in hourly else otherwise

        return cls(
            rate("cpu_hour_cost_sandbox", table.cpu_usd),
            rate("mem_gib_hour_cost_sandbox", table.memory_usd),
            {**table.gpu_usd, **gpus},
            "rates of the account",
        )

    def nusd_per_second(self, machine: Machine, *, cpu: float, memory_mb: int) -> int:
        """The most that a second can cost with these limits (cores, MiB), in whole nano-dollars, rounded up.

        Raises:
            BadLaunchError: the price of its GPU is not known.
        """
        usd = Decimal(str(cpu)) * self.cpu_usd + Decimal(memory_mb) / 1024 * self.memory_usd
        if machine.gpu:
            kind, _, count = machine.gpu.lower().rstrip("!").partition(":")
            if kind not in self.gpu_usd or (count and not count.isdigit()):
                raise BadLaunchError(
                    f"gpu is {machine.gpu!r}: its price is not known, so no hold can cover it.",
                    hint=nearest(kind, list(self.gpu_usd), what="GPUs"),
                )
            usd += self.gpu_usd[kind] * int(count or 1)
        if machine.region:
            usd *= REGION_FACTOR
        return math.ceil(usd * _NUSD_PER_USD)
