"""What this rank holds of a layout, for rules that need more than shapes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh


def own_coordinate(layout: Layout) -> tuple[int, ...]:
    """This rank's coordinate; coordinate 0 stands for every rank of an abstract mesh."""
    if isinstance(layout.mesh, AbstractMesh):
        return (0,) * layout.mesh.ndim
    return layout.coordinate()


def own_shape(layout: Layout) -> tuple[int, ...]:
    return layout.local_shape(own_coordinate(layout))


def own_indices(layout: Layout, dim: int) -> Tensor:
    """Global indices along `dim` of the local tensor, ascending: 1-D int64."""
    return layout.dim_indices(dim, own_coordinate(layout))


def of_nothing(shape: Sequence[int], *operands: Tensor) -> Tensor:
    """Zeros of a shape where a kernel would not take empty operands.

    They depend on the operands: a rank whose part is empty must take part in the backward
    collectives of the others.
    """
    total = operands[0].new_zeros(tuple(shape))
    for operand in operands:
        if operand.is_floating_point() or operand.is_complex():
            total = total + operand.flatten()[:0].sum().to(total.dtype)
    return total
