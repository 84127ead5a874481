"""Gradients of replicated parameters, summed over the axes where each rank holds a summand.

A replicated parameter that sharded activations consume gets, on every rank, only its own share of
the gradient: the layout says value Replicate, gradient Partial (decision D3). One fused all-reduce
per axis and backward makes them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh, mesh_axis
from hp_dtensor.placements import is_partial, is_replicate
from hp_platform.buffers import BufferLayout
from hp_platform.collectives import all_reduce
from hp_platform.ledger import Origin

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hp_platform.axis import MeshAxis

_ORIGIN = Origin("hp_dtensor", "gradient settlement", "backward")


def settle_gradients(
    gradients: Sequence[Tensor],
    layouts: Sequence[Layout],
    *,
    dtype: torch.dtype | None = None,
    origin: Origin = _ORIGIN,
) -> None:
    """All-reduces, in place, the gradients of which each rank along an axis holds a summand.

    Which those are is said by the layouts: axes on which the value is Replicate and the gradient
    Partial. Per mesh axis (and reduction and dtype) there is one all-reduce through a flat buffer
    whose parts start on 512-byte boundaries. Every rank must pass the same list in the same order.

    Args:
        gradients: local gradients, of the layouts' local shapes.
        layouts: the parameters' layouts, on a DeviceMesh.
        dtype: reduce in this dtype, e.g. float32, and cast back; None keeps each one's own.

    Raises:
        ValueError: the lists differ in length, a gradient has another shape than its layout's
            local one, or a layout that needs settling is on an abstract mesh.
    """
    if len(gradients) != len(layouts):
        raise ValueError(f"settle_gradients: {len(gradients)} gradients but {len(layouts)} layouts")
    with torch.no_grad():
        Settlement.of(gradients, layouts, dtype).run(gradients, origin)


@frozen(eq=False)
class Settlement:
    """What `settle_gradients` does to one list of gradients, worked out once.

    For gradients of the same shapes, dtypes and device in the same order it can be run again; its
    buffers are kept for that.
    """

    groups: tuple[_Group, ...]

    @classmethod
    def of(
        cls,
        gradients: Sequence[Tensor],
        layouts: Sequence[Layout],
        dtype: torch.dtype | None = None,
    ) -> Settlement:
        """Args and errors as for `settle_gradients`."""
        members: dict[tuple[DeviceMesh, int, str, torch.dtype], list[int]] = {}
        for index, (gradient, layout) in enumerate(zip(gradients, layouts)):
            for axis, reduction in _summed_axes(layout):
                mesh = _checked_mesh(gradient, layout)
                if mesh is not None:
                    key = (mesh, axis, reduction, dtype or gradient.dtype)
                    members.setdefault(key, []).append(index)
        # Innermost axes last: summands on two axes are reduced over one after another.
        return cls(
            tuple(
                _Group.of(
                    mesh_axis(mesh, axis), reduction, carrier, indices,
                    [gradients[index] for index in indices],
                )
                for (mesh, axis, reduction, carrier), indices in members.items()
            )
        )  # fmt: skip

    def run(self, gradients: Sequence[Tensor], origin: Origin = _ORIGIN) -> None:
        """Settles `gradients`, outside any graph and in place. Every rank must make the call."""
        for group in self.groups:
            group.run([gradients[index] for index in group.indices], origin)


@frozen(eq=False)
class _Group:
    """Gradients that are reduced in one message."""

    axis: MeshAxis
    reduction: str
    indices: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    where: BufferLayout
    spare: list[tuple[Tensor, list[Tensor]]]

    @classmethod
    def of(
        cls,
        axis: MeshAxis,
        reduction: str,
        carrier: torch.dtype,
        indices: Sequence[int],
        gradients: Sequence[Tensor],
    ) -> _Group:
        where = BufferLayout.of([gradient.numel() for gradient in gradients], carrier)
        shapes = tuple(tuple(gradient.shape) for gradient in gradients)
        return cls(axis, reduction, tuple(indices), shapes, where, [])

    def run(self, gradients: list[Tensor], origin: Origin) -> None:
        if len(gradients) == 1:
            (only,) = gradients
            if only.dtype is self.where.dtype and only.is_contiguous():
                all_reduce(only, self.axis, op=self.reduction, origin=origin).wait()
                return
        # Taken out while it is used, so that two passes at a time have a buffer each.
        device = gradients[0].device
        buffer, views = self.spare.pop() if self.spare else self._made(device)
        if buffer.device != device:  # the model has moved since
            buffer, views = self._made(device)
        torch._foreach_copy_(views, gradients)
        all_reduce(buffer, self.axis, op=self.reduction, origin=origin).wait()
        torch._foreach_copy_(gradients, views)
        if not self.spare:
            self.spare.append((buffer, views))

    def _made(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        buffer = self.where.allocate(device)
        return buffer, self.where.views(buffer, self.shapes)


def needs_settlement(layout: Layout) -> bool:
    """Whether some axis of more than one rank leaves each rank with a summand of the gradient."""
    return bool(_summed_axes(layout))


def _summed_axes(layout: Layout) -> list[tuple[int, str]]:
    return [
        (axis, gradient.reduce_op)
        for axis, (value, gradient) in enumerate(zip(layout.placements, layout.grad_placements))
        if is_replicate(value) and is_partial(gradient) and layout.abstract_mesh.sizes[axis] > 1
    ]


def _checked_mesh(gradient: Tensor, layout: Layout) -> DeviceMesh | None:
    """None where there are no values to sum: a meta tensor on an abstract mesh."""
    abstract = isinstance(layout.mesh, AbstractMesh)
    if abstract and not gradient.is_meta:
        raise ValueError(f"settle_gradients: {layout} is on an abstract mesh; use a DeviceMesh")
    own = layout.local_shape((0,) * layout.mesh.ndim if abstract else None)
    if tuple(gradient.shape) != own:
        raise ValueError(
            f"settle_gradients: a gradient has shape {tuple(gradient.shape)}, but {layout} gives "
            f"this rank {own}"
        )
    return None if isinstance(layout.mesh, AbstractMesh) else layout.mesh
