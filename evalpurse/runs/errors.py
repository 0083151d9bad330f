"""What can go wrong around runs, told so that the next step is clear."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import ClassVar

from evalpurse.errors import EvalpurseError

NAME_CHARS_COMPARED = 200
"""The time of a comparison grows with the square of the length; no name is longer than this."""


def nearest(name: str, known: Collection[str], *, what: str) -> str:
    """A sentence with the known names closest to one that is not known."""
    if not known:
        return f"There are no {what} yet."
    name = name[:NAME_CHARS_COMPARED]
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    if close:
        return f"Did you mean {', '.join(close)}?"
    shown = sorted(known)[:10]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return f"Known {what}: {', '.join(shown)}{more}."


class SourceError(EvalpurseError):
    """A harness source cannot be used."""

    code: ClassVar[str] = "bad_source"


class NotARepositoryError(SourceError):
    """The path is not the top folder of a local git repository that can be read."""

    code: ClassVar[str] = "not_a_repository"


class UnknownCommitError(SourceError):
    """The repository has no such commit, or more than one fits."""

    code: ClassVar[str] = "unknown_commit"


class DirtyTreeError(SourceError):
    """HEAD was asked for, but the working tree differs from it."""

    code: ClassVar[str] = "dirty_tree"


class UnsupportedSourceError(SourceError):
    """The tree has something that its commit alone does not hold, or that is not safe to write out."""

    code: ClassVar[str] = "unsupported_source"


class OverlayError(EvalpurseError):
    """A variant's files do not fit on its source."""

    code: ClassVar[str] = "bad_overlay"


class PatchError(OverlayError):
    """A variant's patch is malformed or does not apply."""

    code: ClassVar[str] = "bad_patch"


class VariantExistsError(EvalpurseError):
    """The name already stands for another variant."""

    code: ClassVar[str] = "variant_exists"


class UnknownVariantError(EvalpurseError):
    """No variant has this name."""

    code: ClassVar[str] = "unknown_variant"

    @classmethod
    def named(cls, name: str, known: Collection[str]) -> UnknownVariantError:
        return cls(f"There is no variant '{name}'.", hint=nearest(name, known, what="variants"), variant=name)


class SecretRefusedError(EvalpurseError):
    """A secret's value was given where it would be stored and shown."""

    code: ClassVar[str] = "secret_refused"


class UnknownSecretError(EvalpurseError):
    """A named secret is not in the home folder."""

    code: ClassVar[str] = "unknown_secret"


class UnknownSuiteError(EvalpurseError):
    """No suite has this name."""

    code: ClassVar[str] = "unknown_suite"

    @classmethod
    def named(cls, name: str, known: Collection[str]) -> UnknownSuiteError:
        return cls(f"There is no suite '{name}'.", hint=nearest(name, known, what="suites"), suite=name)


class UnknownCaseError(EvalpurseError):
    """The suite has no such case."""

    code: ClassVar[str] = "unknown_case"


class EmptySuiteError(EvalpurseError):
    """There are no cases to run."""

    code: ClassVar[str] = "empty_suite"


class BadCasesError(EvalpurseError):
    """Cases cannot be created as given; none of them was."""

    code: ClassVar[str] = "bad_cases"


class CaseExistsError(EvalpurseError):
    """A case of this id exists with other content."""

    code: ClassVar[str] = "case_exists"


class GraderError(EvalpurseError):
    """A grader could not give a score: its own failure, not the harness's."""

    code: ClassVar[str] = "grader_error"


class SandboxError(EvalpurseError):
    """A sandbox could not do what it was asked: an infrastructure failure, not the harness's."""

    code: ClassVar[str] = "sandbox_error"


class SandboxGoneError(SandboxError):
    """The sandbox is no longer there, or was never what it should be: looking again does not help."""

    code: ClassVar[str] = "sandbox_gone"


class BackendRefusedError(EvalpurseError):
    """The backend refuses for a reason that no new attempt changes; the rest of the batch must not try.

    `facts["quota"]`: whether a spend or capacity limit is the reason.
    """

    code: ClassVar[str] = "backend_refused"


class SetupFailedError(EvalpurseError):
    """A setup command of a variant failed."""

    code: ClassVar[str] = "setup_failed"


class BadLaunchError(EvalpurseError):
    """A launch asks for something that cannot be; nothing was started or held."""

    code: ClassVar[str] = "bad_launch"


class IdempotencyConflictError(EvalpurseError):
    """The idempotency key already stands for an experiment with other arguments."""

    code: ClassVar[str] = "idempotency_conflict"


class UnknownExperimentError(EvalpurseError):
    """There is no such experiment."""

    code: ClassVar[str] = "unknown_experiment"


class UnknownRunError(EvalpurseError):
    """There is no such run, or it has not ended."""

    code: ClassVar[str] = "unknown_run"


class HiddenError(EvalpurseError):
    """The content of holdout cases and their results is not shown."""

    code: ClassVar[str] = "hidden"


class LeavingError(EvalpurseError):
    """The daemon is stopping and starts nothing new."""

    code: ClassVar[str] = "daemon_stopping"


class IsolationMissingError(EvalpurseError):
    """Isolation of local sandboxes is required, and does not work on this machine."""

    code: ClassVar[str] = "isolation_missing"


class WorldError(EvalpurseError):
    """A folder cannot be a world, or a stored world is not what it was."""

    code: ClassVar[str] = "bad_world"


class WorldChangedError(WorldError):
    """Files changed while they were added."""

    code: ClassVar[str] = "world_changed"


class WorldDamagedError(WorldError):
    """A stored world is no longer what its digest says; it is not mounted."""

    code: ClassVar[str] = "world_damaged"


class WorldExistsError(WorldError):
    """The name already stands for another world."""

    code: ClassVar[str] = "world_exists"


class UnknownWorldError(WorldError):
    """No world has this name, or a digest that starts like this."""

    code: ClassVar[str] = "unknown_world"

    @classmethod
    def named(cls, name: str, known: Collection[str]) -> UnknownWorldError:
        hint = nearest(name, known, what="worlds")
        return cls(
            f"There is no world '{name}'.", hint=f"{hint} Add one with: evalpurse world add DIR --name {name}"
        )


class LedgerLostError(EvalpurseError):
    """The ledger knows nothing of what the results say was paid for."""

    code: ClassVar[str] = "ledger_lost"
