"""Fused attention projections: how many heads, and in which order their rows lie.

Shapes tell how many rows q, k and v have together, never their order. The order comes from a data
file, by the class that defines the forward; without an entry the order stays unknown.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import yaml
from attrs import frozen

from hp_planner.evidence import features
from hp_planner.graph import ModuleGraph, ModuleNode
from hp_planner.heads import FUSED_QKV, OUTPUT, Heads, attention_heads, child, config_head_dim


@frozen
class Refinement:
    """What a data file says of one forward.

    Attributes:
        order: `sections` or `per_head`.
        names: names that its code uses beside those known for every attention.
        reason: what in its code shows the order.
    """

    order: str
    names: frozenset[str]
    reason: str


@cache
def refinements() -> dict[str, Refinement]:
    """All entries of the data file, by the class that defines the forward."""
    text = (files("hp_planner") / "refinements.yaml").read_text()
    return {
        owner: Refinement(entry["order"], frozenset(entry["names"]), entry["reason"])
        for owner, entry in yaml.safe_load(text).items()
    }


def refinement(node: ModuleNode) -> Refinement | None:
    return refinements().get(node.forward.owner)


def fused_heads(graph: ModuleGraph, module: str) -> Heads | str:
    """The heads of an attention whose q, k and v are one weight, or what speaks against them."""
    node = graph.module(module)
    fused, output = child(graph, module, FUSED_QKV), child(graph, module, OUTPUT)
    if fused is None or output is None:
        return "beside it there is no fused weight and no output projection"
    if refinement(node) is None:
        return f"the order of q, k and v in {fused.name.rpartition('.')[2]} cannot be known"
    dim = node.attribute("head_dim", "head_size") or config_head_dim(graph)
    rows, taken = features(fused)[1], features(output)[0]
    if not dim or taken % dim or (rows - taken) % (2 * dim):
        return f"{rows} fused rows and {taken} columns are no whole heads of {dim}"
    query, key_value = taken // dim, (rows - taken) // (2 * dim)
    if not key_value or query % key_value:
        return f"{query} query heads do not divide over {key_value} key/value heads"
    return Heads(query, key_value, dim, dim)


def heads_of(graph: ModuleGraph, module: str) -> Heads | str:
    """The heads of an attention with separate or fused projections."""
    if child(graph, module, FUSED_QKV) is not None:
        return fused_heads(graph, module)
    return attention_heads(graph, module)
