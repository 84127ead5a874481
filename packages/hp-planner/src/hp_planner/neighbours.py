"""Lint check along the stream of hidden states: what one boundary gives, the next takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hp_dtensor.plan import BoundaryKind, Contract
from hp_planner.axis_specs import without_axis
from hp_planner.facts import Facts, Violation, show_contract
from hp_planner.settings import CONTEXT_AXIS
from hp_planner.stream import final_norm


def check_neighbours(facts: Facts) -> Iterator[Violation]:
    """What one boundary gives is what the next takes, gradient included, along the stream."""
    for giver, given, taker, taken in _edges(facts):
        if _sides(facts, giver, given) != _sides(facts, giver, taken):
            yield Violation(
                "neighbours",
                taker,
                f"{show_contract(given)}, what {giver or 'the model'} gives",
                show_contract(taken),
                "make both sides of the exchange agree",
            )


def _sides(facts: Facts, giver: str, contract: Contract) -> Contract:
    """What can be compared: inside a block of experts the sequence has no static contract."""
    spec = facts.specs.get(giver)
    if spec is None or spec.kind is not BoundaryKind.MOE:
        return contract
    return without_axis(contract, CONTEXT_AXIS)


# What a model or an attention holds takes other tensors than it does itself.
NOT_CHAINED = (BoundaryKind.MODEL, BoundaryKind.ATTENTION)

Edge = tuple[str, Contract, str, Contract]


def _edges(facts: Facts) -> Iterator[Edge]:
    """Pairs of contracts that meet: along the layers, and inside each layer with its stream."""
    specs, norm = facts.specs, final_norm(facts.graph)
    chain = [
        specs[b.module]
        for kind in (BoundaryKind.EMBEDDING, BoundaryKind.LAYER)
        for b in facts.boundaries
        if b.kind is kind and b.module in specs
    ]
    layered = any(spec.kind is BoundaryKind.LAYER for spec in chain)
    tail = (BoundaryKind.NORM, BoundaryKind.HEAD) if layered else ()
    for kind in tail:
        for boundary in facts.boundaries:
            in_model = boundary.home == "" and boundary.module in specs
            last = kind is BoundaryKind.HEAD or boundary.module == norm
            if boundary.kind is kind and in_model and last:
                chain.append(specs[boundary.module])
    for giver, taker in pairwise(chain):
        yield (
            giver.module,
            giver.outputs[0].outside,
            taker.module,
            taker.inputs[0].outside,
        )
    for boundary in facts.boundaries:
        home = specs.get(boundary.home) if boundary.home else None
        spec = specs.get(boundary.module)
        if home is None or spec is None or home.kind in NOT_CHAINED:
            continue
        entry, result = home.inputs[0].inside, home.outputs[0].inside
        yield home.module, entry, spec.module, spec.inputs[0].outside
        yield home.module, result, spec.module, spec.outputs[0].outside
