"""Collectives that an operator makes for itself, over the axes that cut the dims it reduces.

Values are combined without gradient, and the gradient is carried by a local expression: the
result is the same on every rank, so each rank has the whole gradient of it and passes on what
belongs to its own elements. A result that is the sum of the ranks' expressions, each linear in its
elements (an extreme: one rank has it), can be differentiated again; of the others (variances,
norms, products) a second derivative is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh, mesh_axis
from hp_dtensor.rules.own_part import own_coordinate
from hp_dtensor.rules.refusal import operator_error
from hp_dtensor.transition import Transition
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
    def forward(ctx: Any, value: Tensor, carrier: Tensor, operator: str, summed: Any) -> Tensor:
        ctx.operator, ctx.summed = operator, summed
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        if torch.is_grad_enabled() and gradient.requires_grad:
            if ctx.summed is None:
                gradient = _Once.apply(gradient, ctx.operator)
            else:
                gradient = ctx.summed.apply(gradient)
        return None, gradient, None, None


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, operator: str) -> Tensor:
        ctx.operator = operator
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise operator_error(
            ctx.operator,
            "a second derivative over cut dims is not defined: each rank knows the first alone",
            [],
            remedy="redistribute the operand so that the reduced dims are whole, e.g. to Replicate",
        )


def carried(value: Tensor, carrier: Tensor, operator: str, summed: Any = None) -> Tensor:
    """`value`, with the gradient of `carrier`, whose own value does not matter.

    Args:
        operator: for errors.
        summed: from the value to what has a summand of its gradient on each rank (`to_summands`),
            where the value is the sum of the ranks' carriers and these are linear; else None.
    """
    if not (carrier.requires_grad and torch.is_grad_enabled()):
        return value
    found: Tensor = _Carried.apply(value, carrier, operator, summed)
    return found


def to_summands(layout: Layout, axes: Sequence[int]) -> Transition:
    """From a result that is whole along `axes` to the same with summands of its gradient there."""
    whole, summands = list(layout.grad_placements), list(layout.grad_placements)
    for axis in axes:
        whole[axis], summands[axis] = Replicate(), Partial()
    return Transition.compile(
        layout.with_placements(layout.placements, whole),
        layout.with_placements(layout.placements, summands),
    )


def axes_cutting(layout: Layout, dims: Sequence[int]) -> tuple[int, ...]:
    """Mesh axes of more than one rank that cut any of `dims`."""
    wanted = set(dims)
    return tuple(axis for axis, cut in layout.sharding_axes().items() if wanted & set(cut))


def to_everyone(layout: Layout, dim: int, axis: int, each: int = 1) -> Transition:
    """From `each` elements along `dim` on each rank of an axis to all of them on every rank.

    The other dims are as in `layout`. Every rank uses some of them, so that its gradient is a
    summand; the transition carries it, any number of times.
    """
    shape = list(layout.shape)
    shape[dim] = layout.abstract_mesh.sizes[axis] * each
    values: list[Placement] = list(layout.placements)
    grads: list[Placement] = list(layout.grad_placements)
    values[axis] = grads[axis] = Shard(dim)
    source = Layout(layout.mesh, values, shape, grads)
    values[axis], grads[axis] = Replicate(), Partial()
    return Transition.compile(source, Layout(layout.mesh, values, shape, grads))
