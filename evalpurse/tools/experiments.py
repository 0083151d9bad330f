"""Tools that launch, watch and end experiments."""

from __future__ import annotations

from typing import Annotated, Literal

import anyio
from pydantic import BaseModel, Field

from evalpurse.budget.accounts import Role
from evalpurse.runs.estimate import Estimate
from evalpurse.runs.experiments import Status
from evalpurse.runs.request import LaunchRequest
from evalpurse.tools.money import nusd, usd, usd_or_none
from evalpurse.tools.texts import clipped
from evalpurse.tools.toolbox import Answer, Call, Toolbox

WAIT_S_MAX = 45.0


class EstimateModel(BaseModel):
    runs: int = Field(description="Cases x variants x repeats.")
    new_runs: int = Field(description="Runs that have to be paid for.")
    reused_runs: int = Field(description="Runs whose result was paid for before; they cost nothing.")
    worst_case_usd: float = Field(description="What holding every new run at once takes.")
    likely_usd: float | None = Field(
        default=None, description="From earlier runs of the same variants; absent when there are none."
    )
    free_usd: float = Field(description="What the account has free now.")
    funded_runs: int = Field(description="New runs whose worst case fits at once.")
    detectable: float | None = Field(
        default=None, description="Smallest true score difference found with power 0.8, in [0, 1]."
    )
    warnings: list[str]


class StatusModel(BaseModel):
    experiment_id: str
    suite: str
    variants: list[str]
    baseline: str
    status: str = Field(description="running, cancelling, finished, cancelled or failed.")
    note: str
    runs: int
    done: int
    outcomes: dict[str, int] = Field(description="Ended runs by outcome.")
    running: int
    queued: int = Field(
        description="Runs that are not started: with their money held, or still waiting for it."
    )
    cap_usd: float
    spent_usd: float
    held_usd: float


class LaunchAnswer(Answer):
    dry_run: bool = Field(default=False, description="True: nothing was started or held.")
    existing: bool = Field(
        default=False, description="True: this key had started it before; nothing new began."
    )
    experiment: StatusModel | None = None
    estimate: EstimateModel | None = None
    isolation: str | None = Field(default=None, description="What keeps runs apart on this machine.")


class StatusAnswer(Answer):
    experiment: StatusModel


def status_model(status: Status) -> StatusModel:
    """A status as a client sees it."""
    return StatusModel(
        experiment_id=status.experiment_id,
        suite=status.suite,
        variants=list(status.variants),
        baseline=status.baseline,
        status=status.status,
        note=clipped(status.note, 1_000),
        runs=status.run_count,
        done=status.done,
        outcomes=dict(sorted(status.ended.items())),
        running=status.live,
        queued=status.run_count - status.done - status.live,
        cap_usd=usd(status.cap_nusd),
        spent_usd=usd(status.spent_nusd),
        held_usd=usd(status.held_nusd),
    )


def _estimate_model(found: Estimate) -> EstimateModel:
    return EstimateModel(
        runs=found.run_count,
        new_runs=found.new_runs,
        reused_runs=found.reused_runs,
        worst_case_usd=usd(found.worst_case_nusd),
        likely_usd=usd_or_none(found.likely_nusd),
        free_usd=usd(found.free_nusd),
        funded_runs=found.funded_runs,
        detectable=found.detectable,
        warnings=list(found.warnings),
    )


def _next_step(status: Status) -> str:
    if not status.over:
        return f"wait_experiment('{status.experiment_id}') again."
    if status.status == "failed":
        return "Read the note; the daemon's log has the trace."
    if "frozen" in status.note:
        return f"Its account is frozen, which the owner must look at: {status.note}"
    unfunded = status.ended.get("unfunded", 0)
    more = f" {unfunded} runs were not funded: request_budget asks for more." if unfunded else ""
    return f"compare_variants('{status.experiment_id}').{more}"


def register(toolbox: Toolbox) -> None:
    """Adds launch_experiment, wait_experiment and cancel_experiment."""

    @toolbox.tool(
        title="Launch experiment", read_only=False, destructive=False, idempotent=True, open_world=True
    )
    async def launch_experiment(
        call: Call,
        suite: Annotated[str, Field(description="Suite whose dev cases are run.")],
        variants: Annotated[list[str], Field(description="Variant names; they run in paired blocks.")],
        cap_usd: Annotated[
            float, Field(description="The most that this experiment may ever cost, in dollars.")
        ],
        allowance_usd: Annotated[
            float,
            Field(
                description="The most that one run may spend on models, equal for all; 0 if it calls none."
            ),
        ],
        idempotency_key: Annotated[
            str,
            Field(description="Your own key: the same key and arguments always mean the same experiment."),
        ],
        repeats: Annotated[int, Field(description="Runs of each variant on each case.")] = 1,
        baseline: Annotated[
            str, Field(description="Variant to compare with; the first one by default.")
        ] = "",
        strategy: Annotated[Literal["grid"], Field(description="grid runs everything.")] = "grid",
        case_ids: Annotated[list[str], Field(description="Only these cases; empty means all.")] = [],  # noqa: B006 (a JSON schema default)
        max_parallel: Annotated[int, Field(description="Runs at once; 0 for the default.")] = 0,
        account: Annotated[str, Field(description="Purse to spend from.")] = "workspace",
        backend: Annotated[str, Field(description="local or modal; empty: as configured.")] = "",
        reuse: Annotated[
            bool, Field(description="Take results that were paid for before instead of running again.")
        ] = True,
        dry_run: Annotated[bool, Field(description="Only say what it would hold, cost and detect.")] = False,
    ) -> LaunchAnswer:
        """Launches suite x variants x repeats as one experiment; nothing starts that its cap does not cover.

        The worst case of every run is held before it starts; what it does not use comes back. When the
        purse cannot cover the whole batch, blocks start as money comes back, and the rest ends as unfunded.
        Returns at once; the experiment goes on without you. Call with dry_run=true first. Repeating a call
        with the same key never pays twice. Experiments and their results are kept until the owner deletes
        the home folder.
        """
        request = LaunchRequest(
            suite=suite,
            variants=tuple(variants),
            repeats=repeats,
            cap_nusd=nusd("cap_usd", cap_usd),
            allowance_nusd=nusd("allowance_usd", allowance_usd),
            idempotency_key=idempotency_key,
            baseline=baseline,
            account=account,
            strategy=strategy,
            case_ids=tuple(case_ids),
            max_parallel=max_parallel,
            reuse=reuse,
            backend=backend or call.services.settings.backend,
        )
        experiments = call.services.experiments
        isolation = call.services.experiments.isolation(request.backend)
        if dry_run:
            found = await experiments.dry_run(request)
            return LaunchAnswer(
                dry_run=True,
                estimate=_estimate_model(found),
                isolation=isolation,
                next="The same call with dry_run=false starts it.",
            )
        launched = await experiments.launch(request, by=Role(call.session.role))
        return LaunchAnswer(
            existing=launched.existing,
            experiment=status_model(launched.status),
            estimate=_estimate_model(launched.estimate) if launched.estimate else None,
            isolation=isolation,
            next=_next_step(launched.status),
        )

    @toolbox.tool(
        title="Wait for experiment", read_only=True, destructive=False, idempotent=True, open_world=False
    )
    async def wait_experiment(
        call: Call,
        experiment_id: Annotated[str, Field(description="Id that launch_experiment returned.")],
        wait_s: Annotated[
            float, Field(ge=0, le=WAIT_S_MAX, description="How long to wait at most.")
        ] = WAIT_S_MAX,
    ) -> StatusAnswer:
        """Waits until an experiment is over, at most 45 s, and says where it stands: call it again.

        Ending this call ends the wait, never the experiment.
        """
        send, receive = anyio.create_memory_object_stream[Status](1)

        def note(status: Status) -> None:
            with_room = send.statistics().current_buffer_used == 0
            if with_room:
                send.send_nowait(status)

        async def report() -> None:
            async for status in receive:
                await call.progress(status.done, status.run_count, "runs ended")

        async with receive, anyio.create_task_group() as tasks, send:
            tasks.start_soon(report)
            status = await call.services.experiments.wait(experiment_id, wait_s, progress=note)
        return StatusAnswer(experiment=status_model(status), next=_next_step(status))

    @toolbox.tool(
        title="Cancel experiment", read_only=False, destructive=True, idempotent=True, open_world=False
    )
    async def cancel_experiment(
        call: Call,
        experiment_id: Annotated[str, Field(description="Id that launch_experiment returned.")],
        reason: Annotated[
            str, Field(max_length=500, description="Why; kept with the experiment.")
        ] = "cancelled",
    ) -> StatusAnswer:
        """Ends an experiment now: live sandboxes are charged for what they used, holds come back.

        Results of runs that had ended stay. An experiment that is over stays as it is.
        """
        status = await call.services.experiments.cancel(experiment_id, reason)
        return StatusAnswer(experiment=status_model(status), next=_next_step(status))
