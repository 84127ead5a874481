"""Tensor-parallel attention with fewer key/value heads than ranks: ranks share heads.

Key/value heads are repeated until they divide over the ranks of `tp`, and a rank computes those
that its query heads need: of K heads over t ranks, with E the least common multiple of both, its
E / t heads, of which some may be the same one. That is what grouped-query attention does with heads
anyway, so the result is the dense one. The module's own code computes; its projections of k and v
use the rows of the rank's heads, and it is told how many queries share a head now.

The weights of k and v are whole on every rank. Their gradients are summands: a rank fills the rows
of its heads, and the sum over the axis adds what the ranks that share a head have.

Obligations: whole hidden states in, with a partial gradient; the rank's query heads; an output
projection whose result is a partial sum. A norm over all key heads together (OLMo 2) sees all of
them, and the rank's heads are taken from its result.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import linear

from hp_dtensor.contracts import ContractError, ModelAxes
from hp_dtensor.plan import BoundarySpec
from hp_integration.regions.context_parallel import context_parallel
from hp_planner.layer_names import KEY, VALUE

__all__ = ["context_parallel_shared_heads", "shared_heads"]

TENSOR_AXIS = "tp"
GROUPS = "num_key_value_groups"
COUNTS = ("num_key_value_heads", "num_kv_heads")


def shared_heads(module: nn.Module, boundary: BoundarySpec, axes: ModelAxes) -> None:
    """Makes an attention compute this rank's key/value heads (`hp_dtensor.regions.RegionFunction`).

    Raises:
        ContractError: the module has no projections of k and v, or does not say how long a head is
            and how many queries share one.
    """
    name = boundary.module or "(root)"
    key, value = _projection(module, KEY, name), _projection(module, VALUE, name)
    dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    groups = getattr(module, GROUPS, None)
    if not isinstance(dim, int) or not isinstance(groups, int) or key.weight.shape[0] % dim:
        raise ContractError(
            f"boundary {name}: ranks can share key/value heads if {type(module).__name__} says how "
            f"long a head is and how many queries share it; found head_dim={dim}, "
            f"{GROUPS}={groups}, {key.weight.shape[0]} rows of k; override it with none"
        )
    heads = key.weight.shape[0] // dim
    index = axes.abstract.axis_index(TENSOR_AXIS)
    own = OwnHeads.of(heads, axes.coordinate[index], axes.abstract.sizes[index])
    norm = _norm_over(module, key.weight.shape[0]) if heads > 1 else None
    if norm is None:
        _project_own(key, own, heads)
    else:
        norm.register_forward_hook(functools.partial(_take_own, own, heads))
    _project_own(value, own, heads)
    setattr(module, GROUPS, heads * groups // own.repeated)
    for count in COUNTS:
        if isinstance(getattr(module, count, None), int):
            setattr(module, count, len(own.each))


def context_parallel_shared_heads(
    module: nn.Module, boundary: BoundarySpec, axes: ModelAxes
) -> None:
    """`shared_heads`, whose keys and values are then gathered over the sequence."""
    shared_heads(module, boundary, axes)
    context_parallel(module, boundary, axes)


@frozen
class OwnHeads:
    """The key/value heads of one rank.

    Attributes:
        repeated: heads of all ranks together, repetitions counted.
        each: for each head that the rank holds, which of the model's it is; ascending.
    """

    repeated: int
    each: tuple[int, ...]

    @classmethod
    def of(cls, heads: int, coordinate: int, size: int) -> OwnHeads:
        """Of `heads` key/value heads over `size` ranks."""
        repeated = math.lcm(heads, size)
        share, times = repeated // size, repeated // heads
        first = coordinate * share
        return cls(repeated, tuple(head // times for head in range(first, first + share)))

    @property
    def first(self) -> int:
        return self.each[0]

    @property
    def distinct(self) -> int:
        """Heads without their repetitions; they lie side by side in the weight."""
        return self.each[-1] - self.first + 1

    def repetitions(self, heads: Tensor, dim: int) -> Tensor:
        """From the distinct heads, [..., distinct, dim of a head], flattened: all that it holds."""
        if len(self.each) == self.distinct:
            return heads
        index = heads.new_tensor([head - self.first for head in self.each]).long()
        split = heads.unflatten(-1, (self.distinct, dim))
        return split.index_select(-2, index).flatten(-2)


def _project_own(projection: nn.Linear, own: OwnHeads, heads: int) -> None:
    # A partial object and no class of ours: a copy of the module is given its own projection.
    projection.forward = functools.partial(_linear, projection, own, heads)  # type: ignore[method-assign]


def _linear(projection: nn.Linear, own: OwnHeads, heads: int, input: Tensor) -> Tensor:
    dim = projection.weight.shape[0] // heads
    start, length = own.first * dim, own.distinct * dim
    weight = projection.weight.narrow(0, start, length)
    bias = projection.bias.narrow(0, start, length) if projection.bias is not None else None
    return own.repetitions(linear(input, weight, bias), dim)


def _take_own(own: OwnHeads, heads: int, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Of the result of a norm over all key heads, those of this rank."""
    dim = output.shape[-1] // heads
    return own.repetitions(output.narrow(-1, own.first * dim, own.distinct * dim), dim)


def _projection(module: nn.Module, names: tuple[str, ...], where: str) -> nn.Linear:
    found = (getattr(module, name, None) for name in names)
    projection = next((each for each in found if isinstance(each, nn.Module)), None)
    if not isinstance(projection, nn.Linear):
        raise ContractError(
            f"boundary {where}: ranks can share key/value heads of torch.nn.Linear projections, "
            f"found {type(projection).__name__} as {'/'.join(names)}; override it with none"
        )
    return projection


def _norm_over(module: nn.Module, rows: int) -> nn.Module | None:
    """The norm over all key heads together, if the attention has one."""
    for child in module.children():
        weight = getattr(child, "weight", None)
        if isinstance(weight, Tensor) and weight.shape == (rows,):
            return child
    return None
