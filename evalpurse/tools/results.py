"""Tools that read results: comparisons, single runs, SQL."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from evalpurse.analysis.compare import Comparison
from evalpurse.analysis.costs import Ratio
from evalpurse.analysis.summary import VariantSummary
from evalpurse.tools.experiments import StatusModel, status_model
from evalpurse.tools.money import usd, usd_or_none
from evalpurse.tools.texts import clipped, fitting, fitting_names, size_bytes
from evalpurse.tools.toolbox import Answer, BadArgumentsError, Call, Toolbox

PAGE_BYTES = 16_000
ROWS_BYTES = 24_000
COLUMNS_BYTES = 8_000
PART_BYTES = 6_000
COMPARISONS_BYTES = 18_000
NAMES_SHOWN = 10


class RatioModel(BaseModel):
    value: float | None = None
    low: float | None = None
    high: float | None = None
    note: str | None = None


class VariantModel(BaseModel):
    variant: str
    score: float | None = Field(default=None, description="Mean of case means, in [0, 1].")
    score_low: float | None = Field(default=None, description="95 % interval, clustered by case.")
    score_high: float | None = None
    cases: int
    runs: int
    counted: int
    outcomes: dict[str, int]
    coverage: float | None = None
    infra_share: float | None = None
    flaky_share: float | None = None
    cost_per_run_usd: float | None = None
    cost_per_success_usd: float | None = None
    duration_p50_s: float | None = None
    duration_p95_s: float | None = None
    start_latency_p50_s: float | None = None
    start_latency_p95_s: float | None = None
    input_tokens_per_run: float | None = None
    output_tokens_per_run: float | None = None


class ComparisonModel(BaseModel):
    candidate: str
    verdict: str = Field(description="better, worse, not_worse, undecided or indecisive_coverage.")
    cheaper: bool = Field(description="Cost ratio below 1 and score not worse by more than the margin.")
    sentence: str
    delta: float = Field(description="Candidate minus baseline, paired by case.")
    delta_low: float = Field(description="95 % interval, new cases drawn.")
    delta_high: float
    se: float | None = None
    suite_se: float | None = Field(default=None, description="Standard error if only these cases matter.")
    p_better: float | None = None
    p_adjusted: float = Field(description="One-sided p of better, Holm corrected over all candidates.")
    detectable: float | None = None
    paired_cases: int
    wins: int
    losses: int
    ties: int
    fixed: list[str] = Field(description="Cases newly solved, the first ten.")
    broken: list[str] = Field(description="Cases no longer solved, the first ten.")
    cost_ratio: RatioModel
    duration_ratio: RatioModel
    worst_case_low: float = Field(description="Difference if every missing run went against the candidate.")
    worst_case_high: float
    warnings: list[str]


class CompareAnswer(Answer):
    experiment: StatusModel
    baseline: str
    variants: list[VariantModel] = Field(description="Each on all its own runs.")
    comparisons: list[ComparisonModel] = Field(description="Each candidate against the baseline.")
    not_compared: dict[str, str] | None = Field(default=None, description="Variants and why not.")
    margin: float
    cost_sources: list[str] = Field(description="Where model costs come from: reported, assumed, metered.")


class RunScore(BaseModel):
    grader: str
    name: str
    value: float
    weight: float


class RunAttempt(BaseModel):
    attempt_id: str
    outcome: str
    cost_usd: float
    detail: str


class ReadRunAnswer(Answer):
    run_id: str
    experiment_id: str
    variant: str
    case_id: str
    repeat: int
    outcome: str
    counted: bool
    score: float | None = None
    exit_code: int | None = None
    error: str
    cost_usd: float
    cost_source: str
    duration_s: float
    reused_from: str | None = None
    scores: list[RunScore]
    attempts: list[RunAttempt]
    part: str
    text: str
    offset: int
    total_bytes: int
    next_offset: int | None = Field(default=None, description="Pass as offset for the next page.")


class TableModel(BaseModel):
    table: str
    meaning: str
    columns: str = Field(description="name TYPE, ...")


class QueryAnswer(Answer):
    columns: list[str] | None = None
    types: list[str] | None = None
    rows: list[list[Any]] | None = None
    row_count: int | None = None
    elapsed_ms: float | None = None
    data_age_s: float | None = Field(
        default=None, description="Age of a large table's copy, when it is not new."
    )
    tables: list[TableModel] | None = Field(default=None, description="The schema, when sql is empty.")


def _variant(summary: VariantSummary) -> VariantModel:
    score = summary.score
    success = summary.cost_per_success
    return VariantModel(
        variant=summary.variant,
        score=score.value if score else None,
        score_low=score.low if score else None,
        score_high=score.high if score else None,
        cases=summary.cases,
        runs=summary.runs,
        counted=summary.counted,
        outcomes=summary.outcomes,
        coverage=summary.coverage,
        infra_share=summary.infra_share,
        flaky_share=summary.flaky_share,
        cost_per_run_usd=usd_or_none(summary.cost_per_run_nusd),
        cost_per_success_usd=usd_or_none(success.value_nusd) if success else None,
        duration_p50_s=summary.duration_p50_s,
        duration_p95_s=summary.duration_p95_s,
        start_latency_p50_s=summary.start_latency_p50_s,
        start_latency_p95_s=summary.start_latency_p95_s,
        input_tokens_per_run=summary.input_tokens_per_run,
        output_tokens_per_run=summary.output_tokens_per_run,
    )


def _ratio(ratio: Ratio) -> RatioModel:
    return RatioModel(value=ratio.value, low=ratio.low, high=ratio.high, note=ratio.note or None)


def _comparison(found: Comparison) -> ComparisonModel:
    difference = found.difference
    return ComparisonModel(
        candidate=found.candidate.variant,
        verdict=found.verdict.value,
        cheaper=found.cheaper,
        sentence=found.sentence,
        delta=difference.delta,
        delta_low=difference.low,
        delta_high=difference.high,
        se=difference.se,
        suite_se=difference.suite_se,
        p_better=difference.p_better,
        p_adjusted=found.p_adjusted,
        detectable=found.detectable,
        paired_cases=difference.cases,
        wins=difference.wins,
        losses=difference.losses,
        ties=difference.ties,
        fixed=list(difference.fixed[:NAMES_SHOWN]),
        broken=list(difference.broken[:NAMES_SHOWN]),
        cost_ratio=_ratio(found.cost),
        duration_ratio=_ratio(found.duration),
        worst_case_low=found.worst_case_low,
        worst_case_high=found.worst_case_high,
        warnings=list(found.warnings),
    )


def register(toolbox: Toolbox) -> None:
    """Adds compare_variants, read_run and query_results."""

    @toolbox.tool(
        title="Compare variants", read_only=True, destructive=False, idempotent=True, open_world=False
    )
    async def compare_variants(
        call: Call,
        experiment_id: Annotated[str, Field(description="Experiment whose runs are compared.")],
        baseline: Annotated[str, Field(description="Compare with this variant; default: the launch's.")] = "",
        margin: Annotated[
            float,
            Field(
                gt=0, lt=1, description="Loss of score that still counts as not worse; state it beforehand."
            ),
        ] = 0.05,
    ) -> CompareAnswer:
        """Compares every variant of an experiment with its baseline, paired by case, with honest intervals.

        A verdict of better or worse is corrected for the number of candidates. cheaper means cost below the
        baseline AND score not worse by more than the margin. Runs lost to infrastructure are missing, not 0.
        On an experiment that still runs the numbers will move: decide when it is over.
        """
        found = await call.services.results.compare(experiment_id, baseline=baseline, margin=margin)
        status = found.status
        variants = fitting(map(_variant, found.variants), COMPARISONS_BYTES // 2)
        comparisons = fitting(map(_comparison, found.comparisons), COMPARISONS_BYTES)
        refused = fitting_names(list(found.refused), PART_BYTES)
        cut = len(variants) < len(found.variants) or len(comparisons) < len(found.comparisons)
        hints = [
            f"Only the first {len(variants)} of {len(found.variants)} variants and {len(comparisons)} of "
            f"{len(found.comparisons)} comparisons fit: launch fewer at once, or ask query_results."
            if cut
            else "",
            "" if status.over else f"Still running: {status.done} of {status.run_count} runs have ended.",
        ]
        return CompareAnswer(
            experiment=status_model(status),
            baseline=found.baseline,
            variants=variants,
            comparisons=comparisons,
            not_compared={name: clipped(found.refused[name], 200) for name in refused} or None,
            margin=margin,
            cost_sources=list(found.cost_sources),
            truncated=cut,
            hint=" ".join(filter(None, hints)),
            next="read_run on broken or failed cases shows why; query_results lists them.",
        )

    @toolbox.tool(title="Read run", read_only=True, destructive=False, idempotent=True, open_world=False)
    async def read_run(
        call: Call,
        run_id: Annotated[str, Field(description="Id of an ended run; query_results lists them.")],
        part: Annotated[
            Literal["log", "transcript", "answer"], Field(description="What to page through.")
        ] = "log",
        offset: Annotated[
            int, Field(ge=0, description="Byte to start from: next_offset of the page before.")
        ] = 0,
    ) -> ReadRunAnswer:
        """Shows one ended run: outcome, scores, cost, and its log, transcript or answer page by page."""
        page = await call.services.results.read_run(run_id, part=part, offset=offset, page_bytes=PAGE_BYTES)
        run = page.run
        scores = fitting(
            (
                RunScore(grader=row["grader"], name=row["name"], value=row["value"], weight=row["weight"])
                for row in page.scores
            ),
            PART_BYTES,
        )
        hints = [
            f"The {part} has {page.total_bytes:,} bytes; offset {offset:,} is beyond its end."
            if offset > page.total_bytes
            else "",
            f"{len(scores)} of {len(page.scores)} scores are shown; query_results has all."
            if len(scores) < len(page.scores)
            else "",
        ]
        return ReadRunAnswer(
            run_id=run_id,
            experiment_id=run["experiment_id"],
            variant=run["variant"],
            case_id=run["case_id"],
            repeat=run["repeat"],
            outcome=run["outcome"],
            counted=run["counted"],
            score=run["score"],
            exit_code=run["exit_code"],
            error=clipped(run["error"], 1_000),
            cost_usd=usd(run["cost_nusd"]),
            cost_source=run["cost_source"],
            duration_s=run["duration_s"],
            reused_from=run["reused_from"] or None,
            scores=scores,
            attempts=fitting(
                (
                    RunAttempt(
                        attempt_id=row["attempt_id"],
                        outcome=row["outcome"],
                        cost_usd=usd(row["cost_nusd"]),
                        detail=clipped(row["detail"], 500),
                    )
                    for row in page.attempts
                ),
                PART_BYTES,
            ),
            part=page.part,
            text=page.text,
            offset=page.offset,
            total_bytes=page.total_bytes,
            next_offset=page.next_offset or None,
            truncated=bool(page.next_offset),
            hint=" ".join(filter(None, hints)),
        )

    @toolbox.tool(title="Query results", read_only=True, destructive=False, idempotent=True, open_world=False)
    async def query_results(
        call: Call,
        sql: Annotated[
            str, Field(description="One SELECT in DuckDB's dialect; empty shows the tables.")
        ] = "",
        limit: Annotated[int, Field(ge=1, le=1000, description="Rows at most.")] = 200,
    ) -> QueryAnswer:
        """Answers one read-only SQL SELECT over cases, variants, experiments, runs, scores, usage and money.

        Empty sql returns the tables with their columns. Example: SELECT variant, outcome, count(*) AS runs,
        avg(score) AS score, sum(cost_usd) AS usd FROM runs WHERE experiment_id = 'exp_...' GROUP BY ALL.
        """
        if not sql.strip():
            tables = await call.services.queries.schema()
            return QueryAnswer(
                tables=[
                    TableModel(
                        table=table.name,
                        meaning=table.meaning,
                        columns=", ".join(f"{column.name} {column.type}" for column in table.columns),
                    )
                    for table in tables
                ],
                next="query_results with one SELECT.",
            )
        found = await call.services.queries.query(sql, limit=limit)
        head = size_bytes([found.columns, found.types])
        if head > COLUMNS_BYTES:
            raise BadArgumentsError(
                f"The result has {len(found.columns):,} columns, whose names and types take {head:,} bytes; "
                f"an answer has room for {COLUMNS_BYTES:,}.",
                hint="Select fewer columns, with shorter names.",
            )
        rows, cut = _fitting(found.rows)
        if found.rows and not rows:
            raise BadArgumentsError(
                f"The first row alone takes {size_bytes(found.rows[0]):,} bytes; an answer has room for "
                f"{ROWS_BYTES:,}.",
                hint="Select fewer columns, or only the beginning of long texts: left(column, 1000).",
            )
        return QueryAnswer(
            columns=list(found.columns),
            types=list(found.types),
            rows=rows,
            row_count=len(rows),
            elapsed_ms=round(found.elapsed_ms, 1),
            data_age_s=round(found.data_age_s, 1) or None,
            truncated=found.truncated or cut,
            hint="Not all rows are shown: aggregate, filter, or page with LIMIT and OFFSET."
            if found.truncated or cut
            else "",
        )


def _fitting(rows: Any) -> tuple[list[list[Any]], bool]:
    """As many rows as a page may carry."""
    kept: list[list[Any]] = []
    size = 0
    for row in rows:
        size += size_bytes(row) + 1
        if size > ROWS_BYTES:
            return kept, True
        kept.append(list(row))
    return kept, False
