"""What one rank does in a move: the pieces it sends and receives, worked out once and replayed.

`Geometry` is the only place that knows which ranks have what in common. What is held along a dim
gets a number; ranks that hold and get the same numbers have the same part, worked out once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

from hp_dtensor.blocks import common_positions
from hp_dtensor.cuts import Runs, length
from hp_dtensor.holdings import Holdings
from hp_dtensor.layout import Coordinate
from hp_dtensor.path import Kind, Move
from hp_dtensor.pieces import Pieces, flat


@frozen(eq=False, slots=False)
class RankStep:
    """One move as one rank performs it.

    Attributes:
        view: the local tensor's shape before, as the pieces see it.
        shape: the local tensor's shape afterwards.
        sends: what of the old local tensor goes to each coordinate of the axis; None where it is
            reduced, or kept, as a whole.
        receives: what of the new local tensor comes from each coordinate; None as for `sends`.
        keeps: whether a value that one coordinate keeps is kept here.
    """

    kind: Kind
    view: tuple[int, ...]
    shape: tuple[int, ...]
    sends: Pieces | None
    receives: Pieces | None
    keeps: bool

    @property
    def send_sizes(self) -> tuple[int, ...]:
        """Elements, per coordinate of the axis; one number where all get the same tensor."""
        return self.sends.sizes if self.sends is not None else ()

    @property
    def receive_sizes(self) -> tuple[int, ...]:
        """Elements, per coordinate of the axis; one number where nobody in particular sends."""
        return self.receives.sizes if self.receives is not None else ()

    @property
    def uneven_sends(self) -> tuple[int, ...] | None:
        """None where all coordinates get equally much."""
        return None if len(set(self.send_sizes)) == 1 else self.send_sizes

    @property
    def uneven_receives(self) -> tuple[int, ...] | None:
        return None if len(set(self.receive_sizes)) == 1 else self.receive_sizes

    def local(self, tensor: Tensor) -> Tensor:
        """The new local tensor of a move that does not communicate."""
        if self.kind is Kind.KEEP:
            return tensor.contiguous() if self.keeps else tensor.new_zeros(self.shape)
        if self.sends is not None:
            return self.sends.block.take(tensor.reshape(self.view)).reshape(self.shape).contiguous()
        assert self.receives is not None
        padded = tensor.new_zeros(self.receives.view)
        self.receives.block.put(padded, tensor)
        return padded.reshape(self.shape)

    @property
    def pack(self) -> Callable[[Tensor], Tensor]:
        """What goes into the collective: 1-D, but for an all-reduce a copy of the tensor."""
        if self.sends is None:
            return _copy
        return flat if self.sends.is_message else self.sends.packed

    @property
    def received_as_it_lies(self) -> bool:
        """The collective's result is the new local tensor, but for its shape."""
        return self.receives is None or self.receives.is_message

    @property
    def unpack(self) -> Callable[[Tensor], Tensor]:
        """The new local tensor from the collective's result."""
        shape, receives = self.shape, self.receives
        if receives is None or self.received_as_it_lies:
            return lambda received: received.view(shape)
        unpacked = receives.unpacked
        if receives.view == shape:
            return unpacked
        return lambda received: unpacked(received).reshape(shape)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


Numbers = tuple[int, ...]
"""What is held along every dim."""


class Geometry:
    """What ranks hold before and after a move, and have in common with one another."""

    def __init__(self, move: Move) -> None:
        self.move = move
        before, after = move.before.holdings, move.after.holdings
        self.flat = max(before.flat_dims, after.flat_dims)
        self.before = _Held(before, self.flat)
        self.after = _Held(after, self.flat)
        # Whether the new local tensors have the shape in which the pieces see them.
        self.as_seen = self.flat <= max(after.flat_dims, 1)
        # The axis cuts one dim at most, before and after: the pieces lie along that one.
        communicates = move.kind.communicates
        self.send_dim = self.after.dim_cut(move.axis) if communicates else None
        self.receive_dim = self.before.dim_cut(move.axis) if communicates else None
        axes = {*before.axes, *after.axes}
        # Ranks that are alike on these have the same part.
        self.axes = sorted(axes | {move.axis} if move.kind is Kind.KEEP else axes)
        self._numbers: dict[Runs, int] = {}
        self._runs: list[Runs] = []
        self._lengths: list[int] = []
        self._common: dict[tuple[int, int], tuple[Runs, Runs]] = {}
        self._sends: dict[tuple[Numbers, Numbers], Pieces] = {}
        self._receives: dict[tuple[Numbers, Numbers], Pieces] = {}
        # Different ranks' parts may lie alike in their local tensors.
        self._alike: dict[tuple[object, ...], Pieces] = {}

    def part(self, coord: Coordinate) -> RankStep:
        """The move as the rank at `coord` performs it."""
        kind = self.move.kind
        whole = kind is Kind.KEEP or kind is Kind.ALL_REDUCE
        old, new = self._held(self.before, coord), self._held(self.after, coord)
        return RankStep(
            kind,
            self._view(old),
            self._view(new) if self.as_seen else self.after.holdings.local_shape(coord),
            None if whole or kind is Kind.PAD else self._sent(old, new, coord),
            None if whole or kind is Kind.SLICE else self._received(old, new, coord),
            coord[self.move.axis] == 0,
        )

    def _sent(self, old: Numbers, new: Numbers, coord: Coordinate) -> Pieces:
        dim = self.send_dim
        peers = () if dim is None else self._along(self.after, dim, coord)
        key = (old, new if dim is None else (*new[:dim], *peers, *new[dim + 1 :]))
        found = self._sends.get(key)
        if found is None:
            positions = [self._in_common(*each)[0] for each in zip(old, new)]
            along = None
            if dim is not None:
                along = [self._in_common(old[dim], each)[0] for each in peers]
            # An all-to-all that replicates sends everything to everyone.
            alike = self.move.kind is Kind.ALL_TO_ALL and along is None
            copies = self._size if alike else 1
            found = self._sends[key] = self._pieces(old, positions, dim or 0, along, copies)
        return found

    def _received(self, old: Numbers, new: Numbers, coord: Coordinate) -> Pieces:
        dim = self.receive_dim
        peers = () if dim is None else self._along(self.before, dim, coord)
        key = (new, old if dim is None else (*old[:dim], *peers, *old[dim + 1 :]))
        found = self._receives.get(key)
        if found is None:
            positions = [self._in_common(*each)[1] for each in zip(old, new)]
            along = None
            if dim is not None:
                along = [self._in_common(each, new[dim])[1] for each in peers]
            found = self._receives[key] = self._pieces(new, positions, dim or 0, along)
        return found

    def _pieces(
        self,
        held: Numbers,
        positions: list[Runs],
        dim: int,
        along: list[Runs] | None,
        copies: int = 1,
    ) -> Pieces:
        view = self._view(held)
        key = (view, *positions, dim, copies, *(along or ()))
        found = self._alike.get(key)
        if found is None:
            found = self._alike[key] = Pieces.of(view, positions, dim, along, copies)
        return found

    def _in_common(self, old: int, new: int) -> tuple[Runs, Runs]:
        """Positions, along a dim, of what is held both before and after, in either."""
        found = self._common.get((old, new))
        if found is None:
            found = common_positions(self._runs[old], self._runs[new])
            self._common[old, new] = found
        return found

    def _view(self, held: Numbers) -> tuple[int, ...]:
        return tuple([self._lengths[number] for number in held])

    # -- numbers ------------------------------------------------------------------------------

    def _held(self, at: _Held, coord: Coordinate) -> Numbers:
        held = []
        for dim, axes in enumerate(at.axes):
            # Most dims are whole, and are not asked about again.
            number = None if axes else at.whole[dim]
            if number is None:
                number = self._number(at, dim, coord)
                if not axes:
                    at.whole[dim] = number
            held.append(number)
        return tuple(held)

    def _along(self, at: _Held, dim: int, coord: Coordinate) -> Numbers:
        """What the ranks along the move's axis hold of a dim."""
        axis = self.move.axis
        key = (*coord[:axis], *coord[axis + 1 :])
        found = at.lines.get(key)
        if found is None:
            peers = [(*coord[:axis], peer, *coord[axis + 1 :]) for peer in range(self._size)]
            found = at.lines[key] = tuple([self._number(at, dim, peer) for peer in peers])
        return found

    def _number(self, at: _Held, dim: int, coord: Coordinate) -> int:
        known = at.numbers[dim]
        axes = at.axes[dim]
        key = coord[axes[0]] if len(axes) == 1 else tuple([coord[axis] for axis in axes])
        number = known.get(key)
        if number is None:
            runs = at.holdings.runs(self.flat, dim, coord)
            number = known[key] = self._numbers.setdefault(runs, len(self._runs))
            if number == len(self._runs):
                self._runs.append(runs)
                self._lengths.append(length(runs))
        return number

    @property
    def _size(self) -> int:
        return self.move.before.abstract_mesh.sizes[self.move.axis]


class _Held:
    """What ranks hold at one end of a move.

    Attributes:
        axes: per dim, the axes that cut it.
        numbers: per dim, the number of what is held, by the coordinate on these axes.
        whole: the number of each dim that no axis cuts, once it is known.
        lines: numbers for all ranks along the move's axis, by coordinate on the others.
    """

    __slots__ = ("axes", "holdings", "lines", "numbers", "whole")

    def __init__(self, holdings: Holdings, flat_dims: int) -> None:
        self.holdings = holdings
        self.axes = holdings.view_axes(flat_dims)
        self.numbers: list[dict[Coordinate | int, int]] = [{} for _ in self.axes]
        self.whole: list[int | None] = [None] * len(self.axes)
        self.lines: dict[Coordinate, Numbers] = {}

    def dim_cut(self, axis: int) -> int | None:
        return next((dim for dim, cutting in enumerate(self.axes) if axis in cutting), None)
