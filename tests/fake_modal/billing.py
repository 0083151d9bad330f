"""Prices, the bill of every sandbox, and the statistics RPCs that the client reads costs from.

The metered use of a sandbox is constant over its life: `Settings.usage_share` of the way from its request to
its limit. The ceiling is what the same seconds would have cost at the limits: the hold of a careful ledger.
"""

# ruff: noqa: N802 - methods carry the names that the protocol calls them by
from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from tests.fake_modal.cloud import Cloud
from tests.fake_modal.registry import Apps
from tests.fake_modal.sandboxes import Sandbox, Sandboxes
from tests.fake_modal.wire import api, invalid

RATES = {
    "cpu_hour_cost": "0.0473",
    "mem_gib_hour_cost": "0.008",
    "cpu_hour_cost_sandbox": "0.1419",
    "mem_gib_hour_cost_sandbox": "0.024",
    "gpu_hour_cost_t4": "0.5904",
    "gpu_hour_cost_l4": "0.7992",
    "gpu_hour_cost_l40s": "1.9512",
    "gpu_hour_cost_h100": "3.9492",
}
"""USD per hour, per physical core, GiB or GPU, under the names that `billing.rates()` uses."""
HOUR_S = 3600
MAX_RANGE_S = 7 * 24 * HOUR_S
MAX_GROUPS = 10_000
EXACT = Decimal("0.000000000001")


def usd(quantity_seconds: float, rate: str) -> Decimal:
    return (Decimal(repr(quantity_seconds)) * Decimal(RATES[rate]) / HOUR_S).quantize(EXACT)


class Billing:
    """Answers what things cost, and keeps the fake's own books for comparison."""

    def __init__(self, cloud: Cloud, sandboxes: Sandboxes, apps: Apps) -> None:
        self._cloud = cloud
        self._sandboxes = sandboxes
        self._apps = apps

    def seconds(self, sandbox: Sandbox, since: float = 0.0, until: float | None = None) -> float:
        """How long it ran within a time range, as far as that is known by now."""
        known = time.time() - self._cloud.settings.stats_delay_s
        end = min(sandbox.ended_at or time.time(), known, until if until is not None else known)
        return max(0.0, end - max(sandbox.created_at, since))

    def metered(self, sandbox: Sandbox) -> tuple[float, float]:
        """Cores and GiB that are billed."""
        share = self._cloud.settings.usage_share
        cores, gib = sandbox.cores, sandbox.gib
        return cores[0] + share * (cores[1] - cores[0]), gib[0] + share * (gib[1] - gib[0])

    def costs(self, sandbox: Sandbox, since: float = 0.0, until: float | None = None) -> dict[str, Decimal]:
        seconds = self.seconds(sandbox, since, until)
        cores, gib = self.metered(sandbox)
        return {
            "CPU": usd(cores * seconds, "cpu_hour_cost_sandbox"),
            "Memory": usd(gib * seconds, "mem_gib_hour_cost_sandbox"),
        }

    def ceiling(self, sandbox: Sandbox) -> Decimal:
        seconds = (sandbox.ended_at or time.time()) - sandbox.created_at
        return usd(sandbox.cores[1] * seconds, "cpu_hour_cost_sandbox") + usd(
            sandbox.gib[1] * seconds, "mem_gib_hour_cost_sandbox"
        )

    def bill(self) -> dict[str, Any]:
        """Every sandbox's lifetime and costs, and their sums; money is USD as text, exact to 1e-12."""
        lines, total, ceiling = {}, Decimal(0), Decimal(0)
        for sandbox in self._sandboxes.by_id.values():
            cost, most = sum(self.costs(sandbox).values(), Decimal(0)), self.ceiling(sandbox)
            total, ceiling = total + cost, ceiling + most
            lines[sandbox.id] = {
                "name": sandbox.name,
                "seconds": (sandbox.ended_at or time.time()) - sandbox.created_at,
                "cores": list(sandbox.cores),
                "gib": list(sandbox.gib),
                "cost_usd": str(cost),
                "ceiling_usd": str(most),
            }
        return {"sandboxes": lines, "cost_usd": str(total), "ceiling_usd": str(ceiling), "rates": RATES}

    async def WorkspaceBillingRates(self, request: Any, call: Any) -> Any:
        lines = [f"{name}: ${rate} per hour" for name, rate in RATES.items()]
        return api.WorkspaceBillingRatesResponse(rates=RATES, formatted="\n".join(lines))

    async def WorkspaceBillingReport(self, stream: Any, request: Any, call: Any) -> None:
        width = HOUR_S if request.resolution == "h" else 24 * HOUR_S
        start = int(request.start_timestamp.ToSeconds() // width) * width
        end = request.end_timestamp.ToSeconds()
        while start + width <= end:
            for app in self._apps.by_id.values():
                members = [s for s in self._sandboxes.by_id.values() if s.app_id == app.id]
                costs = self._sum(members, since=start, until=start + width)
                if sum(costs.values()):
                    item = api.WorkspaceBillingReportItem(
                        object_id=app.id,
                        description=app.name,
                        environment_name=app.environment,
                        cost=str(sum(costs.values())),
                        cost_by_resource={name: str(cost) for name, cost in costs.items()},
                        tags=app.tags if request.tag_names else {},
                    )
                    item.interval.FromSeconds(start)
                    await stream.send_message(item)
            start += width

    async def SandboxGetStats(self, request: Any, call: Any) -> Any:
        sandbox = self._sandboxes.get(request.sandbox_id)
        since = request.since.ToNanoseconds() / 1e9 if request.HasField("since") else sandbox.created_at
        until = request.until.ToNanoseconds() / 1e9 if request.HasField("until") else time.time()
        seconds, (cores, gib) = self.seconds(sandbox, since, until), self.metered(sandbox)
        response = api.SandboxGetStatsResponse(
            duration_hours=seconds / HOUR_S,
            billed_cpu_core_seconds=cores * seconds,
            billed_memory_gib_seconds=gib * seconds,
        )
        if seconds:
            costs = self.costs(sandbox, since, until)
            response.cost = str(sum(costs.values()))
            response.cost_by_resource.update({name: str(cost) for name, cost in costs.items()})
        response.since.FromNanoseconds(int(since * 1e9))
        response.until.FromNanoseconds(int(until * 1e9))
        return response

    async def SandboxGetTimeRangeStats(self, request: Any, call: Any) -> Any:
        since, until = self._range(request)
        groups: dict[tuple[str | None, ...], list[Sandbox]] = {}
        for sandbox in self._sandboxes.by_id.values():
            wanted = all(sandbox.tags.get(name) == value for name, value in request.tags.items())
            if sandbox.app_id == request.app_id and wanted and self.seconds(sandbox, since, until):
                groups.setdefault(tuple(sandbox.tags.get(n) for n in request.group_by_tags), []).append(
                    sandbox
                )
        if len(groups) > MAX_GROUPS:
            raise invalid(f"{len(groups)} groups; at most {MAX_GROUPS} are answered.")
        response = api.SandboxGetTimeRangeStatsResponse()
        for values, members in groups.items():
            costs = self._sum(members, since=since, until=until)
            group = response.groups.add(
                cost=float(sum(costs.values())),
                cost_str=str(sum(costs.values())),
                cost_by_resource_str={name: str(cost) for name, cost in costs.items()},
            )
            for name, value in zip(request.group_by_tags, values, strict=True):
                if value is None:
                    group.tags[name].SetInParent()
                else:
                    group.tags[name].value = value
        return response

    def _range(self, request: Any) -> tuple[float, float]:
        since = request.since.ToNanoseconds() / 1e9
        until = request.until.ToNanoseconds() / 1e9 if request.HasField("until") else time.time()
        for moment in (since, *([until] if request.HasField("until") else [])):
            if moment % HOUR_S:
                raise invalid(f"{_text(moment)} is not on a UTC hour boundary.")
        if until - since > MAX_RANGE_S:
            raise invalid(
                f"The range from {_text(since)} is over {timedelta(seconds=MAX_RANGE_S).days} days."
            )
        return since, until

    def _sum(self, sandboxes: Iterable[Sandbox], *, since: float, until: float) -> dict[str, Decimal]:
        total = {"CPU": Decimal(0), "Memory": Decimal(0)}
        for name, cost in self._each(sandboxes, since, until):
            total[name] += cost
        return total

    def _each(
        self, sandboxes: Iterable[Sandbox], since: float, until: float
    ) -> Iterator[tuple[str, Decimal]]:
        for sandbox in sandboxes:
            yield from self.costs(sandbox, since, until).items()


def _text(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat()
