"""Cases: one task each, kept in suites, never edited.

A case's content is one blob and its digest is the identity of its version. Creating the same content again
changes nothing; other content under the same id is a new version, and only when the caller says so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from evalpurse.budget.accounts import Role
from evalpurse.runs.content import canonical_json, check_size, checked_files, digest_of, file_bytes
from evalpurse.runs.errors import (
    BadCasesError,
    CaseExistsError,
    EmptySuiteError,
    HiddenError,
    UnknownCaseError,
    UnknownSuiteError,
    nearest,
)
from evalpurse.runs.graders.spec import GraderSpec
from evalpurse.store.database import Store
from evalpurse.store.records import CaseRow, Record, SuiteRow

SLUG_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"
CASES_PER_CALL_MAX = 2_000
PAGE_MAX = 500
Split = Literal["dev", "holdout"]


class CaseSpec(BaseModel):
    """One case as it is handed in."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, Field(pattern=SLUG_PATTERN, description="Unique in its suite, 1 to 100 characters.")]
    input: Annotated[Any, Field(description="The task: a text (input.txt), or other JSON (input.json).")]
    graders: Annotated[list[GraderSpec], Field(min_length=1, max_length=50, description="What scores it.")]
    files: Annotated[
        dict[str, str],
        Field(description="Files of the task: relative path to text ('base64:...' for binary content)."),
    ] = {}
    split: Annotated[Split, Field(description="dev, or holdout: hidden from agents.")] = "dev"
    tags: Annotated[list[str], Field(max_length=50, description="Labels to filter by.")] = []
    timeout_s: Annotated[
        float, Field(ge=1, le=86_400, allow_inf_nan=False, description="Time limit of one run, in seconds.")
    ] = 600.0
    metadata: Annotated[dict[str, Any], Field(description="Free notes; the harness does not see them.")] = {}

    @field_validator("input")
    @classmethod
    def _input_is_something(cls, value: Any) -> Any:
        if value is None or (isinstance(value, (str, list, dict)) and not value) or str(value).isspace():
            raise ValueError("the input is empty")
        return value

    @field_validator("tags")
    @classmethod
    def _tags_are_labels(cls, tags: list[str]) -> list[str]:
        if any(not tag.strip() or len(tag) > 80 or not tag.isprintable() for tag in tags):
            raise ValueError("a tag must have 1 to 80 printable characters")
        return sorted(set(tags))

    @model_validator(mode="after")
    def _content_is_sound(self) -> CaseSpec:
        twice = [name for name, count in Counter(grader.name for grader in self.graders).items() if count > 1]
        if twice:
            raise ValueError(f"graders need distinct names; {', '.join(twice)} is used more than once")
        total_bytes = checked_files(self.files) + sum(checked_files(grader.files) for grader in self.graders)
        for name in ("input", "metadata"):
            try:
                total_bytes += len(canonical_json(getattr(self, name)))
            except ValueError as error:
                raise ValueError(f"`{name}`: {error}") from error
        check_size(total_bytes, f"case '{self.id}'")
        return self

    def content(self) -> bytes:
        """All of the case as canonical JSON: what is stored, and what its digest is of."""
        fields = self.model_dump(exclude={"graders"})
        return canonical_json(fields | {"graders": [grader.content() for grader in self.graders]})


@dataclass(frozen=True)
class Case:
    """One version of a case as a launch needs it; all its graders take at most `grade_timeout_s`."""

    suite: str
    case_id: str
    version: int
    case_digest: str
    split: Split
    tags: Sequence[str]
    graders: Sequence[str]
    timeout_s: float
    grade_timeout_s: float
    content_blob: str


@dataclass(frozen=True)
class CaseContent:
    """What a case brings. `files` are relative to the case folder: the input, and `files/...`."""

    case_id: str
    files: Mapping[str, bytes]
    graders: Sequence[GraderSpec]
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class CreateCasesResult:
    """Ids of one creation by what happened to them."""

    suite: str
    created: Sequence[str]
    unchanged: Sequence[str]
    new_versions: Sequence[str]


@dataclass(frozen=True)
class CasePage:
    """Part of a suite. `next_cursor` is empty on the last page; `total` counts all that fit the filter."""

    cases: Sequence[CaseRow]
    total: int
    next_cursor: str


class Cases:
    """Creates and finds cases. One instance a home folder."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._creating = anyio.Lock()

    async def create(
        self, suite: str, cases: Sequence[CaseSpec], replace: bool = False, *, by: Role = Role.OWNER
    ) -> CreateCasesResult:
        """Adds cases to a suite, which is made when it is new: all of them, or none.

        Raises:
            BadCasesError: a bad suite name, no cases, too many, or ids given twice.
            CaseExistsError: ids that exist with other content, without `replace`.
        """
        _check_call(suite, cases)
        contents = await anyio.to_thread.run_sync(_contents, cases)
        async with self._creating:
            newest = await self._newest(suite)
            if by is not Role.OWNER:
                _check_hidden(suite, cases, newest)
            changed = [
                case
                for case in cases
                if case.id not in newest or newest[case.id].case_digest != contents[case.id][0]
            ]
            clashing = [case.id for case in changed if case.id in newest]
            if clashing and not replace:
                raise CaseExistsError(
                    f"{len(clashing)} cases of suite '{suite}' exist with other content: {_some(clashing)}. "
                    "Nothing was created.",
                    hint="Use other ids, or replace=true for new versions; old results keep theirs.",
                    cases=clashing,
                )
            rows: list[Record] = []
            now = datetime.now(UTC)
            if changed and not newest:
                rows.append(SuiteRow(suite, now))
            # Blobs first: a row must never point to content that is not there.
            await self._store.blobs.put_async([contents[case.id][1] for case in changed])
            for case in changed:
                version = newest[case.id].version + 1 if case.id in newest else 1
                rows.append(_row(suite, case, version, contents[case.id][0], now))
            await self._store.append(rows)
        ids = {case.id for case in changed}
        return CreateCasesResult(
            suite,
            created=[case.id for case in changed if case.id not in newest],
            unchanged=[case.id for case in cases if case.id not in ids],
            new_versions=clashing,
        )

    async def list(
        self, suite: str, split: str = "", tags: Sequence[str] = (), cursor: str = "", limit: int = 50
    ) -> CasePage:
        """The newest versions in order of their ids: of one split when given, with all of the tags.

        Raises:
            UnknownSuiteError: names the nearest.
            BadCasesError: a limit out of range.
        """
        if not 1 <= limit <= PAGE_MAX:
            raise BadCasesError(f"limit is {limit}; it can be from 1 to {PAGE_MAX}.")
        wanted = set(tags)
        fitting = [
            row
            for row in (await self._known(suite)).values()
            if split in ("", row.split) and wanted <= set(row.tags)
        ]
        after = [row for row in fitting if row.case_id > cursor]
        page = after[:limit]
        return CasePage(page, len(fitting), page[-1].case_id if len(after) > limit else "")

    async def previews(self, rows: Sequence[CaseRow], chars: int) -> Sequence[str]:
        """The first characters of the inputs of visible cases, in their order.

        Raises:
            HiddenError: one of them is not of the dev split.
        """
        hidden = [row.case_id for row in rows if row.split != "dev"]
        if hidden:
            raise HiddenError(f"Case '{hidden[0]}' is of the holdout; its content is not shown.")
        return await anyio.to_thread.run_sync(lambda: [self._preview(row, chars) for row in rows])

    def _preview(self, row: CaseRow, chars: int) -> str:
        given = json.loads(self._store.blobs.get(row.content_blob))["input"]
        return (given if isinstance(given, str) else canonical_json(given).decode())[:chars]

    async def select(self, suite: str, split: str, case_ids: Collection[str] | None = None) -> Sequence[Case]:
        """The newest versions of the cases to launch, in order of their ids.

        Raises:
            UnknownSuiteError, UnknownCaseError: name the nearest.
            EmptySuiteError: nothing fits.
        """
        known = await self._known(suite)
        rows = [row for row in known.values() if row.split == split]
        if case_ids is not None:
            ids = {row.case_id for row in rows}
            # Ids of the other split are as unknown as any: an agent must not learn them from an error.
            unknown = sorted(set(case_ids) - ids)
            if unknown:
                raise UnknownCaseError(
                    f"Suite '{suite}' has no {split} case {_some(unknown)}.",
                    hint=nearest(unknown[0], ids, what=f"{split} cases"),
                    cases=unknown,
                )
            rows = [row for row in rows if row.case_id in set(case_ids)]
        if not rows:
            raise EmptySuiteError(
                f"There are no {split} cases to run in suite '{suite}', of {len(known)} in all.",
                hint="Create some with create_cases, or choose another split or other ids.",
            )
        return await anyio.to_thread.run_sync(self._with_grade_timeouts, rows)

    async def versions(self, suite: str, wanted: Collection[tuple[str, int]]) -> Sequence[Case]:
        """Given versions of cases, by id and version number, in order of their ids: to go on with a launch.

        Raises:
            UnknownCaseError: a version that is not stored.
        """
        rows = [CaseRow(**row) for row in await self._store.fetch("case_versions_of_suite", suite=suite)]
        found = {(row.case_id, row.version): row for row in rows}
        missing = sorted(set(wanted) - found.keys())
        if missing:
            raise UnknownCaseError(
                f"Version {missing[0][1]} of case '{missing[0][0]}' of suite '{suite}' is not stored.",
                hint="The home folder may have been restored from a backup of another time.",
            )
        return await anyio.to_thread.run_sync(
            self._with_grade_timeouts, [found[key] for key in sorted(set(wanted))]
        )

    def _with_grade_timeouts(self, rows: Sequence[CaseRow]) -> Sequence[Case]:
        cases = []
        for row in rows:
            graders = json.loads(self._store.blobs.get(row.content_blob))["graders"]
            limits = [GraderSpec.model_construct(**grader).time_limit_s for grader in graders]
            cases.append(
                Case(
                    suite=row.suite,
                    case_id=row.case_id,
                    version=row.version,
                    case_digest=row.case_digest,
                    split="holdout" if row.split == "holdout" else "dev",
                    tags=row.tags,
                    graders=row.graders,
                    timeout_s=row.timeout_s,
                    grade_timeout_s=sum(limits),
                    content_blob=row.content_blob,
                )
            )
        return cases

    async def content(self, case: Case) -> CaseContent:
        """A case's input, files and graders.

        Raises:
            BlobMissingError, BlobDamagedError: from the store.
        """
        return await anyio.to_thread.run_sync(self._read, case.content_blob)

    def _read(self, blob: str) -> CaseContent:
        spec = CaseSpec.model_validate_json(self._store.blobs.get(blob))
        if isinstance(spec.input, str):
            files = {"input.txt": spec.input.encode()}
        else:
            files = {"input.json": canonical_json(spec.input)}
        files |= {f"files/{path}": file_bytes(text) for path, text in spec.files.items()}
        return CaseContent(spec.id, files, spec.graders, spec.metadata)

    async def _newest(self, suite: str) -> dict[str, CaseRow]:
        rows = await self._store.fetch("cases_of_suite", suite=suite, split="")
        return {row["case_id"]: CaseRow(**row) for row in rows}

    async def _known(self, suite: str) -> dict[str, CaseRow]:
        newest = await self._newest(suite)
        if not newest:
            raise UnknownSuiteError.named(suite, [row["suite"] for row in await self._store.fetch("suites")])
        return newest


def _check_hidden(suite: str, cases: Sequence[CaseSpec], newest: Mapping[str, CaseRow]) -> None:
    """An agent neither changes holdout cases nor learns from an answer what is in them.

    Raises:
        CaseExistsError: ids that are taken by hidden cases, whatever the given content is.
        BadCasesError: a case would move to another split.
    """
    taken = [case.id for case in cases if case.id in newest and newest[case.id].split != "dev"]
    if taken:
        raise CaseExistsError(
            f"{len(taken)} ids of suite '{suite}' cannot be used: {_some(taken)}. Nothing was created.",
            hint="Use other ids.",
            cases=taken,
        )
    moved = [case.id for case in cases if case.id in newest and newest[case.id].split != case.split]
    if moved:
        raise BadCasesError(
            f"{len(moved)} cases of suite '{suite}' would move to another split: {_some(moved)}. "
            "Nothing was created.",
            hint="Only the owner moves cases between splits.",
            cases=moved,
        )


def _row(suite: str, case: CaseSpec, version: int, digest: str, now: datetime) -> CaseRow:
    return CaseRow(
        suite=suite,
        case_id=case.id,
        version=version,
        case_digest=digest,
        split=case.split,
        tags=case.tags,
        graders=[grader.name for grader in case.graders],
        timeout_s=case.timeout_s,
        content_blob=digest,  # a blob is named by the digest of its content, and so is the case
        created_at=now,
    )


def _contents(cases: Sequence[CaseSpec]) -> dict[str, tuple[str, bytes]]:
    contents = {case.id: case.content() for case in cases}
    return {case_id: (digest_of(content), content) for case_id, content in contents.items()}


def _check_call(suite: str, cases: Sequence[CaseSpec]) -> None:

    if not re.fullmatch(SLUG_PATTERN, suite):
        raise BadCasesError(
            f"Suite name '{suite[:120]}' is not usable.",
            hint="Use 1 to 100 letters, digits, '.', '_' or '-', beginning with a letter, digit or '_'.",
        )
    if not 1 <= len(cases) <= CASES_PER_CALL_MAX:
        raise BadCasesError(
            f"{len(cases)} cases were given; one call takes 1 to {CASES_PER_CALL_MAX}.",
            hint="Split the call.",
        )
    twice = [case_id for case_id, count in Counter(case.id for case in cases).items() if count > 1]
    if twice:
        raise BadCasesError(
            f"Ids must be distinct; given more than once: {_some(twice)}. Nothing was created.",
            hint="Rename or drop the repeated ones.",
            cases=twice,
        )


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - 10} more" if len(ids) > 10 else ""
    return ", ".join(f"'{case_id}'" for case_id in ids[:10]) + more
