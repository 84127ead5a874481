"""The rule of an embedding: a table cut along the vocabulary looks up what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.placements import sharded_dims
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.lookups import OwnDim
from hp_dtensor.rules.recipe import Call, Recipe, Rule


def _embedding(call: Call) -> Recipe:
    """A table cut along the vocabulary looks up what it holds; the rest are zeros to be summed."""
    if call.get("max_norm") is not None or call.get("sparse", False):
        raise call.error(
            "max_norm and sparse gradients have no rule", "leave them out, or replicate the table"
        )
    if call.get("scale_grad_by_freq", False):
        raise call.error("scale_grad_by_freq has no rule", "leave it out, or replicate the table")
    if call.layouts[0].partial_axes():
        raise call.error(
            "the indices are a pending sum, and a lookup is not linear in them",
            "redistribute them to Replicate() first",
        )
    derivation = derive(
        call.operator, parse("..., v d -> ... d"), call.layouts, names=("input", "weight")
    )
    table = derivation.operands[1]
    recipe = Recipe(derivation.operands, derivation.outputs[0])
    if not any(0 in sharded_dims(placement) for placement in table.placements):
        return recipe
    return Recipe(recipe.operands, recipe.outputs, _masked_lookup(table, call.get("padding_idx")))


def _masked_lookup(table: Layout, padding_idx: int | None) -> Callable[..., Tensor]:
    own = OwnDim(table, 0)
    padding = None if padding_idx is None else padding_idx % table.shape[0]
    at = None if padding is None else (own.held == padding).nonzero().flatten().tolist()
    local_padding = at[0] if at else None

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        ids, weight = args[0], args[1]
        if weight.shape[0] == 0:
            # Keeps the table in the graph, so that its (empty) gradient exists on every rank.
            zeros = weight.new_zeros((*ids.shape, weight.shape[1]))
            return zeros + weight.sum()
        position, mine = own.local(ids, "embedding")
        assert mine is not None
        found = F.embedding(position, weight, local_padding)
        return found.masked_fill(~mine.unsqueeze(-1), 0)

    return run


def rules() -> Mapping[str, Rule]:
    parameters = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    return {"embedding": Rule("embedding", _embedding, tuple(parameters.split()))}
