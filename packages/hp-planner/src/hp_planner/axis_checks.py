"""Lint checks of expert and context parallelism: whole experts, and sequences that may be cut."""

from __future__ import annotations

from collections.abc import Iterator

from hp_dtensor.plan import BoundaryKind
from hp_planner.axis_specs import is_whole
from hp_planner.expert_axis import expert_count, expert_modules
from hp_planner.facts import Facts, Violation
from hp_planner.graph import generalized, is_inside
from hp_planner.settings import CONTEXT_AXIS, EXPERT_AXIS
from hp_planner.stream import final_norm

# What an attention's forward names when it looks up its function as transformers' modules do.
ATTENTION_TABLE = "ALL_ATTENTION_FUNCTIONS"


def _size(facts: Facts, axis: str) -> int:
    mesh = facts.plan.mesh
    return mesh.size(axis) if axis in mesh.axis_names else 1


def check_experts(facts: Facts) -> Iterator[Violation]:
    """Whole experts on every rank, of modules that tokens can be sent to."""
    size = _size(facts, EXPERT_AXIS)
    if size == 1:
        return
    cut = {
        spec.boundary
        for spec in facts.plan.parameters
        if EXPERT_AXIS in dict(spec.contract.placements)
    }
    experts = [name for name in expert_modules(facts.boundaries) if name in cut]
    if not experts:
        yield Violation(
            "experts",
            "",
            f"fused experts to share among {EXPERT_AXIS}={size}",
            "none, or only blocks that are left whole",
            f"leave {EXPERT_AXIS} out and make dp_shard larger",
        )
    for name in experts:
        node = facts.graph.module(name)
        count = expert_count(node)
        if count % size:
            yield Violation(
                "experts",
                name,
                f"experts in a multiple of {EXPERT_AXIS}={size}",
                f"{count} experts",
                f"use an {EXPERT_AXIS} that divides {count}",
            )
        uncut = [p.name for p in node.parameters if p.shape[:1] != (count,)]
        if len(node.forward.arguments) < 3 or uncut:
            found = ", ".join(uncut) or f"forward({', '.join(node.forward.arguments)})"
            yield Violation(
                "experts",
                name,
                "[E, ...] parameters and forward(hidden_states, top_k_index, top_k_weights)",
                found,
                f"override {generalized(name.rpartition('.')[0])!r} with none",
            )


def check_context(facts: Facts) -> Iterator[Violation]:
    """Every block of a layer may be given a part of the sequence, or is left whole."""
    if _size(facts, CONTEXT_AXIS) == 1:
        return
    layers = [b for b in facts.boundaries if b.kind is BoundaryKind.LAYER]
    whole = next((b.problem for b in facts.boundaries if b.kind is BoundaryKind.MODEL), "")
    if whole or not final_norm(facts.graph):
        yield Violation(
            "context",
            "",
            "layers that treat every position alike outside their blocks, and a norm after them",
            whole or "no such norm",
            f"leave {CONTEXT_AXIS} out",
        )
    for boundary in facts.boundaries:
        inside = any(is_inside(boundary.module, layer.module) for layer in layers)
        if inside and not is_whole(boundary.module, facts.local):
            yield from _block(facts, boundary.module, boundary.kind, boundary.problem)
    if dict(facts.graph.config).get("output_router_logits"):
        yield Violation(
            "context",
            "",
            "no loss on the router's logits, of which a rank has a part of the sequence",
            "config.output_router_logits is set",
            "set config.output_router_logits = False",
        )


def _block(facts: Facts, name: str, kind: BoundaryKind | None, problem: str) -> Iterator[Violation]:
    node = facts.graph.module(name)
    remedy = f"override the block around {generalized(name)!r} with none"
    if kind is BoundaryKind.MIXER:
        yield Violation(
            "context",
            name,
            "blocks that need no more of the sequence than attention's keys and values",
            f"{node.class_name}, which carries a state along the sequence",
            f"override {generalized(name)!r} with none",
        )
    elif kind is None:
        expected, found = "a block that may be given a part of the sequence", problem or "unknown"
        yield Violation("context", name, expected, found, remedy)
    elif kind is BoundaryKind.ATTENTION and ATTENTION_TABLE not in node.forward.names:
        yield Violation(
            "context",
            name,
            f"an attention that looks its function up in {ATTENTION_TABLE}, where keys and "
            "values are gathered",
            f"{node.class_name}.forward, which does not",
            f"override {generalized(name)!r} with none",
        )
