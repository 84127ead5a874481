"""The size of a dim that is cut: the global number, and over which mesh axes it is cut.

In validate mode shapes are global, and in production the same expression gives the size of this
rank's part. Where a size decides how much is made of something (`k.expand(-1, q.shape[1], -1)`),
each rank makes its part in production, so the rule must know that the number came from a cut dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import Shard

from hp_dtensor.layout import Layout
from hp_dtensor.placements import SectionedShard

__all__ = ["CutSize", "sizes_of"]


class CutSize(int):
    """An int that remembers the mesh axes (by index) that cut the dim evenly into `ways` parts.

    A multiple, and a quotient that is still a whole number for every rank, are cut likewise, and so
    is the sum of sizes cut likewise; a product of sizes cut over different axes is cut over all of
    them. Any other arithmetic gives a plain int.
    """

    cut: tuple[int, ...]
    ways: int

    def __new__(cls, value: int, cut: tuple[int, ...], ways: int) -> CutSize:
        made = super().__new__(cls, value)
        made.cut, made.ways = cut, ways
        return made

    def __mul__(self, other: Any) -> Any:
        if type(other) is int:
            return CutSize(int(self) * other, self.cut, self.ways)
        if isinstance(other, CutSize):
            product = int(self) * int(other)
            if set(self.cut) & set(other.cut):
                return product
            return CutSize(product, self.cut + other.cut, self.ways * other.ways)
        if isinstance(other, torch.Tensor):
            return NotImplemented  # the tensor is told which number it is
        return int(self) * other

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        if isinstance(other, CutSize) and self.cut == other.cut:
            return CutSize(int(self) + int(other), self.cut, self.ways)
        return int(self) + other

    def __radd__(self, other: Any) -> Any:
        # `sum` begins with zero.
        return self if type(other) is int and other == 0 else other + int(self)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, CutSize) and self.cut == other.cut and self > other:
            return CutSize(int(self) - int(other), self.cut, self.ways)
        return int(self) - other

    def __floordiv__(self, other: Any) -> Any:
        found = int(self) // other
        whole = type(other) is int and int(self) % other == 0 and found % self.ways == 0
        return CutSize(found, self.cut, self.ways) if whole else found

    def __reduce__(self) -> tuple[type[CutSize], tuple[int, tuple[int, ...], int]]:
        return CutSize, (int(self), self.cut, self.ways)


def sizes_of(layout: Layout) -> torch.Size:
    """The global shape, with what is cut into equal parts as `CutSize`s.

    Equal parts are those of `Shard`, over one axis or several, and of one `SectionedShard` whose
    sections are all cut evenly.
    """
    cuts: dict[int, list[int]] = {}
    for axis, placement in enumerate(layout.placements):
        if type(placement) is Shard or type(placement) is SectionedShard:
            cuts.setdefault(placement.dim, []).append(axis)
    if not cuts:
        return torch.Size(layout.shape)
    sizes: list[int] = list(layout.shape)
    for dim, axes in cuts.items():
        ways = math.prod(layout.abstract_mesh.sizes[axis] for axis in axes)
        if ways > 1 and _is_even(layout, dim, axes, ways):
            sizes[dim] = CutSize(sizes[dim], tuple(axes), ways)
    return torch.Size(sizes)


def _is_even(layout: Layout, dim: int, axes: list[int], ways: int) -> bool:
    placement = layout.placements[axes[0]]
    if isinstance(placement, SectionedShard):
        return len(axes) == 1 and not any(section % ways for section in placement.sections)
    alone = all(type(layout.placements[axis]) is Shard for axis in axes)
    return alone and layout.shape[dim] % ways == 0
