"""torch's initialisers of parameters, with values that belong to the global tensors (D11)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hp_dtensor.layout import attach_layout, layout_of
from hp_dtensor.random import RandomState, normal_, uniform_

__all__ = ["Initializing"]


class Initializing(TorchFunctionMode):
    """Within it, torch's random initialisers draw from `state`: the same bits for every layout.

    `with Initializing(seed(0)): module.reset_parameters()` fills a DTensor, a local tensor that
    carries a layout, and a whole tensor with parts of the same values. Sizes that initialisers ask
    of a tensor with a layout (fans) are its global ones. Every rank must initialise the same
    tensors in the same order. What draws random numbers in another way raises.
    """

    def __init__(self, state: RandomState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = _DRAWS.get(func)
        if known is not None:
            if kwargs.pop("generator", None) is not None:
                raise ValueError(
                    f"{func.__name__} under Initializing was given a generator; it draws from "
                    f"{self.state!r}: leave the generator away"
                )
            return known(self.state, *args, **kwargs)
        if func in _OTHERS:
            raise NotImplementedError(
                f"{func.__name__} under Initializing: its values would differ between ranks. Use "
                f"one of {', '.join(sorted({each.__name__ for each in _DRAWS}))}, or "
                "hp_dtensor.random.uniform_ of a state and compute from that"
            )
        if func is Tensor.new_tensor and isinstance(args[1], (int, float)):
            # The bounds of nn.init.trunc_normal_, which draws uniform values and inverts them.
            made = {"dtype": args[0].dtype, "device": args[0].device} | kwargs
            return torch.tensor(args[1], **made)
        layout = layout_of(args[0]) if func in _OF_PARTS and _is_plain(args[0]) else None
        if layout is None:
            return func(*args, **kwargs)
        if func in _SIZES:
            return _SIZES[func](torch.Size(layout.shape), *args[1:], **kwargs)
        if func in _ALIASES:
            return attach_layout(func(*args, **kwargs), layout)
        if layout.sharding_axes():
            raise NotImplementedError(
                f"{func.__name__} under Initializing: a part of {layout} is indexed, whose rows "
                "are other ones on each rank. Initialise before the plan is applied, in validate "
                "mode, or write the rows that this rank holds outside of Initializing"
            )
        return func(*args, **kwargs)


def _normal(state: RandomState, tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return normal_(tensor, mean, std, state=state)


def _uniform(state: RandomState, tensor: Tensor, *args: float, **kwargs: float) -> Tensor:
    """`Tensor.uniform_(from, to)` and `nn.init.uniform_(tensor, a, b)`."""
    low, high = [*args, *[0.0, 1.0][len(args) :]]
    low = kwargs.get("from", kwargs.get("a", low))
    high = kwargs.get("to", kwargs.get("b", high))
    return uniform_(tensor, low, high, state=state)


def _fans(tensor: Tensor) -> tuple[int, int]:
    """Fan in and fan out of the global tensor, as in `torch.nn.init`."""
    layout = layout_of(tensor)
    shape = tuple(tensor.shape if layout is None else layout.shape)
    if len(shape) < 2:
        raise ValueError(f"fan in and fan out need a tensor of at least 2 dims, found {shape}")
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


def _xavier(*, normal: bool) -> Callable[..., Tensor]:
    def fill(state: RandomState, tensor: Tensor, gain: float = 1.0) -> Tensor:
        std = gain * math.sqrt(2.0 / sum(_fans(tensor)))
        return _spread(tensor, std, normal, state)

    return fill


def _kaiming(*, normal: bool) -> Callable[..., Tensor]:
    def fill(
        state: RandomState,
        tensor: Tensor,
        a: float = 0,
        mode: str = "fan_in",
        nonlinearity: Any = "leaky_relu",
    ) -> Tensor:
        fan = _fans(tensor)[0 if mode == "fan_in" else 1]
        std = nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
        return _spread(tensor, std, normal, state)

    return fill


def _spread(tensor: Tensor, std: float, normal: bool, state: RandomState) -> Tensor:
    if normal:
        return normal_(tensor, 0.0, std, state=state)
    bound = math.sqrt(3.0) * std
    return uniform_(tensor, -bound, bound, state=state)


_DRAWS: Mapping[Any, Callable[..., Tensor]] = {
    Tensor.normal_: _normal,
    nn.init.normal_: _normal,
    Tensor.uniform_: _uniform,
    nn.init.uniform_: _uniform,
    nn.init.xavier_uniform_: _xavier(normal=False),
    nn.init.xavier_normal_: _xavier(normal=True),
    nn.init.kaiming_uniform_: _kaiming(normal=False),
    nn.init.kaiming_normal_: _kaiming(normal=True),
}
_OTHERS = frozenset(
    {
        Tensor.bernoulli_,
        Tensor.cauchy_,
        Tensor.exponential_,
        Tensor.geometric_,
        Tensor.log_normal_,
        Tensor.random_,
        torch.rand,
        torch.rand_like,
        torch.randn,
        torch.randint,
        torch.randperm,
        torch.randn_like,
        torch.randint_like,
        torch.normal,
        torch.bernoulli,
        torch.multinomial,
    }
)


def _size(shape: torch.Size, dim: int | None = None) -> Any:
    return shape if dim is None else shape[dim]


_SIZES: Mapping[Any, Callable[..., Any]] = {
    Tensor.size: _size,
    Tensor.shape.__get__: lambda shape, *_: shape,  # type: ignore[attr-defined]
    Tensor.numel: lambda shape: shape.numel(),
}
_ALIASES = frozenset({Tensor.data.__get__, Tensor.detach})  # type: ignore[attr-defined]
"""They keep the layout, which torch's own alias of a plain tensor loses."""
_OF_PARTS = frozenset({*_SIZES, *_ALIASES, Tensor.__getitem__, Tensor.__setitem__})


def _is_plain(value: object) -> bool:
    return type(value) in (Tensor, nn.Parameter)
