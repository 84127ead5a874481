"""Joining 0-dimensional results of tensors on different meshes, as norm clipping does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.rules.engine import operator_error
from hp_dtensor.transition import Transition
from hp_platform.ledger import Origin


def are_mixed_scalars(tensors: Sequence[Tensor]) -> bool:
    """Whether all are 0-dimensional and not all are DTensors of one mesh."""
    if any(tensor.ndim for tensor in tensors):
        return False
    layouts = [getattr(tensor, "_layout", None) for tensor in tensors]
    meshes = {None if layout is None else layout.mesh for layout in layouts}
    return len(meshes) > 1


def stack_scalars(tensors: Sequence[Tensor]) -> Tensor:
    """A plain vector of the global values, equal on every rank of the largest mesh.

    A value on a smaller mesh must be the same on all its copies (one for each coordinate of the
    axes that its mesh leaves out). That is verified, with one small reduction per axis of the
    largest mesh: a value that differs (an expert's norm on each expert-parallel rank, say) is not
    a global value.

    Raises:
        OperatorError: no mesh contains all the others, or a value is not the same everywhere.
    """
    layouts = [getattr(tensor, "_layout", None) for tensor in tensors]
    placed = [layout for layout in layouts if layout is not None]
    largest: Any = max((layout.mesh for layout in placed), key=_size)
    for layout in placed:
        if not set(_ranks(layout.mesh)) <= set(_ranks(largest)):
            raise operator_error(
                "stack",
                "scalars are on meshes of which none contains all the ranks of the others",
                placed,
                remedy="lay the tensors out on one mesh, Replicate() on the axes they do not use",
            )
    values = [
        tensor.full_tensor() if layout is not None else tensor  # type: ignore[attr-defined]
        for tensor, layout in zip(tensors, layouts)
    ]
    smaller = [
        i
        for i, layout in enumerate(layouts)
        if layout is not None and _size(layout.mesh) < _size(largest)
    ]
    if smaller and not isinstance(largest, AbstractMesh):
        agreed = _agreed(torch.stack([values[i] for i in smaller]), largest, placed)
        for i, value in zip(smaller, agreed.unbind()):
            values[i] = value
    return torch.stack(values)


def _agreed(values: Tensor, mesh: DeviceMesh, placed: Sequence[Any]) -> Tensor:
    origin = Origin("hp_dtensor", "scalars of smaller meshes", "optimizer")
    source = Layout(mesh, [Partial("max")] * mesh.ndim, (2, len(values)))
    target = source.with_placements([Replicate()] * mesh.ndim)
    bounds = torch.stack([values, -values]).detach()
    bounds = Transition.compile(source, target).run_forward(bounds, origin=origin)
    high, low = bounds[0], -bounds[1]
    if not torch.allclose(high, low, rtol=1e-4, atol=0.0, equal_nan=True):
        raise operator_error(
            "stack",
            f"scalars on a smaller mesh differ between its copies: from {low.tolist()} to "
            f"{high.tolist()}, so none of them is global",
            placed,
            remedy="lay the tensors out on the whole mesh, cut along the axis they differ on",
        )
    return high


def _size(mesh: DeviceMesh | AbstractMesh) -> int:
    return mesh.world_size if isinstance(mesh, AbstractMesh) else mesh.size()


def _ranks(mesh: DeviceMesh | AbstractMesh) -> list[int]:
    if isinstance(mesh, AbstractMesh):
        return list(range(mesh.world_size))
    return mesh.mesh.flatten().tolist()
