"""Reading what experiments found: comparisons of variants, and single runs page by page.

Every cost of a comparison is what the work itself cost: a reused run counts with what it cost when it was
paid for, a retried one with its last attempt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import anyio.to_thread

from evalpurse.analysis.compare import Comparison, comparable, compare_many
from evalpurse.analysis.runs import RunFact
from evalpurse.analysis.summary import VariantSummary, summarise
from evalpurse.runs.errors import BadLaunchError, HiddenError, UnknownRunError, nearest
from evalpurse.runs.experiments import Experiments, Status
from evalpurse.runs.lab import Lab

Part = Literal["log", "transcript", "answer"]

_CHARACTER_BYTES_MAX = 4


@dataclass(frozen=True)
class Compared:
    """All variants of one experiment against its baseline, or another one.

    `variants` describes each on all its own runs; `refused` says why a variant could not be compared.
    """

    status: Status
    baseline: str
    variants: Sequence[VariantSummary]
    comparisons: Sequence[Comparison]
    refused: Mapping[str, str]
    cost_sources: Sequence[str]


@dataclass(frozen=True)
class RunPage:
    """One run and one page of one part of what it left.

    `text` starts at byte `offset` of `total_bytes`; `next_offset` is 0 on the last page.
    """

    run: dict[str, Any]
    scores: Sequence[dict[str, Any]]
    attempts: Sequence[dict[str, Any]]
    part: Part
    text: str
    offset: int
    next_offset: int
    total_bytes: int


class Results:
    """Reads of one lab's finished runs."""

    def __init__(self, lab: Lab, experiments: Experiments) -> None:
        self._lab = lab
        self._experiments = experiments

    async def compare(self, experiment_id: str, *, baseline: str = "", margin: float = 0.05) -> Compared:
        """Every other variant of an experiment against a baseline, paired by case.

        Raises:
            UnknownExperimentError, BadLaunchError: names that the experiment does not have.
            AnalysisError: the baseline has no ended run yet.
        """
        experiment = await self._experiments.experiment(experiment_id)
        chosen = baseline or experiment.baseline
        if chosen not in experiment.variants:
            raise BadLaunchError(
                f"Experiment {experiment_id} has no variant '{chosen}'.",
                hint=nearest(chosen, experiment.variants, what="variants"),
            )
        status = await self._experiments.status(experiment_id)
        rows = await self._lab.store.fetch("runs_of", experiment_id=experiment_id)
        return await anyio.to_thread.run_sync(
            partial(_compared, status, chosen, experiment.variants, rows, margin)
        )

    async def read_run(self, run_id: str, *, part: Part, offset: int, page_bytes: int) -> RunPage:
        """One finished run with one page of its log, transcript or answer.

        Raises:
            UnknownRunError: there is no such run, or it has not ended.
            HiddenError: the run is of a holdout case.
        """
        found = await self._lab.store.fetch("run_by_id", run_id=run_id)
        if not found:
            raise UnknownRunError(
                f"There is no ended run '{run_id}'.",
                hint="query_results lists them: SELECT run_id, outcome FROM runs WHERE experiment_id = '…'.",
            )
        run = found[0]
        if run["split"] != "dev":
            raise HiddenError(
                f"Run {run_id} is of a {run['split']} case; its content is not shown.",
                hint="Read runs of the dev split.",
            )
        content = await self._part(run, part)
        start = min(max(0, offset), len(content))
        after, text = page_of(content, start, page_bytes)
        return RunPage(
            run=run,
            scores=await self._lab.store.fetch("scores_of", run_id=run_id),
            attempts=await self._lab.store.fetch("attempts_of", run_id=run_id),
            part=part,
            text=text,
            offset=start,
            next_offset=after if after < len(content) else 0,
            total_bytes=len(content),
        )

    async def _part(self, run: dict[str, Any], part: Part) -> bytes:
        digest = run[f"{part}_blob"]
        return await anyio.to_thread.run_sync(self._lab.store.blobs.get, digest) if digest else b""


def page_of(content: bytes, start: int, page_bytes: int) -> tuple[int, str]:
    """Where a page that begins at `start` ends, and its text.

    A page ends between two characters, and takes at most `page_bytes` as a JSON text: what is not UTF-8 is
    shown as U+FFFD and control characters as escapes, which take several times their place.
    """
    size = page_bytes
    while True:
        end = _between_characters(content, start, min(start + size, len(content)))
        text = content[start:end].decode("utf-8", errors="replace")
        taken = len(json.dumps(text, ensure_ascii=False).encode()) - 2
        if size <= 1 or taken <= page_bytes:
            return end, text
        size = min(size * 95 // 100, size * page_bytes // taken)


def _between_characters(content: bytes, start: int, end: int) -> int:
    """The end moved back to the beginning of a character that it would cut; binary content stays as it is."""
    for back in range(min(_CHARACTER_BYTES_MAX, end - start - 1)):
        if end == len(content) or content[end - back] & 0xC0 != 0x80:
            return end - back
    return end


def _compared(
    status: Status, baseline: str, variants: Sequence[str], rows: Sequence[dict[str, Any]], margin: float
) -> Compared:
    facts = [_fact(row) for row in rows]
    found = comparable(facts, baseline, [name for name in variants if name != baseline])
    seen = {fact.variant for fact in facts}
    return Compared(
        status=status,
        baseline=baseline,
        variants=[summarise(facts, name) for name in variants if name in seen],
        comparisons=compare_many(facts, baseline, found.candidates, margin=margin)
        if found.candidates
        else [],
        refused={name: str(error) for name, error in found.refused.items()},
        cost_sources=sorted({row["cost_source"] for row in rows if row["cost_source"] != "none"}),
    )


def _fact(row: dict[str, Any]) -> RunFact:
    return RunFact(
        variant=row["variant"],
        case_id=row["case_id"],
        repeat=row["repeat"],
        outcome=row["outcome"],
        counted=row["counted"],
        score=row["score"],
        cost_nusd=row["model_cost_nusd"] + row["sandbox_cost_nusd"],
        duration_s=row["duration_s"],
        start_latency_s=row["start_latency_s"],
        input_tokens=row["input_tokens"],
        output_tokens=row["output_tokens"],
        reused=bool(row["reused_from"]),
        started_at=row["started_at"],
    )
