"""Every collective of the project, on plain tensors.

With `uneven`, which it uses, this is the only caller of torch.distributed's communication.

Each function checks its arguments, issues an asynchronous call and returns a `Handle`.
Nothing is valid before `Handle.wait()`: some backends write results only there. Backends
give no order between calls in flight, so a call whose input is another's result must be
issued after that other's wait.

An axis of size 1 has no group: its collectives copy locally, send nothing and are not
entered in the ledger. The same holds for messages without elements, but for an all-to-all:
a rank cannot know whether the others' shares are empty too.

An average is a sum that `wait()` divides by the axis size. Types a backend does not know are
moved as bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform.arguments import (
    check_coordinate,
    check_op,
    check_shares,
    check_tensor,
    cut_rows,
    make_output,
)
from hp_platform.axis import MeshAxis
from hp_platform.capabilities import Capabilities
from hp_platform.handle import NOBODY, Handle, issue, refuse
from hp_platform.ledger import Origin
from hp_platform.uneven import (
    all_gather_even,
    prepare_all_gather,
    prepare_reduce_scatter,
    reduce_scatter_even,
)

__all__ = [
    "Handle",
    "Origin",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather_objects",
    "reduce",
    "reduce_scatter",
]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def all_gather(
    tensor: Tensor,
    axis: MeshAxis,
    *,
    output: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    origin: Origin = NOBODY,
) -> Handle[Tensor]:
    """Concatenates the ranks' tensors along dim 0, in coordinate order.

    Args:
        tensor: this rank's share, [rows, ...], contiguous.
        output: contiguous tensor, [all rows, ...], that receives the result; a view into a
            larger buffer will do, and `tensor` may lie at its place in it.
        sizes: rows of every coordinate, zeros allowed; equal when omitted.

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "all_gather"
    able = check_tensor(name, tensor, axis, origin, reduces=False, rows=True)
    rows = tensor.shape[0]
    if sizes is None:
        shares: tuple[int, ...] = (rows,) * axis.size
    else:
        shares = check_shares(name, axis, origin, "sizes", sizes)
        if shares[axis.rank] != rows:
            problem = f"sizes says {shares[axis.rank]} rows for this coordinate, the tensor has "
            refuse(name, axis, origin, f"{problem}{rows}")
    total = sum(shares)
    result = make_output(name, axis, origin, output, total, tensor)
    group = axis.process_group
    if group is None or total == 0 or result.numel() == 0:
        return Handle(_copied(tensor, result))
    source, target = _transportable(tensor, able), _transportable(result, able)
    tensors, size = (tensor, result), result.nbytes
    if shares.count(rows) == axis.size:

        def start() -> list[Any]:
            return [all_gather_even(target, source, group=group, async_op=True)]

        return issue(name, axis, origin, start, result, size, tensors, dtype=tensor.dtype)
    flat = target.view(-1)
    lengths = [flat.numel() // total * share for share in shares]
    call = prepare_all_gather(
        able.uneven_all_gather, source.view(-1), flat, lengths, axis.rank, group
    )
    return issue(
        name, axis, origin, call.start, result, size, tensors,
        dtype=tensor.dtype, keep=call.keep, finish=call.finish,
    )  # fmt: skip


def reduce_scatter(
    tensor: Tensor,
    axis: MeshAxis,
    *,
    output: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    op: str = "sum",
    origin: Origin = NOBODY,
) -> Handle[Tensor]:
    """Reduces the ranks' tensors and gives coordinate r its rows of dim 0.

    Args:
        tensor: [all rows, ...], contiguous; left as it is.
        output: contiguous tensor, [this coordinate's rows, ...], that receives the result.
        sizes: rows of every coordinate, zeros allowed; equal when omitted.
        op: "sum" or "avg".

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "reduce_scatter"
    able = check_tensor(name, tensor, axis, origin, reduces=True, rows=True)
    check_op(name, axis, origin, op, ("sum", "avg"), tensor.dtype)
    shares = cut_rows(name, axis, origin, "sizes", sizes, tensor)
    result = make_output(name, axis, origin, output, shares[axis.rank], tensor)
    group = axis.process_group
    if group is None or tensor.numel() == 0:
        return Handle(_copied(tensor, result))
    source, target = _plain(tensor), _plain(result)
    tensors, size = (tensor, result), tensor.nbytes
    if shares.count(shares[0]) == axis.size:

        def start() -> list[Any]:
            return [reduce_scatter_even(target, source, group=group, async_op=True)]

        finish = _then_average(op, target, axis.size)
        return issue(
            name, axis, origin, start, result, size, tensors, dtype=tensor.dtype, finish=finish
        )
    flat = source.view(-1)
    lengths = [flat.numel() // tensor.shape[0] * share for share in shares]
    call = prepare_reduce_scatter(
        able.uneven_reduce_scatter, flat, target.view(-1), lengths, axis.rank, group
    )
    finish = _then_average(op, target, axis.size, call.finish)
    return issue(
        name, axis, origin, call.start, result, size, tensors,
        dtype=tensor.dtype, keep=call.keep, finish=finish,
    )  # fmt: skip


def all_reduce(
    tensor: Tensor, axis: MeshAxis, *, op: str = "sum", origin: Origin = NOBODY
) -> Handle[Tensor]:
    """Reduces the ranks' tensors, in place on every rank.

    Args:
        tensor: contiguous, any shape.
        op: "sum", "avg", "max" or "min".

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "all_reduce"
    check_tensor(name, tensor, axis, origin, reduces=True)
    check_op(name, axis, origin, op, tuple(_OPS), tensor.dtype)
    group = axis.process_group
    if group is None or tensor.numel() == 0:
        return Handle(tensor)
    target = _plain(tensor)

    def start() -> list[Any]:
        return [dist.all_reduce(target, op=_OPS[op], group=group, async_op=True)]

    finish = _then_average(op, target, axis.size)
    return issue(
        name, axis, origin, start, tensor, tensor.nbytes, (tensor,),
        dtype=tensor.dtype, finish=finish,
    )  # fmt: skip


def broadcast(
    tensor: Tensor, axis: MeshAxis, *, source: int, origin: Origin = NOBODY
) -> Handle[Tensor]:
    """Copies the tensor of coordinate `source` over those of all others, in place.

    Args:
        tensor: contiguous, any shape, the same on all ranks.
        source: coordinate on the axis.

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "broadcast"
    able = check_tensor(name, tensor, axis, origin, reduces=False)
    check_coordinate(name, axis, origin, "source", source)
    group = axis.process_group
    if group is None or tensor.numel() == 0:
        return Handle(tensor)
    target = _transportable(tensor, able)

    def start() -> list[Any]:
        return [dist.broadcast(target, group_src=source, group=group, async_op=True)]

    return issue(name, axis, origin, start, tensor, tensor.nbytes, (tensor,), dtype=tensor.dtype)


def reduce(
    tensor: Tensor,
    axis: MeshAxis,
    *,
    destination: int,
    op: str = "sum",
    origin: Origin = NOBODY,
) -> Handle[Tensor]:
    """Reduces the ranks' tensors into that of coordinate `destination`, in place.

    On the other coordinates the tensor is scratch space afterwards: its values depend on the
    backend.

    Args:
        tensor: contiguous, any shape.
        destination: coordinate on the axis.
        op: "sum", "avg", "max" or "min".

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "reduce"
    check_tensor(name, tensor, axis, origin, reduces=True)
    check_op(name, axis, origin, op, tuple(_OPS), tensor.dtype)
    check_coordinate(name, axis, origin, "destination", destination)
    group = axis.process_group
    if group is None or tensor.numel() == 0:
        return Handle(tensor)
    target = _plain(tensor)

    def start() -> list[Any]:
        return [dist.reduce(target, group_dst=destination, op=_OPS[op], group=group, async_op=True)]

    finish = _then_average(op, target, axis.size) if axis.rank == destination else None
    return issue(
        name, axis, origin, start, tensor, tensor.nbytes, (tensor,),
        dtype=tensor.dtype, finish=finish,
    )  # fmt: skip


def all_to_all(
    tensor: Tensor,
    axis: MeshAxis,
    *,
    input_sizes: Sequence[int] | None = None,
    output_sizes: Sequence[int] | None = None,
    output: Tensor | None = None,
    origin: Origin = NOBODY,
) -> Handle[Tensor]:
    """Sends every coordinate its block of rows and receives one block from each.

    A rank that sends and receives nothing still takes part, for the others cannot know.

    Args:
        tensor: [rows, ...], contiguous: blocks along dim 0 in coordinate order.
        input_sizes: rows sent to every coordinate; output_sizes: rows received from each.
            Both or neither: without them all blocks are equal.
        output: contiguous tensor, [received rows, ...], that receives the result.

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "all_to_all"
    able = check_tensor(name, tensor, axis, origin, reduces=False, rows=True)
    if (input_sizes is None) != (output_sizes is None):
        refuse(name, axis, origin, "give both input_sizes and output_sizes, or neither")
    sent = cut_rows(name, axis, origin, "input_sizes", input_sizes, tensor)
    received = sent
    if output_sizes is not None:
        received = check_shares(name, axis, origin, "output_sizes", output_sizes)
    if sent[axis.rank] != received[axis.rank]:
        problem = f"this coordinate sends itself {sent[axis.rank]} rows but expects "
        refuse(name, axis, origin, f"{problem}{received[axis.rank]}")
    result = make_output(name, axis, origin, output, sum(received), tensor)
    group = axis.process_group
    if group is None:
        return Handle(_copied(tensor, result))
    source, target = _transportable(tensor, able), _transportable(result, able)
    # Lengths count in units of dim 0, which bytes have lost.
    row_shape = tensor.shape[1:]
    if source.dtype != tensor.dtype:
        unit = row_shape.numel() * tensor.element_size()
        source, target = source.view(tensor.shape[0], unit), target.view(result.shape[0], unit)

    def start() -> list[Any]:
        return [
            dist.all_to_all_single(
                target, source, list(received), list(sent), group=group, async_op=True
            )
        ]

    return issue(
        name, axis, origin, start, result, tensor.nbytes, (tensor, result), dtype=tensor.dtype
    )


def gather_objects(value: Any, axis: MeshAxis, *, origin: Origin = NOBODY) -> list[Any]:
    """Every coordinate's value, in coordinate order. For small picklable values; blocks.

    Entered in the ledger twice: lengths first, then the padded values.
    """
    group = axis.process_group
    if group is None:
        return [value]
    name = "gather_objects"
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(axis.device)
    length = torch.tensor([payload.numel()], dtype=torch.int64, device=axis.device)
    lengths = length.new_empty(axis.size)

    def start_lengths() -> list[Any]:
        return [all_gather_even(lengths, length, group=group, async_op=True)]

    issue(
        name, axis, origin, start_lengths, None, lengths.nbytes, (), keep=(length, lengths)
    ).wait()
    sizes = lengths.tolist()
    longest = max(sizes)
    padded, gathered = payload.new_zeros(longest), payload.new_empty(longest * axis.size)
    padded[: payload.numel()].copy_(payload)

    def start_values() -> list[Any]:
        return [all_gather_even(gathered, padded, group=group, async_op=True)]

    issue(
        name, axis, origin, start_values, None, gathered.nbytes, (), keep=(padded, gathered)
    ).wait()
    pieces = bytes(gathered.tolist())  # not through numpy, which torch does not require
    return [pickle.loads(pieces[i * longest : i * longest + size]) for i, size in enumerate(sizes)]


def barrier(axis: MeshAxis, *, origin: Origin = NOBODY) -> None:
    """Returns once every coordinate has entered it."""
    group = axis.process_group
    if group is None:
        return
    token = torch.zeros(1, device=axis.device)

    def start() -> list[Any]:
        return [dist.all_reduce(token, group=group, async_op=True)]

    issue("barrier", axis, origin, start, token, 0, (), keep=(token,)).wait()
    # On an accelerator wait() orders streams only; reading the value holds the host too.
    token.item()


def _then_average(
    op: str, target: Tensor, size: int, before: Callable[[], None] | None = None
) -> Callable[[], None] | None:
    """What `wait()` does after the backend: `before`, and for an average the division."""
    if op != "avg":
        return before

    def finish() -> None:
        if before is not None:
            before()
        target.div_(size)

    return finish


def _copied(source: Tensor, target: Tensor) -> Tensor:
    if target.numel() and target.data_ptr() != source.data_ptr():
        _plain(target).copy_(_plain(source))
    return target


def _plain(tensor: Tensor) -> Tensor:
    """The same storage outside autograd: communication is never part of a graph."""
    return tensor.detach() if tensor.requires_grad else tensor


def _transportable(tensor: Tensor, able: Capabilities) -> Tensor:
    """The same storage outside autograd, as flat bytes where the backend lacks the type."""
    plain = _plain(tensor)
    return plain if tensor.dtype in able.dtypes else plain.view(-1).view(torch.uint8)
