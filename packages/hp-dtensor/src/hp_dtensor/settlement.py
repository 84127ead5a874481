"""Gradients of replicated parameters, summed over the axes where each rank holds a summand.

A replicated parameter that sharded activations consume gets, on every rank, only its own share of
the gradient: the layout says value Replicate, gradient Partial (decision D3). One fused all-reduce
per axis and backward makes them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh, mesh_axis
from hp_dtensor.placements import is_partial, is_replicate
from hp_platform.buffers import BufferLayout
from hp_platform.collectives import all_reduce
from hp_platform.ledger import Origin

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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
    groups: dict[tuple[DeviceMesh, int, str, torch.dtype], list[Tensor]] = {}
    for gradient, layout in zip(gradients, layouts):
        for axis, reduction in _summed_axes(layout):
            mesh = _checked_mesh(gradient, layout)
            if mesh is None:
                continue
            key = (mesh, axis, reduction, dtype or gradient.dtype)
            groups.setdefault(key, []).append(gradient)
    # Innermost axes last: a gradient with summands on two axes is reduced over one after another.
    for (mesh, axis, reduction, carrier), members in groups.items():
        _reduce_fused(members, mesh, axis, reduction, carrier, origin)


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


def _reduce_fused(
    members: list[Tensor],
    mesh: DeviceMesh,
    axis: int,
    reduction: str,
    carrier: torch.dtype,
    origin: Origin,
) -> None:
    where = BufferLayout.of([gradient.numel() for gradient in members], carrier)
    buffer = where.allocate(members[0].device)
    views = where.views(buffer, [tuple(gradient.shape) for gradient in members])
    with torch.no_grad():
        torch._foreach_copy_(views, members)
        all_reduce(buffer, mesh_axis(mesh, axis), op=reduction, origin=origin).wait()
        torch._foreach_copy_(members, views)
