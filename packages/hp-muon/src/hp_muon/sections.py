"""Sections: the part of a storage dim that belongs to one of several kinds of matrices.

A fused projection holds matrices of unequal shapes, say query, key and value rows, once or once a
group of heads. Along its dim one kind occupies the same `width` positions, `start` further on, of
every `period`. Counting only these positions gives each kind a storage of its own, without gaps,
on which everything else works: a run of positions held by a rank is again one run there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

Runs = tuple[tuple[int, int], ...]


@frozen
class Section:
    """Positions `start` to `start + width` of every `period` along storage dim `dim`."""

    dim: int
    period: int
    start: int
    width: int

    def flattened(self, shape: Sequence[int], flat_dims: int) -> Section:
        """The same elements where the first `flat_dims` dims of `shape` are seen as one."""
        if flat_dims <= 1:
            return self
        if self.dim >= flat_dims:
            return Section(self.dim - flat_dims + 1, self.period, self.start, self.width)
        inner = math.prod(shape[self.dim + 1 : flat_dims])
        return Section(0, self.period * inner, self.start * inner, self.width * inner)

    def before(self, position: int) -> int:
        """How many positions of the section lie below `position`."""
        whole, rest = divmod(position, self.period)
        return whole * self.width + min(max(rest - self.start, 0), self.width)

    def compact(self, runs: Runs) -> Runs:
        """Runs of positions, counted in the section's own storage; without empty ones."""
        found = ((self.before(start), self.before(stop)) for start, stop in runs)
        return tuple((start, stop) for start, stop in found if start < stop)

    def select(self, runs: Runs) -> Selection:
        """Where the section lies in a local tensor that holds `runs` of its dim, in this order."""
        if runs and all(edge % self.period == 0 for run in runs for edge in run):
            return Selection(self.dim, periodic=(self.period, self.start, self.width))
        found: list[tuple[int, int]] = []
        offset = 0
        for start, stop in runs:
            for whole in range(start // self.period, -(-stop // self.period)):
                low = max(start, whole * self.period + self.start) - start + offset
                high = min(stop, whole * self.period + self.start + self.width) - start + offset
                if low >= high:
                    continue
                if found and found[-1][1] == low:
                    found[-1] = (found[-1][0], high)
                else:
                    found.append((low, high))
            offset += stop - start
        if len(found) <= 1:
            low, high = found[0] if found else (0, 0)
            return Selection(self.dim, bounds=(low, high))
        return Selection(self.dim, index=torch.cat([torch.arange(*run) for run in found]))


@frozen(eq=False)
class Selection:
    """Part of a local tensor along one dim; all of it where no field but `dim` is set.

    Attributes:
        bounds: first and last position but one.
        periodic: period, start and width, for whole periods.
        index: single positions, where they form no regular pattern.
    """

    dim: int = 0
    bounds: tuple[int, int] | None = None
    periodic: tuple[int, int, int] | None = None
    index: Tensor | None = None

    def of(self, local: Tensor) -> Tensor:
        """The part; it shares storage unless it needs an index, see `write_back`.

        A periodic part has one dim more, the periods.
        """
        if self.bounds is not None:
            return local.narrow(self.dim, self.bounds[0], self.bounds[1] - self.bounds[0])
        if self.periodic is not None:
            period, start, width = self.periodic
            if period == local.shape[self.dim]:
                return local.narrow(self.dim, start, width)
            return local.unflatten(self.dim, (-1, period)).narrow(self.dim + 1, start, width)
        if self.index is not None:
            return local.index_select(self.dim, self.index.to(local.device))
        return local

    def write_back(self, local: Tensor, part: Tensor) -> None:
        """Brings what was written to `part` to `local`, where `part` is a copy."""
        if self.index is not None:
            local.index_copy_(self.dim, self.index.to(local.device), part)
