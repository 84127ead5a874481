"""Functions that ask about a DTensor rather than compute with it: no rule, no layout work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hp_dtensor.alike import UPDATES, update_alike
from hp_dtensor.dispatch import dispatch
from hp_dtensor.foreach import foreach, fused_update, is_foreach, is_fused_update, unscale
from hp_dtensor.function_gradient import gradients_of
from hp_dtensor.implicit import allowed
from hp_dtensor.layout import layout_of
from hp_dtensor.rules.engine import OperatorError, operator_error, show
from hp_dtensor.rules.recipe import words
from hp_dtensor.scalars import are_mixed_scalars, stack_scalars
from hp_dtensor.torch_kind import as_torch_dtensor, is_torch_dtensor

Handler = Callable[..., Any]

# Properties and methods answered by the wrapper itself, whose dtype, device and sizes are right.
_OF_WRAPPER = words(
    """
    is_cpu is_cuda is_xpu is_mps is_meta is_sparse is_sparse_csr is_quantized is_mkldnn
    is_nested itemsize nbytes is_complex is_floating_point is_signed is_same_size get_device
    is_inference is_conj is_neg names
    """
)
_OF_LOCAL = ["is_pinned", "data_ptr", "untyped_storage", "storage_offset", "is_shared"]


@cache
def _own_names(wrapper: type) -> Mapping[str, Any]:
    """What the class and its bases define, PyTorch's own left out. Every property read asks."""
    own = wrapper.__mro__[: wrapper.__mro__.index(torch.Tensor)]
    names = {name: value for each in reversed(own) for name, value in vars(each).items()}
    return MappingProxyType(names)


def _on_wrapper(function: Callable[..., Any]) -> Handler:
    def handler(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return handler


def _on_local(name: str) -> Handler:
    def handler(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._local, name)(*args, **kwargs)

    return handler


def _getter(descriptor: Any) -> Handler:
    from hp_dtensor.dtensor import DTensor

    name = descriptor.__name__
    if name in _own_names(DTensor):
        return lambda self, *_: getattr(self, name)
    if name in _OF_WRAPPER:
        return _on_wrapper(lambda self, *_: descriptor.__get__(self))

    def refuse(*_: Any) -> Any:
        raise OperatorError(
            f"{name}: a DTensor does not have this property. Remedy: read it from to_local() or "
            "full_tensor()."
        )

    return refuse


def _setter(descriptor: Any) -> Handler:
    name = descriptor.__name__

    def handler(self: Any, value: Any) -> None:
        from hp_dtensor.dtensor import DTensor

        if name not in _own_names(DTensor):
            raise OperatorError(
                f"{name}: this property of a DTensor cannot be set. Remedy: set it on to_local()."
            )
        setattr(self, name, value)

    return handler


def _compatible(first: Tensor, second: Tensor) -> bool:
    """Whether `first.data = second` will do; torch.nn.Module asks this before it casts."""
    return (
        type(first) is type(second)
        and first.dtype == second.dtype
        and first.device == second.device
        and getattr(first, "_layout", None) == getattr(second, "_layout", None)
    )


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **unsupported: Any,
) -> tuple[Any, ...]:
    """`torch.autograd.grad` on the local tensors; gradients come back as DTensors."""
    from hp_dtensor.dtensor import DTensor

    unsupported = {key: value for key, value in unsupported.items() if key != "only_inputs"}
    if any(unsupported.values()):
        raise OperatorError(f"torch.autograd.grad on DTensors does not support {unsupported}")
    starts = [
        each._with_plain_gradient() if isinstance(each, DTensor) else each
        for each in _sequence(outputs)
    ]
    seeds = _sequence(grad_outputs) if grad_outputs is not None else [None] * len(starts)
    ends = _sequence(inputs)
    gradients = gradients_of(
        [getattr(each, "_local", each) for each in starts],
        ends,
        [s._seed(g) if isinstance(s, DTensor) else g for s, g in zip(starts, seeds)],
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=allow_unused,
        materialize_grads=materialize_grads,
    )
    # A gradient that is differentiated again has its own gradient laid out as the value.
    return tuple(
        DTensor._of(gradient, end._layout.of_dual if create_graph else end.grad_layout)
        if isinstance(end, DTensor) and gradient is not None
        else gradient
        for gradient, end in zip(gradients, ends)
    )


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward` on the local tensors, as reentrant checkpointing calls it."""
    from hp_dtensor.dtensor import DTensor

    outputs = _sequence(tensors)
    seeds = [None] * len(outputs) if grad_tensors is None else _sequence(grad_tensors)
    pairs = [
        _start(each, seed) if isinstance(each, DTensor) else (each, seed)
        for each, seed in zip(outputs, seeds, strict=True)
    ]
    torch.autograd.backward(
        [start for start, _ in pairs],
        [seed for _, seed in pairs],
        retain_graph,
        create_graph,
        inputs=None if inputs is None else [getattr(i, "_local", i) for i in _sequence(inputs)],
    )


def _start(output: Any, gradient: Any) -> tuple[Tensor, Tensor | None]:
    """Where the local pass begins, and with what: a gradient laid out as declared is taken as it
    is, each rank's summand included."""
    laid_out = getattr(gradient, "_layout", None)
    if laid_out is not None and laid_out.placements == output._layout.grad_placements:
        return output._checked_local(), gradient._local
    if laid_out is not None and not allowed().reductions:
        raise operator_error(
            "backward",
            f"the gradient is laid out {show(laid_out)}, expected {show(output.grad_layout)}",
            [output._layout],
            remedy="what is run again in backward must give results laid out as in forward",
        )
    plain = output._with_plain_gradient()
    return plain._checked_local(), plain._seed(gradient)


def _copy(target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    """`copy_` between a DTensor and one of PyTorch's, as loaders for FSDP2 write it."""
    from hp_dtensor.dtensor import DTensor

    if is_torch_dtensor(target):
        theirs = as_torch_dtensor(source)  # outside the graph
        if theirs is not None and not (torch.is_grad_enabled() and source.requires_grad):
            return target.copy_(theirs, *args, **kwargs)
    elif is_torch_dtensor(source):
        layout = layout_of(source)
        assert layout is not None
        source = DTensor.of_layout(source.to_local(), layout)
    elif not isinstance(target, DTensor) and not source._layout.is_replicated:
        raise operator_error(
            "copy_",
            "a part of a tensor cannot be copied into a plain tensor of shape "
            f"{tuple(target.shape)}",
            [source._layout],
            remedy="take full_tensor() of it first, on all ranks, before it is saved; or save and "
            "load by torch.distributed.checkpoint",
        )
    return dispatch(torch.Tensor.copy_, (target, source, *args), kwargs)


def _stack(*args: Any, **kwargs: Any) -> Any:
    """Norms of gradients on different meshes are stacked as plain values."""
    tensors = args[0] if args else kwargs["tensors"]
    if are_mixed_scalars(tensors):
        return stack_scalars(tensors)
    return dispatch(torch.stack, args, kwargs)


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else [value]


@cache
def _handlers() -> Mapping[Any, Handler]:
    from hp_dtensor.dtensor import DTensor

    table: dict[Any, Handler] = {}
    for name, own in _own_names(DTensor).items():
        theirs = getattr(torch.Tensor, name, None)
        if callable(own) and theirs is not None and not name.startswith("__torch"):
            table.setdefault(theirs, own)
    for name in _OF_WRAPPER:
        for space in (torch, torch.Tensor):
            function = getattr(space, name, None)
            if callable(function):
                table[function] = _on_wrapper(function)
    for name in _OF_LOCAL:
        table[getattr(torch.Tensor, name)] = _on_local(name)
    table[torch.numel] = DTensor.numel
    table[torch.detach] = DTensor.detach
    table[torch.is_nonzero] = DTensor.__bool__
    table[torch.Tensor.is_nonzero] = DTensor.__bool__
    table[torch._has_compatible_shallow_copy_type] = _compatible
    table[torch.autograd.grad] = _grad
    table[torch.autograd.backward] = _backward
    table[torch.stack] = _stack
    table[torch.Tensor.copy_] = _copy
    for name in UPDATES:
        update = getattr(torch.Tensor, name)
        table[update] = update_alike(update)
    table[torch._amp_foreach_non_finite_check_and_unscale_] = unscale
    return MappingProxyType(table)


def direct_handler(function: Callable[..., Any]) -> Handler | None:
    """What answers `function` without a layout rule, or None."""
    handler = _handlers().get(function)
    if handler is not None:
        return handler
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return _getter(function.__self__)  # type: ignore[attr-defined]
    if name == "__set__":
        return _setter(function.__self__)  # type: ignore[attr-defined]
    if is_foreach(name):
        return lambda *args, **kwargs: foreach(function, args, kwargs)
    if is_fused_update(name):
        return lambda *args, **kwargs: fused_update(function, args, kwargs)
    return None
