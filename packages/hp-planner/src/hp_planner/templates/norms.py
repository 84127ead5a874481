"""Norms over the last dim, on what each rank holds."""

from __future__ import annotations

from hp_dtensor.plan import REPLICATED, BoundaryKind, BoundarySpec, BoundaryTensor
from hp_planner.boundaries import Boundary
from hp_planner.heads import Heads, attention_heads
from hp_planner.proofs import spans_all_heads
from hp_planner.roles import Role
from hp_planner.shared_heads import spans_key_heads
from hp_planner.templates.block import inside_sharded
from hp_planner.templates.context import Context
from hp_planner.templates.contracts import (
    LAST,
    SUMMED_GRADIENT,
    Drafted,
    by_role,
    first_argument,
)


def norm(context: Context, boundary: Boundary) -> Drafted:
    """On a shard of the sequence, where the weight's gradient is a partial sum.

    A norm over all heads together, in an attention that is split into heads, needs all of them:
    its input is gathered and its output cut again.
    """
    node = context.graph.module(boundary.module)
    home = context.sharded_home(boundary)
    heads = attention_heads(context.graph, home.module) if home is not None else ""
    in_heads = isinstance(heads, Heads) and spans_all_heads(heads, node)
    if home is not None and (not in_heads or _on_shared_heads(context, home, boundary)):
        return inside_sharded(boundary)
    before, after = (LAST, LAST) if in_heads else context.exchange(boundary)
    inside = REPLICATED if in_heads else before
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.NORM,
        inputs=(BoundaryTensor(first_argument(node), before, inside),),
        outputs=(BoundaryTensor("", after, inside),),
        reason=_reason(in_heads, inside != REPLICATED),
    )
    weight = REPLICATED if inside == REPLICATED else SUMMED_GRADIENT
    return Drafted(by_role(boundary, {Role.NORM: weight}), (spec,))


def _reason(in_heads: bool, cut: bool) -> str:
    if in_heads:
        return "norm over all heads, which are gathered for it"
    part = "the rank's part of the sequence" if cut else "whole sequences, the same on every rank"
    return f"norm over the hidden size, on {part}"


def _on_shared_heads(context: Context, home: Boundary, boundary: Boundary) -> bool:
    """A norm over all key heads, which every rank has before it takes those it needs."""
    heads = context.shared_heads(home)
    return heads is not None and spans_key_heads(context.graph, boundary.module, heads)
