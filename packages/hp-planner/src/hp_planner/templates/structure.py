"""The model and its layers: boundaries that own no parameter but say what their parts exchange."""

from __future__ import annotations

from hp_dtensor.plan import REPLICATED, BoundaryKind, BoundarySpec, BoundaryTensor
from hp_planner.boundaries import Boundary
from hp_planner.templates.context import Context
from hp_planner.templates.contracts import (
    MODEL_INPUTS,
    Drafted,
    first_argument,
    known_replicated,
    plain,
    result,
)


def model(context: Context, boundary: Boundary) -> Drafted:
    node = context.graph.module(boundary.module)
    inputs = plain(node, MODEL_INPUTS)
    reason = "the model's own inputs"
    if context.settings.sequence_parallel and boundary.problem:
        reason = f"hidden states stay whole between blocks: {boundary.problem}"
    spec = BoundarySpec("", BoundaryKind.MODEL, inputs, reason=reason)
    return Drafted(known_replicated(boundary, "of the model itself"), (spec,))


def layer(context: Context, boundary: Boundary) -> Drafted:
    """No boundary where hidden states are whole and the forward takes what no rule knows."""
    node = context.graph.module(boundary.module)
    before, after = context.exchange(boundary)
    contracts = known_replicated(boundary, "of the layer itself, whose hidden states are whole")
    if context.stream == REPLICATED and context.boundaries[0].problem:
        return Drafted(contracts)
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.LAYER,
        inputs=(BoundaryTensor(first_argument(node), before, context.stream), *plain(node)),
        outputs=(BoundaryTensor(result(node), after, context.stream),),
        reason="element of the list of layers",
    )
    return Drafted(contracts, (spec,))
