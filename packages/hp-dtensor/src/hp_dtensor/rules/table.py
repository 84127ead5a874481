"""From a torch function to its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from hp_dtensor.rules import matrix, neural, pointwise, reduction, shape
from hp_dtensor.rules.recipe import Rule

_FAMILIES = (pointwise, matrix, reduction, shape, neural)
_SPACES: tuple[Any, ...] = (torch, torch.Tensor, F, torch.linalg, torch.special, torch.nn.init)


def _functions(name: str) -> Iterator[Callable[..., Any]]:
    """Every function of this name: in torch, as a method, in torch.nn.functional, in place."""
    names = [name] if name.endswith("_") else [name, f"{name}_", f"__{name}__", f"__i{name}__"]
    for space in _SPACES:
        for each in names:
            found = getattr(space, each, None)
            if callable(found):
                yield found


@cache
def _named() -> Mapping[str, Rule]:
    named: dict[str, Rule] = {}
    for family in _FAMILIES:
        for name, rule in family.rules().items():
            named.setdefault(name, rule)
    return MappingProxyType(named)


@cache
def rules() -> Mapping[Callable[..., Any], Rule]:
    """Rules by function. Built once, never changed."""
    table: dict[Callable[..., Any], Rule] = {}
    for name, rule in _named().items():
        for function in _functions(name):
            table.setdefault(function, rule)
    return MappingProxyType(table)


def rule_for(function: Callable[..., Any]) -> Rule | None:
    """The rule of a torch function, or None."""
    return rules().get(function)


def rule_named(name: str) -> Rule | None:
    """The rule of the operator called `name`, for functions that stand for many calls of it."""
    return _named().get(name)
