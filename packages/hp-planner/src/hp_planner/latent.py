"""Heads of a multi-head latent attention (DeepSeek-V2, section 2.1), from its factors' shapes."""

from __future__ import annotations

from attrs import frozen

from hp_planner.evidence import features
from hp_planner.graph import ModuleGraph, join
from hp_planner.heads import child
from hp_planner.layer_names import OUTPUT, QUERY


@frozen
class LatentHeads:
    """Number of heads; lengths of one head of q and k, of what k and v are made of, and of v."""

    count: int
    query_dim: int
    key_value_dim: int
    value_dim: int


def latent_heads(graph: ModuleGraph, module: str) -> LatentHeads | str:
    """The heads of the attention called `module`, or what speaks against them."""
    node = graph.module(module)
    query = graph.find(join(module, "q_b_proj")) or child(graph, module, QUERY)
    key_value, output = graph.find(join(module, "kv_b_proj")), child(graph, module, OUTPUT)
    if query is None or key_value is None or output is None:
        return "a latent attention needs q_b_proj or q_proj, kv_b_proj and an output projection"
    count = node.attribute("num_heads", "num_attention_heads", "n_heads")
    count = count if count is not None else graph.size("num_attention_heads")
    if not count:
        return "neither the module nor the config gives the number of heads"
    sizes = (features(query)[1], features(key_value)[1], features(output)[0])
    if any(size % count or not size for size in sizes):
        return f"sizes {list(sizes)} of its factors are no multiples of {count} heads"
    query_dim, key_value_dim, value_dim = (size // count for size in sizes)
    if key_value_dim <= value_dim:
        return f"kv_b_proj gives {key_value_dim} a head, v alone has {value_dim}"
    return LatentHeads(count, query_dim, key_value_dim, value_dim)
