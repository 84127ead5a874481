"""What shows that a block's parts fit one another: shapes of MLPs, experts and norms of heads."""

from __future__ import annotations

from attrs import frozen

from hp_planner.evidence import Evidence, expert_count, features
from hp_planner.graph import ModuleGraph, ModuleNode, join
from hp_planner.heads import Heads, attention_heads, child
from hp_planner.layer_names import DOWN, FUSED_GATE_UP, GATE, ROUTER, UP
from hp_planner.order import INTERLEAVED

ORDER_UNKNOWN = "the order of gate and up"


def mlp_shapes(evidence: Evidence) -> str:
    """Gate and up of one shape, or in one; down the other way round."""
    return mlp_problem(evidence.graph, evidence.block)


def mlp_problem(graph: ModuleGraph, block: str) -> str:
    """Why the parts of `block` are not those of one MLP; empty if they are."""
    gate, up, fused, down = (
        child(graph, block, names) for names in (GATE, UP, FUSED_GATE_UP, DOWN)
    )
    if down is None or (up is None and fused is None):
        return f"beside it there is no pair of {'/'.join(UP)} and {'/'.join(DOWN)}"
    parts = [part for part in (gate, up, fused, down) if part is not None]
    hidden, inner = features(down)[1], features(down)[0]
    fits = features(fused) == (hidden, 2 * inner) if fused is not None and up is None else True
    fits &= all(features(part) == (hidden, inner) for part in (gate, up) if part is not None)
    if fits and 0 not in (hidden, inner):
        return ""
    shapes = [
        f"{p.name.rpartition('.')[2]} {list(w.shape)}"
        for p in parts
        if (w := p.parameter("weight")) is not None
    ]
    return f"shapes do not fit one MLP: {', '.join(shapes)}"


def is_head_norm(evidence: Evidence) -> str:
    """A norm over one head, as long as the heads of the attention it is in."""
    heads = attention_heads(evidence.graph, evidence.block)
    if isinstance(heads, str):
        return heads
    if evidence.parameter.shape[-1] == heads.dim and evidence.parameter.shape[:-1] in (
        (),
        (heads.query,),
        (heads.key_value,),
    ):
        return ""
    return f"it spans {list(evidence.parameter.shape)} and not one head of {heads.dim}"


def spans_all_heads(heads: Heads, node: ModuleNode) -> bool:
    """Whether a norm's weight is as long as all query heads together, or all key heads."""
    weight = node.parameter("weight")
    whole = ((heads.query * heads.dim,), (heads.key_value * heads.dim,))
    return weight is not None and weight.shape in whole


@frozen
class ExpertShapes:
    """Sizes of fused experts, and the dims that tensor parallelism cuts.

    Attributes:
        up_dim: dim of gate_up_proj with the 2 x intermediate features.
        down_dim: dim of down_proj with the intermediate features.
    """

    experts: int
    intermediate: int
    up_dim: int
    down_dim: int


def fused_experts(node: ModuleNode, hidden: int | None) -> ExpertShapes | str:
    """Sizes of a module of fused experts, [out, in] or [in, out], or what speaks against them."""
    fused, down = node.parameter("gate_up_proj"), node.parameter("down_proj")
    if fused is None or down is None or len(fused.shape) != 3 or len(down.shape) != 3:
        return "gate_up_proj and down_proj are not both three-dimensional"
    experts = fused.shape[0]
    for up_dim, down_dim in ((1, 2), (2, 1)):
        inner, given = down.shape[down_dim], down.shape[3 - down_dim]
        fits = fused.shape[up_dim] == 2 * inner and fused.shape[3 - up_dim] == given
        fits &= down.shape[0] == experts and given == (hidden or given)
        if fits and node.attribute("is_transposed") in (None, up_dim == 2):
            return ExpertShapes(experts, inner, up_dim, down_dim)
    return (
        f"gate_up_proj {list(fused.shape)} and down_proj {list(down.shape)} are not "
        "[E, 2I, H] and [E, H, I], nor [E, H, 2I] and [E, I, H]"
    )


def expert_biases(node: ModuleNode, shapes: ExpertShapes) -> bool:
    """Whether what the module holds beside its weights are one bias for each, of every expert."""
    down = node.parameter("down_proj")
    hidden = down.shape[3 - shapes.down_dim] if down is not None else 0
    wanted = {
        "gate_up_proj_bias": (shapes.experts, 2 * shapes.intermediate),
        "down_proj_bias": (shapes.experts, hidden),
    }
    found = {p.leaf: p.shape for p in node.parameters if len(p.shape) < 3}
    return found == wanted


def expert_shapes(evidence: Evidence) -> str:
    shapes = fused_experts(evidence.module, evidence.hidden)
    if isinstance(shapes, str):
        return shapes
    if child(evidence.graph, evidence.block, ROUTER) is None:
        return "beside it there is no router"
    if section_order(evidence.module) is None:
        return f"{ORDER_UNKNOWN} inside gate_up_proj cannot be known"
    return ""


def section_order(node: ModuleNode) -> str | None:
    """`halves` or `interleaved`: stated, from flags of the module, or from its forward; None if
    unknown."""
    if node.stated is not None:
        return INTERLEAVED if node.stated.name == INTERLEAVED else "halves"
    concatenated, splits = node.attribute("is_concatenated"), "chunk" in node.forward.names
    if splits:
        return None if concatenated == 0 else "halves"
    return INTERLEAVED if concatenated == 0 else None


def has_experts(graph: ModuleGraph, block: str) -> bool:
    return graph.find(join(block, "experts")) is not None and bool(expert_count(graph, block))
