"""Errors of plans and their boundaries, beside the family that every package's errors belong to.

`HPError` is offered here too for `hp_planner`, which does not import `hp_platform`.
"""

from __future__ import annotations

from hp_platform.errors import HPError

__all__ = ["ContractError", "HPError", "PlanError"]


class PlanError(HPError, ValueError):
    """The plan does not fit the module or the mesh."""


class ContractError(HPError, ValueError):
    """A tensor at a boundary is not what the contract declares."""
