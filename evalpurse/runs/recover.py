"""Taking up an experiment where a dead daemon left it.

For every open hold there is evidence of what became of its attempt: recorded rows (settle with their
cost), a live or ended sandbox (go on with it), or neither, which on a backend whose sandboxes cannot
vanish proves that nothing was started (start it now, under the same hold), and elsewhere, once the intent
to create is on record, that it was lost (charged in full, then tried again).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import anyio

from evalpurse.budget.accounts import HoldState
from evalpurse.runs.lab import Lab
from evalpurse.runs.outcomes import Outcome
from evalpurse.runs.plan import attempt_id_of, blocks
from evalpurse.runs.schedule import ExperimentRunner, Turn
from evalpurse.store.records import AttemptRow, ExperimentRow, PlannedRunRow

log = logging.getLogger(__name__)

LOOKS_MAX = 50
"""Sandboxes that are looked up at a time: hundreds may be alive, each a call to somebody else's service."""


@dataclass(frozen=True)
class _Past:
    """What the store knows of an experiment's runs."""

    planned: Sequence[PlannedRunRow]
    ended: Mapping[str, str]
    attempts: Mapping[str, AttemptRow]
    intended: frozenset[str]

    def attempts_of(self, run_id: str) -> list[AttemptRow]:
        found = [attempt for attempt in self.attempts.values() if attempt.run_id == run_id]
        return sorted(found, key=lambda attempt: attempt.number)


async def recover(lab: Lab, experiment: ExperimentRow) -> ExperimentRunner:
    """A runner that goes on with an unfinished experiment; every hold that can be is settled first."""
    past = await _past_of(lab, experiment.experiment_id)
    going: dict[str, HoldState] = {}

    async def settle(hold: HoldState) -> None:
        if not await _settle_on_record(lab, past, hold):
            going[hold.hold_id.rpartition(".")[0]] = hold

    await _all([partial(settle, hold) for hold in lab.ledger.open_holds(f"{experiment.experiment_id}.")])
    turns = await _turns(lab, past, going)
    pending = {turn.planned.run_id: turn for turn in turns if turn.planned.run_id not in going}
    cases = await lab.cases.versions(
        experiment.suite, {(row.case_id, row.case_version) for row in past.planned}
    )
    runner = ExperimentRunner(
        lab,
        experiment,
        cases,
        [await lab.variants.get(name) for name in experiment.variants],
        pending=[
            [pending[row.run_id] for row in block]
            for block in blocks(row for row in past.planned if row.run_id in pending)
        ],
        ended=Counter(past.ended.values()),
    )
    for turn in turns:
        if turn.planned.run_id in going:
            runner.adopt(turn)
    log.info(
        "recovered %s: %d ended, %d with a hold, %d pending",
        experiment.experiment_id,
        len(past.ended),
        len(going),
        len(pending),
    )
    return runner


async def _past_of(lab: Lab, experiment_id: str) -> _Past:
    planned = await lab.store.fetch("planned_runs_of", experiment_id=experiment_id)
    ended = await lab.store.fetch("outcomes_of", experiment_id=experiment_id)
    attempts = await lab.store.fetch("attempts_of_experiment", experiment_id=experiment_id)
    intended = await lab.store.fetch("intended_attempts", experiment_id=experiment_id)
    return _Past(
        [PlannedRunRow(**row) for row in planned],
        {row["run_id"]: row["outcome"] for row in ended},
        {row["attempt_id"]: AttemptRow(**row) for row in attempts},
        frozenset(row["attempt_id"] for row in intended),
    )


async def _settle_on_record(lab: Lab, past: _Past, hold: HoldState) -> bool:
    """Settles a hold whose attempt is on record, or whose run ended without one."""
    run_id = hold.hold_id.rpartition(".")[0]
    recorded = past.attempts.get(hold.hold_id)
    if recorded is None and run_id not in past.ended:
        return False
    sandbox = await lab.backend.find(hold.hold_id)
    if sandbox is not None:
        await sandbox.terminate()
    if recorded is not None:
        await lab.ledger.settle(hold.hold_id, recorded.cost_nusd, detail=recorded.outcome)
    else:
        await lab.ledger.release(hold.hold_id, proof=f"{past.ended[run_id]}: its sandbox was never made")
    return True


async def _all(looks: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Does them, some at a time; the first failure is raised when all have ended."""
    limit = anyio.CapacityLimiter(LOOKS_MAX)
    failures: list[Exception] = []

    async def one(look: Callable[[], Awaitable[None]]) -> None:
        async with limit:
            if not failures:
                try:
                    await look()
                except Exception as error:  # noqa: BLE001 (raised below, out of the group)
                    failures.append(error)

    async with anyio.create_task_group() as tasks:
        for look in looks:
            tasks.start_soon(one, look)
    if failures:
        raise failures[0]


async def _turns(lab: Lab, past: _Past, going: dict[str, HoldState]) -> list[Turn]:
    """The next attempt of every run without outcome, in the order of the plan."""
    rows = [row for row in past.planned if row.run_id not in past.ended]
    found: dict[str, Turn] = {}

    async def look(row: PlannedRunRow) -> None:
        found[row.run_id] = await _turn(lab, past, row, going)

    await _all([partial(look, row) for row in rows if row.run_id in going])
    for row in rows:
        if row.run_id not in found:
            found[row.run_id] = await _turn(lab, past, row, {})
    return [found[row.run_id] for row in rows]


async def _turn(lab: Lab, past: _Past, row: PlannedRunRow, going: dict[str, HoldState]) -> Turn:
    """The next attempt of a run without outcome."""
    earlier = past.attempts_of(row.run_id)
    charged = sum(attempt.cost_nusd for attempt in earlier)
    number = earlier[-1].number + 1 if earlier else 1
    hold = going.get(row.run_id)
    if hold is None:
        return await _unheld_turn(lab, row, number, charged)
    sandbox = await lab.backend.find(hold.hold_id)
    if sandbox is None and lab.backend.can_vanish and hold.hold_id in past.intended:
        # Nothing proves that it cost less than its hold.
        why = "The sandbox disappeared while no daemon was running; its whole hold was charged."
        await _record_lost(lab, row, hold, number, hold.amount_nusd, why)
        await lab.ledger.settle(hold.hold_id, hold.amount_nusd, detail=Outcome.INFRA_ERROR.value)
        del going[row.run_id]
        return Turn(row, number + 1, charged + hold.amount_nusd)
    return Turn(row, number, charged, adopted=sandbox)


async def _unheld_turn(lab: Lab, row: PlannedRunRow, number: int, charged_nusd: int) -> Turn:
    """A run without a hold has not begun, unless the results file has lost the rows of an attempt.

    The ledger still knows what such an attempt was charged; its result is gone, and the run is tried again.
    """
    while (state := lab.ledger.hold_state(attempt_id_of(row.run_id, number))) is not None:
        why = "It was settled, but its rows were lost with the end of the results file's log."
        await _record_lost(lab, row, state, number, state.charged_nusd, why)
        charged_nusd += state.charged_nusd
        number += 1
    return Turn(row, number, charged_nusd)


async def _record_lost(
    lab: Lab, row: PlannedRunRow, hold: HoldState, number: int, cost_nusd: int, why: str
) -> None:
    """An attempt that left no result: what it cost stays on record, and the run is tried again."""
    lost = AttemptRow(
        attempt_id=hold.hold_id,
        run_id=row.run_id,
        experiment_id=row.experiment_id,
        number=number,
        backend=lab.backend.name,
        outcome=Outcome.INFRA_ERROR.value,
        cost_nusd=cost_nusd,
        hold_nusd=hold.amount_nusd,
        detail=why,
        started_at=None,
        ended_at=datetime.now(UTC),
    )
    await lab.store.append([lost])
