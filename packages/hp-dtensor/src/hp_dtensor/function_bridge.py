"""The gradient of a `torch.autograd.Function` that was applied to DTensors and gives one.

`Function.apply` cannot be intercepted: it runs the forward on the wrappers, without gradients, and
hangs its node on the result's wrapper, beside the graph of local tensors. Where both its forward
and its backward are written in torch functions, they have run and will run under the layout rules
like any other code, so the node is put into the local graph: its backward is called with the
gradient as a DTensor, and what it returns must be laid out as the gradients of what it was given.
In validate mode its backward may not communicate by itself, which it would not in production.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_dtensor.recomputation import Followed
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.whole_values import current_values
from hp_dtensor.wrapper import Wrapper

__all__ = ["bridged", "way_round"]

_of_wrapper: Any = torch._C.TensorBase


def bridged(result: Wrapper) -> Tensor | None:
    """The local tensor of a function's result with the function in its graph.

    None where that cannot be done: the function has several results, or was not given DTensors.
    """
    node, number = _node_of(result)
    if number or not hasattr(node, "apply") or len(node._input_metadata) != 1:
        return None
    given: list[Any] = [
        getattr(each, "variable", None) for each, _ in node.next_functions if each is not None
    ]
    if not given or not all(isinstance(each, Wrapper) for each in given):
        return None
    with torch.enable_grad():  # the function was applied where gradients are recorded
        local: Tensor = _Bridge.apply(node, [result], given, *(each._local for each in given))
    return local


def way_round(result: Wrapper) -> str:
    """The remedy where a function's result cannot be bridged."""
    if type(_node_of(result)[0]).__name__ == "CheckpointFunctionBackward":
        return (
            "pass use_reentrant=False to torch.utils.checkpoint, or checkpoint a function that is "
            "given DTensors and gives one"
        )
    return (
        "call to_local() before the function and DTensor.from_local() after it, or declare the "
        "module an opaque region"
    )


def _node_of(result: Wrapper) -> tuple[Any, int]:
    with torch._C.DisableTorchFunctionSubclass():
        # Past the properties of the wrapper, which answer for the local tensor.
        return _of_wrapper.grad_fn.__get__(result), _of_wrapper.output_nr.__get__(result)


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, node: Any, results: list[Any], given: list[Any], *_: Tensor) -> Tensor:
        (result,) = results  # in a list, or autograd would enter the wrapper's graph
        ctx.node, ctx.given = node, [each._layout.of_gradient for each in given]
        ctx.kind, ctx.layout = type(result), result._layout.of_gradient
        values = current_values()
        # As the forward ran: in validate mode nothing may communicate by itself.
        ctx.backward = node.apply if values is None else Followed(node.apply, values.following)
        local: Tensor = result._local
        return local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        name = type(ctx.node).__name__.removesuffix("Backward")
        returned = ctx.backward(ctx.kind._of(gradient, ctx.layout))
        returned = returned if isinstance(returned, tuple) else (returned,)
        # One for each argument; those that are no tensors, or need none, have no gradient.
        needed = [g for g, wanted in zip(returned, ctx.node.needs_input_grad) if wanted]
        found = []
        for given, layout in zip(needed, ctx.given):
            if given is not None and getattr(given, "_layout", None) is None:
                raise OperatorError(
                    f"{name}.backward: it returned a plain tensor, which has lost its layout. "
                    "Remedy: compute on the DTensors, or declare the module an opaque region."
                )
            if given is not None and given._layout.placements != layout.placements:
                raise OperatorError(
                    f"{name}.backward: expected a gradient laid out {layout}, found "
                    f"{given._layout}. Remedy: correct the contracts around the module, or declare "
                    "it an opaque region."
                )
            found.append(None if given is None else given._local)
        return (None, None, None, *found)
