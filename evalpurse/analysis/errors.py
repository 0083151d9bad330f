"""What can be wrong with a question put to the statistics."""

from __future__ import annotations

from typing import ClassVar

from evalpurse.errors import EvalpurseError


class AnalysisError(EvalpurseError):
    """The numbers given cannot answer the question asked."""

    code: ClassVar[str] = "analysis"


class UnknownVariantError(AnalysisError):
    """No run of that variant is among the runs given."""

    code: ClassVar[str] = "unknown_variant"


class NoSharedCasesError(AnalysisError):
    """Two variants have no case that both have a counted run of, so nothing can be paired."""

    code: ClassVar[str] = "no_shared_cases"
