"""The gradient that a `torch.autograd.Function` returns for a DTensor it was given.

Autograd of DTensors runs on local tensors, but `Function.apply` cannot be intercepted: it hangs its
node on the wrapper. Where its result is a DTensor, the next operator moves the node (see
`function_bridge`). Where it is plain, as a penalty made of a shard is, the gradient arrives at the
wrapper, where nobody looks: a hook on the wrapper sends it on to the local tensor, or refuses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import Partial, Replicate

from hp_dtensor.implicit import any_requires_grad
from hp_dtensor.layout import Layout
from hp_dtensor.placements import describe
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.wrapper import Wrapper

__all__ = ["expect_function", "gradients_of", "watch"]

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


def gradients_of(
    outputs: Sequence[Any],
    ends: Sequence[Any],
    seeds: Sequence[Any],
    allow_unused: bool | None,
    materialize_grads: bool,
    **options: Any,
) -> list[Tensor | None]:
    """`torch.autograd.grad` of plain outputs: the local gradients of `ends`, with those that
    functions return for the wrappers.

    Raises:
        OperatorError: a function returned a gradient laid out otherwise.
        RuntimeError: there is none, and `allow_unused` and `materialize_grads` are false.
    """
    places = [
        place
        for place, each in enumerate(ends)
        if isinstance(each, Wrapper) and any_requires_grad(each)
    ]
    wrappers = [ends[place] for place in places]
    locals_ = [getattr(each, "_local", each) for each in ends]
    edges = [_edge(wrapper) for wrapper in wrappers]
    with _unwatched(wrappers):
        found: Any = torch.autograd.grad(
            outputs, [*locals_, *edges], seeds, allow_unused=True, **options
        )
    gradients = list(found[: len(ends)])
    for place, returned in zip(places, found[len(ends) :]):
        if returned is not None:
            more, present = _local_gradient(ends[place]._layout, returned), gradients[place]
            gradients[place] = more if present is None else present + more
    for place, gradient in enumerate(gradients):
        if gradient is None and materialize_grads:
            gradients[place] = torch.zeros_like(
                locals_[place], requires_grad=options["create_graph"]
            )
        elif gradient is None and not allow_unused:
            raise RuntimeError(
                f"torch.autograd.grad: nothing leads from the outputs to input {place}, "
                "counted from 0. Remedy: pass allow_unused=True to get None for it, or "
                "materialize_grads=True to get zeros"
            )
    return gradients


@contextlib.contextmanager
def _unwatched(wrappers: Sequence[Any]) -> Iterator[None]:
    """What arrives at the wrappers is captured, and not sent on."""
    with torch._C.DisableTorchFunctionSubclass():
        kept = {id(wrapper): (wrapper, _hooks.__get__(wrapper)) for wrapper in wrappers}
        for wrapper, _ in kept.values():
            _hooks.__set__(wrapper, None)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunctionSubclass():
            for wrapper, hooks in kept.values():
                _hooks.__set__(wrapper, hooks)


def _edge(wrapper: Any) -> GradientEdge:
    """Where gradients for the wrapper itself arrive. PyTorch's own function reads a tensor's
    properties, and those of a wrapper answer for its local tensor."""
    with torch.enable_grad():
        node, number = _Uses.apply(wrapper).grad_fn.next_functions[0]
    return GradientEdge(node, number)


class _Uses(torch.autograd.Function):
    """A use of a tensor, for its place in the graph."""

    @staticmethod
    def forward(ctx: Any, _: Any) -> Tensor:
        return torch.empty(0)


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
