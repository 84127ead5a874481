"""Elementwise updates of tensors laid out alike, as optimizers make them for every parameter.

Where all operands have one layout without pending sums, the local tensors may be updated as they
are, whatever the layout. What is not so simple goes by the rules, to the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch

from hp_dtensor.dispatch import COPY, dispatch, make
from hp_dtensor.implicit import any_requires_grad
from hp_dtensor.layout import Layout
from hp_dtensor.rules.recipe import is_inplace, words
from hp_dtensor.whole_values import current_values

__all__ = ["UPDATES", "foreach_alike", "is_update", "update_alike"]

UPDATES = words("add_ sub_ mul_ div_ lerp_ addcmul_ addcdiv_")
"""Methods of tensors that `update_alike` answers."""
_ELEMENTWISE = frozenset(
    words(
        """
        add add_ sub sub_ mul mul_ div div_ lerp lerp_ addcmul addcmul_ addcdiv addcdiv_
        sqrt sqrt_ neg neg_ reciprocal reciprocal_ maximum maximum_
        """
    )
)
_NUMBERS = (float, int)


def is_update(function: Callable[..., Any]) -> bool:
    """Whether `update_alike` answers it."""
    name = getattr(function, "__name__", "")
    return name in UPDATES and function is getattr(torch.Tensor, name)


def update_alike(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, one of `UPDATES`, for a target and operands of which one is a DTensor."""

    @wraps(function)
    def handler(*args: Any, **kwargs: Any) -> Any:
        target = args[0]
        layout = getattr(target, "_layout", None)
        given = None if layout is None else _locals(args, kwargs, layout)
        if given is None or COPY in target.__dict__:
            return dispatch(function, args, kwargs)
        function(*given, **kwargs)
        return target

    return handler


def foreach_alike(
    function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """One `_foreach_` function without its prefix; NotImplemented where it is for the rules."""
    if name not in _ELEMENTWISE or not _are_numbers(kwargs) or current_values() is not None:
        return NotImplemented
    layouts = [getattr(each, "_layout", None) for each in args[0]]
    recording = torch.is_grad_enabled()
    given: list[Any] = []
    for value in args:
        if type(value) in _NUMBERS:
            given.append(value)
            continue
        if type(value) not in (list, tuple) or len(value) != len(layouts):
            return NotImplemented
        column = [_local(each, layout, recording) for each, layout in zip(value, layouts)]
        if any(each is None for each in column):
            return NotImplemented
        given.append(column)
    writes = is_inplace(name)
    if writes and any(COPY in each.__dict__ for each in args[0]):
        return NotImplemented
    result = function(*given, **kwargs)
    if writes:
        return result
    return [make(local, layout) for local, layout in zip(result, layouts) if layout is not None]


def _locals(args: Sequence[Any], kwargs: Mapping[str, Any], layout: Layout) -> list[Any] | None:
    if not _are_numbers(kwargs) or current_values() is not None:
        return None
    recording = torch.is_grad_enabled()
    given = []
    for value in args:
        local = _local(value, layout, recording)
        if local is None:
            return None
        given.append(local)
    return given


def _local(value: Any, layout: Layout | None, recording: bool) -> Any:
    """A number, or the local tensor of a DTensor of this layout; None for anything else."""
    if type(value) in _NUMBERS:
        return value
    if layout is None or layout.has_sums:
        return None
    try:
        mine, local = value._layout, value._local
    except AttributeError:
        return None
    if mine is not layout and mine != layout:
        return None
    if local.requires_grad:
        # In a graph the rules see to what becomes of gradients.
        return None if recording or not local.is_leaf else local
    return None if any_requires_grad(value) else local


def _are_numbers(kwargs: Mapping[str, Any]) -> bool:
    return all(type(value) in _NUMBERS for value in kwargs.values())
