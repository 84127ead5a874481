"""What the tests of DTensor and of its rules share: layouts by name, dense comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.testing.dense_comparison import DenseCall
from hp_dtensor.testing.rule_check import axis_choices, layout_choices

__all__ = ["agrees", "axis_choices", "integers", "layout_choices", "leaf", "mesh_of", "spread"]


def mesh_of(*sizes: int) -> DeviceMesh:
    names = ("dp", "tp") if len(sizes) == 2 else ("tp",)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def integers(shape: Sequence[int], seed: int = 0) -> Tensor:
    """Small whole numbers in float64, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, tuple(shape), generator=generator).double()


def spread(value: Tensor, layout: Layout) -> DTensor:
    """The part of a dense value that this rank holds; a pending sum is split unevenly."""
    local = value.reshape(-1)[layout.owned_indices()].reshape(layout.local_shape()).clone()
    sizes, coordinate = layout.abstract_mesh.sizes, layout.coordinate()
    summand, count = 0, 1
    for axis in layout.partial_axes():
        summand, count = summand * sizes[axis] + coordinate[axis], count * sizes[axis]
    if summand:
        local = torch.full_like(local, summand)
    else:
        local -= sum(range(1, count))
    return DTensor.of_layout(local, layout)


def leaf(value: Tensor, layout: Layout) -> DTensor:
    """As `spread`, requiring a gradient."""
    return spread(value, layout).requires_grad_()


def agrees(
    function: Callable[..., Any], dense: Sequence[Tensor], laid_out: Sequence[DTensor]
) -> None:
    """Values and gradients of `function` on DTensors are those on dense tensors.

    Raises:
        AssertionError: they are not; on every rank, naming the one that found it.
        OperatorError: the layouts are refused.
    """
    mesh = laid_out[0].device_mesh
    assert isinstance(mesh, DeviceMesh)
    refused = DenseCall.of(function, dense).compare(laid_out, mesh)
    if refused is not None:
        raise OperatorError(refused.reason)
