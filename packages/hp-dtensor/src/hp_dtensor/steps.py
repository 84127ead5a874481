"""Steps: a move's data movement for one rank, worked out once and replayed.

`RankStep.pack` makes what a rank puts into the collective from its local tensor, `unpack` makes
the new local tensor from what it receives. Between the two stands one collective along one mesh
axis, run by a process group or by the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen
from torch import Tensor

from hp_dtensor.blocks import Block, Positions, block_at, common_positions
from hp_dtensor.cuts import Runs, length
from hp_dtensor.layout import Coordinate, Layout
from hp_dtensor.path import Kind, Move
from hp_dtensor.placements import is_partial
from hp_platform.collectives import all_gather, all_reduce, all_to_all, reduce_scatter

Held = tuple[Runs, ...]
Blocks = tuple[tuple[Block, ...], tuple[int, ...]]
"""Blocks, one per coordinate that differs, and their numbers of elements."""

if TYPE_CHECKING:
    from hp_platform.axis import MeshAxis
    from hp_platform.ledger import Origin


@frozen(slots=False)
class EvenCut:
    """A view of `count` equal pieces along one dim.

    Attributes:
        split: the view's shape with that dim as two, count first.
        stacked: the shape of all pieces, one after the other.
        leading: the cut dim is the outermost of more than one element, so that the pieces lie
            one after the other in the view itself.
    """

    split: tuple[int, ...]
    stacked: tuple[int, ...]
    dim: int
    leading: bool

    @classmethod
    def of(cls, view: tuple[int, ...], dim: int, count: int) -> EvenCut:
        piece = (*view[:dim], view[dim] // count, *view[dim + 1 :])
        split = (*view[:dim], count, view[dim] // count, *view[dim + 1 :])
        return cls(split, (count, *piece), dim, math.prod(view[:dim]) == 1)

    @cached_property
    def pieces(self) -> Callable[[Tensor], Tensor]:
        """1-D: the pieces, one after the other; shares the tensor's memory where they lie so."""
        if self.leading:
            return _flat
        split, dim = self.split, self.dim
        return lambda tensor: tensor.reshape(split).movedim(dim, 0).contiguous().view(-1)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


@frozen(eq=False, slots=False)
class RankStep:
    """One move as one rank performs it. Sizes count elements, per coordinate of the axis.

    Attributes:
        view: the local tensor's shape before, as the blocks see it.
        shape: the local tensor's shape afterwards.
        new_view: that shape as the blocks see it.
        sends: the block of the old local tensor that goes to each coordinate; one entry where
            all get the same.
        receives: the block of the new local tensor that comes from each coordinate; one entry
            where all send the same.
        in_order: all received blocks, one after the other, are the new local tensor.
        even_sends, even_receives: how the blocks cut their view, where each is an equal piece of
            one dim and the whole of the others: the usual case, moved by one strided copy or none.
    """

    kind: Kind
    view: tuple[int, ...]
    shape: tuple[int, ...]
    new_view: tuple[int, ...]
    sends: tuple[Block, ...]
    receives: tuple[Block, ...]
    send_sizes: tuple[int, ...]
    receive_sizes: tuple[int, ...]
    in_order: bool
    keeps: bool
    even_sends: EvenCut | None
    even_receives: EvenCut | None

    @cached_property
    def uneven_sends(self) -> tuple[int, ...] | None:
        """None where all coordinates get equally much."""
        return None if len(set(self.send_sizes)) == 1 else self.send_sizes

    @cached_property
    def uneven_receives(self) -> tuple[int, ...] | None:
        return None if len(set(self.receive_sizes)) == 1 else self.receive_sizes

    def local(self, tensor: Tensor) -> Tensor:
        """The new local tensor of a move that does not communicate."""
        if self.kind is Kind.KEEP and not self.keeps:
            return tensor.new_zeros(self.shape)
        viewed = tensor if tensor.shape == self.view else tensor.reshape(self.view)
        if self.kind is not Kind.PAD:
            return self.sends[0].take(viewed).reshape(self.shape).contiguous()
        padded = tensor.new_zeros(self.new_view)
        self.receives[0].put(padded, viewed)
        return padded.reshape(self.shape)

    @cached_property
    def pack(self) -> Callable[[Tensor], Tensor]:
        """What goes into the collective: 1-D, but for an all-reduce a copy of the tensor."""
        if self.kind is Kind.ALL_REDUCE:
            return _copy
        if self.even_sends is not None:
            return self.even_sends.pieces
        if self.kind is Kind.ALL_GATHER and self.sends[0].whole:
            return _flat
        return self._packed

    def _packed(self, tensor: Tensor) -> Tensor:
        if self.kind is Kind.ALL_GATHER or len(self.sends) == 1:
            return self.sends[0].take(tensor.reshape(self.view)).reshape(-1).contiguous()
        viewed = tensor.reshape(self.view)
        return torch.cat([block.take(viewed).reshape(-1) for block in self.sends])

    @cached_property
    def received_as_it_lies(self) -> bool:
        """The collective's result is the new local tensor, but for its shape."""
        even = self.even_receives
        return self.in_order or (even is not None and even.leading)

    @cached_property
    def unpack(self) -> Callable[[Tensor], Tensor]:
        """The new local tensor from the collective's result."""
        shape, even = self.shape, self.even_receives
        if self.received_as_it_lies:
            return lambda received: received.view(shape)
        if even is not None:
            stacked, dim = even.stacked, even.dim
            return lambda received: received.view(stacked).movedim(0, dim).reshape(shape)
        return self._unpacked

    def _unpacked(self, received: Tensor) -> Tensor:
        target = received.new_empty(self.new_view)
        for block, part in zip(self.receives, received.split(list(self.receive_sizes))):
            block.put(target, part)
        return target.reshape(self.shape)


@frozen(eq=False, slots=False)
class Step:
    """A move together with every rank's part in it, worked out on first use."""

    move: Move
    _at: dict[Coordinate, RankStep] = field(factory=dict, repr=False)
    _shared: _Shared = field(factory=lambda: _Shared(), repr=False)

    @cached_property
    def reduction(self) -> str:
        placement = self.move.before.placements[self.move.axis]
        return placement.reduce_op if is_partial(placement) else "sum"

    @cached_property
    def _involved(self) -> tuple[bool, ...]:
        """The axes on which ranks differ: that of the move, and those that cut before or after."""
        every = (*self.move.before.cuts, *self.move.after.cuts)
        axes = {cut.axis for cuts in every for cut in cuts}
        return tuple(i == self.move.axis or i in axes for i in range(self.move.before.mesh.ndim))

    def at(self, coord: Coordinate) -> RankStep:
        # Ranks that differ only on other axes have the same part.
        first = tuple([i if involved else 0 for i, involved in zip(coord, self._involved)])
        part = self._at.get(first)
        if part is None:
            part = self._at[first] = _rank_step(self.move, first, self._shared)
        return part

    def everyone(self) -> list[RankStep]:
        """All ranks' parts, in rank order."""
        parts = [self.at(coord) for coord in self.move.before.abstract_mesh.coordinates()]
        # Nothing is left to work out. Replaced, not emptied: another thread may be working with it.
        object.__setattr__(self, "_shared", _Shared())
        return parts

    def __str__(self) -> str:
        return str(self.move)


Run = Callable[[Tensor, "Origin"], Tensor]


def compile_step(step: Step, part: RankStep, axis: MeshAxis) -> Run:
    """A step on this rank's local tensor as one function; nothing is left to decide in it."""
    kind, pack, unpack = part.kind, part.pack, part.unpack
    if not kind.communicates:
        return lambda local, origin: part.local(local)
    op = step.reduction
    if kind is Kind.ALL_REDUCE:

        def reduce(local: Tensor, origin: Origin) -> Tensor:
            packed = pack(local)
            if packed.is_complex():
                return _reduce_complex(step, part, packed, axis, origin)
            return all_reduce(packed, axis, op=op, origin=origin).wait()

        return reduce
    sends, receives = part.uneven_sends, part.uneven_receives
    # Where pieces lie one after the other on both sides, nothing is packed: the usual case.
    as_they_lie, shape = pack is _flat and part.received_as_it_lies, part.shape
    if kind is Kind.ALL_GATHER and as_they_lie and receives is None:

        def gather_rows(local: Tensor, origin: Origin) -> Tensor:
            flat = local.contiguous().view(-1)
            return all_gather(flat, axis, origin=origin).wait().view(shape)

        return gather_rows
    if kind is Kind.ALL_GATHER:

        def gather(local: Tensor, origin: Origin) -> Tensor:
            return unpack(all_gather(pack(local), axis, sizes=receives, origin=origin).wait())

        return gather
    if kind is Kind.REDUCE_SCATTER and as_they_lie and sends is None:

        def scatter_rows(local: Tensor, origin: Origin) -> Tensor:
            flat = local.contiguous().view(-1)
            if flat.is_complex():
                return _reduce_complex(step, part, flat, axis, origin)
            return reduce_scatter(flat, axis, op=op, origin=origin).wait().view(shape)

        return scatter_rows
    if kind is Kind.REDUCE_SCATTER:

        def scatter(local: Tensor, origin: Origin) -> Tensor:
            packed = pack(local)
            if packed.is_complex():
                return _reduce_complex(step, part, packed, axis, origin)
            return unpack(reduce_scatter(packed, axis, sizes=sends, op=op, origin=origin).wait())

        return scatter

    def exchange(local: Tensor, origin: Origin) -> Tensor:
        handle = all_to_all(
            pack(local),
            axis,
            input_sizes=part.send_sizes,
            output_sizes=part.receive_sizes,
            origin=origin,
        )
        return unpack(handle.wait())

    return exchange


def _reduce_complex(
    step: Step, part: RankStep, packed: Tensor, axis: MeshAxis, origin: Origin
) -> Tensor:
    """Sums of real and imaginary parts: backends reduce no complex numbers."""
    parts = torch.view_as_real(packed.resolve_conj())
    if part.kind is Kind.ALL_REDUCE:
        all_reduce(parts, axis, op=step.reduction, origin=origin).wait()
        return packed
    handle = reduce_scatter(parts, axis, sizes=part.send_sizes, op=step.reduction, origin=origin)
    return part.unpack(torch.view_as_complex(handle.wait()))


def simulate_step(step: Step, locals_: list[Tensor]) -> list[Tensor]:
    """Performs a step on the list of all ranks' local tensors, in rank order."""
    from hp_platform.testing.simulator import Simulator

    move = step.move
    mesh = move.before.abstract_mesh
    parts = step.everyone()
    if not move.kind.communicates:
        return [part.local(local) for part, local in zip(parts, locals_)]
    packed = [part.pack(local) for part, local in zip(parts, locals_)]
    simulator = Simulator(mesh.sizes)
    if move.kind is Kind.ALL_REDUCE:
        return simulator.all_reduce(packed, move.axis, op=step.reduction)
    sends = [part.send_sizes for part in parts]
    receives = [part.receive_sizes for part in parts]
    if move.kind is Kind.ALL_GATHER:
        results = simulator.all_gather(packed, move.axis, sizes=receives)
    elif move.kind is Kind.REDUCE_SCATTER:
        results = simulator.reduce_scatter(packed, move.axis, sizes=sends, op=step.reduction)
    else:
        results = simulator.all_to_all(packed, move.axis, input_sizes=sends, output_sizes=receives)
    return [part.unpack(result) for part, result in zip(parts, results)]


class _Shared:
    """What ranks that hold the same have in common, so that it is worked out once for all.

    Held parts are long tuples: they are compared and hashed once, and have numbers from then on.
    """

    def __init__(self) -> None:
        self.numbers: dict[Held, int] = {}
        self.held: list[Held] = []
        self.views: list[tuple[int, ...]] = []
        self.before: dict[Coordinate, int] = {}
        self.after: dict[Coordinate, int] = {}
        self.lines: dict[tuple[bool, Coordinate], list[int]] = {}
        self.common: dict[tuple[int, int], tuple[Positions, Positions]] = {}
        self.made: dict[tuple[Positions, tuple[int, ...]], Block] = {}
        self.sent: dict[tuple[int, ...], tuple[Blocks, EvenCut | None]] = {}
        self.received: dict[tuple[int, ...], tuple[Blocks, EvenCut | None, bool]] = {}
        self.parts: dict[tuple[object, ...], RankStep] = {}

    def number(
        self, layout: Layout, flat: int, coord: Coordinate, known: dict[Coordinate, int]
    ) -> int:
        found = known.get(coord)
        if found is None:
            held = layout.view_runs(flat, coord)
            found = known[coord] = self.numbers.setdefault(held, len(self.held))
            if found == len(self.held):
                self.held.append(held)
                self.views.append(tuple([length(runs) for runs in held]))
        return found

    def block(self, old: int, new: int, of_new: bool) -> Block:
        """What an old and a new part have in common, in one of the two."""
        pair = self.common.get((old, new))
        if pair is None:
            pair = self.common[old, new] = common_positions(self.held[old], self.held[new])
        key = (pair[of_new], self.views[new if of_new else old])
        found = self.made.get(key)
        if found is None:
            found = self.made[key] = block_at(*key)
        return found

    def sends(self, old: int, to: Sequence[int]) -> tuple[Blocks, EvenCut | None]:
        key = (old, *to)
        found = self.sent.get(key)
        if found is None:
            blocks = tuple([self.block(old, new, False) for new in to])
            sizes = tuple([block.numel for block in blocks])
            found = self.sent[key] = ((blocks, sizes), _even_cut(blocks, self.views[old]))
        return found

    def receives(self, new: int, by: Sequence[int]) -> tuple[Blocks, EvenCut | None, bool]:
        key = (new, *by)
        found = self.received.get(key)
        if found is None:
            blocks, view = tuple([self.block(old, new, True) for old in by]), self.views[new]
            sizes = tuple([block.numel for block in blocks])
            in_order = _in_order(blocks, view)
            found = self.received[key] = ((blocks, sizes), _even_cut(blocks, view), in_order)
        return found


def _rank_step(move: Move, coord: Coordinate, shared: _Shared) -> RankStep:
    before, after = move.before, move.after
    flat = max(before.flat_dims, after.flat_dims)

    def had(coord: Coordinate) -> int:
        return shared.number(before, flat, coord, shared.before)

    def gets(coord: Coordinate) -> int:
        return shared.number(after, flat, coord, shared.after)

    def line(holds: Callable[[Coordinate], int]) -> list[int]:
        """What the ranks along the axis hold: the same for each of them."""
        key = (holds is gets, (*coord[: move.axis], 0, *coord[move.axis + 1 :]))
        found = shared.lines.get(key)
        if found is None:
            found = shared.lines[key] = [holds(peer) for peer in _peers(move, coord)]
        return found

    old, new = had(coord), gets(coord)
    to: list[int] = []
    by: list[int] = []
    if not move.kind.communicates:
        to, by = [new], [old]
    elif move.kind is not Kind.ALL_REDUCE:
        # A gather sends the same to every peer; every peer sends the whole of a reduced part.
        first = _peers(move, coord)[0]
        to = [gets(first)] if move.kind is Kind.ALL_GATHER else line(gets)
        by = [had(first)] if move.kind is Kind.REDUCE_SCATTER else line(had)
    shape, keeps = after.local_shape(coord), coord[move.axis] == 0
    key = (old, new, *to, -1, *by, keeps, shape)
    known = shared.parts.get(key)
    if known is not None:
        return known
    (sends, send_sizes), even_sends = shared.sends(old, to)
    (receives, receive_sizes), even_receives, in_order = shared.receives(new, by)
    part = shared.parts[key] = RankStep(
        kind=move.kind,
        view=shared.views[old],
        shape=shape,
        new_view=shared.views[new],
        sends=sends,
        receives=receives,
        send_sizes=send_sizes,
        receive_sizes=receive_sizes,
        in_order=in_order,
        even_sends=even_sends,
        even_receives=even_receives,
        keeps=keeps,
    )
    return part


def _peers(move: Move, coord: Coordinate) -> list[Coordinate]:
    size, axis = move.before.abstract_mesh.sizes[move.axis], move.axis
    return [(*coord[:axis], peer, *coord[axis + 1 :]) for peer in range(size)]


def _even_cut(blocks: Sequence[Block], view: tuple[int, ...]) -> EvenCut | None:
    """None where the blocks are not equal slices of one dim, in order."""
    count = len(blocks)
    if count < 2 or 0 in view:
        return None
    first = blocks[0].shape
    cut = [dim for dim, (part, whole) in enumerate(zip(first, view)) if part != whole]
    if len(cut) != 1 or first[cut[0]] * count != view[cut[0]]:
        return None
    dim, size = cut[0], first[cut[0]]
    for i, block in enumerate(blocks):
        if block.shape != first or block.index[dim] != slice(i * size, (i + 1) * size):
            return None
        if any(not isinstance(each, slice) for each in block.index):
            return None
    return EvenCut.of(view, dim, count)


def _in_order(blocks: Sequence[Block], view: tuple[int, ...]) -> bool:
    """Whether the blocks are consecutive rows of the whole view."""
    position = 0
    for block in blocks:
        if not block.numel:
            continue
        if any(size != whole for size, whole in zip(block.shape[1:], view[1:])):
            return False
        if block.index:
            rows = block.index[0]
            if not isinstance(rows, slice) or rows.start != position:
                return False
            position = rows.stop
    return True
