"""A reduce-scatter of a flat tensor that is never made: peers read its pieces where they lie.

What a rank posts is the address of a table with the addresses of its pieces, 0 for one that it
does not have and that counts as zeros.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hp_platform.axis import MeshAxis
from hp_platform.division import divide_
from hp_platform.errors import HPError
from hp_platform.handle import Handle, issue, refuse
from hp_platform.peer_memory import BLOCK, Lent, PeerMemory, peer_memory
from hp_platform.records import Origin

Pieces = Sequence[Tensor | None]
"""Flat contiguous tensors; None for one of zeros."""
PiecewiseReduceScatter = Callable[[Pieces, Tensor, Tensor, float, Origin], Handle[Tensor]]
"""Of this rank's pieces, an output, scratch memory, what to divide the sum by, and an origin."""

SCRATCH_BYTES = BLOCK
"""What scratch memory is of use."""


@dataclass(frozen=True)
class Stretch:
    """A part of a piece that lies in a rank's share.

    Attributes:
        piece: which one.
        start: its first element, counted in the piece.
        place: its first element, counted in the share.
        numel: how many.
    """

    piece: int
    start: int
    place: int
    numel: int


@dataclass(frozen=True)
class PieceLayout:
    """Where pieces lie in a flat tensor; what no piece covers is zero.

    Attributes:
        offsets: element at which each begins.
        numels: elements of each.
        total: elements of the flat tensor.

    Raises:
        HPError: pieces overlap, are not in order, or do not fit.
    """

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    total: int

    def __post_init__(self) -> None:
        places = sorted(zip(self.offsets, self.numels, strict=True))
        ends = [0, *(offset + numel for offset, numel in places)]
        starts = [*(offset for offset, _ in places), self.total]
        if any(start < end for end, start in zip(ends, starts)) or min(self.numels, default=0) < 0:
            raise HPError(
                f"pieces of {self.numels} elements at {self.offsets} overlap, or do not fit into "
                f"{self.total} elements"
            )

    def within(self, begin: int, end: int) -> list[Stretch]:
        """What lies between two elements, in the order in which it lies there."""
        found = []
        for index, (offset, numel) in enumerate(zip(self.offsets, self.numels)):
            first, last = max(offset, begin), min(offset + numel, end)
            if first < last:
                found.append(Stretch(index, first - offset, first - begin, last - first))
        return sorted(found, key=lambda stretch: stretch.place)

    def gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Where no piece lies between two elements: start and stop, counted from `begin`."""
        covered = [(s.place, s.place + s.numel) for s in self.within(begin, end)]
        bounds = [(0, 0), *covered, (end - begin, end - begin)]
        return [(stop, start) for (_, stop), (start, _) in pairwise(bounds) if stop < start]


def piecewise_reduce_scatter(
    layout: PieceLayout, dtype: torch.dtype, axis: MeshAxis
) -> PiecewiseReduceScatter | None:
    """A reduce-scatter (sum, equal shares) of what `layout` describes, made many times.

    All ranks of the axis make every call, each with the pieces that it has. The pieces are lent:
    they must not be written before `Handle.wait_for_readers()` has returned; see `all_gather`.

    Args:
        layout: the same on all ranks; its total divides by the size of the axis.

    Returns:
        None where the ranks cannot read one another's memory: see `meeting.share_memory`.
    """
    memory = peer_memory(axis)
    if memory is None or not layout.total:
        return None
    name, length = "reduce_scatter", layout.total // axis.size
    prepared = _Prepared(memory, layout, dtype)

    def call(
        pieces: Pieces, output: Tensor, scratch: Tensor, divisor: float, origin: Origin
    ) -> Handle[Tensor]:
        found = [None if piece is None else piece.numel() for piece in pieces]
        if any(n is not None and n != m for n, m in zip(found, layout.numels, strict=True)):
            refuse(name, axis, origin, f"expected pieces of {layout.numels} elements, got {found}")
        if output.numel() != length or not scratch.numel():
            problem = f"expected an output of {length} elements and scratch memory, got "
            refuse(name, axis, origin, f"{problem}{output.numel()} and {scratch.numel()}")
        for each in (*pieces, output, scratch):
            if each is not None and not (each.dtype is dtype and each.is_contiguous()):
                problem = f"expected contiguous tensors of {dtype}, got {each.dtype}, strides "
                refuse(name, axis, origin, f"{problem}{each.stride()}")
        # Pieces are nowhere given to a transport, which their alignment would matter to.
        return issue(
            name, axis, origin, lambda: (prepared.start(pieces, output, scratch, divisor, origin),),
            output, prepared.nbytes, (output,), dtype,
        )  # fmt: skip

    return call


class _Prepared:
    """What stays the same from call to call."""

    def __init__(self, memory: PeerMemory, layout: PieceLayout, dtype: torch.dtype) -> None:
        length = layout.total // memory.size
        begin = memory.rank * length
        self.nbytes = layout.total * dtype.itemsize
        self._memory = memory
        self._stretches = layout.within(begin, begin + length)
        self._gaps = layout.gaps(begin, begin + length)
        self._peers = [peer for peer in range(memory.size) if peer != memory.rank]
        self._table = ctypes.c_uint64 * len(layout.numels)

    def start(
        self, pieces: Pieces, target: Tensor, scratch: Tensor, divisor: float, origin: Origin
    ) -> Lent:
        tag, inference = origin.tag << 1 | 1, torch.is_inference_mode_enabled()
        table = self._table(*[0 if piece is None else piece.data_ptr() for piece in pieces])
        address = ctypes.addressof(table)
        number = self._memory.post(tag, address, self.nbytes, (table, pieces))

        def read() -> None:
            # Tensors made in inference mode are written in it only.
            with torch.inference_mode() if inference else nullcontext():
                self._read(number, tag, pieces, target, scratch, divisor)

        self._memory.expect(number, tag, read)
        return Lent(self._memory, number)

    def _read(
        self,
        number: int,
        tag: int,
        own: Pieces,
        target: Tensor,
        scratch: Tensor,
        divisor: float,
    ) -> None:
        tables = [(peer, self._table_of(number, peer, tag)) for peer in self._peers]
        for first, last in self._gaps:
            target[first:last].zero_()
        for stretch in self._stretches:
            index, skipped = stretch.piece, stretch.start * target.element_size()
            piece, place = own[index], target[stretch.place :][: stretch.numel]
            if piece is not None:
                piece = piece[stretch.start :][: stretch.numel]
            shares = [(peer, table[index] + skipped) for peer, table in tables if table[index]]
            self._sum(piece, shares, place, scratch, divisor)
        for peer in self._peers:
            self._memory.has_read(number, peer)

    def _table_of(self, number: int, peer: int, tag: int) -> ctypes.Array[ctypes.c_uint64]:
        table = self._table()
        address = self._memory.address(number, peer, tag, self.nbytes)
        self._memory.read(peer, address, ctypes.addressof(table), ctypes.sizeof(table))
        return table

    def _sum(
        self,
        own: Tensor | None,
        shares: list[tuple[int, int]],
        place: Tensor,
        scratch: Tensor,
        divisor: float,
    ) -> None:
        """`place` becomes the sum of `own` and of what lies at the peers' addresses, in that
        order, divided: block by block, so that each step finds it in the core's own cache."""
        size = place.element_size()
        block = min(BLOCK // size, scratch.numel())
        for first in range(0, place.numel(), block):
            count = min(block, place.numel() - first)
            result = place[first : first + count]
            summed = None if own is None else own[first : first + count]
            for peer, address in shares:
                received = result if summed is None else scratch[:count]
                start = address + first * size
                self._memory.read(peer, start, received.data_ptr(), count * size)
                if summed is not None:
                    torch.add(summed, received, out=result)
                summed = result
            if summed is None:
                result.zero_()
                continue
            if summed is not result:
                result.copy_(summed)
            divide_(result, divisor)
