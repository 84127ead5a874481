"""What the expert and context axes share: boundaries that tensor parallelism has not drawn.

Both axes lay their placements over the plan that the tensor-parallel templates give. Where that
has no boundary (one tensor-parallel rank), a blank one is made here: everything replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve
from torch.distributed.tensor import Placement

from hp_dtensor.plan import (
    REPLICATED,
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    ParameterSpec,
    ShardingPlan,
)
from hp_planner.boundaries import Boundary
from hp_planner.graph import ModuleGraph, ModuleNode, is_inside

# The reason of a boundary that an override leaves whole, in templates and axes alike; lint
# knows such boundaries by it.
LEFT_WHOLE = "left whole by an override"
POSITIONS = ("position_embeddings", "position_ids")
PLAIN = (*POSITIONS, "attention_mask")


def on_axis(
    contract: Contract,
    axis: str,
    placement: Placement | None = None,
    gradient: Placement | None = None,
) -> Contract:
    """The contract with a placement, or a gradient placement, on one more axis."""
    placements, gradients = dict(contract.placements), dict(contract.grad_placements)
    if placement is not None:
        placements[axis] = placement
    if gradient is not None:
        gradients[axis] = gradient
    return Contract(placements, gradients)


def without_axis(contract: Contract, axis: str) -> Contract:
    """The contract with the axis replicated."""
    return Contract(
        {name: placement for name, placement in contract.placements if name != axis},
        {name: gradient for name, gradient in contract.grad_placements if name != axis},
    )


def spec_without_axis(spec: BoundarySpec, axis: str) -> BoundarySpec:
    """The boundary as it is where the axis has one rank."""

    def alone(tensor: BoundaryTensor) -> BoundaryTensor:
        outside, inside = without_axis(tensor.outside, axis), without_axis(tensor.inside, axis)
        return evolve(tensor, outside=outside, inside=inside)

    return evolve(
        spec,
        inputs=tuple(map(alone, spec.inputs)),
        outputs=tuple(map(alone, spec.outputs)),
        localize=tuple(a for a in spec.localize if a.axis != axis),
    )


def blank_block(node: ModuleNode, kind: BoundaryKind, reason: str) -> BoundarySpec:
    """A block of a layer, or a layer: hidden states in, hidden states out, all replicated."""
    arguments = node.forward.arguments
    hidden = BoundaryTensor(arguments[0] if arguments else "hidden_states", REPLICATED, REPLICATED)
    plain = (
        BoundaryTensor(name, REPLICATED, REPLICATED, plain=True, optional=True)
        for name in PLAIN
        if name in arguments
    )
    where = "0" if node.forward.returns_tuple else ""
    return BoundarySpec(
        module=node.name,
        kind=kind,
        inputs=(hidden, *plain),
        outputs=(BoundaryTensor(where, REPLICATED, REPLICATED),),
        reason=reason,
    )


def is_whole(name: str, local: Iterable[str]) -> bool:
    """Whether the module is left whole by an override, or lies in one that is."""
    return any(name == module or is_inside(name, module) for module in local)


def replaced(
    plan: ShardingPlan,
    graph: ModuleGraph,
    specs: Mapping[str, BoundarySpec],
    parameters: Iterable[ParameterSpec],
) -> ShardingPlan:
    """The plan with these boundaries, in the graph's order, and parameters."""
    ordered = tuple(specs[node.name] for node in graph.modules if node.name in specs)
    return evolve(plan, boundaries=ordered, parameters=tuple(parameters))


def enclosing(boundaries: Iterable[Boundary], name: str) -> Boundary | None:
    """The innermost boundary that is `name` or holds it."""
    found = [b for b in boundaries if b.module == name or is_inside(name, b.module)]
    return max(found, key=lambda boundary: len(boundary.module), default=None)
