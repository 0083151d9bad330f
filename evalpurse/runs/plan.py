"""In which order the runs of an experiment go out: paired blocks, breadth before depth.

A block is all variants of one case and repeat. Blocks rotate over the cases and every case is seen once
before any is seen twice, so whatever the purse pays for is a fair comparison. Within a block the order of
variants rotates too, so that none is always first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from evalpurse.runs.cases import Case
from evalpurse.runs.variants import Variant
from evalpurse.store.records import PlannedRunRow


class ReuseKey(NamedTuple):
    """What must be equal for a finished run to stand for a new one."""

    variant_digest: str
    case_digest: str
    repeat: int


def run_id_of(experiment_id: str, seq: int) -> str:
    """The id of the run at a place in launch order."""
    return f"{experiment_id}.{seq:05d}"


def attempt_id_of(run_id: str, number: int) -> str:
    """The id of an attempt: also its sandbox's name and its hold's id."""
    return f"{run_id}.{number}"


def launch_order(
    experiment_id: str, cases: Sequence[Case], variants: Sequence[Variant], repeats: int
) -> list[PlannedRunRow]:
    """All runs of an experiment in launch order; nothing is reused yet."""
    rows: list[PlannedRunRow] = []
    for repeat in range(1, repeats + 1):
        for place, case in enumerate(cases):
            turn = (place + repeat - 1) % len(variants)
            for variant in (*variants[turn:], *variants[:turn]):
                seq = len(rows)
                rows.append(
                    PlannedRunRow(
                        run_id=run_id_of(experiment_id, seq),
                        experiment_id=experiment_id,
                        seq=seq,
                        case_id=case.case_id,
                        case_version=case.version,
                        case_digest=case.case_digest,
                        variant=variant.name,
                        variant_digest=variant.digest,
                        repeat=repeat,
                        reuse_run_id="",
                    )
                )
    return rows


def reuse_key(row: PlannedRunRow) -> ReuseKey:
    """The key under which an earlier run of the same work is found."""
    return ReuseKey(row.variant_digest, row.case_digest, row.repeat)


def blocks(rows: Iterable[PlannedRunRow]) -> list[list[PlannedRunRow]]:
    """Rows in launch order, cut into blocks of one case and repeat."""
    return [list(block) for _, block in groupby(rows, key=lambda row: (row.repeat, row.case_id))]
