"""A bias that is added once, to the sum over ranks (row-parallel layers, Megatron-LM section 3).

A linear layer cut along its input features gives a summand of its result on every rank. Its bias
is replicated and would be added by every rank, so it is left out of the layer's forward and added
to what the boundary hands out. A plan says so by itself: a layer that has a bias and whose result
is `Partial` inside its boundary can mean nothing else.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from hp_dtensor.contracts import ModelAxes
from hp_dtensor.dtensor import DTensor
from hp_dtensor.placements import Partial, is_partial
from hp_dtensor.plan import BoundarySpec

__all__ = ["adds_bias_late", "install_late_bias"]


def adds_bias_late(module: nn.Module, boundary: BoundarySpec, axes: ModelAxes) -> bool:
    """Whether the module is a layer with a bias of its own whose result is a sum over ranks."""
    bias = module._parameters.get("bias")
    if bias is None or module._parameters.get("weight") is None:
        return False
    return any(_summed_axes(boundary, axes))


def _summed_axes(boundary: BoundarySpec, axes: ModelAxes) -> tuple[bool, ...]:
    """By model axis, whether the module's result is a sum over its ranks."""
    results = [tensor.inside for tensor in boundary.outputs if tensor.where == ""]
    return tuple(
        size > 1 and any(is_partial(inside.placement(axis)) for inside in results)
        for axis, size in zip(axes.abstract.axis_names, axes.abstract.sizes)
    )


def install_late_bias(module: nn.Module, boundary: BoundarySpec, axes: ModelAxes) -> None:
    """Makes the forward leave the bias out, and a hook add it. Call it after the exit's hook."""
    if not adds_bias_late(module, boundary, axes):
        return
    module.forward = _WithoutBias(module, _summed_axes(boundary, axes))
    module.register_forward_hook(_add_bias)


class _WithoutBias:
    """The module's forward, run while the module has no bias (zeros where it needs one).

    A deep copy of the module copies this too, and means the copy.
    """

    def __init__(self, module: nn.Module, summed: tuple[bool, ...]) -> None:
        self.module, self.forward, self.summed = module, module.forward, summed
        functools.update_wrapper(self, module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.module._parameters
        bias = own["bias"]
        assert bias is not None
        absent = None if isinstance(self.module, nn.Linear) else self._zeros(bias)
        own["bias"] = absent  # type: ignore[assignment]
        try:
            return self.forward(*args, **kwargs)
        finally:
            own["bias"] = bias

    def _zeros(self, bias: Tensor) -> Tensor:
        """Zeros on every rank, which are a summand of zeros in all."""
        if not isinstance(bias, DTensor):
            return torch.zeros_like(bias)
        layout = bias.layout
        placements = [
            Partial() if summed else placement
            for summed, placement in zip(self.summed, layout.placements)
        ]
        zeros = torch.zeros_like(bias.to_local())
        return DTensor.of_layout(zeros, layout.with_placements(placements))


def _add_bias(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Reads the parameter at every call: `fully_shard` puts the gathered one in its place."""
    bias = module._parameters["bias"]
    assert bias is not None
    return output + bias
