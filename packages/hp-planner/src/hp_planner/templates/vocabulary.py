"""Embedding and head: rows of the vocabulary sharded, tables of positions whole."""

from __future__ import annotations

from hp_dtensor.plan import REPLICATED, BoundaryKind, BoundarySpec, BoundaryTensor
from hp_planner.boundaries import Boundary
from hp_planner.manners import Manner
from hp_planner.roles import Role
from hp_planner.templates.block import whole
from hp_planner.templates.context import Context
from hp_planner.templates.contracts import (
    LAST,
    PARTIAL,
    ROWS,
    SUMMED_GRADIENT,
    Drafted,
    by_role,
    first_argument,
    known_replicated,
)


def embedding(context: Context, boundary: Boundary) -> Drafted:
    """Vocabulary rows sharded; whole on exit, because models read the sequence length there."""
    if boundary.manner is not Manner.SHARDED:
        return whole(context, boundary)
    node = context.graph.module(boundary.module)
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.EMBEDDING,
        inputs=(BoundaryTensor(first_argument(node), REPLICATED, REPLICATED, plain=True),),
        outputs=(BoundaryTensor("", REPLICATED, PARTIAL),),
        reason="every rank looks up its own rows of the vocabulary",
    )
    return Drafted(by_role(boundary, {Role.EMBEDDING: ROWS}), (spec,))


def position(context: Context, boundary: Boundary) -> Drafted:
    """Learned positions are looked up whole on every rank, before the first layer."""
    return Drafted(known_replicated(boundary, "small, and looked up on every rank"))


def head(context: Context, boundary: Boundary) -> Drafted:
    """Vocabulary rows sharded; logits gathered."""
    if boundary.manner is not Manner.SHARDED:
        return whole(context, boundary)
    node = context.graph.module(boundary.module)
    before, after = context.exchange(boundary)
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.HEAD,
        inputs=(BoundaryTensor(first_argument(node), before, SUMMED_GRADIENT),),
        outputs=(BoundaryTensor("", after, LAST),),
        reason="every rank scores its own rows of the vocabulary",
    )
    return Drafted(by_role(boundary, {Role.HEAD: ROWS}), (spec,))
