"""Linear layers by themselves: cut by their output or by their input features (Megatron-LM).

What the neighbours exchange is whole, or a contract that the block's template gives.
"""

from __future__ import annotations

from attrs import evolve

from hp_dtensor.plan import (
    REPLICATED,
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    LocalAttribute,
)
from hp_planner.boundaries import Boundary
from hp_planner.evidence import features, is_transposed
from hp_planner.fused import order_of
from hp_planner.graph import ModuleNode, generalized
from hp_planner.manners import COLUMNWISE, ROWWISE
from hp_planner.order import INTERLEAVED, PER_GROUP, PER_HEAD
from hp_planner.roles import NO_TEMPLATE, Role, RoleAssignment
from hp_planner.settings import TENSOR_AXIS
from hp_planner.templates.context import Context
from hp_planner.templates.contracts import (
    COLUMNS,
    LAST,
    PARTIAL,
    ROWS,
    SUMMED_GRADIENT,
    Drafted,
    Members,
    first_argument,
)

# What an override may state about the rows of a fused weight.
ORDERS_OF = {
    Role.FUSED_QKV: ("q|k|v", PER_HEAD, PER_GROUP),
    Role.FUSED_GATE_UP: ("gate|up", INTERLEAVED),
}


def column_weight(node: ModuleNode, is_bias: bool) -> Contract:
    """Cut by output features: the weight's rows, its columns where it is stored [in, out]."""
    return COLUMNS if is_transposed(node) and not is_bias else ROWS


def row_weight(node: ModuleNode, is_bias: bool, after: Contract = REPLICATED) -> Contract:
    """Cut by input features; the bias is replicated and added once, to what is handed out."""
    if is_bias:
        return REPLICATED if after == REPLICATED else SUMMED_GRADIENT
    return ROWS if is_transposed(node) else COLUMNS


def column_layer(node: ModuleNode, kind: BoundaryKind) -> BoundarySpec:
    """Whole input, whole output; every rank computes its own output features."""
    return BoundarySpec(
        module=node.name,
        kind=kind,
        inputs=(BoundaryTensor(first_argument(node), REPLICATED, SUMMED_GRADIENT),),
        outputs=(BoundaryTensor("", REPLICATED, LAST),),
        localize=output_size(node),
        reason="every rank its own output features, which are gathered",
    )


def output_size(node: ModuleNode) -> tuple[LocalAttribute, ...]:
    """The number of output features that a layer of transformers shapes its result with."""
    size = node.attribute("nf") if is_transposed(node) else None
    return (LocalAttribute("nf", TENSOR_AXIS, size),) if size else ()


def sized_layer(node: ModuleNode, kind: BoundaryKind) -> tuple[BoundarySpec, ...]:
    """A layer of a block sharded as one, cut by output features: only its size is its own."""
    size = output_size(node)
    reason = "every rank its own output features"
    return (BoundarySpec(node.name, kind, localize=size, reason=reason),) if size else ()


def row_layer(node: ModuleNode, kind: BoundaryKind) -> BoundarySpec:
    """Whole input, whole output; every rank multiplies its own input features."""
    return BoundarySpec(
        module=node.name,
        kind=kind,
        inputs=(BoundaryTensor(first_argument(node), REPLICATED, LAST),),
        outputs=(BoundaryTensor("", REPLICATED, PARTIAL),),
        reason="every rank its own input features, summed",
    )


def by_linear(context: Context, boundary: Boundary) -> Drafted:
    """A block whose linear layers are sharded one by one; all else is computed on every rank."""
    size, why = context.settings.tensor_size, context.problem(boundary)
    unordered = order_of(context.graph.module(boundary.module)) is None
    contracts: Members = ()
    specs: dict[str, BoundarySpec] = {}
    for member in boundary.members:
        if member.role in NO_TEMPLATE:
            continue
        node = context.graph.module(member.parameter.module)
        contract = REPLICATED
        kind = boundary.kind or BoundaryKind.MLP
        # A layer whose weight some code reads past it cannot have its own entry and exit.
        called = not context.graph.used_directly & {p.name for p in node.parameters}
        if called and member.role in COLUMNWISE and _divides(node, size, 1):
            contract = column_weight(node, member.is_bias)
            specs[node.name] = column_layer(node, kind)
        elif called and member.role in ROWWISE and _divides(node, size, 0):
            contract = row_weight(node, member.is_bias)
            specs[node.name] = row_layer(node, kind)
        if contract == REPLICATED and not member.is_bias:
            member = evolve(member, reason=f"{member.reason}; replicated: {why}")
        elif unordered and member.role in ORDERS_OF and not member.is_bias:
            member = evolve(member, reason=f"{member.reason}; {_gathered(member, why)}")
        contracts += ((member, contract),)
    return Drafted(contracts, tuple(specs.values()))


def _gathered(member: RoleAssignment, why: str) -> str:
    """Right in any order of the rows, and dearer than heads: said by name, with the way out."""
    block = generalized(member.boundary)
    return (
        f"cut row by row and gathered, every rank computes all of its block: {why}; "
        f"an override {block!r}: {{order: ...}} states it: {', '.join(ORDERS_OF[member.role])}"
    )


def _divides(node: ModuleNode, size: int, side: int) -> bool:
    """Whether the features on one side of the layer are a multiple of the ranks."""
    return features(node)[side] % size == 0
