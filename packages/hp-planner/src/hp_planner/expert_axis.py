"""Expert parallelism over `ep`: fused experts cut by their first dim, everything else copied.

Ranks of the axis see different batches, as data-parallel ranks do, and the loss is the mean of
theirs. Tokens travel to the ranks that hold their experts, inside an opaque region, so no
activation has a placement on the axis. A parameter that is no expert is replicated and its
gradient is the average over the axis (`R grad P(avg)`); an expert sees the tokens of all ranks,
and the region divides its gradient by their number.
"""

from __future__ import annotations

from attrs import evolve
from torch.distributed.tensor import Partial, Shard

from hp_dtensor.plan import (
    REPLICATED,
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    LocalAttribute,
    ParameterSpec,
    Region,
    RegionKind,
    ShardingPlan,
)
from hp_planner.axis_specs import is_whole, on_axis, replaced
from hp_planner.boundaries import Boundary
from hp_planner.graph import ModuleGraph, ModuleNode
from hp_planner.settings import EXPERT_AXIS, Settings

DISPATCH = "hp_integration.regions:expert_parallel"
DISPATCH_WITH_BIASES = "hp_integration.regions:expert_parallel_with_biases"
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
BATCH_AVERAGE = Partial("avg")


def add_expert_axis(
    graph: ModuleGraph,
    boundaries: tuple[Boundary, ...],
    settings: Settings,
    local: frozenset[str],
    plan: ShardingPlan,
) -> ShardingPlan:
    """The plan with placements on `ep`; as it is where that axis has one rank."""
    if settings.expert_size == 1:
        return plan
    experts = tuple(expert_modules(boundaries, local))
    specs = {spec.module: spec for spec in plan.boundaries}
    for name in experts:
        node = graph.module(name)
        specs[name] = _dispatched(node, specs.get(name) or _blank(node))
    parameters = [_parameter(spec, experts) for spec in plan.parameters]
    return replaced(plan, graph, specs, parameters)


def expert_modules(
    boundaries: tuple[Boundary, ...], local: frozenset[str] = frozenset()
) -> list[str]:
    """Modules of fused experts that are not left whole."""
    return [
        b.module
        for b in boundaries
        if b.kind is BoundaryKind.EXPERTS and not is_whole(b.module, local)
    ]


def expert_count(node: ModuleNode) -> int:
    """Experts of a fused module: the first dim of its parameters."""
    return next((p.shape[0] for p in node.parameters if p.shape), 0)


def _dispatched(node: ModuleNode, spec: BoundarySpec) -> BoundarySpec:
    count, known = expert_count(node), dict(node.attributes)
    localize = tuple(
        LocalAttribute(name, EXPERT_AXIS, count) for name in COUNTS if known.get(name) == count
    )
    biased = spec.region is not None and bool(spec.region.function)
    region = Region(
        RegionKind.OPAQUE,
        "tokens travel to the ranks that hold their experts",
        DISPATCH_WITH_BIASES if biased else DISPATCH,
    )
    outputs = tuple(evolve(tensor, like=spec.inputs[0].where) for tensor in spec.outputs)
    cut = any(tensor.inside.placements for tensor in outputs)
    features = ", and of these its own features" if cut else ""
    return evolve(
        spec,
        localize=(*spec.localize, *localize),
        region=region,
        outputs=outputs,
        reason=f"fused experts, each rank some of them{features}",
    )


def _blank(node: ModuleNode) -> BoundarySpec:
    hidden, index, weights = (*node.forward.arguments, "", "", "")[:3]
    return BoundarySpec(
        module=node.name,
        kind=BoundaryKind.EXPERTS,
        inputs=(
            BoundaryTensor(hidden, REPLICATED, REPLICATED),
            BoundaryTensor(index, REPLICATED, REPLICATED, plain=True),
            BoundaryTensor(weights, REPLICATED, REPLICATED),
        ),
        outputs=(BoundaryTensor("", REPLICATED, REPLICATED),),
        reason="fused experts, each rank some of them",
    )


def _parameter(spec: ParameterSpec, experts: tuple[str, ...]) -> ParameterSpec:
    if spec.boundary in experts:
        return evolve(spec, contract=on_axis(spec.contract, EXPERT_AXIS, Shard(0)))
    contract = on_axis(spec.contract, EXPERT_AXIS, gradient=BATCH_AVERAGE)
    return evolve(spec, contract=contract)
