"""Convolutions along a dim that one axis cuts in order: each rank gets what its windows reach.

A window of an output element reaches a few elements beside a rank's own. Every rank sends the
elements at both ends of its part, as many as any window needs, and takes those of its neighbours:
of the next ones too, where a rank holds fewer. The output is cut so that each element stays with
the input element it belongs to: the last of its window (a causal convolution and its slice
`[..., :length]` keep the input's cut), or the middle where padding is the same on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.placements import Placement, RaggedShard, Shard
from hp_dtensor.rules.along import to_everyone
from hp_dtensor.rules.own_part import own_coordinate
from hp_dtensor.rules.parts import cutting_axes, placed_in_order, shares_in_order
from hp_platform.collectives import Origin


@frozen
class Window:
    """What a convolution reads along one dim: `reach` is the distance from first to last."""

    size: int
    reach: int
    stride: int
    before: int
    after: int

    @property
    def count(self) -> int:
        return max((self.size + self.before + self.after - self.reach - 1) // self.stride + 1, 0)

    def first(self, output: int) -> int:
        """The first element of an output's window; in front of 0 and behind the end are zeros."""
        return output * self.stride - self.before

    def outputs_below(self, bound: int) -> int:
        """Outputs that belong to input elements below `bound`."""
        middle = 2 * self.before == self.reach and self.before == self.after
        anchor = 0 if middle else self.reach - self.before
        return min(max(-(-(bound - anchor) // self.stride), 0), self.count)


@frozen
class Halo:
    """One cut dim of an input and the windows over it.

    Attributes:
        layout: of the input.
        dim, axis: which dim is cut by which mesh axis, by that one alone.
        held: elements of every rank of the axis, in order.
        outputs: output elements of every rank.
        left, right: how many elements every rank sends of both ends of its part.
    """

    layout: Layout
    dim: int
    axis: int
    window: Window
    held: tuple[int, ...]
    outputs: tuple[int, ...]
    left: int
    right: int

    @classmethod
    def of(cls, layout: Layout, dim: int, window: Window) -> Halo | None:
        """None where the dim has to be made whole instead."""
        axes = cutting_axes(layout, dim)
        placement = layout.placements[axes[0]]
        in_order = type(placement) in (Shard, RaggedShard) and layout.flat_dims <= 1
        padded = max(window.before, window.after) > window.reach
        if len(axes) > 1 or not in_order or padded or not window.count:
            return None
        ways = layout.abstract_mesh.sizes[axes[0]]
        held = shares_in_order(placement, window.size, ways)  # type: ignore[arg-type]
        ends = [window.outputs_below(end) for end in accumulate(held)]
        ends[-1] = window.count
        outputs = tuple(b - a for a, b in zip([0, *ends], ends))
        halo = cls(layout, dim, axes[0], window, held, outputs, 0, 0)
        needed = [halo.needed(rank) for rank in range(ways)]
        left, right = (max(each[side] for each in needed) for side in (0, 1))
        if (left + right) * ways >= window.size:
            return None  # the whole dim is not more
        return cls(layout, dim, axes[0], window, held, outputs, left, right)

    @property
    def placement(self) -> Placement:
        """Of the output."""
        return placed_in_order(self.dim, self.outputs)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Global positions from and up to which a rank's windows read; empty without outputs."""
        first = sum(self.outputs[:rank])
        last = first + self.outputs[rank] - 1
        low = self.window.first(first)
        return low, self.window.first(last) + self.window.reach + 1 if last >= first else low

    def needed(self, rank: int) -> tuple[int, int]:
        """Elements that a rank needs of those before its own, and of those after."""
        if not self.outputs[rank]:
            return 0, 0
        start = sum(self.held[:rank])
        low, high = self.bounds(rank)
        before = start - max(low, 0)
        return max(before, 0), max(min(high, self.window.size) - start - self.held[rank], 0)

    def extended(self, local: Tensor, origin: Origin) -> Tensor:
        """The local part with what its windows reach on both sides, zeros beyond the ends."""
        rank = own_coordinate(self.layout)[self.axis]
        start = sum(self.held[:rank])
        low, high = self.bounds(rank)
        before, after = self.needed(rank)
        size, own = self.window.size, local.shape[self.dim]
        first = max(low - start, 0)
        kept = max(min(high - start, own) - first, 0) if self.outputs[rank] else 0
        pieces = [
            *self._beside(local, rank, before, self.left, -1, origin),
            local.narrow(self.dim, min(first, own), kept),
            *self._beside(local, rank, after, self.right, 1, origin),
        ]
        amounts = [0] * (2 * (local.ndim - 1 - self.dim))
        amounts += [max(-low, 0), max(high - size, 0)] if self.outputs[rank] else [0, 0]
        return F.pad(torch.cat(pieces, self.dim), amounts)

    def _beside(
        self, local: Tensor, rank: int, count: int, sent: int, side: int, origin: Origin
    ) -> Sequence[Tensor]:
        """`count` elements of the ranks on one side, the farthest outermost."""
        if not sent:
            return []
        own = local.shape[self.dim]
        few = min(sent, own)
        edge = local.narrow(self.dim, own - few if side < 0 else 0, few)
        amounts = [0] * (2 * (local.ndim - 1 - self.dim))
        amounts += [sent - few, 0] if side < 0 else [0, sent - few]
        moved = to_everyone(self.layout, self.dim, self.axis, sent)
        every = moved.apply(F.pad(edge, amounts).contiguous(), origin=origin)
        pieces = [every.narrow(self.dim, 0, 0)]  # a rank that needs nothing joins the backward
        other = rank + side
        while count:
            taken = min(count, sent, self.held[other])
            at = (other + 1) * sent - taken if side < 0 else other * sent
            pieces.append(every.narrow(self.dim, at, taken))
            count -= taken
            other += side
        return pieces[::-1] if side < 0 else pieces
