"""Graders: what gives a finished run its scores."""

from evalpurse.runs.graders.grade import Graded, Score, grade_all
from evalpurse.runs.graders.spec import GraderSpec

__all__ = ["Graded", "GraderSpec", "Score", "grade_all"]
