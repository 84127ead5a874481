"""Rules of operators that take parts of dims: indexing by slices and integers, splits, narrowing.

A part of a cut dim stays where it is (`hp_dtensor.rules.parts`), and where torch gives a view the
result is one: writing into `x[:2]` lands in `x` on the ranks that hold those rows. Where no
placement describes the part, the result is a pending sum and marked as a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.placements import is_partial, is_sharding, sharded_dims
from hp_dtensor.rules.parts import (
    Selection,
    as_slice,
    cutting_axes,
    moved,
    own_positions,
    placements_of_part,
)
from hp_dtensor.rules.recipe import Call, Operand, Recipe

Step = int | None | Selection
"""What an index does next: take one element, make a new dim of size one, or keep a selection."""

EVERYTHING = slice(None)


def parsed(call: Call, index: Any) -> list[Step]:
    """An index expression as one step per dim, and one per None.

    Raises:
        OperatorError: too many indices, one out of range, or of a kind without a rule.
    """
    shape = call.input.shape
    items = list(index) if isinstance(index, tuple) else [index]
    consumed = sum(1 for item in items if item is not None and item is not Ellipsis)
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    if consumed > len(shape):
        raise call.error(
            f"too many indices for a tensor of {len(shape)} dims", f"give at most {len(shape)}"
        )
    steps: list[Step] = []
    dim = 0
    for item in items:
        if item is Ellipsis:
            steps += [Selection(n, 0, n) for n in shape[dim : dim + len(shape) - consumed]]
            dim += len(shape) - consumed
        elif item is None:
            steps.append(None)
        else:
            steps.append(_step(call, item, dim, shape[dim]))
            dim += 1
    return steps


def _step(call: Call, item: Any, dim: int, size: int) -> Step:
    if isinstance(item, slice):
        if item.step is not None and item.step <= 0:
            raise call.error(f"step {item.step} of a slice must be positive", "use flip()")
        return Selection.of(item, size)
    if isinstance(item, int) and not isinstance(item, bool):
        if not -size <= item < size:
            raise call.error(
                f"index {item} is out of range for dim {dim} of size {size}",
                f"use {-size} to {size - 1}; indices are those of the global tensor",
            )
        return item % size
    raise call.error(
        f"an index of type {type(item).__name__} on sharded or partial tensors has no rule",
        "use slices, integers, None, or DTensors of integers",
    )


@frozen(eq=False)
class Kept:
    """What this rank has of one dim of a part.

    Attributes:
        item: positions in the local tensor; a slice where they are evenly spaced.
        result: positions in the part. None: all of the part's dim.
        pending: the part is put into zeros, and is a summand along the axes that cut the dim.
    """

    item: slice | Tensor
    result: Tensor | None = None
    pending: bool = False


@frozen(eq=False)
class Part:
    """A part of a tensor as this rank has it.

    Attributes:
        source: how the tensor must be laid out.
        layout: of the part.
        dims: one per dim of the tensor.
        form: indexes the local part, dims not yet dropped or made, into the local result.
        steps: the index expression.
    """

    source: Layout
    layout: Layout
    dims: tuple[Kept, ...]
    form: tuple[Any, ...]
    steps: tuple[Step, ...]

    @property
    def copies(self) -> bool:
        return any(kept.pending or isinstance(kept.item, Tensor) for kept in self.dims)

    def take(self, local: Tensor) -> Tensor:
        """The local part; a view of `local` where it can be one."""
        region = self.region(local)
        for dim, kept in enumerate(self.dims):
            if kept.pending:
                assert kept.result is not None
                shape = list(region.shape)
                shape[dim] = self.sizes[dim]
                zeros = region.new_zeros(shape)
                region = zeros.index_copy(dim, kept.result.to(region.device), region)
        return region[self.form]

    def region(self, local: Tensor) -> Tensor:
        for dim, kept in enumerate(self.dims):
            if isinstance(kept.item, Tensor):
                local = local.index_select(dim, kept.item.to(local.device))
        items = [k.item if isinstance(k.item, slice) else EVERYTHING for k in self.dims]
        return local[tuple(items)] if items else local

    @property
    def sizes(self) -> list[int]:
        """Global sizes of the part before dims are dropped."""
        steps = [step for step in self.steps if step is not None]
        return [1 if isinstance(step, int) else step.count for step in steps]


def part_of(call: Call, steps: Sequence[Step], layout: Layout | None = None) -> Part:
    """The part of a tensor (the input) that an index expression names."""
    source = call.input.layout if layout is None else layout
    if source.flat_dims > 1:
        raise call.error(
            "no part of a tensor whose leading dims are flattened has a rule",
            "redistribute the RaggedShard to Shard or Replicate() first",
        )
    placements: list[Placement] = list(source.placements)
    grads: list[Placement] = list(source.grad_placements)
    dims: list[Kept] = []
    form: list[Any] = []
    shape: list[int] = []
    for step in steps:
        if step is None:
            form.append(None)
            shape.append(1)
            continue
        dim = len(dims)
        kept, chosen = _kept(source, dim, step)
        dims.append(kept)
        for axis, placement in enumerate(source.placements):
            if dim in sharded_dims(placement):
                found = chosen.get(axis)
                lost: Placement = Partial() if kept.pending else Replicate()
                placements[axis] = lost if found is None else moved(found, len(shape))
                grads[axis] = Replicate() if found is None else placements[axis]
        if isinstance(step, int):
            form.append(0)
        else:
            form.append(EVERYTHING)
            shape.append(step.count)
    made = Layout(source.mesh, placements, shape, grads)
    part = Part(source, made, tuple(dims), tuple(form), tuple(steps))
    if call.input.dtype == torch.bool and any(kept.pending for kept in dims) and layout is None:
        return part_of(call, steps, _gathered(source, dims))
    return part


def _kept(source: Layout, dim: int, step: int | Selection) -> tuple[Kept, dict[int, Placement]]:
    size = source.shape[dim]
    axes = cutting_axes(source, dim)
    selection = Selection(size, step, step + 1) if isinstance(step, int) else step
    if not axes or selection.is_everything:
        same = {
            axis: placement
            for axis, placement in enumerate(source.placements)
            if dim in sharded_dims(placement) and not isinstance(step, int)
        }
        if selection.is_everything and not (axes and isinstance(step, int)):
            return Kept(EVERYTHING), same
    if not axes:
        return Kept(slice(selection.start, selection.stop, selection.step)), {}
    local, result = own_positions(source, dim, selection)
    chosen = {} if isinstance(step, int) else placements_of_part(source, dim, selection)
    return Kept(as_slice(local), result, not chosen), chosen


def _gathered(source: Layout, dims: Sequence[Kept]) -> Layout:
    """Truth values are not summed: the dims that would be pending are gathered first."""
    pending = {dim for dim, kept in enumerate(dims) if kept.pending}
    values = [
        Replicate() if pending & set(sharded_dims(placement)) else placement
        for placement in source.placements
    ]
    return source.with_placements(values)


def take_parts(call: Call, expressions: Sequence[Sequence[Step]], *, many: bool) -> Recipe:
    """Results that are parts of the input, one per index expression."""
    parts = [part_of(call, steps) for steps in expressions]
    rest = (None,) * (len(call.operands) - 1)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        taken = tuple(part.take(args[0]) for part in parts)
        return taken if many else taken[0]

    needed = next((p.source for p in parts if p.source != call.input.layout), None)
    if needed is not None:
        parts = [part_of(call, steps, needed) for steps in expressions]
    layouts = [part.layout for part in parts]
    return Recipe(
        None if needed is None else (needed, *rest),
        layouts if many else layouts[0],
        run,
        copies=needed is not None or any(part.copies for part in parts),
    )


def whole(call: Call) -> list[Step]:
    return [Selection(size, 0, size) for size in call.input.shape]


def along(call: Call, dim: int, step: Step) -> list[Step]:
    """The index expression that does `step` on one dim."""
    steps = whole(call)
    steps[dim] = step
    return steps


# -- writing ---------------------------------------------------------------------------------------


def write_part(call: Call, steps: Sequence[Step], value: Any) -> Recipe:
    """Writes a value that broadcasts to the part: each rank writes what it holds of it."""
    target = call.input.layout
    part = part_of(call, steps, target)
    _check_pending(call, target, value)
    if not isinstance(value, Operand):

        def fill(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
            _assign(args[0], part, args[2])

        return Recipe(None, target, fill)
    if len(value.shape) > len(part.layout.shape):
        raise call.error(
            f"the value has {len(value.shape)} dims, the part written {len(part.layout.shape)}",
            "give a value that broadcasts to the part",
        )
    needed, cut_by_hand = _value_layout(part, value.layout)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        given = args[2]
        for dim, positions in cut_by_hand:
            given = given.index_select(dim, positions.to(given.device))
        _assign(args[0], part, _aligned(given, part))

    return Recipe((None, needed), target, run)


def _check_pending(call: Call, target: Layout, value: Any) -> None:
    for axis in target.partial_axes():
        placed = value.layout.placements[axis] if isinstance(value, Operand) else None
        if placed != target.placements[axis] and value not in (0, 0.0):
            raise call.error(
                "the tensor written in place is a pending sum, and the value is not one, so every "
                "rank would add it",
                "redistribute the tensor to Replicate() or Shard first",
            )


def _value_layout(part: Part, value: Layout) -> tuple[Layout, list[tuple[int, Tensor]]]:
    """The layout a value needs: as the part is cut, or whole, cut by each rank for itself."""
    target = part.source
    offset = len(part.layout.shape) - len(value.shape)
    placements: list[Placement] = []
    for placement in target.placements:
        placements.append(placement if is_partial(placement) else Replicate())
    grads: list[Placement] = [
        Partial() if is_sharding(p) else g
        for p, g in zip(target.placements, target.grad_placements)
    ]
    by_hand: list[tuple[int, Tensor]] = []
    for dim, out in _out_dims(part):
        axes = [a for a, p in enumerate(target.placements) if dim in sharded_dims(p)]
        at = None if out is None or out < offset else out - offset
        if at is None or value.shape[at] == 1 or not axes:
            continue
        chosen = {axis: moved(part.layout.placements[axis], at) for axis in axes
                  if is_sharding(part.layout.placements[axis])}  # fmt: skip
        if chosen and all(value.placements[axis] == placed for axis, placed in chosen.items()):
            for axis, placed in chosen.items():
                placements[axis] = grads[axis] = placed
        else:
            result = part.dims[dim].result
            if result is None:
                size = target.shape[dim]
                result = own_positions(target, dim, Selection(size, 0, size))[1]
            by_hand.append((at, result))
    return value.with_placements(placements, grads), by_hand


def _out_dims(part: Part) -> list[tuple[int, int | None]]:
    """For every dim of the tensor, which dim of the part it is."""
    found: list[tuple[int, int | None]] = []
    out = 0
    for step in part.steps:
        if step is None:
            out += 1
        elif isinstance(step, int):
            found.append((len(found), None))
        else:
            found.append((len(found), out))
            out += 1
    return found


def _aligned(value: Tensor, part: Part) -> Tensor:
    """A value with one dim per dim of the tensor, so that it broadcasts to the region."""
    value = value[(None,) * (len(part.layout.shape) - value.ndim)]
    out = 0
    for step in part.steps:
        if step is None:
            value = value.squeeze(out)
        else:
            if isinstance(step, int):
                value = value.unsqueeze(out)
            out += 1
    return value


def _assign(local: Tensor, part: Part, value: Any) -> None:
    items = [kept.item for kept in part.dims]
    if sum(isinstance(item, Tensor) for item in items) <= 1:
        local[tuple(items)] = value
        return
    indices = []
    for dim, item in enumerate(items):
        positions = torch.arange(local.shape[dim])[item] if isinstance(item, slice) else item
        indices.append(positions.view([-1 if i == dim else 1 for i in range(len(items))]))
    local[tuple(indices)] = value
