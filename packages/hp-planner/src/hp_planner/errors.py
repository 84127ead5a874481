"""The planner's errors. Both are `ValueError`s, raised before any process group is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_planner.facts import Violation


class PlanError(ValueError):
    """A plan cannot be made from what was asked: the mesh, an argument or an override is wrong."""


class LintError(PlanError):
    """The plan breaks rules. The message lists every violation, repeated layers folded.

    Attributes:
        violations: all of them, unfolded.
    """

    def __init__(self, message: str, violations: tuple[Violation, ...]) -> None:
        super().__init__(message)
        self.violations = violations
