"""Fused exchange of packed chunks over several mesh axes, one axis at a time.

Every rank holds its own chunk at its place in a buffer that is ordered row-major by coordinate.
Axis by axis, last to first, the ranks along an axis exchange what they hold so far, which is
contiguous in the buffer; after the first axis every rank holds all chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from attrs import frozen
from torch import Tensor

from hp_platform import Handle, MeshAxis, Origin, all_gather, broadcast


@frozen(eq=False)
class Hop:
    """The exchange along one axis: chunk of coordinate c is [starts[c], starts[c] + sizes[c])."""

    axis: MeshAxis
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


def hops(sizes: Sequence[int], axes: Sequence[MeshAxis]) -> tuple[Hop, ...]:
    """The hops of an exchange.

    Args:
        sizes: elements of every coordinate's chunk, row-major over `axes`.
        axes: the axes, of which this rank knows its own coordinates.
    """
    starts = list(accumulate(sizes, initial=0))
    found = []
    for position in reversed(range(len(axes))):
        axis = axes[position]
        inner = math.prod(other.size for other in axes[position + 1 :])
        line = 0
        for other in axes[:position]:
            line = line * other.size + other.rank
        first = line * axis.size * inner
        edges = [starts[first + c * inner] for c in range(axis.size + 1)]
        chunks = tuple(stop - start for start, stop in pairwise(edges))
        found.append(Hop(axis, tuple(edges[:-1]), chunks))
    return tuple(found)


def gather(buffer: Tensor, plan: Sequence[Hop], origin: Origin) -> Tensor:
    """Fills `buffer` with all chunks: one fused all-gather per axis."""
    for hop in plan:
        block = buffer[hop.starts[0] : hop.starts[-1] + hop.sizes[-1]]
        start = hop.starts[hop.axis.rank]
        own = buffer[start : start + hop.sizes[hop.axis.rank]]
        all_gather(own, hop.axis, output=block, sizes=hop.sizes, origin=origin).wait()
    return buffer


class Relay:
    """A packed broadcast in flight: every chunk's owner sends it to all, axis by axis.

    A hop needs the result of the one before, and backends keep no order between calls in
    flight, so a hop is issued only after the one before has been waited for: `advance` does
    that at a point of the caller's choice, the same on every rank.
    """

    def __init__(self, buffer: Tensor, plan: Sequence[Hop], origin: Origin) -> None:
        self._buffer = buffer
        self._plan = list(plan)
        self._origin = origin
        self._handles: list[Handle[Tensor]] = []
        self.advance()

    def advance(self) -> None:
        """Moves on to the next axis; on the last one, leaves the broadcast in flight."""
        if not self._plan:
            return
        self._settle()
        hop = self._plan.pop(0)
        self._handles = [
            broadcast(
                self._buffer[start : start + size], hop.axis, source=source, origin=self._origin
            )
            for source, (start, size) in enumerate(zip(hop.starts, hop.sizes))
            if size
        ]

    def wait(self) -> Tensor:
        """Completes all hops."""
        while self._plan:
            self.advance()
        self._settle()
        return self._buffer

    def _settle(self) -> None:
        for handle in self._handles:
            handle.wait()
        self._handles = []
