"""Context parallelism over `cp`: hidden states stay sharded along the sequence in every layer.

As with sequence parallelism the embedding's output is whole, because models count positions from
its length; the first layer takes this rank's part, the final norm's output is gathered. Every
parameter in between sees a part of the sequence, so its gradient is a partial sum. Attention needs
the keys and values of all positions and gathers them inside an opaque region; a block that is
left whole by an override gets the whole sequence instead. Blocks with experts flatten batch and
sequence, for which there is no static contract, so they are opaque too.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve
from torch.distributed.tensor import Partial, Shard

from hp_dtensor.plan import (
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    ParameterSpec,
    Region,
    RegionKind,
    ShardingPlan,
)
from hp_planner.axis_specs import (
    LEFT_WHOLE,
    POSITIONS,
    blank_block,
    enclosing,
    is_whole,
    on_axis,
    replaced,
)
from hp_planner.boundaries import Boundary
from hp_planner.graph import ModuleGraph, is_inside
from hp_planner.settings import CONTEXT_AXIS, Settings
from hp_planner.shared_heads import NO_WEIGHTS, SHARED_HEADS
from hp_planner.stream import final_norm

GATHERED_ATTENTION = "hp_integration.regions:context_parallel"
GATHERED_SHARED_HEADS = "hp_integration.regions:context_parallel_shared_heads"
ON_SEQUENCE = (
    BoundaryKind.LAYER,
    BoundaryKind.NORM,
    BoundaryKind.ATTENTION,
    BoundaryKind.MLP,
    BoundaryKind.MOE,
)
ATTENTION_REGION = Region(
    RegionKind.OPAQUE, "keys and values are gathered inside, after rotary", GATHERED_ATTENTION
)
SHARED_HEADS_REGION = evolve(ATTENTION_REGION, function=GATHERED_SHARED_HEADS)
FLATTENED = Region(RegionKind.OPAQUE, "batch and a part of the sequence are flattened inside")


def _part(contract: Contract) -> Contract:
    """This rank's part of the sequence of [batch, sequence, ...]."""
    return on_axis(contract, CONTEXT_AXIS, Shard(1))


def add_context_axis(
    graph: ModuleGraph,
    boundaries: tuple[Boundary, ...],
    settings: Settings,
    local: frozenset[str],
    plan: ShardingPlan,
) -> ShardingPlan:
    """The plan with placements on `cp`; as it is where that axis has one rank."""
    if settings.context_size == 1:
        return plan
    layers = [b.module for b in boundaries if b.kind is BoundaryKind.LAYER]
    last = final_norm(graph)
    specs = {spec.module: spec for spec in plan.boundaries}
    for name, kind in _drawn_here(boundaries, local, layers, last).items():
        reason = LEFT_WHOLE if name in local else "part of a layer"
        specs.setdefault(name, blank_block(graph.module(name), kind, reason))
    for name, spec in specs.items():
        owner = enclosing(boundaries, name)
        along = is_inside_any(name, layers) or name in layers or name == last
        if owner is None or not along:
            continue
        if name in local or _on_sequence(spec, owner, boundaries):
            specs[name] = _cut(spec, name in local, name == layers[0], name == last)
    parameters = [_parameter(spec, local, layers, last) for spec in plan.parameters]
    return replaced(plan, graph, specs, parameters)


def _drawn_here(
    boundaries: tuple[Boundary, ...], local: frozenset[str], layers: list[str], last: str
) -> dict[str, BoundaryKind]:
    """Boundaries that the sequence needs, whether or not tensor parallelism has drawn them."""
    found = {
        b.module: b.kind
        for b in boundaries
        if b.kind in ON_SEQUENCE
        and (is_inside_any(b.module, layers) or b.module in layers or b.module == last)
        and not any(is_inside(b.module, module) for module in local)
        and not _in_experts_block(b, boundaries)
    }
    for name in local:
        if is_inside_any(name, layers):
            found.setdefault(name, BoundaryKind.MLP)
    return {name: kind for name, kind in found.items() if kind is not None}


def is_inside_any(name: str, modules: list[str]) -> bool:
    return any(is_inside(name, module) for module in modules)


def _in_experts_block(boundary: Boundary, boundaries: tuple[Boundary, ...]) -> bool:
    return any(
        b.kind is BoundaryKind.MOE and is_inside(boundary.module, b.module) for b in boundaries
    )


def _on_sequence(spec: BoundarySpec, owner: Boundary, boundaries: tuple[Boundary, ...]) -> bool:
    """Whether the boundary exchanges hidden states of a layer; not so inside a block of experts,
    where an opaque region hides the sequence."""
    if spec.kind not in ON_SEQUENCE:
        return False
    return not _in_experts_block(evolve(owner, module=spec.module), boundaries)


def _cut(spec: BoundarySpec, whole: bool, first: bool, final: bool) -> BoundarySpec:
    """The boundary's tensors on a part of the sequence: outside, and inside unless `whole`."""
    inside: Callable[[Contract], Contract] = (lambda contract: contract) if whole else _part

    def entering(tensor: BoundaryTensor) -> BoundaryTensor:
        if tensor.plain:
            cut = spec.kind is BoundaryKind.ATTENTION and tensor.where in POSITIONS and not whole
            return evolve(tensor, inside=_part(tensor.inside)) if cut else tensor
        outside = tensor.outside if first else _part(tensor.outside)
        return evolve(tensor, outside=outside, inside=inside(tensor.inside))

    def leaving(tensor: BoundaryTensor) -> BoundaryTensor:
        if tensor.plain:
            return tensor
        outside = tensor.outside if final else _part(tensor.outside)
        return evolve(tensor, outside=outside, inside=inside(tensor.inside))

    region = spec.region if whole else _region(spec)
    outputs = tuple(map(leaving, spec.outputs))
    if region is not None and region is not spec.region:
        # An opaque region owes what it returns: as many features of the same tokens.
        like = spec.inputs[0].where
        outputs = tuple(t if t.plain else evolve(t, like=like) for t in outputs)
    gathers = region in (ATTENTION_REGION, SHARED_HEADS_REGION)
    if gathers and [tensor.where for tensor in outputs] == ["0"]:
        outputs = (*outputs, NO_WEIGHTS)
    return evolve(spec, inputs=tuple(map(entering, spec.inputs)), outputs=outputs, region=region)


def _region(spec: BoundarySpec) -> Region | None:
    if spec.kind is BoundaryKind.MOE:
        return FLATTENED
    # An output projection with a boundary of its own lies inside the attention.
    holds_attention = spec.kind is BoundaryKind.ATTENTION and len(spec.inputs) > 1
    if not holds_attention:
        return spec.region
    shared = spec.region is not None and spec.region.function == SHARED_HEADS
    return SHARED_HEADS_REGION if shared else ATTENTION_REGION


def _parameter(
    spec: ParameterSpec, local: frozenset[str], layers: list[str], last: str
) -> ParameterSpec:
    """On a part of the sequence a parameter's gradient is a summand."""
    home = spec.boundary
    along = is_inside_any(home, layers) or home in layers or home == last
    if not along or is_whole(home, local):
        return spec
    return evolve(spec, contract=on_axis(spec.contract, CONTEXT_AXIS, gradient=Partial()))
