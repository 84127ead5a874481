"""Blocks: which part of one rank's local tensor belongs to which part of another's.

A block is a product of index lists, one per dim of a local tensor. Both sides list the common
elements in ascending global order, so a flattened block means the same to sender and receiver.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from hp_dtensor.cuts import Run, Runs, length, merged, runs_to_indices

Index = slice | Tensor


@frozen(eq=False)
class Block:
    """Positions along every dim of a local tensor.

    Attributes:
        index: per dim, a slice or a 1-D int64 tensor of positions.
        shape: number of positions per dim.
        whole: the block is the whole local tensor.
        cut: the dims of which it has a part only.
    """

    index: tuple[Index, ...]
    shape: tuple[int, ...]
    numel: int
    whole: bool
    cut: tuple[int, ...]

    def take(self, tensor: Tensor) -> Tensor:
        """The block of `tensor`, of shape `self.shape`; a view where it is made of slices."""
        for dim in self.cut:
            index = self.index[dim]
            if isinstance(index, slice):
                tensor = tensor.narrow(dim, index.start, index.stop - index.start)
            else:
                tensor = tensor.index_select(dim, index.to(tensor.device))
        return tensor

    def put(self, target: Tensor, values: Tensor) -> None:
        """Writes `values`, of any shape with the block's number of elements, into `target`."""
        if not self.numel:
            return
        values = values.reshape(self.shape)
        lists = []
        for dim in self.cut:
            index = self.index[dim]
            if isinstance(index, slice):
                target = target.narrow(dim, index.start, index.stop - index.start)
            else:
                lists.append(dim)
        if not lists:
            target.copy_(values)
        elif len(lists) == 1:
            target.index_copy_(lists[0], self._positions(lists[0], target), values)
        else:
            target[self._mesh(target)] = values

    def _positions(self, dim: int, target: Tensor) -> Tensor:
        index = self.index[dim]
        if isinstance(index, Tensor):
            return index.to(target.device)
        return torch.arange(self.shape[dim], device=target.device)

    def _mesh(self, target: Tensor) -> tuple[Tensor, ...]:
        """Every dim's positions, shaped to broadcast into the block. Slices are narrowed away."""
        ndim = len(self.shape)
        return tuple(
            self._positions(dim, target).view([-1 if i == dim else 1 for i in range(ndim)])
            for dim in range(ndim)
        )


Positions = tuple[Runs, ...]
"""Per dim of a local tensor."""


def common_positions(first: Sequence[Runs], second: Sequence[Runs]) -> tuple[Positions, Positions]:
    """What two ranks have in common, as positions in each one's local tensor."""
    of_first, of_second = [], []
    for one, other in zip(first, second):
        if one == other:
            positions: tuple[Runs, Runs] = (_all(one), _all(other))
        else:
            positions = _common_positions(one, other)
        of_first.append(positions[0])
        of_second.append(positions[1])
    return tuple(of_first), tuple(of_second)


def _all(runs: Runs) -> Runs:
    size = length(runs)
    return ((0, size),) if size else ()


def _common_positions(first: Runs, second: Runs) -> tuple[Runs, Runs]:
    """Positions, in each run list, of the indices that are in both."""
    of_first: list[Run] = []
    of_second: list[Run] = []
    i = j = before_first = before_second = 0
    while i < len(first) and j < len(second):
        (a, b), (c, d) = first[i], second[j]
        low, high = max(a, c), min(b, d)
        if low < high:
            of_first.append((before_first + low - a, before_first + high - a))
            of_second.append((before_second + low - c, before_second + high - c))
        if b <= d:
            before_first += b - a
            i += 1
        if d <= b:
            before_second += d - c
            j += 1
    return merged(of_first), merged(of_second)


def block_at(positions: Positions, view: Sequence[int]) -> Block:
    """The block at these positions of a local tensor of shape `view`."""
    index: list[Index] = []
    shape: list[int] = []
    for runs in positions:
        if len(runs) > 1:
            index.append(runs_to_indices(runs))
        else:
            index.append(slice(*runs[0]) if runs else slice(0, 0))
        shape.append(length(runs))
    cut = tuple([dim for dim, size in enumerate(view) if shape[dim] != size])
    return Block(tuple(index), tuple(shape), math.prod(shape), not cut, cut)
