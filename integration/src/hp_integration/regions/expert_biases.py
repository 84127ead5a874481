"""Fused experts with biases whose inner features are spread over the ranks of `tp`.

What a rank's experts return is a summand, so the bias of the down projection, which the module adds
on every rank, would be added once for each. Here all but a part, one over the axis's size, is taken
back, in proportion to the routing weights as it was added. The gradient of the bias is then one
part, too, on each rank, and their sum is the whole one; so is that of the routing weights.

Obligations: the module is called with hidden states, routing index and routing weights, multiplies
an expert's result, bias included, with its routing weight, and sums a token's experts.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen
from torch import Tensor, nn

from hp_dtensor.contracts import Argument, ContractError, ModelAxes
from hp_dtensor.plan import BoundarySpec
from hp_integration.regions.expert_parallel import expert_parallel

__all__ = ["expert_biases", "expert_parallel_with_biases"]

TENSOR_AXIS = "tp"
BIAS = "down_proj_bias"


def expert_biases(module: nn.Module, boundary: BoundarySpec, axes: ModelAxes) -> None:
    """Lets experts add the bias of their result once (`hp_dtensor.regions.RegionFunction`).

    Raises:
        ContractError: the boundary declares other inputs, or the module has no such bias.
    """
    found = [Argument.of(module, tensor.where) for tensor in boundary.inputs]
    arguments = [argument for argument in found if argument is not None]
    name = boundary.module or "(root)"
    if len(arguments) != 3 or not isinstance(getattr(module, BIAS, None), Tensor):
        raise ContractError(
            f"boundary {name}: a bias that is added once needs {BIAS}, and hidden states, routing "
            f"index and routing weights as inputs, found {[t.where for t in boundary.inputs]} of "
            f"{type(module).__name__}; override the block around it with none"
        )
    index = axes.abstract.axis_index(TENSOR_AXIS)
    once = BiasOnce(arguments[1], arguments[2], axes.abstract.sizes[index])
    module.register_forward_hook(once.leave, with_kwargs=True)


def expert_parallel_with_biases(module: nn.Module, boundary: BoundarySpec, axes: ModelAxes) -> None:
    """`expert_biases` on the rows that expert dispatch brings to a rank."""
    expert_biases(module, boundary, axes)
    expert_parallel(module, boundary, axes)


@frozen
class BiasOnce:
    """Forward hook.

    Attributes:
        index, weights: where routing index and weights, [T, k] each, are in a call.
        size: ranks that each add the bias.
    """

    index: Argument
    weights: Argument
    size: int

    def leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        """The rank's summand, [T, H], with its part of the biases."""
        index, weights = self.index.read(args, kwargs), self.weights.read(args, kwargs)
        bias: Tensor = getattr(module, BIAS)
        # One column more, for the choices that transformers marks as dropped.
        each = weights.new_zeros(weights.shape[0], bias.shape[0] + 1)
        each = each.scatter_add(1, index, weights)[:, :-1]
        return output - (1 - 1 / self.size) * (each.to(bias.dtype) @ bias).to(output.dtype)
