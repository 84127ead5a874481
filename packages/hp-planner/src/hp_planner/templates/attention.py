"""Attention: heads sharded (Megatron-LM section 3), dense and multi-head latent."""

from __future__ import annotations

from hp_dtensor.placements import SectionedShard
from hp_dtensor.plan import (
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    LocalAttribute,
)
from hp_planner.boundaries import Boundary
from hp_planner.code_names import LOCAL_SIZES
from hp_planner.evidence import is_transposed
from hp_planner.fused import heads_of, order_of, section_rows
from hp_planner.graph import ModuleNode
from hp_planner.heads import Heads
from hp_planner.manners import COLUMNWISE, ROWWISE, Manner
from hp_planner.order import Order
from hp_planner.roles import NO_TEMPLATE, Role, RoleAssignment
from hp_planner.settings import TENSOR_AXIS
from hp_planner.shared_heads import SHARED_ROLES, with_shared_heads
from hp_planner.templates.block import whole, whole_block
from hp_planner.templates.context import Context
from hp_planner.templates.contracts import (
    LAST,
    PARTIAL,
    ROWS,
    SUMMED_GRADIENT,
    Drafted,
    Members,
    first_argument,
    plain,
    result,
)
from hp_planner.templates.linear import by_linear, column_weight, row_weight, sized_layer

BY_HEAD = frozenset({Role.SINK})


def attention(context: Context, boundary: Boundary) -> Drafted:
    manner = context.manner(boundary)
    if manner is Manner.SHARDED:
        return _by_heads(context, boundary)
    if manner is Manner.WHOLE:
        return whole(context, boundary)
    inside = by_linear(context, boundary)
    around = whole_block(context, boundary, context.problem(boundary))
    return Drafted(inside.contracts, (*around, *inside.specs))


def _by_heads(context: Context, boundary: Boundary) -> Drafted:
    """What makes q, k and v of heads is cut by rows, the output projection by columns.

    Everything replicated inside is used on a share of the heads, so its gradient is a summand;
    so are k and v where there are fewer of their heads than ranks (`hp_planner.shared_heads`).
    """
    graph = context.graph
    node = graph.module(boundary.module)
    before, after = context.exchange(boundary)
    told = order_of(node)
    shared = context.shared_heads(boundary) is not None
    contracts: Members = ()
    late: BoundarySpec | None = None
    sized: dict[str, BoundarySpec] = {}
    for member in boundary.members:
        if member.role in NO_TEMPLATE:
            continue
        holder = graph.module(member.parameter.module)
        contract = SUMMED_GRADIENT
        if member.role is Role.FUSED_QKV and told is not None and told.sections:
            contract = _sections(_rows(context, node, told), is_transposed(holder), member)
            sized |= {spec.module: spec for spec in sized_layer(holder, BoundaryKind.ATTENTION)}
        elif shared and member.role in SHARED_ROLES:
            pass
        elif member.role in COLUMNWISE:
            contract = column_weight(holder, member.is_bias)
            sized |= {spec.module: spec for spec in sized_layer(holder, BoundaryKind.ATTENTION)}
        elif member.role in ROWWISE:
            contract = row_weight(holder, member.is_bias, after)
            late = late or (row_with_bias(holder, boundary, context) if member.is_bias else None)
        elif member.role in BY_HEAD or _head_by_head(member):
            contract = ROWS
        contracts += ((member, contract),)
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.ATTENTION,
        inputs=(BoundaryTensor(first_argument(node), before, SUMMED_GRADIENT), *plain(node)),
        outputs=(BoundaryTensor(result(node), after, after if late else PARTIAL),),
        localize=local_sizes(node, LOCAL_SIZES | (told.divide if told else frozenset())),
        reason="every rank computes its own heads",
    )
    spec = with_shared_heads(spec) if shared else spec
    return Drafted(contracts, (spec, *sized.values(), *((late,) if late else ())))


def _rows(context: Context, node: ModuleNode, told: Order) -> tuple[int, ...]:
    heads = heads_of(context.graph, node.name)
    assert isinstance(heads, Heads)
    return section_rows(told, heads)


def _sections(rows: tuple[int, ...], transposed: bool, member: RoleAssignment) -> Contract:
    """q, k and v each cut by itself, so that every rank holds whole heads of all three."""
    dim = 1 if transposed and not member.is_bias else 0
    return Contract({TENSOR_AXIS: SectionedShard(dim, rows)})


def _head_by_head(member: RoleAssignment) -> bool:
    """A norm with a weight of its own for every head."""
    return member.role is Role.HEAD_NORM and len(member.parameter.shape) == 2


def row_with_bias(node: ModuleNode, boundary: Boundary, context: Context) -> BoundarySpec:
    """An output projection with a bias hands out the sum, so that the bias is added once."""
    _, after = context.exchange(boundary)
    return BoundarySpec(
        module=node.name,
        kind=boundary.kind or BoundaryKind.MLP,
        inputs=(BoundaryTensor(first_argument(node), LAST, LAST),),
        outputs=(BoundaryTensor("", after, PARTIAL),),
        reason="output projection with a bias, which is added once, to the sum",
    )


def local_sizes(node: ModuleNode, names: frozenset[str]) -> tuple[LocalAttribute, ...]:
    """Attributes that the forward reads and that count what is cut, own or of the config."""
    own = [name for name in sorted(names) if name in node.forward.own and node.attribute(name)]
    found = [LocalAttribute(name, TENSOR_AXIS, node.attribute(name) or 0) for name in own]
    config = dict(node.config)
    found += [
        LocalAttribute(f"config.{name}", TENSOR_AXIS, config[name])
        for name in sorted(names)
        if f"config.{name}" in node.forward.own and name in config
    ]
    return tuple(found)
