"""From a torch function to its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from hp_dtensor.rules import (
    attention,
    by_value,
    convolution,
    creation,
    embedding,
    extremes,
    indexing,
    joining,
    lookups,
    losses,
    mask_writes,
    masks,
    matrix,
    normalization,
    norms,
    pointwise,
    reduction,
    scan,
    selection,
    softmax,
    views,
)
from hp_dtensor.rules.recipe import Rule

FAMILIES = (
    pointwise,
    creation,
    matrix,
    reduction,
    extremes,
    norms,
    softmax,
    scan,
    views,
    indexing,
    lookups,
    masks,
    mask_writes,
    by_value,
    joining,
    attention,
    embedding,
    convolution,
    normalization,
    losses,
    selection,
)
SPACES: tuple[Any, ...] = (torch, torch.Tensor, F, torch.linalg, torch.special, torch.nn.init)


# Functions that share a rule's name and not its arguments: internal forms whose operands are in
# another order, conversions to Python numbers, F.unfold, which cuts images into patches, and a
# function that torch has removed.
NOT_MEANT: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.embedding,
        torch.batch_norm,
        torch.instance_norm,
        torch.poisson_nll_loss,
        torch.solve,  # type: ignore[attr-defined]
        torch.Tensor.solve,
        torch.kl_div,
        torch.binary_cross_entropy_with_logits,
        torch.hinge_embedding_loss,
        F.unfold,
        torch.Tensor.__complex__,
        torch.Tensor.__float__,
        torch.Tensor.__int__,
        torch.Tensor.__bool__,
        torch.Tensor.__long__,
        torch.Tensor.__nonzero__,
    }
)


def functions_named(name: str) -> Iterator[Callable[..., Any]]:
    """Every function of this name: in torch, as a method, in torch.nn.functional, in place."""
    names = [name] if name.endswith("_") else [name, f"{name}_", f"__{name}__", f"__i{name}__"]
    for space in SPACES:
        for each in names:
            if each.startswith("__") and space is not torch.Tensor:
                continue  # of the module itself
            found = getattr(space, each, None)
            if callable(found) and found not in NOT_MEANT:
                yield found


@cache
def named() -> Mapping[str, Rule]:
    table: dict[str, Rule] = {}
    for family in FAMILIES:
        for name, rule in family.rules().items():
            table.setdefault(name, rule)
    return MappingProxyType(table)


@cache
def rules() -> Mapping[Callable[..., Any], Rule]:
    """Rules by function. Built once, never changed."""
    table: dict[Callable[..., Any], Rule] = {}
    for name, rule in named().items():
        for function in functions_named(name):
            table.setdefault(function, rule)
    return MappingProxyType(table)


def rule_for(function: Callable[..., Any]) -> Rule | None:
    """The rule of a torch function, or None."""
    return rules().get(function)


def rule_named(name: str) -> Rule | None:
    """The rule of the operator called `name`, for functions that stand for many calls of it."""
    return named().get(name)
