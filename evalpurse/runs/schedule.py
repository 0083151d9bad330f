"""One experiment on its way: hold, run, settle, and hold again with what came back.

Whole blocks are held as long as the purse covers their worst case; more are held as runs settle below it.
When the next block does not fit and no held money can come back, the rest is `unfunded`. At every instant
each planned run is in exactly one place: pending (nothing held), ready (held, not started), live, ended.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import anyio
from anyio.abc import TaskGroup

from evalpurse.budget.accounts import Hold, HoldPhase, Role
from evalpurse.budget.errors import AccountFrozenError, AccountInUseError, ExceedsLimitError
from evalpurse.budget.ledger import HOLDS_MAX
from evalpurse.budget.money import format_usd
from evalpurse.runs.attempt import Attempt
from evalpurse.runs.cases import Case
from evalpurse.runs.charge import sandbox_cost_nusd
from evalpurse.runs.errors import (
    BackendRefusedError,
    BadLaunchError,
    OverlayError,
    SandboxError,
    SetupFailedError,
    SourceError,
)
from evalpurse.runs.job import Job
from evalpurse.runs.lab import Lab
from evalpurse.runs.outcomes import Outcome
from evalpurse.runs.plan import attempt_id_of
from evalpurse.runs.rows import unstarted_run_row
from evalpurse.runs.sandboxes.protocol import Limits, Prepared, Sandbox
from evalpurse.runs.variants import Variant
from evalpurse.store.records import ExperimentRow, ExperimentStatusRow, PlannedRunRow

log = logging.getLogger(__name__)

RESTORE_SLACK_S = 300.0
"""Further time for what is started or restored in a sandbox before its harness."""


def limits_of(case: Case, variant: Variant) -> Limits:
    """What an attempt may use: the case's timeout, unless the variant sets its own."""
    machine, limits = variant.spec.machine, Limits()
    return Limits(
        timeout_s=variant.spec.timeout_s or case.timeout_s,
        grade_timeout_s=case.grade_timeout_s,
        slack_s=limits.slack_s + (RESTORE_SLACK_S if machine.restore or machine.docker else 0.0),
    )


def held_seconds(limits: Limits) -> float:
    """How long an attempt may keep its sandbox: harness, graders, start and end."""
    return limits.timeout_s + limits.grade_timeout_s + limits.slack_s


def worst_case_nusd(limits: Limits, nusd_per_second: int, allowance_nusd: int) -> int:
    """The hold of one attempt: all its time at the backend's rate, and its whole allowance."""
    return sandbox_cost_nusd(held_seconds(limits), nusd_per_second) + allowance_nusd


@dataclass(frozen=True)
class Turn:
    """The next attempt of a planned run. `adopted` is its sandbox, if an earlier daemon made one."""

    planned: PlannedRunRow
    number: int = 1
    charged_before_nusd: int = 0
    adopted: Sandbox | None = None

    @property
    def hold_id(self) -> str:
        return attempt_id_of(self.planned.run_id, self.number)


class ExperimentRunner:
    """Carries one experiment to its end. `run` is called once; `cancel` at any moment."""

    def __init__(
        self,
        lab: Lab,
        experiment: ExperimentRow,
        cases: Sequence[Case],
        variants: Sequence[Variant],
        *,
        pending: Iterable[Sequence[Turn]],
        ended: Counter[str],
    ) -> None:
        self._lab = lab
        self.experiment = experiment
        self._cases = {case.case_id: case for case in cases}
        self._variants = {variant.name: variant for variant in variants}
        self._pending: deque[Sequence[Turn]] = deque(pending)
        self._ready: deque[Turn] = deque()
        self._live: set[str] = set()
        self._open = {turn.planned.run_id: turn for block in self._pending for turn in block}
        self._rates: dict[str, int] = json.loads(experiment.rates)
        self._prices = lab.prices_of(experiment.prices_digest)
        self._begun: set[str] = set()
        """Holds under which an attempt may have made its sandbox."""
        self.ended = ended
        self._prepared: dict[str, Prepared] = {}
        self._broken: dict[str, str] = {}
        self._refused: BackendRefusedError | None = None
        self._slot = anyio.CapacityLimiter(experiment.max_parallel)
        self._scope = anyio.CancelScope()
        self._wake = anyio.Event()
        self._cancel_reason: str | None = None
        self.ending = anyio.Lock()
        """Held by who decides how the experiment ends, so that the last status on record is the true one."""
        self._leaving = False
        self.finished = anyio.Event()
        self.changed = anyio.Event()
        self.status = "running"
        self.note = ""

    # what others may know

    @property
    def experiment_id(self) -> str:
        return self.experiment.experiment_id

    @property
    def over(self) -> bool:
        """Whether every run has its outcome and the account is closed."""
        return self.status != "running"

    @property
    def live(self) -> int:
        """Runs that have a sandbox, or are about to."""
        return self._slot.borrowed_tokens

    @property
    def held(self) -> int:
        """Runs with a hold that have not started."""
        return len(self._ready)

    @property
    def pending(self) -> int:
        """Runs without a hold."""
        return sum(len(block) for block in self._pending)

    def worst_case_nusd(self, planned: PlannedRunRow) -> int:
        """The hold of one attempt of a planned run."""
        rate = self._rates[planned.variant]
        return worst_case_nusd(self._limits(planned), rate, self.experiment.allowance_nusd)

    # what others may do

    def cancel(self, reason: str) -> None:
        """Ends the experiment: live sandboxes are ended and settled, the rest never starts.

        The first reason counts.
        """
        if self._cancel_reason is None:
            self._cancel_reason, self.status = reason, "cancelling"
        self._scope.cancel()

    def leave(self) -> None:
        """Lets go without ending anything: sandboxes go on for the next daemon."""
        self._leaving = True
        self._scope.cancel()

    async def hold_what_fits(self) -> None:
        """Holds as many whole pending blocks as the purse covers, in one durable transaction.

        Between the look at what is free and the hold there is no await, so no other experiment comes between.
        """
        account = self.experiment_id
        if not self._pending or self._lab.ledger.frozen_by(account):
            return
        free = self._lab.ledger.free(account)
        chosen: list[Sequence[Turn]] = []
        holds: list[Hold] = []
        for block in self._pending:
            of_block = [self._hold(turn) for turn in block]
            free -= sum(hold.amount_nusd for hold in of_block)
            if free < 0 or len(holds) + len(of_block) > HOLDS_MAX:
                break
            chosen.append(block)
            holds += of_block
        if chosen:
            await self._lab.ledger.hold_many(holds, atomic=True)
            for block in chosen:
                self._pending.popleft()
                self._ready.extend(block)

    def adopt(self, turn: Turn) -> None:
        """Takes over an attempt whose hold is already in the ledger (after a restart)."""
        self._open[turn.planned.run_id] = turn
        self._ready.append(turn)

    async def run(self) -> None:
        """Runs to the end; returns when every planned run has an outcome, or at once after `leave`."""
        status, reason = "finished", ""
        try:
            with self._scope:
                await self._prepare()
                async with anyio.create_task_group() as tasks:
                    await self._drive(tasks)
            if self._leaving:
                return
            with anyio.CancelScope(shield=True):
                async with self.ending:
                    if self._cancel_reason is not None:
                        status, reason = "cancelled", self._cancel_reason
                        await self._end_rest(Outcome.CANCELLED, self._cancel_reason)
                    elif self._refused is not None:
                        status, reason = "failed", str(self._refused)
                    await self._close(status, reason)
        finally:
            self.finished.set()
            self._touch()

    async def fail(self, reason: str) -> None:
        """Closes the experiment after a fault of our own; what was live is settled on evidence."""
        with anyio.CancelScope(shield=True):
            self._live.clear()
            await self._end_rest(Outcome.INFRA_ERROR, reason)
            await self._close("failed", reason)
        self._touch()

    # inside

    def _touch(self) -> None:
        self._wake.set()
        changed, self.changed = self.changed, anyio.Event()
        changed.set()

    async def _prepare(self) -> None:
        """Sources and setup, once a variant, before anything fans out."""
        needed = {turn.planned.variant for turn in self._open.values()}
        for name in self._variants:
            if name not in needed:
                continue
            try:
                self._prepared[name] = await self._lab.variants.prepare(
                    self._variants[name], self._lab.backend
                )
            except BackendRefusedError as error:
                self._refuse(error)
                return
            except (SourceError, OverlayError, SetupFailedError, SandboxError, BadLaunchError) as error:
                log.warning("variant %s of %s: %s", name, self.experiment_id, error)
                self._broken[name] = str(error)

    async def _drive(self, tasks: TaskGroup) -> None:
        in_flight_max = 2 * self.experiment.max_parallel + 64
        while True:
            self._wake = anyio.Event()
            if self._refused is None:
                await self._lab.until_written(self.hold_what_fits)
            elif await self._drop_unstarted():
                return
            while self._ready and len(self._live) < in_flight_max:
                turn = self._ready.popleft()
                self._live.add(turn.planned.run_id)
                tasks.start_soon(self._one, turn)
            if not self._live and not self._ready:
                if not self._pending:
                    return
                if not self._money_may_come():
                    await self._end_rest(Outcome.UNFUNDED, self._why_unfunded())
                    return
                with anyio.move_on_after(1.0):
                    await self._wake.wait()
                continue
            await self._wake.wait()

    def _refuse(self, error: BackendRefusedError) -> None:
        """Nothing that is not running may try any more; what runs goes on. The first one counts."""
        if self._refused is None:
            log.error("experiment %s: %s", self.experiment_id, error)
            self._refused = error

    async def _drop_unstarted(self) -> bool:
        """Ends what has not begun, after a refusal; tells whether nothing is running either."""
        outcome, reason = self._why_not_started()
        self._pending.clear()
        adopted = [turn for turn in self._ready if turn.adopted is not None]
        self._ready = deque(adopted)
        kept = self._live | {turn.planned.run_id for turn in adopted}
        rest = [turn for run_id, turn in self._open.items() if run_id not in kept]
        await self._end_unstarted(rest, outcome, reason)
        return not self._live and not self._ready

    def _money_may_come(self) -> bool:
        """Whether somebody else's held money is what the next block lacks."""
        if self._lab.ledger.frozen_by(self.experiment_id):
            return False
        need = sum(self.worst_case_nusd(turn.planned) for turn in self._pending[0])
        for account in self._lab.ledger.chain(self.experiment_id):
            if account.free_nusd < need and not account.held_nusd:
                return False
            if account.free_nusd + account.held_nusd < need:
                return False
        return True

    def _why_not_started(self) -> tuple[Outcome, str]:
        if self._refused is not None:
            quota = self._refused.facts.get("quota")
            return Outcome.UNFUNDED if quota else Outcome.INFRA_ERROR, str(self._refused)
        return Outcome.UNFUNDED, self._why_unfunded()

    def _why_unfunded(self) -> str:
        frozen = self._lab.ledger.frozen_by(self.experiment_id)
        if frozen:
            why = self._lab.overruns.get(self.experiment_id, "")
            way = f"Account {frozen} is frozen; its owner looks, then: evalpurse budget unfreeze {frozen}."
            return f"{way} {why}".strip()
        need = sum(self.worst_case_nusd(turn.planned) for turn in self._pending[0])
        free = self._lab.ledger.free(self.experiment_id)
        return f"The next block needs {format_usd(need)} held; {format_usd(free)} is free."

    async def _one(self, turn: Turn) -> None:
        """One run to its outcome, through as many attempts as infrastructure failures allow."""
        try:
            unstartable = self._unstartable(turn)
            if unstartable is None:
                await self._attempts(turn)
            else:
                with anyio.CancelScope(shield=True):
                    await self._end_unstarted([turn], *unstartable)
        finally:
            self._live.discard(turn.planned.run_id)
            self._touch()

    async def _attempts(self, turn: Turn) -> None:
        while True:
            self._begun.add(turn.hold_id)
            attempt = self._attempt(turn)
            try:
                last = turn.number > self._lab.settings.infra_retries
                result = await attempt.run(last=last, may_start=self._may_start)
                if result is None:
                    with anyio.CancelScope(shield=True):
                        await self._end_unstarted([turn], *self._why_not_started())
                    return
                if attempt.recorded is None:
                    turn = Turn(
                        turn.planned,
                        number=turn.number + 1,
                        charged_before_nusd=turn.charged_before_nusd + result.charge.total_nusd,
                    )
                    self._open[turn.planned.run_id] = turn
                    if not await self._hold_retry(turn):
                        with anyio.CancelScope(shield=True):
                            await attempt.record_as_final(result)
            finally:
                if attempt.recorded is not None:
                    self._count(turn.planned.run_id, attempt.recorded)
            if attempt.recorded is not None:
                return

    async def _hold_retry(self, turn: Turn) -> bool:
        """Waits a little, then holds the next attempt; False when the purse has no room for it."""
        delay_s = self._lab.settings.infra_retry_delay_s * 2 ** (turn.number - 2)
        await anyio.sleep(delay_s * random.uniform(0.5, 1.5))  # noqa: S311 (jitter, not a secret)
        try:
            with anyio.CancelScope(shield=True):
                hold = [self._hold(turn)]
                await self._lab.until_written(lambda: self._lab.ledger.hold_many(hold, atomic=True))
        except (ExceedsLimitError, AccountFrozenError):
            return False
        return True

    def _unstartable(self, turn: Turn) -> tuple[Outcome, str] | None:
        if turn.adopted is not None:
            return None
        if turn.planned.variant in self._broken:
            return Outcome.INFRA_ERROR, self._broken[turn.planned.variant]
        return None

    def _may_start(self) -> bool:
        """Asked when a run's turn has really come: what was held before a freeze must not start after it."""
        return self._refused is None and not self._lab.ledger.frozen_by(self.experiment_id)

    async def _end_rest(self, outcome: Outcome, reason: str) -> None:
        """Gives every run that has no outcome yet this one; sandboxes that exist are ended and settled."""
        self._pending.clear()
        self._ready.clear()
        rest = list(self._open.values())
        begun = [turn for turn in rest if turn.adopted is not None or turn.hold_id in self._begun]
        async with anyio.create_task_group() as tasks:
            for turn in begun:
                tasks.start_soon(self._abandon, turn, outcome, reason)
        await self._end_unstarted([turn for turn in rest if turn not in begun], outcome, reason)

    async def _abandon(self, turn: Turn, outcome: Outcome, reason: str) -> None:
        attempt = self._attempt(turn)
        await attempt.abandon(outcome, reason)
        if attempt.recorded is not None:
            self._count(turn.planned.run_id, attempt.recorded)

    async def _end_unstarted(self, rest: Sequence[Turn], outcome: Outcome, reason: str) -> None:
        """Records runs whose turn never came, then gives back what was held for them."""
        now = datetime.now(UTC)
        rows = [
            unstarted_run_row(
                turn.planned,
                self.experiment,
                outcome,
                reason,
                now,
                attempts=turn.number - 1,
                charged_nusd=turn.charged_before_nusd,
            )
            for turn in rest
        ]
        await self._lab.until_written(lambda: self._lab.store.append(rows))
        async with anyio.create_task_group() as tasks:
            for turn in rest:
                state = self._lab.ledger.hold_state(turn.hold_id)
                if state is not None and state.state is HoldPhase.HELD:
                    tasks.start_soon(self._lab.until_written, partial(self._release, turn.hold_id, outcome))
                self._count(turn.planned.run_id, outcome)
        self._touch()

    async def _release(self, hold_id: str, outcome: Outcome) -> None:
        await self._lab.ledger.release(hold_id, proof=f"{outcome.value}: its sandbox was never made")

    async def _close(self, status: str, reason: str) -> None:
        await self._lab.events.flush()
        await self._lab.until_written(partial(self._lab.ended, self.experiment_id))
        try:
            await self._lab.until_written(
                lambda: self._lab.ledger.close(
                    f"close:{self.experiment_id}", self.experiment_id, by=Role.AGENT
                )
            )
        except AccountInUseError as error:
            log.warning("the account of %s stays open: %s", self.experiment_id, error)
        row = ExperimentStatusRow(self.experiment_id, status, reason, datetime.now(UTC))
        await self._lab.until_written(lambda: self._lab.store.append([row]))
        self.status, self.note = status, reason

    def _count(self, run_id: str, outcome: Outcome) -> None:
        if self._open.pop(run_id, None) is not None:
            self.ended[outcome.value] += 1

    def _limits(self, planned: PlannedRunRow) -> Limits:
        return limits_of(self._cases[planned.case_id], self._variants[planned.variant])

    def _hold(self, turn: Turn) -> Hold:
        return Hold(
            hold_id=turn.hold_id,
            account=self.experiment_id,
            amount_nusd=self.worst_case_nusd(turn.planned),
            prices_digest=self.experiment.prices_digest,
            purpose="run",
        )

    def _attempt(self, turn: Turn) -> Attempt:
        planned, limits = turn.planned, self._limits(turn.planned)
        held = self._lab.ledger.hold_state(turn.hold_id)
        job = Job(
            planned=planned,
            suite=self.experiment.suite,
            split=self.experiment.split,
            case=self._cases[planned.case_id],
            variant=self._variants[planned.variant],
            prepared=self._prepared.get(planned.variant),
            limits=limits,
            allowance_nusd=self.experiment.allowance_nusd,
            prices=self._prices,
            hold_nusd=held.amount_nusd if held is not None else self.worst_case_nusd(planned),
            held_s=held_seconds(limits),
            number=turn.number,
            charged_before_nusd=turn.charged_before_nusd,
        )
        return Attempt(
            self._lab,
            job,
            self._slot,
            adopted=turn.adopted,
            leaving=lambda: self._leaving,
            on_refused=self._refuse,
        )
