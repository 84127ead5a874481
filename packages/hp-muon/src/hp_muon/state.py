"""Optimizer state between ranks: one canonical tensor per parameter, whoever owns it.

In memory a parameter's momentum exists on its replica owners only. Outside (in `state_dict`, in a
checkpoint) it is a tensor with the parameter's own layout, present on every rank, so that it can
be saved by torch.distributed.checkpoint and loaded on any other mesh, world size or setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_dtensor import AbstractMesh, Layout, Replicate
from hp_muon.errors import MuonError
from hp_platform import MeshAxis, Origin, all_reduce, broadcast


def local_tensor(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor of either kind, sharing storage; a plain tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _is_of_pytorch(tensor: Tensor) -> TypeGuard[TorchDTensor]:
    """Whether it is PyTorch's own DTensor. By type: those of hp_dtensor answer `isinstance` too."""
    return issubclass(type(tensor), TorchDTensor)


def replicated_like(parameter: Tensor, layout: Layout | None, value: Tensor) -> Tensor:
    """`value`, the same on every rank, as a distributed tensor of the parameter's kind."""
    if layout is None:
        return value
    everywhere = [Replicate()] * len(layout.placements)
    if _is_of_pytorch(parameter):
        mesh = parameter.device_mesh
        return TorchDTensor.from_local(value, mesh, everywhere, run_check=False)
    return with_layout_of(value, Layout(layout.mesh, everywhere, value.shape), value)


def with_layout_of(parameter: Tensor, layout: Layout | None, local: Tensor) -> Tensor:
    """`local` as a distributed tensor of the parameter's kind and layout; plain if it is plain."""
    if layout is None:
        return local
    if _is_of_pytorch(parameter):
        return TorchDTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=torch.Size(layout.shape),
            stride=torch.empty(layout.shape, device="meta").stride(),
        )
    from hp_dtensor import DTensor  # loads the operator rules, which Muon itself does without

    if isinstance(layout.mesh, AbstractMesh):
        raise MuonError(f"{layout} is on an abstract mesh; state needs a DeviceMesh")
    return DTensor.from_local(local, layout.mesh, layout.placements, shape=layout.shape)


def to_local_state(value: Tensor, parameter: Tensor, layout: Layout | None, name: str) -> Tensor:
    """A loaded state tensor as this rank's local tensor.

    Takes a distributed tensor with the parameter's layout, a local tensor, or a full one, of
    which the local part is selected.

    Raises:
        MuonError: it has another layout or shape.
    """
    local_shape = tuple(local_tensor(parameter).shape)
    if hasattr(value, "to_local"):
        found = local_tensor(value)
        if tuple(found.shape) != local_shape or layout is None or value.shape != layout.shape:
            raise MuonError(
                f"state of parameter {name!r}: loaded {_describe(value)}, but the parameter is "
                f"{layout or local_shape}; load through torch.distributed.checkpoint into this "
                "optimizer's state_dict(), or redistribute the state first"
            )
        return found
    if tuple(value.shape) == local_shape:
        return value
    if layout is not None and tuple(value.shape) == layout.shape:
        indices = layout.owned_indices().to(value.device)
        return value.reshape(-1)[indices].reshape(local_shape)
    raise MuonError(
        f"state of parameter {name!r}: loaded shape {tuple(value.shape)}, expected the local shape "
        f"{local_shape} or the global shape {layout.shape if layout else local_shape}"
    )


def from_owner(
    held: Tensor | None, like: Tensor, owner: tuple[int, ...], axes: tuple[MeshAxis, ...], name: str
) -> Tensor:
    """The owner's tensor on every rank of its replica subgroup; all of them make this call.

    Args:
        held: on the owner, its tensor; None elsewhere.
        like: a tensor of the wanted shape and device.
        owner: the owner's coordinate on `axes`.
    """
    value = torch.zeros_like(like, dtype=torch.float32) if held is None else held
    value = value.contiguous()
    origin = Origin("hp_muon", name, "state_dict")
    for position in reversed(range(len(axes))):
        if all(axes[p].rank == owner[p] for p in range(position)):
            broadcast(value, axes[position], source=owner[position], origin=origin).wait()
    return value


def sum_over(value: Tensor, axes: Sequence[MeshAxis], name: str) -> None:
    """Sums `value` in place over the ranks of all axes; all of them make this call."""
    for axis in axes:
        all_reduce(value, axis, origin=Origin("hp_muon", name, "state_dict")).wait()


def _describe(value: Any) -> str:
    return f"{tuple(value.shape)} {getattr(value, 'placements', '')}"
