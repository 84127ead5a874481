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

from hp_dtensor.cuts import Run, Runs, full_run, length, merged, runs_to_indices

Index = slice | Tensor


@frozen(eq=False, slots=False)
class Block:
    """Positions along every dim of a local tensor.

    Attributes:
        index: per dim, a slice or a 1-D int64 tensor of positions.
        shape: number of positions per dim.
        chosen: the dims of which it has a part only, or that it has in another order.
    """

    index: tuple[Index, ...]
    shape: tuple[int, ...]
    chosen: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def take(self, tensor: Tensor) -> Tensor:
        """The block of `tensor`, of shape `self.shape`; a view where it is made of slices."""
        for dim in self.chosen:
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
        for dim in self.chosen:
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


def common_positions(first: Runs, second: Runs) -> tuple[Runs, Runs]:
    """Of the indices along a dim that are in both run lists, the positions in each."""
    if first == second:
        every = full_run(length(first))
        return every, every
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


def block_at(positions: Sequence[Runs], view: Sequence[int]) -> Block:
    """The block at these positions, in this order, of a local tensor of shape `view`."""
    index: list[Index] = []
    shape: list[int] = []
    chosen: list[int] = []
    for dim, runs in enumerate(positions):
        size = length(runs)
        shape.append(size)
        if len(runs) > 1:
            index.append(runs_to_indices(runs))
            chosen.append(dim)
        else:
            index.append(slice(*runs[0]) if runs else slice(0, 0))
            if size != view[dim]:
                chosen.append(dim)
    return Block(tuple(index), tuple(shape), tuple(chosen))
