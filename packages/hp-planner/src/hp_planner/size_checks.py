"""Lint checks of sizes: whole heads on every rank, and equal shares of every cut dim."""

from __future__ import annotations

from collections.abc import Iterator

from hp_dtensor.placements import SectionedShard, Shard, describe
from hp_dtensor.plan import BoundaryKind, ParameterSpec
from hp_planner.facts import Facts, Violation
from hp_planner.fused import heads_of
from hp_planner.graph import generalized
from hp_planner.heads import Heads
from hp_planner.latent import LatentHeads, latent_heads
from hp_planner.manners import Manner
from hp_planner.roles import Role
from hp_planner.settings import TENSOR_AXIS


def check_heads(facts: Facts) -> Iterator[Violation]:
    """Whole query heads on every rank. Too few key/value heads are computed on every rank."""
    for boundary in facts.sharded(BoundaryKind.ATTENTION):
        if boundary.manner is not Manner.SHARDED:
            continue
        latent = latent_heads(facts.graph, boundary.module)
        dense = heads_of(facts.graph, boundary.module)
        count, dim = 0, 0
        if isinstance(dense, Heads):
            count, dim = dense.query, dense.dim
        elif isinstance(latent, LatentHeads):
            count, dim = latent.count, latent.value_dim
        if count % facts.size:
            yield Violation(
                "heads",
                boundary.module,
                f"query heads in a multiple of {TENSOR_AXIS}={facts.size}",
                f"{count} query heads of {dim}",
                f"use a smaller {TENSOR_AXIS} that divides {count}, or override "
                f"{generalized(boundary.module)!r} with none",
            )


HEAD_ROLES = (Role.QUERY, Role.KEY, Role.VALUE)


def check_divisibility(facts: Facts) -> Iterator[Violation]:
    """Equal shares on every rank: production gathers and slices even shards only."""
    members = facts.members
    for spec in facts.plan.parameters:
        member = members.get(spec.name)
        if member is not None and member.role in HEAD_ROLES:
            continue
        placement = spec.contract.placement(TENSOR_AXIS)
        if not isinstance(placement, Shard | SectionedShard):
            continue
        if placement.dim >= len(spec.shape):
            found = f"{describe(placement)} of shape {list(spec.shape)}"
            yield Violation("divisibility", spec.name, "a dim it has", found, "correct the plan")
            continue
        if (
            member is not None
            and member.role is Role.ATTENTION_OUTPUT
            and placement.dim == len(spec.shape) - 1
            and not member.is_bias
        ):
            continue
        sections = (
            placement.sections
            if isinstance(placement, SectionedShard)
            else (spec.shape[placement.dim],)
        )
        if sum(sections) != spec.shape[placement.dim]:
            yield Violation(
                "divisibility",
                spec.name,
                f"sections that add up to dim {placement.dim} of {list(spec.shape)}",
                describe(placement),
                "correct the sections",
            )
        for section in sorted({s for s in sections if s % facts.size}):
            yield _uneven(facts, spec, placement.dim, section)


def _uneven(facts: Facts, spec: ParameterSpec, dim: int, length: int) -> Violation:
    vocabulary = spec.role in ("embedding", "head", "head_bias")
    what = "vocabulary" if vocabulary else f"dim {dim}"
    none = f"override {generalized(spec.boundary)!r} with none"
    remedy = (
        f"pad the vocabulary to a multiple of {facts.size}, or {none}"
        if vocabulary
        else f"use a {TENSOR_AXIS} that divides {length}, or {none}"
    )
    expected = f"{what} in a multiple of {TENSOR_AXIS}={facts.size}"
    return Violation("divisibility", spec.name, expected, f"{length}", remedy)
