"""How many heads an attention module has, worked out from its weights.

The weights decide: `head_dim` comes from the module itself (its code views with it), from the
config otherwise, and the counts follow from the rows of q, k and v. What does not add up is a
problem, told in words, and never guessed at.
"""

from __future__ import annotations

from attrs import frozen

from hp_planner.graph import ModuleGraph, ModuleNode, ParameterNode, join

QUERY = ("q_proj", "wq", "q_lin", "query")
KEY = ("k_proj", "wk", "k_lin", "key")
VALUE = ("v_proj", "wv", "v_lin", "value")
OUTPUT = ("o_proj", "wo", "out_lin", "out_proj", "dense")


@frozen
class Heads:
    """Sizes of one attention module.

    Attributes:
        query, key_value: numbers of heads; dim: length of one head.
    """

    query: int
    key_value: int
    dim: int


def child(graph: ModuleGraph, module: str, names: tuple[str, ...]) -> ModuleNode | None:
    """The child of `module` with one of these names."""
    found = (graph.find(join(module, name)) for name in names)
    return next((node for node in found if node is not None), None)


def weight_of(graph: ModuleGraph, module: str, names: tuple[str, ...]) -> ParameterNode | None:
    node = child(graph, module, names)
    return None if node is None else node.parameter("weight")


def attention_heads(graph: ModuleGraph, module: str) -> Heads | str:
    """The heads of the attention module called `module`, or what speaks against them."""
    weights = [weight_of(graph, module, names) for names in (QUERY, KEY, VALUE, OUTPUT)]
    q, k, v, o = weights
    if q is None or k is None or v is None or o is None:
        missing = [
            "/".join(names)
            for names, weight in zip((QUERY, KEY, VALUE, OUTPUT), weights)
            if weight is None
        ]
        return f"beside it there is no {' and no '.join(missing)}"
    if any(len(weight.shape) != 2 for weight in (q, k, v, o)):
        return "q, k, v and the output projection are not all matrices"
    node = graph.module(module)
    dim = node.attribute("head_dim", "head_size") or _config_head_dim(graph)
    if dim is None:
        return "neither the module nor the config gives head_dim"
    rows = {"q": q.shape[0], "k": k.shape[0], "v": v.shape[0]}
    for name, count in rows.items():
        if count % dim:
            return f"{name} has {count} rows, not a multiple of head_dim {dim}"
    heads = Heads(query=rows["q"] // dim, key_value=rows["k"] // dim, dim=dim)
    if rows["k"] != rows["v"]:
        return f"k has {rows['k']} rows and v {rows['v']}"
    if heads.query % heads.key_value:
        return f"{heads.query} query heads do not divide over {heads.key_value} key/value heads"
    if o.shape[1] != rows["q"]:
        return f"the output projection takes {o.shape[1]} columns, q gives {rows['q']}"
    return heads


def _config_head_dim(graph: ModuleGraph) -> int | None:
    given = graph.size("head_dim")
    hidden, heads = graph.size("hidden_size"), graph.size("num_attention_heads")
    if given is not None or hidden is None or not heads:
        return given
    return hidden // heads if hidden % heads == 0 else None
