"""Elements that a mask selects: how many there are depends on values, which every rank must know.

`x[mask]` asks all ranks for their counts. Rows selected by a mask over leading dims stay with the
rank that holds them, in a `RaggedShard` of as many units as each rank has found; the first of the
masked dims may be cut for that, in order, by one axis. Everything else that cuts the masked dims is
gathered first. Without values, and where a boundary allows no communication, this is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from hp_dtensor.implicit import allowed
from hp_dtensor.layout import Layout
from hp_dtensor.placements import RaggedShard, is_sharding, sharded_dims
from hp_dtensor.rules.along import Along
from hp_dtensor.rules.parts import moved
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule
from hp_dtensor.rules.refusal import operator_error


def selection_by(call: Call, mask: Operand) -> Recipe:
    """The recipe of `x[mask]`, for a mask of the leading dims."""
    if tuple(mask.shape) != call.input.shape[: len(mask.shape)] or not mask.shape:
        raise call.error(
            f"the mask has shape {tuple(mask.shape)}",
            "give it the sizes of the tensor's leading dims",
        )
    return Recipe(None, None, composite=_selected)


def _selected(tensor: Any, index: Any) -> Any:
    mask = index[0] if isinstance(index, tuple | list) else index
    if not allowed().reductions or mask.to_local().is_meta:
        raise operator_error(
            "__getitem__",
            "how many elements a mask selects depends on values, which all ranks would have to "
            "exchange here",
            [tensor.layout, mask.layout],
            remedy="use torch.where() or masked_fill(), or redistribute tensor and mask to "
            "Replicate() first",
        )
    fitted = _Fitted(tensor.layout, mask.layout)
    values, grads = fitted.of_tensor()
    source = tensor.redistribute(placements=values, grad_placements=grads)
    chosen = mask.redistribute(placements=fitted.of_mask())
    local = source.to_local()[chosen.to_local()]
    counts = [len(local)]
    if fitted.axis is not None:
        along = Along(chosen.layout, (fitted.axis,), "__getitem__")
        counts = along.gather(torch.tensor(counts, device=local.device)).flatten().tolist()
    return type(tensor).of_layout(local, fitted.of_result(source.layout, counts))


class _Fitted:
    """Tensor and mask as the selection needs them.

    Attributes:
        axis: the mesh axis along which rows stay where they are, or None.
    """

    def __init__(self, tensor: Layout, mask: Layout) -> None:
        self.tensor, self.mask = tensor, mask
        self.masked = len(mask.shape)
        self.axis: int | None = None
        self.rows: Placement = Replicate()
        for axis, placements in enumerate(zip(tensor.placements, mask.placements)):
            found = next((p for p in placements if _cuts_rows_in_order(p)), None)
            trailing = self._trailing(tensor.placements[axis])
            if self.axis is None and found is not None and not trailing:
                self.axis, self.rows = axis, found

    def _trailing(self, placement: Placement) -> bool:
        dims = sharded_dims(placement)
        return len(dims) == 1 and dims[0] >= self.masked

    def of_tensor(self) -> tuple[list[Placement], list[Placement]]:
        """Placements of the value and of its gradient."""
        values: list[Placement] = []
        grads: list[Placement] = []
        for axis, placement in enumerate(self.tensor.placements):
            if axis == self.axis:
                placement = self.rows
            elif is_sharding(placement) and not self._trailing(placement):
                placement = Replicate()
            kept = placement == self.tensor.placements[axis]
            declared = self.tensor.grad_placements[axis]
            values.append(placement)
            grads.append(declared if kept else (self.rows if axis == self.axis else Replicate()))
        return values, grads

    def of_mask(self) -> list[Placement]:
        return [
            self.rows if axis == self.axis else Replicate()
            for axis in range(len(self.mask.placements))
        ]

    def of_result(self, source: Layout, counts: Sequence[int]) -> Layout:
        """Rows by what each rank has found; trailing dims as they were."""
        divisor = math.gcd(*counts)
        rows: Placement = Shard(0)
        if divisor:
            rows = RaggedShard((0,), [count // divisor for count in counts])

        def placed(axis: int, placement: Placement) -> Placement:
            if axis == self.axis:
                return rows
            dims = sharded_dims(placement)
            return moved(placement, dims[0] - self.masked + 1) if dims else placement

        return Layout(
            source.mesh,
            [placed(axis, p) for axis, p in enumerate(source.placements)],
            (sum(counts), *source.shape[self.masked :]),
            [placed(axis, p) for axis, p in enumerate(source.grad_placements)],
        )


def _cuts_rows_in_order(placement: Placement) -> bool:
    return sharded_dims(placement) == (0,) and type(placement) in (Shard, RaggedShard)


def _masked_select(input: Any, mask: Any) -> Any:
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return input.expand(shape)[mask.expand(shape)]


def with_lists(tensor: Any, index: Any) -> Any:
    """Lists of positions as whole tensors, which are the same on every rank."""
    items = index if isinstance(index, tuple) else (index,)
    whole = [Replicate()] * len(tensor.placements)

    def positions(item: Any) -> Any:
        if not isinstance(item, list):
            return item
        made = torch.tensor(item, device=tensor.to_local().device)
        return type(tensor).of_layout(made, Layout(tensor.layout.mesh, whole, made.shape))

    return tensor[tuple(positions(item) for item in items)]


def rules() -> Mapping[str, Rule]:
    def select(call: Call) -> Recipe | None:
        layouts = call.layouts
        if all(each.is_replicated and each.grad_placements == each.placements for each in layouts):
            return None
        return Recipe(None, None, composite=_masked_select)

    return {"masked_select": Rule("masked_select", select, ("input", "mask"))}
