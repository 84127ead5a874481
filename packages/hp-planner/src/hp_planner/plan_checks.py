"""Lint checks of the plan against its model: complete, well formed, as its templates give it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from attrs import evolve

from hp_dtensor.plan import REPLICATED, Contract, ShardingPlan
from hp_planner.facts import Facts, Violation, show_contract
from hp_planner.graph import ModuleGraph, generalized
from hp_planner.loss_axis import is_loss_parallel
from hp_planner.override_file import DECLARED
from hp_planner.remedies import block_around, computed_whole, remedy
from hp_planner.roles import NO_TEMPLATE, RoleAssignment
from hp_planner.settings import Settings
from hp_planner.templates import Context, instantiate_templates
from hp_planner.templates.moe import add_whole_experts


def check_coverage(facts: Facts) -> Iterator[Violation]:
    """Every parameter has exactly one entry, of its own shape; no entry is of something else."""
    counts = Counter(spec.name for spec in facts.plan.parameters)
    aliases = facts.graph.aliases
    nodes = {p.name: p for p in facts.graph.parameters if p.name not in aliases}
    members, context = facts.members, _context(facts)
    for name, node in nodes.items():
        if name in counts:
            continue
        kind = "trainable parameter" if node.requires_grad else "parameter"
        yield Violation(
            "coverage",
            name,
            f"a role with a template for this {kind} of shape {list(node.shape)}",
            _no_entry(members[name]),
            remedy(context, members[name]),
        )
    for spec in facts.plan.parameters:
        if spec.name not in nodes:
            text = "the model has no such parameter, or it is tied to one listed before"
            yield Violation("coverage", spec.name, "a parameter of the model", text, "plan again")
        elif spec.shape != nodes[spec.name].shape:
            yield Violation(
                "coverage",
                spec.name,
                f"shape {list(nodes[spec.name].shape)}",
                f"shape {list(spec.shape)} in the plan",
                "make the plan for this model",
            )
    for name, count in counts.items():
        if count > 1:
            yield Violation("one boundary", name, "one entry", f"{count}", "remove the others")


def _context(facts: Facts) -> Context:
    settings = Settings(facts.plan.mesh, facts.sequence_parallel, is_loss_parallel(facts.plan))
    return Context(facts.graph, settings, facts.boundaries, facts.local)


def _no_entry(member: RoleAssignment) -> str:
    if member.role in NO_TEMPLATE:
        return member.reason
    return f"no entry in the plan for this {member.label}"


def check_axes(facts: Facts) -> Iterator[Violation]:
    """Contracts name model axes of the mesh only."""
    allowed = set(facts.plan.model_axes)
    for where, contract in _contracts(facts.plan):
        stray = [axis for axis in contract.axes() if axis not in allowed]
        if stray:
            yield Violation(
                "axes",
                where,
                f"model axes of the mesh ({', '.join(sorted(allowed)) or 'none'})",
                ", ".join(stray),
                "leave data axes to fully_shard and name axes that the mesh has",
            )


def _contracts(plan: ShardingPlan) -> Iterator[tuple[str, Contract]]:
    for parameter in plan.parameters:
        yield parameter.name, parameter.contract
    for spec in plan.boundaries:
        for tensor in (*spec.inputs, *spec.outputs):
            yield spec.module, tensor.outside
            yield spec.module, tensor.inside


def _without_template(
    context: Context, members: Mapping[str, RoleAssignment], names: Iterable[str]
) -> str:
    """`none` on what holds each name: the block around it, whose parts have no template alone."""
    held = (
        (name in members and block_around(context, members[name])) or name.rpartition(".")[0]
        for name in names
    )
    keys = dict.fromkeys(generalized(module) for module in held)
    return " and ".join(f"override {key!r} with none" for key in keys)


def check_tied(facts: Facts) -> Iterator[Violation]:
    """One tensor under several names is placed alike under each."""
    expected = _expected(facts, untied=True)
    by_name = {spec.name: spec for spec in expected.parameters}
    members = facts.members
    declared = {s.name: s.contract for s in facts.plan.parameters if s.role == DECLARED}
    context = _context(facts)
    for names in facts.plan.tied:
        for name in names[1:]:
            alike = names[0] in declared and declared[names[0]] == REPLICATED
            if alike and name in members and computed_whole(context, members[name]):
                continue
            if name in members and name not in by_name:
                yield Violation(
                    "tied",
                    name,
                    f"a role with a template under this name of {names[0]} too",
                    members[name].reason,
                    _without_template(context, members, (name, names[0])),
                )
        contracts = {name: by_name[name].contract for name in names if name in by_name}
        if names[0] not in contracts and names[0] in declared:
            contracts[names[0]] = declared[names[0]]
        if len(set(contracts.values())) > 1:
            found = ", ".join(f"{n} {show_contract(c)}" for n, c in contracts.items())
            yield Violation(
                "tied",
                names[0],
                "one placement under all names of a tied parameter",
                found,
                " and ".join(
                    f"override {generalized(n.rpartition('.')[0])!r} with none" for n in names
                ),
            )


def _expected(facts: Facts, untied: bool = False) -> ShardingPlan:
    """What the templates give for this plan's mesh, options and local modules."""
    graph = facts.graph
    if untied:
        graph = ModuleGraph(graph.model, graph.model_type, graph.modules, graph.config)
    loss_parallel = is_loss_parallel(facts.plan)
    settings = Settings(facts.plan.mesh, facts.sequence_parallel, loss_parallel)
    return instantiate_templates(graph, facts.boundaries, settings, facts.local)


def check_templates(facts: Facts) -> Iterator[Violation]:
    """Parameters and boundaries are as their template gives them, or declared."""
    expected = _expected(facts)
    found = {spec.name: spec for spec in facts.plan.parameters}
    members = facts.members
    for spec in expected.parameters:
        other = found.get(spec.name)
        if other is None or members[spec.name].role in NO_TEMPLATE or other.role == DECLARED:
            continue
        if other.contract != spec.contract:
            yield Violation(
                "template",
                spec.name,
                f"{show_contract(spec.contract)}, as its boundary {spec.boundary} computes",
                f"{show_contract(other.contract)} ({other.reason})",
                f"override {generalized(spec.boundary)!r} as a whole",
            )
    # What is whole and has a region for that may have been declared.
    drawn = evolve(expected, parameters=facts.plan.parameters)
    yield from _boundary_differences(add_whole_experts(facts.graph, drawn), facts.plan)


def _boundary_differences(expected: ShardingPlan, plan: ShardingPlan) -> Iterator[Violation]:
    found = {spec.module: spec for spec in plan.boundaries}
    for spec in expected.boundaries:
        other = found.pop(spec.module, None)
        if other is None:
            yield Violation(
                "template", spec.module, f"a boundary ({spec.kind.value})", "none", "plan again"
            )
            continue
        for side, want, have in (
            ("inputs", spec.inputs, other.inputs),
            ("outputs", spec.outputs, other.outputs),
            ("localized attributes", spec.localize, other.localize),
            ("region", spec.region, other.region),
            ("kind", spec.kind, other.kind),
        ):
            if want != have:
                yield Violation(
                    "template", spec.module, f"{side} {_brief(want)}", _brief(have), "plan again"
                )
    for name in found:
        yield Violation("template", name, "no boundary here", "one", "plan again")


def _brief(value: object) -> str:
    if isinstance(value, tuple):
        return "; ".join(_brief(item) for item in value) or "none"
    outside, inside = getattr(value, "outside", None), getattr(value, "inside", None)
    if isinstance(outside, Contract) and isinstance(inside, Contract):
        where = getattr(value, "where", "") or "result"
        return f"{where} {show_contract(outside)} -> {show_contract(inside)}"
    return str(value)
