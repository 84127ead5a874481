"""The tensor that a backend is given in place of the caller's: same memory, or another device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hp_platform.axis import MeshAxis
from hp_platform.capabilities import Capabilities
from hp_platform.handle import Handle


def carried(tensor: Tensor, axis: MeshAxis) -> Tensor:
    """A copy on the axis's device."""
    return tensor.detach().to(axis.device)


def brought_back(staged: Handle[Tensor], target: Tensor) -> Handle[Tensor]:
    """The handle of a call on a carried tensor, whose `wait()` fills the caller's tensor."""
    found = staged._result
    return staged.delivering(target, lambda: plain(target).copy_(found))


def overwritten(tensor: Tensor) -> Tensor:
    """The same storage outside autograd, once graphs that have saved it will notice the change."""
    try:
        increment_version(tensor)
    except RuntimeError:
        if not tensor.is_inference():  # those count no versions, and no graph can save them
            raise
    return tensor.detach() if tensor.requires_grad else tensor


def copied(source: Tensor, target: Tensor) -> Tensor:
    """`target`, with the values of `source`."""
    if target.numel() and target.data_ptr() != source.data_ptr():
        plain(target).copy_(plain(source))
    return target


def plain(tensor: Tensor) -> Tensor:
    """The same storage outside autograd: communication is never part of a graph."""
    return tensor.detach() if tensor.requires_grad else tensor


def transportable(tensor: Tensor, able: Capabilities) -> Tensor:
    """The same storage outside autograd, as flat bytes where the backend lacks the type."""
    inside = tensor.detach() if tensor.requires_grad else tensor
    return inside if tensor.dtype in able.moves else inside.view(-1).view(torch.uint8)
