"""How many heads an attention module has, worked out from its weights.

The weights decide: `head_dim` comes from the module itself (its code views with it), from the
config otherwise, and the counts follow from the rows of q, k and v. What does not add up is a
problem, told in words, and never guessed at.
"""

from __future__ import annotations

from attrs import frozen

from hp_planner.evidence import features
from hp_planner.graph import ModuleGraph, ModuleNode, ParameterNode, join
from hp_planner.layer_names import KEY, OUTPUT, QUERY, VALUE


@frozen
class Heads:
    """Sizes of one attention module.

    Attributes:
        query, key_value: numbers of heads; dim: length of one head of q and k; value_dim: of v.
    """

    query: int
    key_value: int
    dim: int
    value_dim: int


def child(graph: ModuleGraph, module: str, names: tuple[str, ...]) -> ModuleNode | None:
    """The child of `module` with one of these names."""
    found = (graph.find(join(module, name)) for name in names)
    return next((node for node in found if node is not None), None)


def weight_of(graph: ModuleGraph, module: str, names: tuple[str, ...]) -> ParameterNode | None:
    node = child(graph, module, names)
    return None if node is None else node.parameter("weight")


def attention_heads(graph: ModuleGraph, module: str) -> Heads | str:
    """The heads of the attention module called `module`, or what speaks against them.

    A query projection may give two values a head, of which one is a gate: it then has twice the
    rows that the output projection takes.
    """
    nodes = [child(graph, module, names) for names in (QUERY, KEY, VALUE, OUTPUT)]
    q, k, v, o = nodes
    if q is None or k is None or v is None or o is None:
        missing = [
            "/".join(names)
            for names, found in zip((QUERY, KEY, VALUE, OUTPUT), nodes)
            if found is None
        ]
        return f"beside it there is no {' and no '.join(missing)}"
    if any(0 in features(part) for part in (q, k, v, o)):
        return "q, k, v and the output projection are not all matrices"
    node = graph.module(module)
    dim = node.attribute("head_dim", "head_size") or config_head_dim(graph)
    if dim is None:
        return "neither the module nor the config gives head_dim"
    rows = {"q": features(q)[1], "k": features(k)[1], "v": features(v)[1]}
    for name in ("q", "k"):
        if rows[name] % dim:
            return f"{name} has {rows[name]} rows, not a multiple of head_dim {dim}"
    key_value, taken = rows["k"] // dim, features(o)[0]
    if rows["v"] % key_value:
        return f"k has {key_value} heads and v {rows['v']} rows"
    value_dim = rows["v"] // key_value
    if taken % value_dim:
        return f"the output projection takes {taken} columns, v has heads of {value_dim}"
    query = taken // value_dim
    if rows["q"] not in (query * dim, 2 * query * dim):
        return f"the output projection takes {taken} columns, q gives {rows['q']}"
    if query % key_value:
        return f"{query} query heads do not divide over {key_value} key/value heads"
    return Heads(query=query, key_value=key_value, dim=dim, value_dim=value_dim)


def config_head_dim(graph: ModuleGraph) -> int | None:
    """Length of one head by the config, given or as a part of the hidden size."""
    given = graph.size("head_dim")
    hidden, heads = graph.size("hidden_size"), graph.size("num_attention_heads")
    if given is not None or hidden is None or not heads:
        return given
    return hidden // heads if hidden % heads == 0 else None
