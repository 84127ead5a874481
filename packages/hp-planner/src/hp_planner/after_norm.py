"""What lies between the norm after the layers and the head.

A head cut over the vocabulary gives its input a gradient of which every rank has a summand. The
norm may take it as it is only if nothing with parameters stands between the two: such a module
would make its own gradient from the summand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_dtensor.plan import BoundaryKind
from hp_planner.graph import ModuleGraph, is_inside, join, parent

if TYPE_CHECKING:
    from hp_planner.boundaries import Boundary

BEFORE_LAYERS = (BoundaryKind.EMBEDDING, BoundaryKind.POSITION)


def between_norm_and_head(graph: ModuleGraph, boundaries: tuple[Boundary, ...], norm: str) -> str:
    """A module with parameters that may stand between the final norm and the head; or empty."""
    layers = {b.module for b in boundaries if b.kind is BoundaryKind.LAYER}
    owner = parent(norm)
    later = {
        join(owner, name)
        for _, stream in (graph.module(owner).streams if graph.find(owner) is not None else ())
        for name in stream.later
    }
    for boundary in boundaries:
        name = boundary.module
        outside_layers = not any(name == layer or is_inside(name, layer) for layer in layers)
        if not boundary.members or name == norm or not outside_layers:
            continue
        if boundary.kind is BoundaryKind.HEAD or boundary.kind in BEFORE_LAYERS:
            continue
        in_body = not owner or is_inside(name, owner)
        if not in_body or any(name == part or is_inside(name, part) for part in later):
            return name
    return ""
