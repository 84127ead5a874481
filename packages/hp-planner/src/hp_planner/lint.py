"""Pass 6: everything that can be known to be wrong before a process group exists.

Each check is a function from the same frozen facts to violations; all of them run, and all
violations are reported together. A plan made or changed by hand is held to the same rules: a
parameter or a contract that no template gives is a violation unless an override declared it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from hp_dtensor.plan import ShardingPlan
from hp_planner.axis_checks import check_context, check_experts
from hp_planner.code_checks import check_code, check_draws, check_dropouts
from hp_planner.facts import Facts, Violation, read_facts
from hp_planner.folding import fold
from hp_planner.graph import ModuleGraph, read_module
from hp_planner.neighbours import check_neighbours
from hp_planner.plan_checks import (
    check_axes,
    check_coverage,
    check_templates,
    check_tied,
)
from hp_planner.size_checks import check_divisibility, check_heads

Check = Callable[[Facts], Iterator[Violation]]


def lint(model: nn.Module | ModuleGraph, plan: ShardingPlan) -> tuple[Violation, ...]:
    """Pass 6: every violation of a plan for a model; empty when there is none."""
    graph = model if isinstance(model, ModuleGraph) else read_module(model)
    facts = read_facts(graph, plan)
    checks: tuple[Check, ...] = (check_coverage, check_axes, check_experts, check_context)
    checks += (check_dropouts, check_draws)
    if facts.size > 1:
        checks += (
            check_heads,
            check_divisibility,
            check_code,
            check_tied,
            check_templates,
            check_neighbours,
        )
    return tuple(violation for check in checks for violation in check(facts))


def report(graph: ModuleGraph, plan: ShardingPlan, violations: Iterable[Violation]) -> str:
    """All violations as text, those of repeated layers folded into one."""
    found = tuple(violations)
    groups = fold(found, lambda v: v.where, lambda v: (v.rule, v.expected, v.found, v.remedy))
    family = f" (model_type {graph.model_type!r})" if graph.model_type else ""
    lines = [
        f"{graph.model}{family} cannot be planned on {plan.mesh}: {len(groups)} "
        f"{'kind' if len(groups) == 1 else 'kinds'} of violation, {len(found)} in all"
    ]
    for where, (first, *_) in groups:
        lines.append(f"  [{first.rule}] {where or 'the model'}")
        lines.append(f"      expected {first.expected}; found {first.found}")
        lines.append(f"      remedy: {first.remedy}")
    return "\n".join(lines)
