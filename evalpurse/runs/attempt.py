"""One attempt, from its hold to its settlement.

Every step leaves evidence before the next is taken: the hold is durable before the sandbox exists, the
sandbox's own marker before the harness starts, the rows of the result before the sandbox is removed, and
the removal before the hold is settled. A daemon killed at any instant finds, for each open hold, either
recorded rows, or a sandbox, or proof that nothing was started.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import anyio

from evalpurse.budget.accounts import Role
from evalpurse.errors import EvalpurseError
from evalpurse.runs.cases import CaseContent
from evalpurse.runs.charge import NOTHING_RAN, Charge, CostSource, charge_for, sandbox_share_nusd
from evalpurse.runs.errors import BackendRefusedError, GraderError, SandboxError
from evalpurse.runs.graders import grade_all
from evalpurse.runs.graders.metrics import HarnessMetrics, metrics_of
from evalpurse.runs.job import Job, Result
from evalpurse.runs.lab import Lab
from evalpurse.runs.outcomes import TREATMENTS, Outcome, outcome_of_end
from evalpurse.runs.rows import attempt_row, keep_output, run_row, score_rows, usage_rows
from evalpurse.runs.sandboxes.protocol import Ended, EndReason, Output, Sandbox, SandboxSpec
from evalpurse.store.errors import RowsRefusedError
from evalpurse.store.records import EventRow, Record

log = logging.getLogger(__name__)

END_S = 2.0
"""Between the last look at the clock and the end of a remote sandbox: recording, and one call."""

DISK_FULL_BYTES = 16 << 20
"""Less free space than this may be what a harness failed at."""


class Attempt:
    """Carries out one job in one sandbox. `run` is called once."""

    def __init__(
        self,
        lab: Lab,
        job: Job,
        slot: anyio.CapacityLimiter,
        *,
        adopted: Sandbox | None,
        leaving: Callable[[], bool],
        on_refused: Callable[[BackendRefusedError], None],
    ) -> None:
        """`on_refused` is told, before anybody else's turn comes, that no attempt on this backend will do."""
        self._lab = lab
        self._job = job
        self._slot = slot
        self._leaving = leaving
        self._on_refused = on_refused
        self._refused = False
        self._sandbox = adopted
        self._intended = False
        self._grading_s = 0.0
        self._intended_at = datetime.now(UTC)
        self.recorded: Outcome | None = None
        """The run's outcome, once its row is durable."""

    async def run(self, *, last: bool, may_start: Callable[[], bool]) -> Result | None:
        """Runs the job to its recorded, settled end; None when its turn came and it might not start any more.

        Unless this is the `last` attempt, an outcome that is retried leaves the run open (`recorded` stays
        None). A cancellation ends and settles the sandbox, unless the daemon is leaving: then it stays for
        the next daemon.
        """
        try:
            async with self._slot, self._lab.slots:
                if self._sandbox is None and not may_start():
                    return None
                result = await self._carry_out()
                if self._lab.backend.can_vanish:
                    # Its place is taken until its sandbox is gone: somebody else counts what is alive.
                    return await self._shielded_end(result, last=last)
        except anyio.get_cancelled_exc_class():
            if not self._leaving():
                with anyio.CancelScope(shield=True):
                    await self.abandon(Outcome.CANCELLED, "Cancelled.")
            raise
        return await self._shielded_end(result, last=last)

    async def _shielded_end(self, result: Result, *, last: bool) -> Result:
        with anyio.CancelScope(shield=True):
            last = last or self._refused
            await self._conclude(result, final=last or not TREATMENTS[result.outcome].retried)
        return result

    async def abandon(self, outcome: Outcome, reason: str) -> None:
        """Ends the sandbox, if there is one, and records and settles the attempt with this outcome."""
        await self._conclude(await self._evidence(outcome, reason), final=True)

    async def _carry_out(self) -> Result:
        try:
            sandbox = self._sandbox or await self._create()
            self._sandbox = sandbox
            self._step("start", self._lab.backend.start_kind(self._job.variant.digest))
            await sandbox.start()
            ended = await sandbox.wait()
            self._step("collect", ended.reason.value)
            output = await sandbox.get() if ended.reason is not EndReason.LOST else None
            return await self._judge(sandbox, ended, output)
        except BackendRefusedError as error:
            self._refused = True
            self._on_refused(error)
            return await self._infra_error(str(error))
        except EvalpurseError as error:
            return await self._infra_error(str(error))
        except Exception as error:
            log.exception("attempt %s failed inside evalpurse", self._job.attempt_id)
            return await self._infra_error(
                f"Internal error: {type(error).__name__}: {error}. See the daemon's log."
            )

    async def _create(self) -> Sandbox:
        intent = EventRow(
            self._intended_at,
            self._job.planned.experiment_id,
            self._job.planned.run_id,
            self._job.attempt_id,
            "create",
            "",
        )
        if self._lab.backend.can_vanish:
            self._intended = True
            await self._lab.until_written(lambda: self._lab.store.append([intent]))
        else:
            self._lab.events.add(intent)
        content = await self._lab.content(self._job.case)
        return await self._lab.backend.create(self._spec(content))

    def _spec(self, content: CaseContent) -> SandboxSpec:
        job, variant, prepared = self._job, self._job.variant, self._job.prepared
        if prepared is None:
            raise SandboxError(f"The source of variant {variant.name} is not prepared.")
        return SandboxSpec(
            name=job.attempt_id,
            tags={
                "home": self._lab.home_id,
                "experiment": job.planned.experiment_id,
                "run": job.planned.run_id,
                "attempt": str(job.number),
            },
            prepared=prepared,
            command=variant.spec.command,
            case_files=content.files,
            params=variant.spec.params,
            env=variant.spec.env,
            secrets=self._lab.secrets(variant.spec.secrets),
            network=variant.spec.network,
            limits=job.limits,
            allowance_usd=self._lab.usd_text(job.allowance_nusd),
            machine=variant.spec.machine,
        )

    async def _judge(self, sandbox: Sandbox, ended: Ended, output: Output | None) -> Result:
        metrics = metrics_of(output) if output is not None else None
        charge = self._charge(metrics, ended)
        await self._freeze_if_overrun(charge)
        outcome = outcome_of_end(ended, over_allowance=charge.over_allowance)
        if outcome is Outcome.AGENT_ERROR and self._disk_is_full():
            full = f"The disk of this machine was full: {_end_text(outcome, ended)}"
            return Result(Outcome.INFRA_ERROR, charge, ended, output, metrics, error=full)
        if not TREATMENTS[outcome].graded or output is None:
            return Result(outcome, charge, ended, output, metrics, error=_end_text(outcome, ended))
        self._step("grade")
        content = await self._lab.content(self._job.case)
        began = time.monotonic()
        try:
            graded = await grade_all(content.graders, output, content, sandbox)
        except GraderError as error:
            self._grading_s = time.monotonic() - began
            charge = self._charge(metrics, ended)
            return Result(Outcome.GRADER_ERROR, charge, ended, output, metrics, error=str(error))
        self._grading_s = time.monotonic() - began
        return Result(Outcome.SCORED, self._charge(metrics, ended), ended, output, metrics, graded)

    def _disk_is_full(self) -> bool:
        """Whether a harness on this machine may have failed for want of space that is not its fault."""
        backend = self._lab.backend
        return not backend.can_vanish and shutil.disk_usage(self._lab.home.path).free < DISK_FULL_BYTES

    async def _infra_error(self, error: str) -> Result:
        if self._sandbox is None:
            self._sandbox = await self._lab.backend.find(self._job.attempt_id)
        charge = self._charge(None) if self._sandbox is not None else NOTHING_RAN
        return Result(Outcome.INFRA_ERROR, charge, error=error)

    async def _evidence(self, outcome: Outcome, reason: str) -> Result:
        """What an attempt that is given up has used, read before its sandbox goes."""
        if self._sandbox is None:
            self._sandbox = await self._lab.backend.find(self._job.attempt_id)
        if self._sandbox is None:
            charge = self._vanished() if self._intended else NOTHING_RAN
            return Result(outcome, charge, error=reason)
        try:
            ended = await self._sandbox.stop()
            output = await self._sandbox.get()
        except SandboxError as error:
            return Result(outcome, self._charge(None), error=f"{reason} {error}")
        if ended is None:  # no harness, so no model calls; the sandbox itself was there
            return Result(outcome, replace(NOTHING_RAN, sandbox_nusd=self._sandbox_nusd()), error=reason)
        metrics = metrics_of(output)
        charge = self._charge(metrics, ended)
        await self._freeze_if_overrun(charge)
        return Result(outcome, charge, ended, output, metrics, error=reason)

    def _vanished(self) -> Charge:
        """A sandbox that was asked for and is gone: nothing proves that it cost less than its hold."""
        job = self._job
        return Charge(
            job.allowance_nusd, job.hold_nusd - job.allowance_nusd, CostSource.ASSUMED, note="It disappeared."
        )

    def _charge(self, metrics: HarnessMetrics | None, ended: Ended | None = None) -> Charge:
        return charge_for(
            metrics,
            allowance_nusd=self._job.allowance_nusd,
            sandbox_nusd=self._sandbox_nusd(ended),
            prices=self._job.prices,
            at=self._sandbox.created_at if self._sandbox is not None else datetime.now(UTC),
        )

    def _sandbox_nusd(self, ended: Ended | None = None) -> int:
        """The sandbox's life at its limits, as a share of what is held for it.

        Where somebody else bills for it, it lives until we end it, with the moment that its end still takes,
        and no longer than it was made for. On this machine, time after the harness's end is free.
        """
        if self._sandbox is None:
            return 0
        job = self._job
        seconds = (datetime.now(UTC) - self._sandbox.created_at).total_seconds()
        if self._lab.backend.can_vanish:
            seconds += END_S
        elif ended is not None:
            seconds = (ended.ended_at - self._sandbox.created_at).total_seconds() + self._grading_s
        held_nusd = max(0, job.hold_nusd - job.allowance_nusd)
        return sandbox_share_nusd(seconds, held_s=job.held_s, held_nusd=held_nusd)

    async def _conclude(self, result: Result, *, final: bool) -> None:
        """Record, remove, settle: each durable before the next, each repeated until it is done."""
        try:
            await self._record(result, final=final)
        except RowsRefusedError as error:
            log.exception("the result of %s has values that cannot be stored", self._job.attempt_id)
            result = Result(Outcome.INFRA_ERROR, result.charge, error=f"Its result cannot be stored: {error}")
            await self._record(result, final=True)
        if self._sandbox is not None:
            await self._lab.until_written(self._sandbox.terminate)
        await self._lab.until_written(lambda: self._settle(result))

    async def _record(self, result: Result, *, final: bool) -> None:
        rows = await self._lab.until_written(lambda: self._rows(result, final=final))
        await self._lab.until_written(lambda: self._lab.store.append(rows))
        self.recorded = result.outcome if final else None

    async def record_as_final(self, result: Result) -> None:
        """Makes the last attempt's end the run's end, when no further attempt can be made."""
        rows = await self._lab.until_written(lambda: self._final_rows(result))
        await self._lab.until_written(lambda: self._lab.store.append(rows))
        self.recorded = result.outcome

    async def _settle(self, result: Result) -> None:
        job = self._job
        await self._lab.ledger.settle(job.attempt_id, result.charge.total_nusd, detail=result.outcome.value)

    async def _freeze_if_overrun(self, charge: Charge) -> None:
        """Real money went above what was held: nothing new may start, from the moment that it is known."""
        job = self._job
        unpriced = charge.over_allowance and charge.source is CostSource.ASSUMED
        if charge.model_nusd > job.allowance_nusd or unpriced:
            self._lab.overruns[job.planned.experiment_id] = f"Run {job.planned.run_id}: {charge.note}"
            await self._lab.until_written(
                lambda: self._lab.ledger.freeze(
                    f"overrun:{job.attempt_id}",
                    job.planned.experiment_id,
                    reason=charge.note,
                    by=Role.AGENT,
                )
            )

    async def _rows(self, result: Result, *, final: bool) -> list[Record]:
        job = self._job
        rows: list[Record] = [attempt_row(job, result, self._lab.backend.name), *usage_rows(job, result)]
        if final:
            rows += await self._final_rows(result)
        return rows

    async def _final_rows(self, result: Result) -> list[Record]:
        kept = await keep_output(self._lab.store.blobs, result.output)
        return [run_row(self._job, result, kept, self._intended_at), *score_rows(self._job, result)]

    def _step(self, step: str, detail: str = "") -> None:
        planned = self._job.planned
        self._lab.events.add(
            EventRow(
                datetime.now(UTC), planned.experiment_id, planned.run_id, self._job.attempt_id, step, detail
            )
        )


def _end_text(outcome: Outcome, ended: Ended) -> str:
    match outcome:
        case Outcome.INFRA_ERROR:
            return ended.detail or "The sandbox disappeared."
        case Outcome.TIMEOUT:
            return ended.detail or "Ended at its deadline."
        case Outcome.AGENT_ERROR if ended.reason is EndReason.EXITED:
            code = ended.exit_code
            return f"Signal {-code}." if code is not None and code < 0 else f"Exit code {code}."
        case Outcome.AGENT_ERROR:
            return ended.detail or f"Went over its limit of {ended.reason.value}."
        case _:
            return ""
