"""The planner's errors. All are `ValueError`s and of the `HPError` family that the packages share,
raised before any process group is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_dtensor.errors import PlanError as DTensorPlanError

if TYPE_CHECKING:
    from hp_planner.facts import Violation


class PlanError(DTensorPlanError):
    """A plan cannot be made from what was asked: the mesh, an argument or an override is wrong."""


class LintError(PlanError):
    """The plan breaks rules. The message lists every violation, repeated layers folded.

    Attributes:
        violations: all of them, unfolded.
    """

    def __init__(self, message: str, violations: tuple[Violation, ...]) -> None:
        super().__init__(message)
        self.violations = violations
