"""Which part of a slice each rank holds, and the placements that say so.

A slice of a cut dim needs no communication: every rank keeps what it has of it. The result has the
same kind of placement where that describes it, the part of a `SectionedShard`, or else a
`RaggedShard` with every rank's share. Where no placement does, each rank puts its part into zeros
and the result is a pending sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor

from hp_dtensor.cuts import Runs
from hp_dtensor.layout import Layout
from hp_dtensor.placements import (
    Placement,
    RaggedShard,
    Replicate,
    SectionedShard,
    Shard,
    StridedShard,
    sharded_dims,
)
from hp_dtensor.rules.cut import chunk_sizes
from hp_dtensor.rules.own_part import own_coordinate


@frozen
class Selection:
    """Elements `start`, `start + step`, ... below `stop` of a dim of `size`; `step` is positive."""

    size: int
    start: int
    stop: int
    step: int = 1

    @classmethod
    def of(cls, item: slice, size: int) -> Selection:
        return cls(size, *item.indices(size))

    @property
    def count(self) -> int:
        return len(range(self.start, self.stop, self.step))

    @property
    def is_everything(self) -> bool:
        return self.count == self.size and self.step == 1

    def positions(self, runs: Runs) -> tuple[Tensor, Tensor]:
        """What a rank that holds `runs` has of it: positions in its local dim and in the result."""
        local, result = [], []
        before = 0
        for low, high in runs:
            first = max(low, self.start)
            first += -(first - self.start) % self.step
            held = torch.arange(first, max(first, min(high, self.stop)), self.step)
            local.append(held - low + before)
            result.append((held - self.start) // self.step)
            before += high - low
        if not local:
            nothing = torch.empty(0, dtype=torch.int64)
            return nothing, nothing
        return torch.cat(local), torch.cat(result)


def cutting_axes(layout: Layout, dim: int) -> tuple[int, ...]:
    """Mesh axes of more than one rank that cut `dim`."""
    return tuple(axis for axis, dims in layout.sharding_axes().items() if dim in dims)


def placements_of_part(layout: Layout, dim: int, selection: Selection) -> dict[int, Placement]:
    """Placements (of dim 0) for the axes that cut `dim`, once it is reduced to the selection.

    Empty where no placements describe what the ranks hold.
    """
    line = _line(layout, dim)
    axes = cutting_axes(line, 0)
    wanted = {
        coord: selection.positions(line.dim_runs(0, coord))[1]
        for coord in line.abstract_mesh.coordinates()
    }
    counts = {coord: len(held) for coord, held in wanted.items()}
    for chosen in _candidates(line, axes, selection, counts):
        placements = [chosen.get(axis, Replicate()) for axis in range(len(line.placements))]
        try:
            made = Layout(line.abstract_mesh, placements, (selection.count,))
        except ValueError:
            continue
        if all(torch.equal(made.dim_indices(0, coord), held) for coord, held in wanted.items()):
            return chosen
    return {}


def _line(layout: Layout, dim: int) -> Layout:
    """One dim by itself."""
    placements: list[Placement] = []
    for placement in layout.placements:
        cuts = sharded_dims(placement) == (dim,)
        placements.append(moved(placement, 0) if cuts else Replicate())
    return Layout(layout.abstract_mesh, placements, (layout.shape[dim],))


def moved(placement: Placement, dim: int) -> Placement:
    """The same cut of another dim."""
    if isinstance(placement, StridedShard):
        return StridedShard(dim, placement.split_factor)
    if isinstance(placement, SectionedShard):
        return SectionedShard(dim, placement.sections)
    if isinstance(placement, RaggedShard):
        return RaggedShard((dim,), placement.local_units)
    return Shard(dim)


def _candidates(
    line: Layout, axes: Sequence[int], selection: Selection, counts: dict[tuple[int, ...], int]
) -> Iterator[dict[int, Placement]]:
    """Placements to try, the simplest first."""
    yield {axis: Shard(0) for axis in axes}
    yield {axis: _restricted(line.placements[axis], selection) for axis in axes}
    ragged = {axis: _shares(axis, axes, counts) for axis in axes}
    if all(sum(units) for units in ragged.values()):
        for axis in axes:  # an even axis may stay what it is beside a ragged one
            if len(axes) > 1:
                rest = {other: Shard(0) for other in axes if other != axis}
                yield {**rest, axis: RaggedShard((0,), ragged[axis])}
        yield {axis: RaggedShard((0,), units) for axis, units in ragged.items()}


def _restricted(placement: Placement, selection: Selection) -> Placement:
    if not isinstance(placement, SectionedShard):
        return placement
    kept, end = [], 0
    for section in placement.sections:
        inside = Selection(selection.size, selection.start, selection.stop, selection.step)
        positions = inside.positions(((end, end + section),) if section else ())[0]
        kept.append(len(positions))
        end += section
    return SectionedShard(0, [count for count in kept if count] or [0])


def _shares(axis: int, axes: Sequence[int], counts: dict[tuple[int, ...], int]) -> tuple[int, ...]:
    """How much each coordinate of an axis holds, the axes inside it taken together."""
    size = 1 + max(coord[axis] for coord in counts)
    inner = axes.index(axis)
    totals = [0] * size
    fixed = set(axes[:inner])
    seen = set()
    for coord, count in counts.items():
        key = tuple(coord[other] for other in axes)
        # The first coordinate of the outer axes that holds anything stands for all of them.
        if key in seen or any(coord[other] != _first(other, counts) for other in fixed):
            continue
        seen.add(key)
        totals[coord[axis]] += count
    divisor = math.gcd(*totals) or 1
    return tuple(total // divisor for total in totals)


def _first(axis: int, counts: dict[tuple[int, ...], int]) -> int:
    return min((coord[axis] for coord, count in counts.items() if count), default=0)


def shares_in_order(placement: Shard | RaggedShard, size: int, ways: int) -> tuple[int, ...]:
    """How many elements of a dim of `size` each rank of an axis holds, in order."""
    if isinstance(placement, RaggedShard):
        total = sum(placement.local_units)
        return tuple(size * units // total for units in placement.local_units)
    return chunk_sizes(size, ways)


def placed_in_order(dim: int, counts: Sequence[int]) -> Placement:
    """The placement by which each rank holds `counts` elements of a dim, in order."""
    divisor = math.gcd(*counts)
    if not divisor or tuple(counts) == chunk_sizes(sum(counts), len(counts)):
        return Shard(dim)
    return RaggedShard((dim,), [count // divisor for count in counts])


def own_positions(layout: Layout, dim: int, selection: Selection) -> tuple[Tensor, Tensor]:
    """`Selection.positions` for this rank."""
    return selection.positions(layout.dim_runs(dim, own_coordinate(layout)))


def as_slice(positions: Tensor) -> slice | Tensor:
    """Evenly spaced positions as a slice, with which indexing gives a view."""
    if len(positions) == 0:
        return slice(0, 0)
    first, last = int(positions[0]), int(positions[-1])
    if len(positions) == 1:
        return slice(first, first + 1)
    step = int(positions[1]) - first
    if first + step * (len(positions) - 1) == last and bool((positions.diff() == step).all()):
        return slice(first, last + 1, step)
    return positions
