"""Which DTensors answer yes to `isinstance(x, torch.distributed.tensor.DTensor)` (decision B42).

Code written for FSDP2 asks that before it calls `full_tensor()` or `to_local()`, and takes what
answers no for a whole tensor. So a DTensor answers yes wherever PyTorch has a DTensor with the same
parts on the same ranks. Others, ragged and sectioned ones, answer no: PyTorch's arithmetic on their
placements would take them for replicated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard

from hp_dtensor.layout import Layout
from hp_dtensor.placements import (
    Placement,
    StridedShard,
    is_partial,
    is_replicate,
    sharded_dims,
    to_torch_placement,
)
from hp_dtensor.whole_values import current_values

__all__ = ["as_torch_dtensor", "class_of", "is_torch_dtensor", "torch_placements"]

_MEMO = "_torch_placements"


class Standing(TorchDTensor):
    """What `__class__` of a DTensor of ours is where it answers for PyTorch's; nothing is one.

    A class of its own, because `torch.utils.swap_tensors` asks a tensor's `__class__` for slots to
    exchange, and PyTorch's DTensor has some which are properties of ours.
    """

    __slotnames__: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> Standing:
        raise TypeError("made by nobody; see hp_dtensor.DTensor.from_local")


def is_torch_dtensor(tensor: object) -> bool:
    """Whether a tensor is PyTorch's own DTensor, and not one of ours that answers for it."""
    return issubclass(type(tensor), TorchDTensor)


def class_of(tensor: Any) -> type:
    """What `tensor.__class__` is: a subclass of PyTorch's DTensor, or the tensor's own type.

    In validate mode it is the own type: in production model code meets plain tensors there. So it
    is while PyTorch compiles a function that was given the tensor: the compiler leaves out the
    guards on what it takes for PyTorch's DTensor.
    """
    layout = tensor._layout
    if current_values() is not None or torch_placements(layout) is None:
        return type(tensor)
    if not isinstance(layout.mesh, DeviceMesh):
        return type(tensor)
    if torch._guards.TracingContext.try_get() is not None:
        return type(tensor)
    return Standing


def as_torch_dtensor(tensor: Any) -> TorchDTensor | None:
    """PyTorch's DTensor over the same memory, outside the graph; None where there is none."""
    layout = tensor._layout
    placements = torch_placements(layout)
    if placements is None or not isinstance(layout.mesh, DeviceMesh):
        return None
    return TorchDTensor.from_local(
        tensor._local.detach(),
        layout.mesh,
        placements,
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=tensor.stride(),
    )


def torch_placements(layout: Layout) -> tuple[Placement, ...] | None:
    """The placements with which PyTorch's DTensor of this mesh and shape has the same parts on the
    same ranks; None if there are none."""
    known: dict[str, Any] = vars(layout)  # a pure function of an immutable value, kept with it
    if _MEMO not in known:
        known[_MEMO] = _torch_placements(layout)
    found: tuple[Placement, ...] | None = known[_MEMO]
    return found


def _own_first(name: str) -> Callable[..., Any]:
    """PyTorch's method of this name; of a DTensor of ours it is our method.

    Called through the class, as `map(DTensor.full_tensor, parameters)` does, PyTorch's would find
    all it asks for, and leave the gradient with a wrapper, where nobody looks.
    """
    theirs: Callable[..., Any] = getattr(TorchDTensor, name)

    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(self)
        found = theirs if issubclass(kind, TorchDTensor) else getattr(kind, name, theirs)
        return found(self, *args, **kwargs)

    return method


for _name in ("to_local", "full_tensor", "redistribute"):
    setattr(TorchDTensor, _name, _own_first(_name))


def _torch_placements(layout: Layout) -> tuple[Placement, ...] | None:
    for axis, placement in enumerate(layout.placements):
        if is_replicate(placement) or is_partial(placement) or type(placement) is Shard:
            continue
        if type(placement) is not StridedShard or not _is_right_to_left(layout, axis):
            return None
    return tuple(to_torch_placement(placement) for placement in layout.placements)


def _is_right_to_left(layout: Layout, axis: int) -> bool:
    """Whether a strided cut comes after the axes to its right, and everything is even.

    PyTorch cuts its strided shard from left to right, which gives the same parts then. Where sizes
    are uneven, the two orders differ.
    """
    placement, sizes = layout.placements[axis], layout.abstract_mesh.sizes
    assert isinstance(placement, StridedShard)
    cutting = [i for i, p in enumerate(layout.placements) if placement.dim in sharded_dims(p)]
    after = math.prod(sizes[i] for i in cutting if i > axis)
    even = layout.shape[placement.dim] % math.prod(sizes[i] for i in cutting) == 0
    return even and after == placement.split_factor
