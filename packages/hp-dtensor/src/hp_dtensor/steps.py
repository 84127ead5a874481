"""Steps: a move's data movement for one rank, worked out once and replayed.

`RankStep.pack` makes what a rank puts into the collective from its local tensor, `unpack` makes
the new local tensor from what it receives. Between the two stands one collective along one mesh
axis, run by a process group or by the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen
from torch import Tensor

from hp_dtensor.layout import Coordinate
from hp_dtensor.path import Kind, Move
from hp_dtensor.pieces import flat
from hp_dtensor.placements import is_partial
from hp_dtensor.rank_step import Geometry, RankStep
from hp_platform.collectives import all_gather, all_reduce, all_to_all, reduce_scatter

if TYPE_CHECKING:
    from hp_platform.axis import MeshAxis
    from hp_platform.ledger import Origin


@frozen(eq=False, slots=False)
class Step:
    """A move together with every rank's part in it, worked out on first use."""

    move: Move
    _at: dict[Coordinate, RankStep] = field(factory=dict, repr=False)

    @cached_property
    def reduction(self) -> str:
        placement = self.move.before.placements[self.move.axis]
        return placement.reduce_op if is_partial(placement) else "sum"

    @cached_property
    def _geometry(self) -> Geometry:
        return Geometry(self.move)

    def at(self, coord: Coordinate) -> RankStep:
        """The part of the rank at `coord`."""
        # Ranks that differ only on axes which do not matter here have the same part.
        key = tuple([coord[axis] for axis in self._axes])
        part = self._at.get(key)
        if part is None:
            part = self._at[key] = self._geometry.part(coord)
        return part

    def everyone(self) -> list[RankStep]:
        """All ranks' parts, in rank order."""
        parts = [self.at(coord) for coord in self.move.before.abstract_mesh.coordinates()]
        # Nothing is left to work out.
        vars(self).pop("_geometry", None)
        return parts

    @cached_property
    def _axes(self) -> list[int]:
        return self._geometry.axes

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
    as_they_lie, shape = pack is flat and part.received_as_it_lies, part.shape
    if kind is Kind.ALL_GATHER and as_they_lie and receives is None:

        def gather_rows(local: Tensor, origin: Origin) -> Tensor:
            rows = local.contiguous().view(-1)
            return all_gather(rows, axis, origin=origin).wait().view(shape)

        return gather_rows
    if kind is Kind.ALL_GATHER:

        def gather(local: Tensor, origin: Origin) -> Tensor:
            return unpack(all_gather(pack(local), axis, sizes=receives, origin=origin).wait())

        return gather
    if kind is Kind.REDUCE_SCATTER and as_they_lie and sends is None:

        def scatter_rows(local: Tensor, origin: Origin) -> Tensor:
            rows = local.contiguous().view(-1)
            if rows.is_complex():
                return _reduce_complex(step, part, rows, axis, origin)
            return reduce_scatter(rows, axis, op=op, origin=origin).wait().view(shape)

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
