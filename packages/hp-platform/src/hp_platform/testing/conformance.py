"""The laws that every backend of ours must obey, as cases with known answers.

A case's inputs are small integers computed from rank, row and column, and its expected
results are computed from the same formula by index arithmetic: no collective, real or
simulated, takes part in making them. Integers this small are exact in every dtype, so results
must be equal, not close.

`violations` and `overlapping_violations` try a process group, `simulate` and `wrong_results` the
simulator; `local_tensor.run` tries PyTorch's LocalTensorMode with the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hp_platform import collectives, transfers
from hp_platform.axis import MeshAxis
from hp_platform.handle import Handle
from hp_platform.records import Origin
from hp_platform.testing.simulator import Simulator

OPERATIONS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_to_all",
    "exchange",
)
"""`exchange` sends the blocks of an all-to-all as messages, two for every pair of ranks."""

_COLUMNS = 3
_SENTINEL = 77
_MARGIN = 5
_LARGE = 4099
"""Rows of large messages: backends choose other algorithms for them; not a multiple of anything."""
_ORIGIN = Origin("hp_platform", "conformance")


@dataclass(frozen=True)
class Case:
    """One collective on one group.

    Attributes:
        operation: one of `OPERATIONS`.
        world_size: ranks in the group.
        dtype: element type.
        shares: rows of every coordinate; the block from coordinate a to b of an all-to-all or
            exchange has `shares[(a + 2 b) % world_size]` rows; the others use `shares[0]` rows.
        op: the reduction.
        root: source of a broadcast, destination of a reduce.
    """

    operation: str
    world_size: int
    dtype: torch.dtype
    shares: tuple[int, ...]
    op: str = "sum"
    root: int = 0

    def block(self, sender: int, receiver: int) -> int:
        """Rows that one coordinate sends another in an all-to-all or exchange."""
        return self.shares[(sender + 2 * receiver) % self.world_size]

    def sent(self, rank: int) -> list[int]:
        """Rows that `rank` sends to each coordinate."""
        return [self.block(rank, peer) for peer in range(self.world_size)]

    def received(self, rank: int) -> list[int]:
        """Rows that `rank` receives from each coordinate."""
        return [self.block(peer, rank) for peer in range(self.world_size)]

    def input_rows(self, rank: int) -> int:
        """Rows of the tensor that `rank` brings."""
        if self.operation == "all_gather":
            return self.shares[rank]
        if self.operation == "reduce_scatter":
            return sum(self.shares)
        if self.operation in ("all_to_all", "exchange"):
            return sum(self.sent(rank))
        return self.shares[0]

    def input(self, rank: int) -> Tensor:
        """The tensor that `rank` brings, [rows, 3]."""
        return self._filled([(rank, range(self.input_rows(rank)))])

    def expected(self, rank: int) -> Tensor | None:
        """The tensor that `rank` must hold afterwards; None where nothing is promised."""
        world = range(self.world_size)
        if self.operation == "all_gather":
            return self._filled([(peer, range(self.shares[peer])) for peer in world])
        if self.operation in ("all_to_all", "exchange"):
            blocks = []
            for peer in world:
                start = sum(self.sent(peer)[:rank])
                blocks.append((peer, range(start, start + self.block(peer, rank))))
            return self._filled(blocks)
        if self.operation == "broadcast":
            return self._filled([(self.root, range(self.shares[0]))])
        if self.operation == "reduce" and rank != self.root:
            return None
        start = sum(self.shares[:rank]) if self.operation == "reduce_scatter" else 0
        rows_held = self.shares[rank] if self.operation == "reduce_scatter" else self.shares[0]
        return self._reduced(range(start, start + rows_held))

    def _filled(self, blocks: Sequence[tuple[int, range]]) -> Tensor:
        """Rows that belong to ranks, one block after another."""
        return torch.cat([_values(rank, rows) for rank, rows in blocks]).to(self.dtype)

    def _reduced(self, rows: range) -> Tensor:
        found = torch.stack([_values(rank, rows) for rank in range(self.world_size)])
        if self.op in ("max", "min"):
            values = found.amax(0) if self.op == "max" else found.amin(0)
        else:
            values = found.sum(0)
        return (values / self.world_size if self.op == "avg" else values).to(self.dtype)


def cases(world_size: int, dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """All cases for a group: every operation with even, uneven, empty and large shares."""
    uneven = tuple(2 * ((rank + 1) % 3) + 1 for rank in range(world_size))
    empty = tuple(0 if rank % 2 else 3 for rank in range(world_size))
    last_only = (0,) * (world_size - 1) + (4,)
    even = (2,) * world_size
    roots = sorted({0, world_size // 2, world_size - 1})
    for dtype in dtypes:
        for shares in (even, uneven, empty, last_only, (0,) * world_size):
            yield from _moving(world_size, dtype, shares)
            for op in _ops(dtype, ("sum", "avg")):
                yield Case("reduce_scatter", world_size, dtype, shares, op)
        for op in _ops(dtype, ("sum", "avg", "max", "min")):
            yield Case("all_reduce", world_size, dtype, (3,) * world_size, op)
            for root in roots:
                yield Case("reduce", world_size, dtype, (3,) * world_size, op, root)
        for root in roots:
            yield Case("broadcast", world_size, dtype, (3,) * world_size, root=root)


def large_cases(world_size: int, dtype: torch.dtype) -> Iterator[Case]:
    """Every operation once with messages of tens of kilobytes, even and uneven."""
    for shares in ((_LARGE,) * world_size, tuple(_LARGE + 2 * r for r in range(world_size))):
        yield from _moving(world_size, dtype, shares)
        yield Case("reduce_scatter", world_size, dtype, shares)
    shares, last = (_LARGE,) * world_size, world_size - 1
    yield Case("all_reduce", world_size, dtype, shares)
    yield Case("broadcast", world_size, dtype, shares, root=last)
    yield Case("reduce", world_size, dtype, shares, root=last)


def moving_cases(world_size: int, dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Cases that only move data, for types that a backend need not compute with."""
    for dtype in dtypes:
        for shares in ((2,) * world_size, tuple(range(world_size))):
            yield from _moving(world_size, dtype, shares)
        yield Case("broadcast", world_size, dtype, (3,) * world_size, root=world_size - 1)


def _moving(world_size: int, dtype: torch.dtype, shares: tuple[int, ...]) -> Iterator[Case]:
    for operation in ("all_gather", "all_to_all", "exchange"):
        yield Case(operation, world_size, dtype, shares)


def simulate(case: Case, simulator: Simulator | None = None) -> list[Tensor] | None:
    """Every rank's result on the simulator; None where it has no such operation."""
    simulator = simulator or Simulator((case.world_size,))
    ranks = range(case.world_size)
    inputs = [case.input(rank) for rank in ranks]
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
    if case.operation == "all_to_all":
        sent, received = [case.sent(r) for r in ranks], [case.received(r) for r in ranks]
        return simulator.all_to_all(inputs, 0, sent, received)
    return None


def wrong_results(case: Case, results: Sequence[Tensor]) -> list[str]:
    """Says which of all ranks' results are not the expected ones."""
    found = []
    for rank, result in enumerate(results):
        expected = case.expected(rank)
        if expected is not None:
            found += _difference(case, rank, "the result", result, expected)
    return found


def violations(case: Case, axis: MeshAxis) -> list[str]:
    """Runs the case on this rank of a real group and says which laws it breaks.

    Laws: the result is the expected one; it lies in the given output, a view into a larger
    buffer, and nothing beside it is written; an input that is not the result is left alone;
    waiting again changes nothing.
    """
    return _start(case, axis).finish()


def overlapping_violations(flight: Sequence[Case], axis: MeshAxis) -> list[str]:
    """Starts all cases before it waits for any, the last one first, and says what breaks."""
    trials = [_start(case, axis) for case in flight]
    return [violation for trial in reversed(trials) for violation in trial.finish()]


@dataclass
class _Trial:
    """A case in flight.

    Attributes:
        wait: waits for the case and returns its result.
        result: the tensor in which the result must arrive; buffer: what it is a view into.
        tensor: the input, and before: its values; None where it is the result itself.
    """

    case: Case
    rank: int
    wait: Callable[[], Any]
    result: Tensor
    buffer: Tensor
    tensor: Tensor | None = None
    before: Tensor | None = None

    def finish(self) -> list[str]:
        case, rank, expected = self.case, self.rank, self.case.expected(self.rank)
        returned = self.wait()
        found = []
        for what in ("the result", "the result of a second wait()"):
            if returned is not None and returned.data_ptr() != self.result.data_ptr():
                found.append(f"{case} on rank {rank}: {what} is not in the tensor given")
            if expected is not None:
                found += _difference(case, rank, what, self.result, expected)
                if returned is not None:
                    found += _difference(case, rank, f"{what}, as returned,", returned, expected)
            returned = self.wait()
        if self.tensor is not None and self.before is not None:
            found += _difference(case, rank, "the input afterwards", self.tensor, self.before)
        margins = torch.cat([self.buffer[:_MARGIN], self.buffer[-_MARGIN:]])
        untouched = _sentinels(len(margins), margins.dtype)
        return found + _difference(case, rank, "memory beside the tensor", margins, untouched)


def _start(case: Case, axis: MeshAxis) -> _Trial:
    tensor = case.input(axis.rank)
    if case.operation in ("all_reduce", "broadcast", "reduce"):
        buffer, inside = _inside_buffer(tensor)
        return _Trial(case, axis.rank, _in_place(case, axis, inside).wait, inside, buffer)
    expected = case.expected(axis.rank)
    assert expected is not None
    filled = _sentinels(expected.numel(), expected.dtype).view(expected.shape)
    buffer, output = _inside_buffer(filled)
    start = _exchange if case.operation == "exchange" else _into
    before = tensor.clone()
    wait = start(case, axis, tensor, output)
    return _Trial(case, axis.rank, wait, output, buffer, tensor, before)


def _in_place(case: Case, axis: MeshAxis, tensor: Tensor) -> Handle[Tensor]:
    if case.operation == "all_reduce":
        return collectives.all_reduce(tensor, axis, op=case.op, origin=_ORIGIN)
    if case.operation == "broadcast":
        return collectives.broadcast(tensor, axis, source=case.root, origin=_ORIGIN)
    return collectives.reduce(tensor, axis, destination=case.root, op=case.op, origin=_ORIGIN)


def _into(case: Case, axis: MeshAxis, tensor: Tensor, output: Tensor) -> Callable[[], Tensor]:
    if case.operation == "all_gather":
        return collectives.all_gather(
            tensor, axis, output=output, sizes=case.shares, origin=_ORIGIN
        ).wait
    if case.operation == "reduce_scatter":
        return collectives.reduce_scatter(
            tensor, axis, output=output, sizes=case.shares, op=case.op, origin=_ORIGIN
        ).wait
    sent, received = case.sent(axis.rank), case.received(axis.rank)
    return collectives.all_to_all(
        tensor, axis, input_sizes=sent, output_sizes=received, output=output, origin=_ORIGIN
    ).wait


def _exchange(case: Case, axis: MeshAxis, tensor: Tensor, output: Tensor) -> Callable[[], None]:
    """Sends every block as two messages, the second of which has its last row.

    The ranks list their messages in different orders, which must not matter.
    """
    batch: list[transfers.Send | transfers.Receive] = []
    for peer, (block, into) in enumerate(
        zip(tensor.split(case.sent(axis.rank)), output.split(case.received(axis.rank)))
    ):
        batch += [transfers.Send(part, peer) for part in (block[:-1], block[-1:])]
        batch += [transfers.Receive(part, peer) for part in (into[:-1], into[-1:])]
    turn = 4 * axis.rank
    handle = transfers.exchange(batch[turn:] + batch[:turn], axis, origin=_ORIGIN)

    def wait() -> None:
        handle.wait()

    return wait


def _inside_buffer(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A flat buffer of sentinels, and a contiguous view inside it with `tensor`'s values."""
    buffer = _sentinels(tensor.numel() + 2 * _MARGIN, tensor.dtype)
    view = buffer[_MARGIN : _MARGIN + tensor.numel()].view(tensor.shape)
    view.copy_(tensor)
    return buffer, view


def _sentinels(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count,), _SENTINEL, dtype=torch.float32).to(dtype)


def _difference(case: Case, rank: int, what: str, found: Tensor, expected: Tensor) -> list[str]:
    place = f"{case} on rank {rank}: {what}"
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        kinds = [f"{t.dtype} of shape {tuple(t.shape)}" for t in (found, expected)]
        return [f"{place} is {kinds[0]}, expected {kinds[1]}"]
    if torch.equal(_bytes(found), _bytes(expected)):
        return []
    wrong = (_bytes(found) != _bytes(expected)).nonzero()
    shown = [t.reshape(-1)[:24].tolist() for t in (found, expected)]
    return [f"{place} is {shown[0]}, expected {shown[1]} (first 24; {len(wrong)} bytes differ)"]


def _bytes(tensor: Tensor) -> Tensor:
    # Some types, such as those of 8 bits, cannot be compared themselves.
    return tensor.contiguous().view(-1).view(torch.uint8)


def _values(rank: int, rows: range) -> Tensor:
    """Rows of a rank's numbers, [rows, 3]."""
    # Ranks differ in every element; sums over 8 ranks stay below 128, the limit of int8, and
    # averages over 2, 3, 4 and 8 ranks are multiples of one half, so all dtypes are exact. Rows
    # are scrambled, so that a chunk of them in another's place shows.
    row = torch.arange(rows.start, rows.stop)
    scrambled = (row * 0x9E3779B1 >> 9) % 4
    return (3 * rank + scrambled[:, None] + torch.arange(_COLUMNS)).to(torch.float32)


def _ops(dtype: torch.dtype, wanted: Sequence[str]) -> Iterator[str]:
    for op in wanted:
        if op != "avg" or dtype.is_floating_point:
            yield op
