"""The gradient that a `torch.autograd.Function` returns for a DTensor it was given.

Autograd of DTensors runs on local tensors, but `Function.apply` cannot be intercepted: it hangs its
node on the wrapper. Where its result is a DTensor, the next operator moves the node (see
`function_bridge`). Where it is plain, as a penalty made of a shard is, the gradient arrives at the
wrapper, where nobody looks: a hook on the wrapper sends it on to the local tensor, or refuses it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.placements import describe
from hp_dtensor.rules.engine import OperatorError

__all__ = ["expect_function", "watch"]

_hooks: Any = torch._C.TensorBase._backward_hooks


def watch(wrapper: Any) -> None:
    """A gradient that autograd brings to `wrapper` itself goes to its local tensor, a leaf."""
    with torch._C.DisableTorchFunctionSubclass():
        # Past the wrapper's own `register_hook`, which is about the local tensor.
        if _hooks.__get__(wrapper) is None:
            _hooks.__set__(wrapper, {0: partial(_receive, wrapper._local, wrapper._layout)})


def expect_function(wrapper: Any) -> None:
    """A wrapper that requires a gradient is read where none is recorded: it may be in the forward
    of a function. That of a leaf is watched from the beginning."""
    if not wrapper._local.is_leaf:
        watch(wrapper)


def _receive(local: Tensor, layout: Layout, gradient: Tensor) -> Tensor:
    if not local.is_leaf:
        raise OperatorError(
            f"a torch.autograd.Function was given a DTensor laid out {layout} that other operators "
            "have computed, and gave a plain tensor, whose gradient they would not get. Remedy: "
            "call to_local() before the function, or return DTensors from it"
        )
    local.backward(_local_gradient(layout, gradient), create_graph=torch.is_grad_enabled())
    return _Kept.like(gradient)


def _local_gradient(layout: Layout, gradient: Any) -> Tensor:
    expected = layout.of_gradient
    found: Layout | None = getattr(gradient, "_layout", None)
    if found is None:
        if expected.is_replicated:
            return gradient
        raise OperatorError(
            "the backward of a torch.autograd.Function returned a plain tensor of shape "
            f"{tuple(gradient.shape)} for a DTensor. Expected a DTensor laid out {expected}. "
            "Remedy: wrap this rank's part of the gradient, DTensor.from_local(part, "
            "p.device_mesh, p.placements, shape=p.shape)"
        )
    if found.mesh == expected.mesh and found.placements == expected.placements:
        return gradient._local
    settled = tuple(Replicate() if isinstance(p, Partial) else p for p in expected.placements)
    if found.mesh == expected.mesh and found.placements == settled:
        # The whole of a sum: a summand on the first rank, and zero on the others.
        first = all(layout.coordinate()[axis] == 0 for axis in expected.partial_axes())
        return gradient._local if first else torch.zeros_like(gradient._local)
    raise OperatorError(
        "the backward of a torch.autograd.Function returned a gradient placed "
        f"{describe(found.placements)} on {found.abstract_mesh}. Expected {expected}. Remedy: "
        "redistribute it there"
    )


class _Kept(torch.Tensor):
    """What autograd accumulates on the wrapper in place of a gradient: a shape without memory."""

    @classmethod
    def like(cls, tensor: Tensor) -> _Kept:
        made: _Kept = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, dtype=tensor.dtype, device=tensor.device
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> _Kept:
        return cls.like(args[0])
