"""Derives a sharding plan from a transformer's module graph: six pure passes, overrides, lint."""

from hp_planner.cost import Memory, Message, Workload, memory, messages
from hp_planner.derive import plan
from hp_planner.diff import Change, PlanDiff, diff
from hp_planner.errors import LintError, PlanError
from hp_planner.explain import explain
from hp_planner.facts import Violation
from hp_planner.lint import lint

__all__ = [
    "Change",
    "LintError",
    "Memory",
    "Message",
    "PlanDiff",
    "PlanError",
    "Violation",
    "Workload",
    "diff",
    "explain",
    "lint",
    "memory",
    "messages",
    "plan",
]
