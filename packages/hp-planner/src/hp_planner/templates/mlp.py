"""MLPs: intermediate features sharded (Megatron-LM section 3)."""

from __future__ import annotations

from hp_dtensor.placements import SectionedShard
from hp_dtensor.plan import BoundaryKind, BoundarySpec, BoundaryTensor, Contract
from hp_planner.boundaries import Boundary
from hp_planner.code_names import FEATURE_COUNTS
from hp_planner.evidence import is_transposed
from hp_planner.manners import COLUMNWISE, ROWWISE, Manner
from hp_planner.order import INTERLEAVED
from hp_planner.roles import NO_TEMPLATE, Role, RoleAssignment
from hp_planner.settings import TENSOR_AXIS
from hp_planner.templates.attention import local_sizes, row_with_bias
from hp_planner.templates.block import whole, whole_block
from hp_planner.templates.context import Context
from hp_planner.templates.contracts import (
    PARTIAL,
    SUMMED_GRADIENT,
    Drafted,
    Members,
    first_argument,
    result,
)
from hp_planner.templates.linear import by_linear, column_weight, row_weight, sized_layer


def mlp(context: Context, boundary: Boundary) -> Drafted:
    """Gate and up by rows, each half of a fused weight by itself; down by columns."""
    manner = context.manner(boundary)
    if manner is Manner.WHOLE:
        return whole(context, boundary)
    if manner is Manner.BY_LINEAR:
        inside = by_linear(context, boundary)
        around = whole_block(context, boundary, context.problem(boundary))
        return Drafted(inside.contracts, (*around, *inside.specs))
    node = context.graph.module(boundary.module)
    divide = node.stated.divide if node.stated is not None else frozenset()
    # Where gate and up alternate, a plain cut keeps each beside its own.
    alternate = node.stated is not None and node.stated.name == INTERLEAVED
    before, after = context.exchange(boundary)
    contracts: Members = ()
    late: BoundarySpec | None = None
    sized: dict[str, BoundarySpec] = {}
    for member in boundary.members:
        if member.role in NO_TEMPLATE:
            continue
        holder = context.graph.module(member.parameter.module)
        contract = SUMMED_GRADIENT
        if member.role is Role.FUSED_GATE_UP and not alternate:
            contract = _halves(member, is_transposed(holder))
            sized |= {spec.module: spec for spec in sized_layer(holder, BoundaryKind.MLP)}
        elif member.role in COLUMNWISE:
            contract = column_weight(holder, member.is_bias)
            sized |= {spec.module: spec for spec in sized_layer(holder, BoundaryKind.MLP)}
        elif member.role in ROWWISE:
            contract = row_weight(holder, member.is_bias, after)
            late = late or (row_with_bias(holder, boundary, context) if member.is_bias else None)
        contracts += ((member, contract),)
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.MLP,
        inputs=(BoundaryTensor(first_argument(node), before, SUMMED_GRADIENT),),
        outputs=(BoundaryTensor(result(node), after, after if late else PARTIAL),),
        localize=local_sizes(node, FEATURE_COUNTS | divide),
        reason="every rank computes its own features",
    )
    return Drafted(contracts, (spec, *sized.values(), *((late,) if late else ())))


def _halves(member: RoleAssignment, transposed: bool) -> Contract:
    dim = 1 if transposed and not member.is_bias else 0
    half = member.parameter.shape[dim] // 2
    return Contract({TENSOR_AXIS: SectionedShard(dim, (half, half))})
