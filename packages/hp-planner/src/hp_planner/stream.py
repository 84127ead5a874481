"""Whether the hidden states may stay sharded along the sequence between the blocks of a model.

They may where the model's forward passes them from layer to layer and then to one norm, and where
a layer, outside its blocks and norms, treats every position alike. Where that is not known they
stay whole on every rank, which is right for any code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_dtensor.plan import BoundaryKind
from hp_planner.graph import ModuleGraph, is_inside, join, parent

if TYPE_CHECKING:
    from hp_planner.boundaries import Boundary

KNOWN_ARGUMENTS = frozenset(
    {"attention_mask", "position_ids", "position_embeddings", "cache", "past_key_values"}
    | {"past_key_value", "layer_past", "use_cache", "cache_position", "output_attentions"}
    | {"output_router_logits", "layer_idx", "cache_params", "head_mask"}
)
BLOCKS = (BoundaryKind.ATTENTION, BoundaryKind.MLP, BoundaryKind.MOE, BoundaryKind.MIXER)
# Modules without parameters that act on one position at a time.
HARMLESS = ("torch.nn.modules.dropout.", "torch.nn.modules.activation.", "transformers.activations")
IDENTITY = "torch.nn.modules.linear.Identity"


def final_norm(graph: ModuleGraph) -> str:
    """The norm that takes what the last layer gives; empty if that is not known."""
    found = [
        join(node.name, stream.norm)
        for node in graph.modules
        for _, stream in node.streams
        if stream.norm
    ]
    return found[0] if len(found) == 1 else ""


def stream_problem(graph: ModuleGraph, boundaries: tuple[Boundary, ...]) -> str:
    """Why the hidden states stay whole between blocks; empty if they need not."""
    kinds = {b.module: b.kind for b in boundaries}
    layers = [b.module for b in boundaries if b.kind is BoundaryKind.LAYER]
    lists = tuple(dict.fromkeys(parent(layer) for layer in layers))
    if len(lists) != 1:
        return "the model has no list of layers" if not lists else "layers lie in several lists"
    owner = graph.find(parent(lists[0]))
    streams = dict(owner.streams) if owner is not None else {}
    code = streams.get(lists[0].rpartition(".")[2])
    if code is None or code.problem:
        return code.problem if code is not None else "the layers' list has no forward around it"
    if kinds.get(final_norm(graph)) is not BoundaryKind.NORM:
        return "what follows the layers is no norm that a template knows"
    for layer in layers:
        problem = _layer_problem(graph, kinds, layer)
        if problem:
            return problem
    return ""


def _layer_problem(graph: ModuleGraph, kinds: dict[str, BoundaryKind | None], layer: str) -> str:
    node = graph.module(layer)
    if node.as_layer:
        return node.as_layer
    if node.parameters:
        return f"{node.class_name} has parameters of its own"
    strange = [a for a in node.forward.arguments[1:] if a not in KNOWN_ARGUMENTS]
    if strange:
        return f"{node.class_name}.forward takes {', '.join(strange)}"
    for name in node.children:
        problem = _part_problem(graph, kinds, name)
        if problem:
            return f"{node.class_name}: {problem}"
    return ""


def _part_problem(graph: ModuleGraph, kinds: dict[str, BoundaryKind | None], name: str) -> str:
    """A part of a layer is a block, a norm, or something that acts on one position at a time."""
    part, kind = graph.find(name), kinds.get(name)
    leaf = name.rpartition(".")[2]
    if part is None:
        return f"{leaf} is also a part of something else"
    if kind is BoundaryKind.NORM:
        return ""
    if kind in BLOCKS:
        strange = [a for a in part.forward.arguments[1:] if a not in KNOWN_ARGUMENTS]
        return f"{part.class_name}.forward takes {', '.join(strange)}" if strange else ""
    inside = any(is_inside(p.name, name) for p in graph.parameters)
    harmless = any(base.startswith(HARMLESS) or base == IDENTITY for base in part.bases)
    if inside or not harmless:
        return f"{leaf} is no block that a template knows"
    return ""
