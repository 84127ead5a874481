"""What to type for a parameter without a role, so that the plan that follows is right."""

from __future__ import annotations

from hp_dtensor.plan import REPLICATED, BoundaryKind
from hp_planner.boundaries import Boundary
from hp_planner.graph import generalized, is_inside
from hp_planner.manners import Manner
from hp_planner.order import GATE_UP_ORDERS, INTERLEAVED
from hp_planner.proofs import ORDER_UNKNOWN
from hp_planner.roles import RoleAssignment
from hp_planner.settings import TENSOR_AXIS
from hp_planner.templates import Context

WHOLE = f"{{{TENSOR_AXIS}: R}}"
SUMMAND = f"{{{TENSOR_AXIS}: R grad P}}"
BLOCKS = (
    BoundaryKind.ATTENTION,
    BoundaryKind.MLP,
    BoundaryKind.MOE,
    BoundaryKind.EXPERTS,
    BoundaryKind.MIXER,
)


def remedy(context: Context, member: RoleAssignment) -> str:
    """The override that settles a parameter without a role; the first one told is the likely one.

    Where all that is around it is computed whole on every rank, so is its gradient.
    """
    name, around = generalized(member.name), generalized(member.name.rpartition(".")[0])
    if ORDER_UNKNOWN in member.reason:
        return (
            f"override {around!r} with {{order: {GATE_UP_ORDERS[0]}}} or "
            f"{{order: {INTERLEAVED}}}, whichever its forward takes, or the block around it with "
            "none"
        )
    if computed_whole(context, member):
        return f"override {name!r} with {WHOLE}: every rank computes all of what is around it"
    block = block_around(context, member)
    if block is not None:
        return (
            f"override {generalized(block)!r} with none, or {name!r} with {WHOLE} if every rank "
            f"computes all of it, {SUMMAND} if each holds a summand of its gradient"
        )
    return (
        f"override {name!r} with {WHOLE} if the forward uses it before its layers or on gathered "
        f"logits, {SUMMAND} if between the last norm and the head"
    )


def computed_whole(context: Context, member: RoleAssignment) -> bool:
    """Whether what uses this parameter is known to be computed whole on every rank."""
    boundary = context.find(member.boundary)
    if boundary is None:
        return False
    if boundary.kind in BLOCKS and context.manner(boundary) is Manner.SHARDED:
        return False
    return context.sharded_home(boundary) is None and (
        context.stream == REPLICATED or _block(context, boundary) is not None
    )


def block_around(context: Context, member: RoleAssignment) -> str | None:
    """The outermost block around a parameter that `none` can leave whole."""
    boundary = context.find(member.boundary)
    found = None if boundary is None else _block(context, boundary)
    return None if found is None else found.module


def _block(context: Context, boundary: Boundary) -> Boundary | None:
    around = [
        b
        for b in context.boundaries
        if b.kind in BLOCKS
        and (b.module == boundary.module or is_inside(boundary.module, b.module))
    ]
    return min(around, key=lambda b: len(b.module)) if around else None
