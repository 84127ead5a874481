"""Collectives that an operator makes for itself, over the axes that cut the dims it reduces.

Values are combined without gradient, and the gradient is carried by a local expression: the
result is the same on every rank, so each rank has the whole gradient of it and passes on what
belongs to its own elements. Such results can be differentiated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh, mesh_axis
from hp_dtensor.rules.own_part import own_coordinate
from hp_platform.collectives import Origin, all_gather, all_reduce


@frozen(eq=False)
class Along:
    """The mesh axes `axes` of a layout's mesh, for small values of one shape on every rank."""

    layout: Layout
    axes: tuple[int, ...]
    operator: str

    @property
    def origin(self) -> Origin:
        return Origin("hp_dtensor", self.operator, "operator")

    @property
    def count(self) -> int:
        sizes = self.layout.abstract_mesh.sizes
        total = 1
        for axis in self.axes:
            total *= sizes[axis]
        return total

    @property
    def place(self) -> int:
        """This rank's position in what `gather` gives."""
        coordinate, sizes = own_coordinate(self.layout), self.layout.abstract_mesh.sizes
        place = 0
        for axis in self.axes:
            place = place * sizes[axis] + coordinate[axis]
        return place

    def gather(self, local: Tensor) -> Tensor:
        """The ranks' tensors stacked along a new first dim, the first axis varying slowest."""
        found = local.detach().contiguous().unsqueeze(0)
        mesh: Any = self.layout.mesh
        for axis in reversed(self.axes):
            if isinstance(mesh, AbstractMesh):
                found = torch.cat([found] * mesh.sizes[axis])
            else:
                found = all_gather(found, mesh_axis(mesh, axis), origin=self.origin).wait()
        return found

    def reduce(self, local: Tensor, op: str) -> Tensor:
        """The ranks' tensors combined by "sum", "max" or "min"; truth values as integers."""
        if local.dtype == torch.bool:
            return self.reduce(local.to(torch.uint8), op).to(torch.bool)
        found = local.detach().clone(memory_format=torch.contiguous_format)
        mesh: Any = self.layout.mesh
        if not isinstance(mesh, AbstractMesh):
            for axis in self.axes:
                found = all_reduce(found, mesh_axis(mesh, axis), op=op, origin=self.origin).wait()
        return found


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, carrier: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def carried(value: Tensor, carrier: Tensor) -> Tensor:
    """`value`, with the gradient of `carrier`, whose own value does not matter."""
    if not (carrier.requires_grad and torch.is_grad_enabled()):
        return value
    found: Tensor = _Carried.apply(value, carrier)
    return found


def axes_cutting(layout: Layout, dims: Sequence[int]) -> tuple[int, ...]:
    """Mesh axes of more than one rank that cut any of `dims`."""
    wanted = set(dims)
    return tuple(axis for axis, cut in layout.sharding_axes().items() if wanted & set(cut))
