"""Tools that write and list cases."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from evalpurse.budget.accounts import Role
from evalpurse.runs.cases import CaseSpec
from evalpurse.tools.texts import fitting, fitting_names
from evalpurse.tools.toolbox import PAGE_BYTES_TARGET, Answer, Call, Toolbox

PAGE_MAX = 100
PREVIEW_CHARS = 200
IDS_BYTES = 10_000


class CreatedCases(Answer):
    suite: str
    created: list[str] = Field(description="Ids of new cases.")
    new_versions: list[str] = Field(description="Ids of cases that got a new version.")
    unchanged: list[str] = Field(description="Ids of cases that existed with the same content.")


class ListedCase(BaseModel):
    case_id: str
    version: int
    tags: list[str]
    graders: list[str]
    timeout_s: float
    input: str = Field(default="", description="The first 200 characters of the input.")


class ListedSuite(BaseModel):
    suite: str
    cases: int
    dev: int
    holdout: int


class ListedCases(Answer):
    suites: list[ListedSuite] | None = Field(default=None, description="All suites, when none was named.")
    suite: str | None = None
    cases: list[ListedCase] | None = None
    total: int | None = Field(default=None, description="Visible cases that fit the filter.")
    next_cursor: str | None = Field(default=None, description="Pass as cursor for the next page.")


def register(toolbox: Toolbox) -> None:
    """Adds create_cases and list_cases."""

    @toolbox.tool(title="Create cases", read_only=False, destructive=False, idempotent=True, open_world=False)
    async def create_cases(
        call: Call,
        suite: Annotated[str, Field(description="Suite that the cases belong to; made on first use.")],
        cases: Annotated[list[CaseSpec], Field(min_length=1, max_length=1000, description="The cases.")],
        replace: Annotated[
            bool,
            Field(description="Give an existing id with other content a new version instead of refusing."),
        ] = False,
    ) -> CreatedCases:
        """Creates eval cases in a suite: all of them, or none and an error that names every wrong one.

        A case is one task: an input, optional files, and one or more graders that know what is expected. A
        harness finds the input in $EVALPURSE_CASE/input.txt (or input.json) and writes its answer to
        $EVALPURSE_OUT/answer.txt.
        Cases are kept for ever; changing one makes a new version, and results of the old one stay apart.
        Cases with split "holdout" are never shown again and not run by launch_experiment.
        """
        made = await call.services.cases.create(suite, cases, replace=replace, by=Role(call.session.role))
        named = [fitting_names(ids, IDS_BYTES) for ids in (made.created, made.new_versions, made.unchanged)]
        cut = sum(map(len, named)) < len(cases)
        return CreatedCases(
            suite=suite,
            created=named[0],
            new_versions=named[1],
            unchanged=named[2],
            truncated=cut,
            hint=f"Not all ids are shown: {len(made.created)} created, {len(made.new_versions)} with a new "
            f"version, {len(made.unchanged)} unchanged."
            if cut
            else "",
            next="create_variant for your harness, then launch_experiment with dry_run=true.",
        )

    @toolbox.tool(title="List cases", read_only=True, destructive=False, idempotent=True, open_world=False)
    async def list_cases(
        call: Call,
        suite: Annotated[str, Field(description="Suite to list; empty lists all suites.")] = "",
        tags: Annotated[list[str], Field(description="Only cases that carry all of these tags.")] = [],  # noqa: B006 (published as a JSON schema default, never mutated)
        cursor: Annotated[str, Field(description="next_cursor of the page before.")] = "",
        limit: Annotated[int, Field(ge=1, le=PAGE_MAX, description="Cases a page.")] = 50,
    ) -> ListedCases:
        """Lists the visible cases of a suite page by page, or all suites when none is named."""
        cases = call.services.cases
        if not suite:
            return await _suites(call, cursor)
        page = await cases.list(suite, split="dev", tags=tags, cursor=cursor, limit=limit)
        inputs = await cases.previews(page.cases, PREVIEW_CHARS)
        fit = fitting(
            (
                ListedCase(
                    case_id=row.case_id,
                    version=row.version,
                    tags=list(row.tags),
                    graders=list(row.graders),
                    timeout_s=row.timeout_s,
                    input=text,
                )
                for row, text in zip(page.cases, inputs, strict=True)
            ),
            PAGE_BYTES_TARGET,
        )
        following = page.next_cursor if len(fit) == len(page.cases) else fit[-1].case_id
        return ListedCases(
            suite=suite,
            cases=fit,
            total=page.total,
            next_cursor=following or None,
            truncated=bool(following),
        )


async def _suites(call: Call, cursor: str) -> ListedCases:
    rows = [row for row in await call.services.store.fetch("suites") if row["suite"] > cursor]
    fit = fitting(
        (
            ListedSuite(
                suite=row["suite"], cases=row["cases"], dev=row["dev_cases"], holdout=row["holdout_cases"]
            )
            for row in rows
        ),
        PAGE_BYTES_TARGET,
    )
    cut = len(fit) < len(rows)
    return ListedCases(
        suites=fit,
        next_cursor=fit[-1].suite if cut else None,
        truncated=cut,
        next="list_cases with a suite." if rows or cursor else "create_cases makes the first suite.",
    )
