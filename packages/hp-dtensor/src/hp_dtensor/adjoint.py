"""Value and gradient placements of both ends of a transition, and its adjoint (decision D3).

A value x and its gradient g are both global tensors; a layout says how each is spread over the
ranks. The pairing of a value's locals x_r with its gradient's locals g_r is

    <x, g> = sum over ranks of <x_r, g_r>,

where, along an axis on which both are replicated, one coordinate counts instead of all. Under it
Shard pairs with Shard, Partial with Replicate, and Replicate with Replicate or Partial. The
adjoint of a transition T from `source` to `target` takes a gradient laid out as the target's and
delivers one laid out as the source's, with <T x, y> = <x, T* y>: it is the transition between the
two gradient layouts, with values and gradients exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.placements import (
    Placement,
    is_partial,
    is_replicate,
)


def dual(layout: Layout) -> Layout:
    """The gradient's layout; its own gradient is laid out as the value."""
    return layout.of_dual


def factor(source: Layout, target: Layout) -> float:
    """By what a transition multiplies, beside moving data.

    A summand of an average over n ranks has 1/n of the value's gradient. A transition between
    gradients therefore divides by n where it arrives at such a summand, and multiplies where it
    leaves one.
    """
    return _averaged(source) / _averaged(target)


def _averaged(layout: Layout) -> int:
    sizes = layout.abstract_mesh.sizes
    return math.prod(n for n, p in zip(sizes, layout.grad_placements) if _is_average(p))


def _is_average(placement: Placement) -> bool:
    return is_partial(placement) and placement.reduce_op == "avg"


def has_adjoint(layout: Layout) -> bool:
    """Whether the value is linear in its locals: a maximum or minimum over ranks is not."""
    return all(p.reduce_op in ("sum", "avg") for p in layout.placements if is_partial(p))


def pairing(layout: Layout, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """<x, g> over the local tensors of all ranks, in rank order: a 0-dim tensor."""
    once = [
        axis
        for axis, (p, g) in enumerate(zip(layout.placements, layout.grad_placements))
        if is_replicate(p) and is_replicate(g)
    ]
    counted = [
        number
        for number, coord in enumerate(layout.abstract_mesh.coordinates())
        if all(coord[axis] == 0 for axis in once)
    ]
    value = end_to_end([values[number] for number in counted])
    gradient = end_to_end([gradients[number] for number in counted])
    return (value * gradient).sum()


def end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """Their elements one after the other: 1-D."""
    return torch.cat([each if each.ndim == 1 else each.reshape(-1) for each in tensors])
