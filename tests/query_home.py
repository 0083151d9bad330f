"""A store with a small visible experiment, and canaries wherever agent SQL must not reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from anyio.from_thread import BlockingPortal, start_blocking_portal

from evalpurse.home import Home
from evalpurse.store.database import Store
from evalpurse.store.query import QueryResult, QueryService
from evalpurse.store.records import (
    AccountRow,
    AttemptRow,
    CaseRow,
    EventRow,
    ExperimentRow,
    ExperimentStatusRow,
    JournalRow,
    PlannedRunRow,
    Record,
    RunRow,
    ScoreRow,
    SuiteRow,
    UsageRow,
    VariantRow,
    WorldRow,
)

CANARY = "canary7f3a"
START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
DEV, HOLDOUT = "exp_devdevde", "exp_holdhold"
SCORES = {
    "base": {"a": (1.0, 0.0), "b": (0.5, 0.5), "c": (0.0, 0.0)},
    "fast": dict.fromkeys("abc", (1.0, 0.5)),
}


class Guarded(NamedTuple):
    """A query service over planted data, called from a plain test."""

    home: Home
    service: QueryService
    portal: BlockingPortal

    def query(self, sql: str, **options: Any) -> QueryResult:
        return self.portal.call(lambda: self.service.query(sql, **options))

    def rows(self, sql: str) -> list[list[Any]]:
        return self.query(sql).rows


@contextmanager
def guarded(folder: Path) -> Iterator[Guarded]:
    """A store, filled, and a query service over it, in an event loop of their own."""
    home = Home(folder / "home").create()
    (home.path / "secret.txt").write_text(f"{CANARY}-file")
    with start_blocking_portal() as portal:
        store = portal.call(Store.open, home)
        try:
            portal.call(store.append, rows())
            service = QueryService(store, home)
            try:
                yield Guarded(home, service, portal)
            finally:
                portal.call(service.close)
        finally:
            portal.call(store.close)


def rows() -> list[Record]:
    """The visible experiment has 3 cases, 2 variants and 2 repeats; everything else is a canary."""
    return [
        SuiteRow("arith", START),
        WorldRow("manuals", "d" * 64, 2, 9, f"{CANARY}-manifest", START),
        *(case(name, "dev") for name in "abc"),
        case(f"{CANARY}-case", "holdout"),
        *(variant(name) for name in ("base", "fast")),
        experiment(DEV, "dev"),
        experiment(HOLDOUT, "holdout"),
        ExperimentStatusRow(DEV, "running", "", START),
        ExperimentStatusRow(DEV, "finished", "all runs ended", START + timedelta(minutes=5)),
        *dev_runs(),
        *run_rows(HOLDOUT, 1, f"{CANARY}-case", "base", 1, 0.25, "holdout"),
        AccountRow("workspace", "", 10_000_000_000, 4_000_000_000, 0, "open"),
        AccountRow("team", "workspace", 5_000_000_000, 4_000_000_000, 500_000_000, "open"),
        *(entry(seq, run_id) for seq, run_id in enumerate((f"{DEV}.00001.1", f"{HOLDOUT}.00001.1"), 1)),
    ]


def dev_runs() -> list[Record]:
    found: list[Record] = []
    seq = 0
    for name in "abc":
        for repeat in (1, 2):
            for label in ("base", "fast"):
                seq += 1
                score = SCORES[label][name][repeat - 1]
                found += run_rows(DEV, seq, name, label, repeat, score, "dev")
    return found


def case(name: str, split: str) -> CaseRow:
    tags = ["easy", f"tag-{name}"] if split == "dev" else [f"{CANARY}-tag"]
    return CaseRow("arith", name, 1, f"digest-{name}", split, tags, ["exact"], 60.0, f"{CANARY}-blob", START)


def variant(name: str) -> VariantRow:
    return VariantRow(
        variant=name,
        variant_digest=f"digest-{name}",
        repo="repo",
        commit_sha="c" * 40,
        run_command="run",
        model="m1",
        params='{"top_k": 3, "windows": true}',
        parent="" if name == "base" else "base",
        description=f"the {name} one",
        spec_blob=f"{CANARY}-spec",
        created_at=START,
    )


def experiment(name: str, split: str) -> ExperimentRow:
    return ExperimentRow(
        experiment_id=name,
        suite="arith",
        split=split,
        strategy="grid",
        variants=["base", "fast"],
        case_count=3,
        repeats=2,
        run_count=12,
        cap_nusd=5_000_000_000,
        allowance_nusd=100_000_000,
        account="team",
        max_parallel=4,
        backend="local",
        prices_digest="prices",
        baseline="base",
        idempotency_key=f"{CANARY}-key",
        arguments_digest=f"{CANARY}-arguments",
        reuse=True,
        rates="{}",
        created_at=START,
    )


def run_rows(
    experiment_id: str, seq: int, case_id: str, label: str, repeat: int, score: float, split: str
) -> list[Record]:
    """A run with all that belongs to it. Its number decides cost, tokens and times."""
    run_id, hidden = f"{experiment_id}.{seq:05d}", "" if split == "dev" else CANARY
    ended = START + timedelta(seconds=10 * seq)
    digests = (f"digest-{case_id}", f"digest-{label}")
    return [
        PlannedRunRow(
            run_id, experiment_id, seq, case_id, 1, digests[0], label, digests[1], repeat, reuse_run_id=""
        ),
        RunRow(
            run_id=run_id,
            experiment_id=experiment_id,
            suite="arith",
            split=split,
            case_id=case_id,
            case_version=1,
            case_digest=digests[0],
            variant=label,
            variant_digest=digests[1],
            repeat=repeat,
            outcome="scored",
            counted=True,
            score=score,
            attempts=1,
            reused_from="",
            cost_nusd=seq * 1_000_000,
            model_cost_nusd=seq * 1_000_000,
            sandbox_cost_nusd=0,
            cost_source="reported",
            input_tokens=100 * seq,
            output_tokens=10 * seq,
            duration_s=float(seq),
            start_latency_s=0.5,
            exit_code=0,
            error=hidden,
            answer_blob=f"{CANARY}-answer",
            log_blob=f"{CANARY}-log",
            transcript_blob=f"{CANARY}-transcript",
            artifacts_blob=f"{CANARY}-artifacts",
            started_at=ended - timedelta(seconds=seq),
            ended_at=ended,
        ),
        AttemptRow(
            f"{run_id}.1",
            run_id,
            experiment_id,
            1,
            "local",
            "scored",
            1_000_000,
            2_000_000,
            hidden,
            None,
            ended,
        ),
        ScoreRow(run_id, experiment_id, case_id, split, label, "exact", "exact", score, 1.0),
        UsageRow(
            run_id,
            experiment_id,
            f"{run_id}.1",
            split,
            "p",
            "m1",
            "reported",
            1,
            100,
            0,
            10,
            1_000_000,
            ended,
        ),
        EventRow(ended, experiment_id, run_id, f"{run_id}.1", "create", hidden),
    ]


def entry(seq: int, attempt_id: str) -> JournalRow:
    return JournalRow(seq, f"hold:{attempt_id}", "hold", "team", attempt_id, 2_000_000, START, attempt_id)
