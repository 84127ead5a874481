"""Tensors inside the nested arguments and results of a forward."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `function` applied to its tensors; containers that do not change stay the same
    objects, others are copied."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        made: Any = copy.copy(value)
        for key, item in changed.items():
            made[key] = item
        return made
    if isinstance(value, tuple | list):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        fields = {name: map_tensors(function, item) for name, item in values.items()}
        if all(fields[name] is item for name, item in values.items()):
            return value
        made = copy.copy(value)
        for name, item in fields.items():
            object.__setattr__(made, name, item)
        return made
    return value
