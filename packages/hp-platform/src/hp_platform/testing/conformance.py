"""The laws that every backend of ours must obey, as cases with known answers.

A case's inputs are small integers computed from rank, row and column, and its expected
results are computed from the same formula by index arithmetic: no collective, real or
simulated, takes part in making them. Integers this small are exact in every dtype, so results
must be equal, not close.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hp_platform import collectives
from hp_platform.axis import MeshAxis
from hp_platform.ledger import Origin
from hp_platform.testing.simulator import Simulator

OPERATIONS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_to_all",
)

_COLUMNS = 3
_SENTINEL = 77
_MARGIN = 5
_ORIGIN = Origin("hp_platform", "conformance")


@dataclass(frozen=True)
class Case:
    """One collective on one group.

    Attributes:
        operation: one of `OPERATIONS`.
        world_size: ranks in the group.
        dtype: element type.
        shares: rows of every coordinate; every block of an all-to-all from a to b has
            `shares[(a + b) % world_size]` rows; the others use `shares[0]` rows.
        op: the reduction.
        root: source of a broadcast, destination of a reduce.
    """

    operation: str
    world_size: int
    dtype: torch.dtype
    shares: tuple[int, ...]
    op: str = "sum"
    root: int = 0

    def blocks(self, rank: int) -> list[int]:
        """Rows that `rank` sends to each coordinate in an all-to-all, and receives from each."""
        return [self.shares[(rank + peer) % self.world_size] for peer in range(self.world_size)]

    def input_rows(self, rank: int) -> int:
        """Rows of the tensor that `rank` brings."""
        if self.operation == "all_gather":
            return self.shares[rank]
        if self.operation in ("reduce_scatter", "all_to_all"):
            return sum(self.shares)
        return self.shares[0]

    def input(self, rank: int) -> Tensor:
        """The tensor that `rank` brings, [rows, 3]."""
        return self._filled([(rank, row) for row in range(self.input_rows(rank))])

    def expected(self, rank: int) -> Tensor | None:
        """The tensor that `rank` must hold afterwards; None where nothing is promised."""
        world = range(self.world_size)
        if self.operation == "all_gather":
            return self._filled([(peer, row) for peer in world for row in range(self.shares[peer])])
        if self.operation == "all_to_all":
            rows = []
            for peer in world:
                start = sum(self.blocks(peer)[:rank])
                rows += [(peer, start + row) for row in range(self.blocks(peer)[rank])]
            return self._filled(rows)
        if self.operation == "broadcast":
            return self._filled([(self.root, row) for row in range(self.shares[0])])
        if self.operation == "reduce" and rank != self.root:
            return None
        start = sum(self.shares[:rank]) if self.operation == "reduce_scatter" else 0
        rows_held = self.shares[rank] if self.operation == "reduce_scatter" else self.shares[0]
        return self._reduced(range(start, start + rows_held))

    def _filled(self, places: Sequence[tuple[int, int]]) -> Tensor:
        values = [[_value(rank, row, column) for column in range(_COLUMNS)] for rank, row in places]
        return torch.tensor(values, dtype=self.dtype).view(len(places), _COLUMNS)

    def _reduced(self, rows: Sequence[int]) -> Tensor:
        values = []
        for row in rows:
            for column in range(_COLUMNS):
                found = [_value(rank, row, column) for rank in range(self.world_size)]
                total = {"max": max(found), "min": min(found)}.get(self.op, sum(found))
                values.append(total / self.world_size if self.op == "avg" else total)
        return torch.tensor(values, dtype=self.dtype).view(len(rows), _COLUMNS)


def cases(world_size: int, dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """All cases for a group: every operation with even, uneven and empty shares."""
    uneven = tuple(2 * ((rank + 1) % 3) + 1 for rank in range(world_size))
    empty = tuple(0 if rank % 2 else 3 for rank in range(world_size))
    last_only = (0,) * (world_size - 1) + (4,)
    for dtype in dtypes:
        for shares in ((2,) * world_size, uneven, empty, last_only, (0,) * world_size):
            for operation in ("all_gather", "all_to_all"):
                yield Case(operation, world_size, dtype, shares)
            for op in _ops(dtype, ("sum", "avg")):
                yield Case("reduce_scatter", world_size, dtype, shares, op)
        for op in _ops(dtype, ("sum", "avg", "max", "min")):
            yield Case("all_reduce", world_size, dtype, (3,) * world_size, op)
            yield Case("reduce", world_size, dtype, (3,) * world_size, op, world_size - 1)
        for root in range(world_size):
            yield Case("broadcast", world_size, dtype, (3,) * world_size, root=root)


def simulate(case: Case) -> list[Tensor]:
    """Every rank's result on the simulator."""
    simulator = Simulator((case.world_size,))
    inputs = [case.input(rank) for rank in range(case.world_size)]
    if case.operation == "all_gather":
        return simulator.all_gather(inputs, 0, case.shares)
    if case.operation == "reduce_scatter":
        return simulator.reduce_scatter(inputs, 0, case.shares, case.op)
    if case.operation == "all_reduce":
        return simulator.all_reduce(inputs, 0, case.op)
    if case.operation == "broadcast":
        return simulator.broadcast(inputs, 0, case.root)
    if case.operation == "reduce":
        return simulator.reduce(inputs, 0, case.root, case.op)
    blocks = [case.blocks(rank) for rank in range(case.world_size)]
    return simulator.all_to_all(inputs, 0, blocks, blocks)


def violations(case: Case, axis: MeshAxis) -> list[str]:
    """Runs the case on this rank of a real group and says which laws it breaks.

    Laws: the result is the expected one; it lies in the given output, a view into a larger
    buffer, and nothing beside it is written; an input that is not the result is left alone.
    """
    expected = case.expected(axis.rank)
    if case.operation in ("all_gather", "reduce_scatter", "all_to_all"):
        assert expected is not None
        return _with_output(case, axis, expected)
    buffer, tensor = _inside_buffer(case.input(axis.rank))
    if case.operation == "all_reduce":
        handle = collectives.all_reduce(tensor, axis, op=case.op, origin=_ORIGIN)
    elif case.operation == "broadcast":
        handle = collectives.broadcast(tensor, axis, source=case.root, origin=_ORIGIN)
    else:
        handle = collectives.reduce(tensor, axis, destination=case.root, op=case.op, origin=_ORIGIN)
    result = handle.wait()
    found = _surroundings(case, axis, buffer)
    if result is not tensor:
        found.append(f"{case} on rank {axis.rank}: the result is not the tensor given")
    if expected is not None:
        found += _difference(case, axis, "the result", result, expected)
    return found


def _with_output(case: Case, axis: MeshAxis, expected: Tensor) -> list[str]:
    tensor = case.input(axis.rank)
    before = tensor.clone()
    buffer, output = _inside_buffer(torch.full_like(expected, _SENTINEL))
    if case.operation == "all_gather":
        handle = collectives.all_gather(
            tensor, axis, output=output, sizes=case.shares, origin=_ORIGIN
        )
    elif case.operation == "reduce_scatter":
        handle = collectives.reduce_scatter(
            tensor, axis, output=output, sizes=case.shares, op=case.op, origin=_ORIGIN
        )
    else:
        blocks = case.blocks(axis.rank)
        handle = collectives.all_to_all(
            tensor, axis, input_sizes=blocks, output_sizes=blocks, output=output, origin=_ORIGIN
        )
    found = _difference(case, axis, "the result", handle.wait(), expected)
    found += _difference(case, axis, "the output", output, expected)
    found += _difference(case, axis, "the input afterwards", tensor, before)
    return found + _surroundings(case, axis, buffer)


def _inside_buffer(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A flat buffer of sentinels, and a contiguous view inside it with `tensor`'s values."""
    buffer = torch.full((tensor.numel() + 2 * _MARGIN,), _SENTINEL, dtype=tensor.dtype)
    view = buffer[_MARGIN : _MARGIN + tensor.numel()].view(tensor.shape)
    view.copy_(tensor)
    return buffer, view


def _surroundings(case: Case, axis: MeshAxis, buffer: Tensor) -> list[str]:
    margins = torch.cat([buffer[:_MARGIN], buffer[buffer.numel() - _MARGIN :]])
    return _difference(
        case, axis, "memory beside the tensor", margins, torch.full_like(margins, _SENTINEL)
    )


def _difference(
    case: Case, axis: MeshAxis, what: str, found: Tensor, expected: Tensor
) -> list[str]:
    if found.dtype == expected.dtype and torch.equal(found, expected):
        return []
    return [f"{case} on rank {axis.rank}: {what} is {found.tolist()}, expected {expected.tolist()}"]


def _value(rank: int, row: int, column: int) -> int:
    # Ranks differ in every element; sums over 8 ranks stay below 128, the limit of int8, and
    # averages over 2, 3, 4 and 8 ranks are multiples of one half, so all dtypes are exact.
    return 3 * rank + row % 4 + column


def _ops(dtype: torch.dtype, wanted: Sequence[str]) -> Iterator[str]:
    for op in wanted:
        if op != "avg" or dtype.is_floating_point:
            yield op
