"""Operators whose results have as many elements as values say: positions, distinct values, bins.

Every rank has to know all of it. The operand is gathered (truth values in its place where these
are all that counts), the operator runs on the whole tensor, and its results are whole on every
rank. Where a boundary allows no communication, and without values, this is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree

from hp_dtensor.implicit import allowed
from hp_dtensor.rules.recipe import Call, Recipe, Rule
from hp_dtensor.rules.refusal import operator_error


def on_gathered(call: Call, function: Callable[..., Any], *, truth: bool = False) -> Recipe | None:
    """`function` on whole operands; None where they are whole, with whole gradients.

    Args:
        truth: only whether an element is zero matters, so that is what is gathered.
    """
    layouts = call.layouts
    if all(each.is_replicated and each.grad_placements == each.placements for each in layouts):
        return None
    composite = partial(_gathered, call.operator, function, truth)
    return Recipe(None, None, composite=composite)


def _gathered(
    operator: str, function: Callable[..., Any], truth: bool, *args: Any, **kwargs: Any
) -> Any:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if hasattr(leaf, "_layout")]
    if not allowed().reductions or any(tensor.to_local().is_meta for tensor in tensors):
        raise operator_error(
            operator,
            "how many elements it gives depends on values, which all ranks would have to exchange "
            "here",
            [tensor.layout for tensor in tensors],
            remedy="redistribute the operands to Replicate() first where values are at hand, or "
            "declare the module that calls it an opaque region",
        )

    def whole(leaf: Any) -> Any:
        if not hasattr(leaf, "_layout"):
            return leaf
        found = leaf != 0 if truth and leaf.dtype != torch.bool else leaf
        return found.redistribute(placements=[Replicate()] * len(found.placements))

    args, kwargs = pytree.tree_unflatten([whole(leaf) for leaf in leaves], structure)
    return function(*args, **kwargs)


def rules() -> Mapping[str, Rule]:
    found = {}
    for name, function, truth in (
        ("nonzero", torch.nonzero, True),
        ("argwhere", torch.argwhere, True),
        ("unique", torch.unique, False),
        ("unique_consecutive", torch.unique_consecutive, False),
        ("bincount", torch.bincount, False),
    ):
        derive = partial(on_gathered, function=function, truth=truth)
        found[name] = Rule(name, derive, ("input", "first", "second", "third", "fourth"))
    return found
