"""Blocks of experts: every rank routes all tokens and computes its own features of all experts."""

from __future__ import annotations

from attrs import evolve

from hp_dtensor.placements import SectionedShard
from hp_dtensor.plan import (
    REPLICATED,
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    LocalAttribute,
    Region,
    RegionKind,
    ShardingPlan,
    sharded,
)
from hp_planner.axis_specs import LEFT_WHOLE, replaced
from hp_planner.boundaries import Boundary
from hp_planner.graph import ModuleGraph, ModuleNode, is_inside
from hp_planner.manners import Manner
from hp_planner.order import INTERLEAVED
from hp_planner.proofs import ExpertShapes, fused_experts, section_order
from hp_planner.roles import NO_TEMPLATE, Role
from hp_planner.settings import TENSOR_AXIS
from hp_planner.templates.block import whole
from hp_planner.templates.context import Context
from hp_planner.templates.contracts import (
    PARTIAL,
    SUMMED_GRADIENT,
    Drafted,
    Tensors,
    by_role,
    first_argument,
    known_replicated,
    result,
)

EXPERT_REGION = Region(RegionKind.OPAQUE, "grouped expert kernels on plain local tensors")
# A bias on the summed features must be added once in all: each rank keeps its share of it.
EXPERT_BIASES = "hp_integration.regions:expert_biases"
EXPERT_SIZES = ("intermediate_dim", "intermediate_size", "expert_dim", "moe_intermediate_size")


def moe(context: Context, boundary: Boundary) -> Drafted:
    """Router replicated; what experts return is a summand, so its gradient is a partial sum.

    A block whose code does more than add up its parts has whole parts, each summed by itself.
    """
    if boundary.manner is not Manner.SHARDED:
        return whole(context, boundary)
    node = context.graph.module(boundary.module)
    before, after = context.exchange(boundary)
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.MOE,
        inputs=(BoundaryTensor(first_argument(node), before, SUMMED_GRADIENT),),
        outputs=(BoundaryTensor(result(node), after, PARTIAL),),
        reason="every rank routes all tokens and computes its own features of every expert",
    )
    table = {Role.ROUTER: SUMMED_GRADIENT, Role.SHARED_EXPERT_GATE: SUMMED_GRADIENT}
    return Drafted(by_role(boundary, table), (spec,))


def experts(context: Context, boundary: Boundary) -> Drafted:
    """Gate and up halves each cut by rows, down by columns, in an opaque region."""
    node = context.graph.module(boundary.module)
    before, after = context.exchange(boundary)
    shapes = fused_experts(node, context.graph.size("hidden_size"))
    if boundary.manner is not Manner.SHARDED or isinstance(shapes, str):
        reason = f"replicated: {boundary.problem}"
        return Drafted(known_replicated(boundary, reason))
    sizes = dict(node.attributes)
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.EXPERTS,
        inputs=_inputs(node, before, SUMMED_GRADIENT),
        outputs=(BoundaryTensor("", after, PARTIAL),),
        localize=tuple(
            LocalAttribute(name, TENSOR_AXIS, shapes.intermediate)
            for name in EXPERT_SIZES
            if sizes.get(name) == shapes.intermediate
        ),
        region=_region(context, node),
        reason="fused experts, each rank its own features of all of them",
    )
    table = {
        "gate_up_proj": _gate_up(node, shapes, shapes.up_dim),
        "gate_up_proj_bias": _gate_up(node, shapes, 1),
        "down_proj": sharded(TENSOR_AXIS, shapes.down_dim),
        "down_proj_bias": SUMMED_GRADIENT,
    }
    members = (m for m in boundary.members if m.role not in NO_TEMPLATE)
    return Drafted(tuple((m, table[m.parameter.leaf]) for m in members), (spec,))


def _region(context: Context, node: ModuleNode) -> Region:
    biased = node.parameter("down_proj_bias") is not None and context.settings.tensor_size > 1
    return evolve(EXPERT_REGION, function=EXPERT_BIASES) if biased else EXPERT_REGION


def _gate_up(node: ModuleNode, shapes: ExpertShapes, dim: int) -> Contract:
    """Halves are cut each by itself; where gate and up alternate, pairs stay together."""
    if section_order(node) == INTERLEAVED:
        return sharded(TENSOR_AXIS, dim)
    halves = (shapes.intermediate, shapes.intermediate)
    return Contract({TENSOR_AXIS: SectionedShard(dim, halves)})


def add_whole_experts(graph: ModuleGraph, plan: ShardingPlan) -> ShardingPlan:
    """The plan with a region for every module of experts that is whole and has no boundary.

    Which experts compute is a choice by value, which a check without values cannot follow. A region
    with nothing cut changes nothing else.
    """
    specs = {spec.module: spec for spec in plan.boundaries}
    contracts = {spec.name: spec.contract for spec in plan.parameters}
    regions = [spec.module for spec in plan.boundaries if spec.region is not None]
    for node in graph.modules:
        named = node.name.rpartition(".")[2] == "experts" and len(node.forward.arguments) == 3
        if not named or any(node.name == name or is_inside(node.name, name) for name in regions):
            continue
        inside = [c for name, c in contracts.items() if is_inside(name, node.name)]
        below = any(is_inside(name, node.name) for name in specs)
        if inside and all(contract == REPLICATED for contract in inside) and not below:
            specs[node.name] = _whole_experts(node, "experts that every rank holds and runs whole")
    return replaced(plan, graph, specs, plan.parameters)


def whole_experts(context: Context, boundary: Boundary) -> BoundarySpec:
    """Experts of a block that is left whole: an opaque region still, with nothing cut."""
    return _whole_experts(context.graph.module(boundary.module), LEFT_WHOLE)


def _whole_experts(node: ModuleNode, reason: str) -> BoundarySpec:
    return BoundarySpec(
        module=node.name,
        kind=BoundaryKind.EXPERTS,
        inputs=_inputs(node, REPLICATED, REPLICATED),
        outputs=(BoundaryTensor("", REPLICATED, REPLICATED),),
        region=EXPERT_REGION,
        reason=reason,
    )


def _inputs(node: ModuleNode, before: Contract, inside: Contract) -> Tensors:
    hidden, index, weights = (*node.forward.arguments, "", "", "")[:3]
    return (
        BoundaryTensor(hidden, before, inside),
        BoundaryTensor(index, REPLICATED, REPLICATED, plain=True),
        BoundaryTensor(weights, before, inside),
    )
