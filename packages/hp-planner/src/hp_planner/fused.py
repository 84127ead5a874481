"""Fused weights: how many heads are in one, and in which order their rows lie.

Shapes tell how many rows q, k and v have together, never their order. The order comes from an
override, or from a data file by the class that defines the forward; without either it is unknown.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import yaml

from hp_planner.evidence import features
from hp_planner.graph import ModuleGraph, ModuleNode
from hp_planner.heads import Heads, attention_heads, child, config_head_dim
from hp_planner.layer_names import FUSED_QKV, OUTPUT, QUERY
from hp_planner.order import PER_HEAD, Order


@cache
def refinements() -> dict[str, Order]:
    """All entries of the data file, by the class that defines the forward."""
    text = (files("hp_planner") / "refinements.yaml").read_text()
    return {
        owner: Order(entry["order"], frozenset(entry["names"]), source=entry["reason"])
        for owner, entry in yaml.safe_load(text).items()
    }


def order_of(node: ModuleNode) -> Order | None:
    """The order of a block's fused weight: stated by an override, or known for its forward."""
    return node.stated or refinements().get(node.forward.owner)


def fused_heads(graph: ModuleGraph, module: str) -> Heads | str:
    """The heads of an attention whose q, k and v are one weight, or k and v, or what speaks
    against them."""
    node = graph.module(module)
    fused, output = child(graph, module, FUSED_QKV), child(graph, module, OUTPUT)
    query_weight = child(graph, module, QUERY)
    if fused is None or output is None:
        return "beside it there is no fused weight and no output projection"
    order = order_of(node)
    if order is None:
        return f"the order of q, k and v in {fused.name.rpartition('.')[2]} cannot be known"
    dim = node.attribute("head_dim", "head_size") or config_head_dim(graph)
    rows, taken = features(fused)[1], features(output)[0]
    inside = taken if query_weight is None else 0
    if not dim or taken % dim or (rows - inside) % (2 * dim):
        return f"{rows} fused rows and {taken} columns are no whole heads of {dim}"
    query, key_value = taken // dim, (rows - inside) // (2 * dim)
    if key_value <= 0 or query % key_value:
        return f"{query} query heads do not divide over {key_value} key/value heads"
    if query_weight is not None and features(query_weight)[1] != taken:
        return f"q gives {features(query_weight)[1]}, the output projection takes {taken}"
    if query_weight is None and order.name == PER_HEAD and query != key_value:
        return f"order per_head needs a k and a v for each of {query} heads, found {key_value}"
    return Heads(query, key_value, dim, dim)


def section_rows(order: Order, heads: Heads) -> tuple[int, ...]:
    """Rows of each section of a fused q, k and v, first to last; empty if they are not
    contiguous."""
    rows = {
        "q": heads.query * heads.dim,
        "k": heads.key_value * heads.dim,
        "v": heads.key_value * heads.dim,
    }
    return tuple(rows[name] for name in order.sections)


def heads_of(graph: ModuleGraph, module: str) -> Heads | str:
    """The heads of an attention with separate or fused projections."""
    if child(graph, module, FUSED_QKV) is not None:
        return fused_heads(graph, module)
    return attention_heads(graph, module)
