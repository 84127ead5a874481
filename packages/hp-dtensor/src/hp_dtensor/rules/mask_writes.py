"""Values written one after the other where a mask is set: `masked_scatter`, `x[mask] = values`.

The i-th element that the mask selects takes the i-th value, so each rank has to know how many are
selected before its own. Along one dim that is cut in order the ranks exchange counts, one for each
row in front of that dim; otherwise they gather the mask. The values are whole on every rank, which
uses some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.placements import RaggedShard, Shard, is_sharding
from hp_dtensor.rules.along import Along
from hp_dtensor.rules.dims import letters
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.own_part import own_coordinate
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule
from hp_dtensor.rules.refusal import operator_error
from hp_dtensor.transition import Transition
from hp_platform.collectives import Origin


def _masked_scatter(call: Call) -> Recipe:
    check_same_dtype(call, call.get("source"))
    source = call.get("source").layout
    given = [call.input.layout, call.get("mask").layout, _whole(source)]
    values = " ".join(f"[v{i}]" for i in range(len(source.shape)))
    made = derive(
        call.operator,
        parse(f"..., ..., {values} -> ...", linear=False),
        given,
        names=("input", "mask", "source"),
        leader=0 if call.inplace else None,
        yielding=(1,),
    )
    output = made.outputs[0]
    count = _Counting(call.operator, output, made.operands[1])
    limit = math.prod(source.shape)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        local, mask, given = _named(args, kwargs)
        shape = output.local_shape(own_coordinate(output))
        where = mask.expand(shape)
        place, total = count.places(where, mask)
        _check_total(call, total, limit)
        flat = given.reshape(-1)
        chosen = flat.new_zeros(shape) if limit == 0 else flat[place.clamp(0, limit - 1)]
        found = torch.where(where, chosen.view(shape), local)
        if limit == 0 and flat.requires_grad:
            found = found + flat.sum()
        return local.copy_(found) if call.inplace else found

    return Recipe(made.operands, output, run, communicates=count.communicates)


def check_same_dtype(call: Call, value: Operand) -> None:
    """As torch, which writes no other dtype at selected places."""
    if value.dtype != call.input.dtype:
        raise call.error(
            f"values of {value.dtype} are written into a tensor of {call.input.dtype}",
            f"convert them with .to({call.input.dtype})",
        )


def _named(args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = dict(zip(("input", "mask", "source"), args)) | kwargs
    return given["input"], given["mask"], given["source"]


def _whole(layout: Layout) -> Layout:
    kept = [Replicate() if is_sharding(p) else p for p in layout.placements]
    changed = any(is_sharding(p) for p in layout.placements)
    return layout.with_placements(kept) if changed else layout


def _check_total(call: Call, total: Tensor, limit: int) -> None:
    if total.is_meta:
        return
    enough = total <= limit
    if total.device.type != "cpu":
        torch._assert_async(enough)  # no wait for the device, as in torch's own kernels
    elif not enough:
        raise call.error(
            f"the mask selects {int(total)} elements, and the source has {limit}",
            "give the source as many elements as the mask selects",
        )


class _Counting:
    """How many selected elements of the global tensor come before each of this rank's."""

    def __init__(self, operator: str, output: Layout, mask: Layout) -> None:
        self.operator, self.output, self.mask = operator, output, mask
        axes = tuple(output.sharding_axes())
        self.axes = tuple(axis for axis in axes if output.abstract_mesh.sizes[axis] > 1)
        self.dim: int | None = None
        if len(self.axes) == 1 and output.flat_dims <= 1:
            (dim,) = output.sharding_axes()[self.axes[0]]
            in_order = type(output.placements[self.axes[0]]) in (Shard, RaggedShard)
            self.dim = dim if in_order else None

    @property
    def communicates(self) -> str:
        if not self.axes:
            return ""
        return "the mask gathered" if self.dim is None else "the ranks' counts of the mask gathered"

    def places(self, where: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Place of every element among those selected, 1-D, and how many these are."""
        if not self.axes:
            counted = where.reshape(-1).cumsum(0)
            return counted - 1, where.sum()
        if self.dim is None:
            return self._of_whole(mask)
        outer = math.prod(where.shape[: self.dim])
        rows = where.reshape(outer, math.prod(where.shape[self.dim :]))
        along = Along(self.output, self.axes, self.operator)
        counts = along.gather(rows.sum(1))
        every = counts.sum(0)
        before = every.cumsum(0) - every + counts[: along.place].sum(0)
        return (rows.cumsum(1) - 1 + before[:, None]).reshape(-1), every.sum()

    def _of_whole(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        whole = self.mask.with_placements([Replicate()] * len(self.mask.placements))
        origin = Origin("hp_dtensor", self.operator, "operator")
        gathered = Transition.compile(self.mask, whole).apply(mask, origin=origin)
        counted = gathered.expand(self.output.shape).reshape(-1).cumsum(0)
        own = self.output.owned_indices(own_coordinate(self.output)).to(counted.device)
        return counted[own] - 1, counted[-1:].sum()


def write_rows(tensor: Any, index: Any, value: Any) -> None:
    """`tensor[mask] = value` with one row of `value` for each element of the mask."""
    mask = index[0] if isinstance(index, tuple | list) else index
    selected = mask.sum()
    if not selected.to_local().is_meta and int(selected) != value.shape[0]:
        raise operator_error(
            "__setitem__",
            f"the mask selects {int(selected)} elements, and {value.shape[0]} values are given",
            [tensor.layout, mask.layout, value.layout],
            remedy="give as many values as the mask selects, or one for all of them",
        )
    tensor.masked_scatter_(mask[(..., *[None] * (tensor.ndim - mask.ndim))], value)


def value_letters(call: Call, masked: int, value_shape: tuple[int, ...]) -> str | None:
    """The pattern of a value that is the same for every selected element; None for rows."""
    names = letters(len(call.input.shape))
    rest = len(names) - masked
    if len(value_shape) <= rest:
        return " ".join(names[len(names) - len(value_shape) :])
    if len(value_shape) == rest + 1 and value_shape[0] == 1:
        return " ".join(["1", *names[masked:]])
    return None


def rules() -> Mapping[str, Rule]:
    return {
        "masked_scatter": Rule("masked_scatter", _masked_scatter, ("input", "mask", "source")),
    }
