"""The entry and exit of a block in a layer, whatever is inside: hidden states gathered and cut."""

from __future__ import annotations

from hp_dtensor.plan import REPLICATED, BoundaryKind, BoundarySpec, BoundaryTensor
from hp_planner.axis_specs import LEFT_WHOLE
from hp_planner.boundaries import Boundary
from hp_planner.graph import ModuleNode
from hp_planner.roles import Role
from hp_planner.templates.context import Context
from hp_planner.templates.contracts import (
    SUMMED_GRADIENT,
    Drafted,
    by_role,
    first_argument,
    known_replicated,
    plain,
    replicated,
    result,
)


def whole_block(context: Context, boundary: Boundary, reason: str) -> tuple[BoundarySpec, ...]:
    """Computed on whole hidden states on every rank; no boundary where they are whole already."""
    before, after = context.exchange(boundary)
    if before == REPLICATED and after == REPLICATED:
        return ()
    node = context.graph.module(boundary.module)
    return (
        BoundarySpec(
            module=node.name,
            kind=boundary.kind or likely_kind(node),
            inputs=(BoundaryTensor(first_argument(node), before, REPLICATED), *plain(node)),
            outputs=(BoundaryTensor(result(node), after, REPLICATED),),
            reason=reason,
        ),
    )


def whole(context: Context, boundary: Boundary) -> Drafted:
    """A block that no template shards: its known parameters replicated, with the reason."""
    if context.sharded_home(boundary) is not None:
        return inside_sharded(boundary)
    reason = f"replicated: {boundary.problem}"
    return Drafted(
        known_replicated(boundary, reason), whole_block(context, boundary, boundary.problem)
    )


def inside_sharded(boundary: Boundary) -> Drafted:
    """Computed on every rank inside a block sharded as one: what it gives, one rank's share
    consumes, so its parameters' gradients are summands."""
    return Drafted(by_role(boundary, dict.fromkeys(Role, SUMMED_GRADIENT)))


def local(context: Context, boundary: Boundary) -> Drafted:
    """What the override `none` asks for: whole on every rank, unknown parameters included."""
    node = context.graph.module(boundary.module)
    before, after = context.exchange(boundary)
    ids = boundary.kind in (BoundaryKind.EMBEDDING, BoundaryKind.POSITION)
    spec = BoundarySpec(
        module=node.name,
        kind=boundary.kind or likely_kind(node),
        inputs=(
            BoundaryTensor(first_argument(node), before, REPLICATED, plain=ids),
            *plain(node),
        ),
        outputs=(BoundaryTensor(result(node), after, REPLICATED),),
        reason=LEFT_WHOLE,
    )
    return Drafted(replicated(boundary, LEFT_WHOLE), (spec,))


def likely_kind(node: ModuleNode) -> BoundaryKind:
    attention = "attention" in node.class_name.lower() or "attn" in node.name.lower()
    return BoundaryKind.ATTENTION if attention else BoundaryKind.MLP
