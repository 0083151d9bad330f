"""Experiments: launch, watch, cancel, and take up again after a crash.

Launching is one critical section that a cancelled call cannot cut: the experiment's account, its rows and
its first holds are made together, and the same idempotency key always leads to the same experiment.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

import anyio
from anyio.abc import TaskGroup

from evalpurse.budget.accounts import Role
from evalpurse.budget.errors import LedgerUnavailableError
from evalpurse.budget.money import format_usd
from evalpurse.runs.errors import (
    BadLaunchError,
    IdempotencyConflictError,
    LeavingError,
    SandboxError,
    UnknownExperimentError,
    nearest,
)
from evalpurse.runs.estimate import Estimate
from evalpurse.runs.lab import RETRY_WRITE_S, Lab
from evalpurse.runs.plan import blocks
from evalpurse.runs.planner import Plan, Planner
from evalpurse.runs.recover import recover
from evalpurse.runs.request import LaunchRequest
from evalpurse.runs.schedule import ExperimentRunner, Turn
from evalpurse.store.records import ExperimentRow, ExperimentStatusRow, Record, RunRow

log = logging.getLogger(__name__)

OVER = ("finished", "cancelled", "failed")
"""Statuses of an experiment that will not change again."""


@dataclass(frozen=True)
class Status:
    """Where an experiment stands. `ended` counts runs by outcome, without live, held and pending ones."""

    experiment_id: str
    suite: str
    variants: Sequence[str]
    baseline: str
    status: str
    note: str
    run_count: int
    ended: dict[str, int]
    live: int
    held: int
    pending: int
    cap_nusd: int
    spent_nusd: int
    held_nusd: int
    created_at: datetime

    @property
    def done(self) -> int:
        return sum(self.ended.values())

    @property
    def over(self) -> bool:
        return self.status in OVER


@dataclass(frozen=True)
class Launched:
    """A launch's answer. `existing` means that the key was used before with the same arguments."""

    existing: bool
    estimate: Estimate | None
    status: Status


class Experiments:
    """All experiments of one daemon; their runners live in the task group it is given."""

    def __init__(self, labs: Mapping[str, Lab], tasks: TaskGroup) -> None:
        """`labs` has one lab a backend; they differ in nothing else."""
        self._labs = labs
        self._lab = next(iter(labs.values()))
        self._tasks = tasks
        self._runners: dict[str, ExperimentRunner] = {}
        self._stuck: dict[str, str] = {}
        self._launching = anyio.Lock()
        self._taking: dict[str, anyio.Event] = {}
        """Experiments that are being taken up after a restart."""
        self._leaving = False
        self._left = anyio.Event()

    async def dry_run(self, request: LaunchRequest) -> Estimate:
        """What a launch would hold, cost and detect; raises what `Planner.plan` raises; changes nothing."""
        lab = self._lab_of(request.backend)
        await lab.ready()
        return (await Planner(lab).plan(request)).estimate

    def isolation(self, backend: str) -> str:
        """What keeps runs apart on a backend; raises BadLaunchError for one that there is not."""
        return self._lab_of(backend).backend.isolation_statement

    def _lab_of(self, backend: str) -> Lab:
        if backend not in self._labs:
            raise BadLaunchError(
                f"There is no backend '{backend}'.", hint=nearest(backend, list(self._labs), what="backends")
            )
        return self._labs[backend]

    async def launch(self, request: LaunchRequest, *, by: Role) -> Launched:
        """Starts an experiment under its cap, or returns the one that this key started before.

        Raises:
            IdempotencyConflictError: the key stands for other arguments.
            ExceedsLimitError: the cap is above what the account has free.
            and what `Planner.plan` raises; then nothing was started or held.
        """
        request.check()
        async with self._launching:
            with anyio.CancelScope(shield=True):
                launched = await self._launch(request, by)
        return launched

    async def _launch(self, request: LaunchRequest, by: Role) -> Launched:
        stored = await self._lab.store.fetch("experiment_by_id", experiment_id=request.experiment_id)
        if stored:
            known = _experiment(stored[0])
            if known.arguments_digest != request.digest:
                raise IdempotencyConflictError(
                    f"idempotency_key {request.idempotency_key!r} already stands for experiment "
                    f"{known.experiment_id} (suite {known.suite}, variants {', '.join(known.variants)}, "
                    f"{known.repeats} repeats, cap {format_usd(known.cap_nusd)}).",
                    hint="Send the same arguments to see that experiment, or choose another key.",
                    experiment_id=known.experiment_id,
                )
            return Launched(True, None, await self.status(known.experiment_id))
        if self._leaving:
            raise LeavingError(
                "The daemon is stopping and starts nothing new.", hint="Call again in a few seconds."
            )
        lab = self._lab_of(request.backend)
        await lab.ready()
        planner = Planner(lab)
        plan = await planner.plan(request)
        planner.check_money(plan)
        experiment = self._experiment_row(plan)
        await self._lab.ledger.open_account(
            f"launch:{experiment.experiment_id}",
            experiment.experiment_id,
            parent=request.account,
            limit_nusd=request.cap_nusd,
            by=by,
        )
        now = datetime.now(UTC)
        reused = await planner.reused(plan, now)
        running = ExperimentStatusRow(experiment.experiment_id, "running", "", now)
        rows: list[Record] = [experiment, running, *plan.rows, *reused]
        await self._lab.store.append(rows)
        runner = ExperimentRunner(
            lab,
            experiment,
            plan.cases,
            plan.variants,
            pending=[
                [Turn(row) for row in block]
                for block in blocks(row for row in plan.rows if not row.reuse_run_id)
            ],
            ended=Counter(row.outcome for row in reused if isinstance(row, RunRow)),
        )
        with suppress(LedgerUnavailableError):  # it is running from here on, and tries again by itself
            await runner.hold_what_fits()
        self._start(runner)
        return Launched(False, plan.estimate, await self.status(experiment.experiment_id))

    async def status(self, experiment_id: str) -> Status:
        """Where an experiment stands now.

        Raises:
            UnknownExperimentError: with the nearest ids.
        """
        runner = self._runners.get(experiment_id)
        if runner is not None:
            return self._status(runner.experiment, runner.status, runner.note, dict(runner.ended), runner)
        stored = await self._stored(experiment_id)
        counts = await self._lab.store.fetch("outcome_counts", experiment_id=experiment_id)
        ended = {row["outcome"]: row["runs"] for row in counts}
        note = self._stuck.get(experiment_id, stored["status_reason"])
        return self._status(_experiment(stored), stored["status"], note, ended, None)

    async def experiment(self, experiment_id: str) -> ExperimentRow:
        """The row of an experiment; raises UnknownExperimentError with the nearest ids."""
        runner = self._runners.get(experiment_id)
        return runner.experiment if runner is not None else _experiment(await self._stored(experiment_id))

    async def _stored(self, experiment_id: str) -> dict[str, Any]:
        """The stored row with its newest status; raises UnknownExperimentError with the nearest ids."""
        found = await self._lab.store.fetch("experiment_by_id", experiment_id=experiment_id)
        if not found:
            known = [row["experiment_id"] for row in await self._lab.store.fetch("experiments")]
            raise UnknownExperimentError(
                f"There is no experiment '{experiment_id}'.",
                hint=nearest(experiment_id, known, what="experiments"),
            )
        return found[0]

    async def wait(
        self, experiment_id: str, wait_s: float, *, progress: Callable[[Status], object] | None = None
    ) -> Status:
        """Returns when the experiment is over, at the latest after `wait_s` seconds.

        Cancelling the wait ends the wait only. `progress` is called at most about twice a second.
        """
        started = anyio.current_time()
        await self._taken_up(experiment_id, wait_s)
        status = await self.status(experiment_id)
        runner = self._runners.get(experiment_id)
        if runner is None or status.over:
            return status
        with anyio.move_on_at(started + wait_s):
            while not runner.finished.is_set():
                changed = runner.changed
                with anyio.move_on_after(1.0):
                    await changed.wait()
                if progress is not None:
                    progress(await self.status(experiment_id))
                with anyio.move_on_after(0.4):
                    await runner.finished.wait()
        return await self.status(experiment_id)

    async def cancel(self, experiment_id: str, reason: str) -> Status:
        """Ends an experiment and returns when every run has an outcome and every hold is settled.

        An experiment that is over stays as it is.
        """
        await self.experiment(experiment_id)
        await self._taken_up(experiment_id, math.inf)
        runner = self._runners.get(experiment_id)
        if runner is not None and not runner.finished.is_set():
            with anyio.CancelScope(shield=True):
                async with runner.ending:
                    if runner.status == "running":
                        row = ExperimentStatusRow(experiment_id, "cancelling", reason, datetime.now(UTC))
                        await self._lab.until_written(lambda: self._lab.store.append([row]))
                        runner.cancel(reason)
            await runner.finished.wait()
        return await self.status(experiment_id)

    async def recover(self) -> None:
        """Takes up every experiment that a dead daemon left unfinished.

        Those of a backend that others run are taken up beside everything else: it may not answer now.
        """
        for row in await self._lab.store.fetch("unfinished_experiments"):
            experiment = _experiment(row)
            taken = self._taking[experiment.experiment_id] = anyio.Event()
            cancelling = row["status_reason"] if row["status"] == "cancelling" else None
            if self._lab_of(experiment.backend).backend.can_vanish:
                self._tasks.start_soon(self._take_up, experiment, cancelling, taken)
            else:
                await self._take_up(experiment, cancelling, taken)

    async def _take_up(self, experiment: ExperimentRow, cancelling: str | None, taken: anyio.Event) -> None:
        experiment_id = experiment.experiment_id
        try:
            runner = await self._recovered(self._lab_of(experiment.backend), experiment)
        except Exception as error:
            # Its money stays held and its sandboxes stay; the other experiments must go on.
            log.exception("experiment %s could not be taken up", experiment_id)
            self._stuck[experiment_id] = f"Could not be taken up after a restart: {error}"
        else:
            if runner is None:
                return
            self._stuck.pop(experiment_id, None)
            if cancelling is not None:
                runner.cancel(cancelling)
            self._start(runner)
        del self._taking[experiment_id]
        taken.set()

    async def _recovered(self, lab: Lab, experiment: ExperimentRow) -> ExperimentRunner | None:
        """The runner, when the backend answers; None when the daemon leaves before it does."""
        tries = 0
        while not self._leaving:
            try:
                await lab.ready()
                return await recover(lab, experiment)
            except (BadLaunchError, SandboxError) as error:
                if not lab.backend.can_vanish:
                    raise
                log.warning("experiment %s cannot be taken up yet: %s", experiment.experiment_id, error)
                self._stuck[experiment.experiment_id] = f"Waits to be taken up after a restart: {error}"
            with anyio.move_on_after(RETRY_WRITE_S[min(tries, len(RETRY_WRITE_S) - 1)]):
                await self._left.wait()
            tries += 1
        return None

    async def leave(self) -> None:
        """Lets go of every experiment; running sandboxes go on, and the next daemon takes them up."""
        self._leaving = True
        self._left.set()
        going = [runner for runner in self._runners.values() if not runner.finished.is_set()]
        for runner in going:
            runner.leave()
        for runner in going:
            await runner.finished.wait()

    async def _taken_up(self, experiment_id: str, wait_s: float) -> None:
        taken = self._taking.get(experiment_id)
        if taken is not None:
            with anyio.move_on_after(wait_s):
                await taken.wait()

    def _start(self, runner: ExperimentRunner) -> None:
        self._runners[runner.experiment_id] = runner
        self._tasks.start_soon(self._supervise, runner)

    async def _supervise(self, runner: ExperimentRunner) -> None:
        """A fault in one experiment ends that experiment, loudly; it must not take the daemon with it."""
        try:
            await runner.run()
        except Exception as error:
            log.exception("experiment %s failed inside evalpurse", runner.experiment_id)
            await self._fail(
                runner, f"Internal error: {type(error).__name__}: {error}. See the daemon's log."
            )
        if runner.over and runner.experiment_id in self._runners:
            del self._runners[runner.experiment_id]

    async def _fail(self, runner: ExperimentRunner, reason: str) -> None:
        try:
            await runner.fail(reason)
        except Exception:
            # What it holds stays held: the next daemon takes it up again. The other experiments go on.
            log.exception("experiment %s could not be closed after its fault", runner.experiment_id)
            self._stuck[runner.experiment_id] = reason
            del self._runners[runner.experiment_id]

    def _experiment_row(self, plan: Plan) -> ExperimentRow:
        request = plan.request
        return ExperimentRow(
            experiment_id=request.experiment_id,
            suite=request.suite,
            split=request.split,
            strategy=request.strategy,
            variants=list(request.variants),
            case_count=len(plan.cases),
            repeats=request.repeats,
            run_count=len(plan.rows),
            cap_nusd=request.cap_nusd,
            allowance_nusd=request.allowance_nusd,
            account=request.account,
            max_parallel=request.max_parallel or int(self._lab_of(request.backend).slots.total_tokens),
            backend=request.backend,
            prices_digest=self._lab.prices.digest,
            baseline=request.baseline or request.variants[0],
            idempotency_key=request.idempotency_key,
            arguments_digest=request.digest,
            reuse=request.reuse,
            rates=json.dumps(dict(plan.rates)),
            created_at=datetime.now(UTC),
        )

    def _status(
        self,
        experiment: ExperimentRow,
        status: str,
        note: str,
        ended: dict[str, int],
        runner: ExperimentRunner | None,
    ) -> Status:
        account = self._lab.ledger.account(experiment.experiment_id)
        return Status(
            experiment_id=experiment.experiment_id,
            suite=experiment.suite,
            variants=experiment.variants,
            baseline=experiment.baseline,
            status=status,
            note=note,
            run_count=experiment.run_count,
            ended=ended,
            live=runner.live if runner else 0,
            held=runner.held if runner else 0,
            pending=runner.pending if runner else 0,
            cap_nusd=account.limit_nusd,
            spent_nusd=account.spent_nusd,
            held_nusd=account.held_nusd,
            created_at=experiment.created_at,
        )


def _experiment(row: dict[str, Any]) -> ExperimentRow:
    """The row without the status that is joined to it."""
    return ExperimentRow(**{field.name: row[field.name] for field in fields(ExperimentRow)})
