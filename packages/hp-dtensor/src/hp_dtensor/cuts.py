"""How one dim of a tensor is divided: index runs, and the cuts that divide them.

A *run list* holds ascending, disjoint, non-empty `(start, stop)` intervals of global indices along
one dim (or along several flattened dims); it is what one coordinate holds, in local storage order.
A *cut* belongs to one mesh axis and takes a run list to the part that a coordinate keeps. Every
cut keeps ascending order, so a rank's local storage is always ordered by global index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

Run = tuple[int, int]
Runs = tuple[Run, ...]


def full_run(size: int) -> Runs:
    return ((0, size),) if size else ()


def length(runs: Runs) -> int:
    """Number of indices."""
    if len(runs) == 1:
        return runs[0][1] - runs[0][0]
    size = 0
    for start, stop in runs:
        size += stop - start
    return size


def merged(runs: Sequence[Run]) -> Runs:
    """The same indices with adjacent runs joined and empty ones left out."""
    if len(runs) == 1:
        return tuple(runs) if runs[0][0] != runs[0][1] else ()
    out: list[Run] = []
    for start, stop in runs:
        if start == stop:
            continue
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


def slice_runs(runs: Runs, low: int, high: int) -> list[Run]:
    """Elements `low` to `high` (positions in the list, not global indices)."""
    if len(runs) == 1:
        start, stop = runs[0]
        return [(min(start + low, stop), min(start + high, stop))]
    out: list[Run] = []
    position = 0
    for start, stop in runs:
        size = stop - start
        first, last = max(low - position, 0), min(high - position, size)
        if first < last:
            out.append((start + first, start + last))
        position += size
        if position >= high:
            break
    return out


def runs_to_indices(runs: Runs) -> Tensor:
    """The run list as a 1-D int64 tensor."""
    if len(runs) == 1:
        return torch.arange(*runs[0])
    if not runs:
        return torch.empty(0, dtype=torch.int64)
    size = length(runs)
    if size <= 32 * len(runs):  # short runs: a list is made faster than so many tensors
        return torch.tensor([i for start, stop in runs for i in range(start, stop)])
    return torch.cat([torch.arange(start, stop) for start, stop in runs])


FEW = 4096
"""Of up to so many indices a part is taken from all of them; of more it is worked out."""


def indices_of(per_dim: Sequence[Runs], shape: Sequence[int]) -> Tensor:
    """Row-major flat indices, ascending, of a product of runs in a tensor of this shape: 1-D
    int64."""
    if math.prod(shape) <= FEW:
        return taken(per_dim, all_indices(shape))
    indices = runs_to_indices(per_dim[0])
    for runs, size in zip(per_dim[1:], shape[1:]):
        indices = (indices.unsqueeze(-1) * size + runs_to_indices(runs)).view(-1)
    return indices


def all_indices(shape: Sequence[int]) -> Tensor:
    """Every element's row-major flat index: int64 of this shape."""
    return torch.arange(math.prod(shape)).view(*shape) if shape else torch.tensor(0)


def taken(per_dim: Sequence[Runs], tensor: Tensor) -> Tensor:
    """The elements in a product of runs, row-major: 1-D. May share the tensor's memory."""
    for dim, runs in enumerate(per_dim):
        if len(runs) != 1:
            tensor = tensor.index_select(dim, runs_to_indices(runs))
        elif length(runs) != tensor.shape[dim]:
            tensor = tensor.narrow(dim, runs[0][0], length(runs))
    return tensor.reshape(-1)


def flatten_runs(per_dim: Sequence[Runs], shape: Sequence[int]) -> Runs:
    """Runs over the row-major flattening of dims of sizes `shape`, held as a product."""
    flat: Runs = ((0, 1),)
    for runs, size in zip(per_dim, shape):
        if runs == ((0, size),):
            flat = tuple((start * size, stop * size) for start, stop in flat)
        else:
            flat = tuple(
                (row * size + start, row * size + stop)
                for first, last in flat
                for row in range(first, last)
                for start, stop in runs
            )
    return merged(flat)


def _kept(runs: Runs, spans: Sequence[Run]) -> Runs:
    """What lies at these positions of the list."""
    if len(spans) == 1:
        return merged(slice_runs(runs, *spans[0]))
    return merged([run for low, high in spans for run in slice_runs(runs, low, high)])


def total(spans: Sequence[Run]) -> int:
    return sum([high - low for low, high in spans])


def _chunk(size: int, count: int, index: int) -> Run:
    step = -(-size // count)
    low = min(index * step, size)
    return low, min(low + step, size)


@frozen
class Chunk:
    """Chunks of ceil size, as `torch.chunk`; the last ones may be short or empty."""

    axis: int
    count: int

    def spans(self, size: int, index: int) -> list[Run]:
        """Positions that coordinate `index` keeps of a run list of `size` indices."""
        return [_chunk(size, self.count, index)]

    def kept(self, size: int) -> set[int]:
        """How many of `size` indices coordinates keep: all numbers that there are."""
        step = -(-size // self.count)
        if step * self.count == size:
            return {step}
        whole, rest = divmod(size, step)
        return {step, rest, 0} if whole + 1 < self.count else {step, rest}

    def keep(self, runs: Runs, index: int) -> Runs:
        return _kept(runs, self.spans(length(runs), index))


@frozen
class Strided:
    """`pieces` chunks of ceil size, each cut by itself."""

    axis: int
    count: int
    pieces: int

    def spans(self, size: int, index: int) -> list[Run]:
        """As `Chunk.spans`."""
        found = []
        for piece in range(self.pieces):
            start, stop = _chunk(size, self.pieces, piece)
            low, high = _chunk(stop - start, self.count, index)
            found.append((start + low, start + high))
        return found

    def kept(self, size: int) -> set[int]:
        """As `Chunk.kept`."""
        return {total(self.spans(size, index)) for index in range(self.count)}

    def keep(self, runs: Runs, index: int) -> Runs:
        return _kept(runs, self.spans(length(runs), index))


@frozen
class Sectioned:
    """Each section (global bounds) cut by itself, whatever part of it is still held."""

    axis: int
    count: int
    bounds: tuple[Run, ...]

    def spans(self, size: int, index: int) -> list[Run]:
        """As `Chunk.spans`, where the whole dim is still held."""
        found = []
        for start, stop in self.bounds:
            low, high = _chunk(stop - start, self.count, index)
            found.append((start + low, start + high))
        return found

    def kept(self, size: int) -> set[int]:
        """As `Chunk.kept`."""
        return {total(self.spans(size, index)) for index in range(self.count)}

    def keep(self, runs: Runs, index: int) -> Runs:
        kept: list[Run] = []
        for low, high in self.bounds:
            inside = merged([(max(a, low), min(b, high)) for a, b in runs if a < high and b > low])
            kept += slice_runs(inside, *_chunk(length(inside), self.count, index))
        return merged(kept)


@frozen
class Ragged:
    """Shares in whole units; `dims` leading dims are flattened first."""

    axis: int
    count: int
    dims: int
    units: tuple[int, ...]

    def spans(self, size: int, index: int) -> list[Run]:
        """As `Chunk.spans`."""
        unit = size // sum(self.units)
        low = sum(self.units[:index]) * unit
        return [(low, low + self.units[index] * unit)]

    def kept(self, size: int) -> set[int]:
        """As `Chunk.kept`."""
        unit = size // sum(self.units)
        return {unit * share for share in self.units}

    def keep(self, runs: Runs, index: int) -> Runs:
        return _kept(runs, self.spans(length(runs), index))

    def divides(self, size: int) -> bool:
        return size % sum(self.units) == 0


Cut = Chunk | Strided | Sectioned | Ragged


def sections_to_bounds(sections: Sequence[int]) -> tuple[Run, ...]:
    ends = [sum(sections[: i + 1]) for i in range(len(sections))]
    return tuple((end - size, end) for end, size in zip(ends, sections))


def following_shards(ordered: Sequence[Cut], split_factor: int) -> int | None:
    """How many of the cuts already in order make `split_factor` pieces; None if no number does."""
    for count in range(len(ordered) + 1):
        if math.prod(cut.count for cut in ordered[:count]) == split_factor:
            return count
    return None
