"""Every collective of the project, on plain tensors.

With `uneven`, which it uses, and `transfers`, this is the only caller of torch.distributed's
communication.

Each function checks its arguments, issues an asynchronous call and returns a `Handle`.
Nothing is valid before `Handle.wait()`: some backends write results only there. Backends
give no order between calls in flight, so a call whose input is another's result must be
issued after that other's wait.

An axis of size 1 has no group: its collectives copy locally, send nothing and are not
entered in the ledger. The same holds for messages without elements, but for an all-to-all:
a rank cannot know whether the others' shares are empty too.

An average is a sum that `wait()` divides by the axis size, so the sum must not overflow the
type. Types a backend does not know are moved as bytes, and not reduced.

Autograd does not see any of this. A tensor that a collective overwrites is treated as by an
in-place operation: where it requires grad, the call is refused unless grad mode is off, and
graphs that have saved it notice the change. `output` is the caller's own buffer; only the
refusal applies to it.

What is in host memory where the axis communicates on a device, such as an offloaded shard or
its norm, is carried to that device, and the result back. So is a single element on any other.
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
    check_scratch,
    check_shares,
    check_tensor,
    cut_rows,
    make_output,
)
from hp_platform.axis import MeshAxis
from hp_platform.direct import prepare_direct_exchange
from hp_platform.equal_shares import prepare_equal_all_gather, prepare_equal_reduce_scatter
from hp_platform.handle import NOBODY, Handle, issue, refuse
from hp_platform.ledger import Origin
from hp_platform.staging import brought_back, carried, copied, overwritten, plain, transportable
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
_ALL_OPS = tuple(_OPS)
_SUMS = ("sum", "avg")


def all_gather(
    tensor: Tensor,
    axis: MeshAxis,
    *,
    output: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    lends: bool = False,
    origin: Origin = NOBODY,
) -> Handle[Tensor]:
    """Concatenates the ranks' tensors along dim 0, in coordinate order.

    Args:
        tensor: this rank's share, [rows, ...], contiguous.
        output: contiguous tensor, [all rows, ...], that receives the result; a view into a
            larger buffer will do, and `tensor` may lie at its place in it.
        sizes: rows of every coordinate, zeros allowed; equal when omitted.
        lends: peers may read `tensor` where it is until `Handle.wait_for_readers()` has returned,
            which the caller will wait for before `tensor` is written or the process ends. The
            same on all ranks. A peer reads when it waits for the call: nothing that it does
            before may need what this rank does after `wait_for_readers()`. Of use where
            `share_memory` has found that they can read.

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "all_gather"
    able = check_tensor(name, tensor, axis, origin, rows=True)
    rows = tensor.shape[0]
    shares: Sequence[int] | None = None
    total = rows * axis.size
    if sizes is not None:
        shares = check_shares(name, axis, origin, "sizes", sizes)
        if shares[axis.rank] != rows:
            problem = f"sizes says {shares[axis.rank]} rows for this coordinate, the tensor has "
            refuse(name, axis, origin, f"{problem}{rows}")
        total = sum(shares)
        if shares.count(rows) == axis.size:
            shares = None
    result = make_output(
        name, axis, origin, output, total, tensor,
        lambda: sum(shares[: axis.rank]) if shares is not None else axis.rank * rows,
    )  # fmt: skip
    group = axis.process_group
    if group is None or not result.numel():
        return Handle(copied(tensor, result))
    if able is None:
        staged = all_gather(carried(tensor, axis), axis, sizes=sizes, origin=origin)
        return brought_back(staged, result)
    source, target = transportable(tensor, able), transportable(result, able)
    tensors, size = (tensor, result), result.nbytes
    if shares is None:
        if able.direct:
            begin = prepare_equal_all_gather(source.view(-1), target.view(-1), axis, lends)
            return issue(
                name, axis, origin, lambda: begin(origin), result, size, tensors, tensor.dtype
            )
        return issue(
            name, axis, origin,
            lambda: (all_gather_even(target, source, group=group, async_op=True),),
            result, size, tensors, tensor.dtype,
        )  # fmt: skip
    flat = target.view(-1)
    lengths = [flat.numel() // total * share for share in shares]
    call = prepare_all_gather(
        able.uneven_all_gather, source.view(-1), flat, lengths, axis.rank, group
    )
    return issue(
        name, axis, origin, call.start, result, size, tensors, tensor.dtype, call.keep,
        call.finish, shares,
    )  # fmt: skip


def reduce_scatter(
    tensor: Tensor,
    axis: MeshAxis,
    *,
    output: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    op: str = "sum",
    scratch: Tensor | None = None,
    lends: bool = False,
    origin: Origin = NOBODY,
) -> Handle[Tensor]:
    """Reduces the ranks' tensors and gives coordinate r its rows of dim 0.

    Args:
        tensor: [all rows, ...], contiguous; left as it is. It may be read until `wait()` returns.
        output: contiguous tensor, [this coordinate's rows, ...], that receives the result. It
            may be the part of `tensor` that this coordinate gets, which is then overwritten.
        sizes: rows of every coordinate, zeros allowed; equal when omitted.
        op: "sum" or "avg".
        scratch: 1-D memory of `tensor`'s type for all its rows but this coordinate's, left alone
            until `wait()` returns. Some backends need it and take new memory if none is given.
        lends: as for `all_gather`.

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "reduce_scatter"
    able = check_tensor(name, tensor, axis, origin, True, True)
    if op != "sum":
        check_op(name, axis, origin, op, _SUMS, tensor.dtype)
    rank, rows, shares = axis.rank, tensor.shape[0] // axis.size, None
    if sizes is not None or rows * axis.size != tensor.shape[0]:
        shares = cut_rows(name, axis, origin, "sizes", sizes, tensor)
        rows = shares[rank]
        if shares.count(rows) == axis.size:
            shares = None
    result = make_output(
        name, axis, origin, output, rows, tensor,
        lambda: rank * rows if shares is None else sum(shares[:rank]),
    )  # fmt: skip
    check_scratch(name, axis, origin, scratch, tensor, result)
    group = axis.process_group
    if group is None or not tensor.numel():
        return Handle(copied(tensor, result))
    if able is None:
        staged = reduce_scatter(carried(tensor, axis), axis, sizes=sizes, op=op, origin=origin)
        return brought_back(staged, result)
    source, target = plain(tensor), plain(result)
    tensors, size = (tensor, result), tensor.nbytes
    if shares is None:
        if able.direct:
            prepare = prepare_equal_reduce_scatter(source.view(-1), scratch, axis, lends)
            call = prepare(target.view(-1), origin)
            finish = _then_average(op, target, axis.size, call.finish)
            return issue(
                name, axis, origin, call.start, result, size, tensors, tensor.dtype, call.keep,
                finish,
            )  # fmt: skip
        return issue(
            name, axis, origin,
            lambda: (reduce_scatter_even(target, source, group=group, async_op=True),),
            result, size, tensors, tensor.dtype, (), _then_average(op, target, axis.size),
        )  # fmt: skip
    flat = source.view(-1)
    lengths = [flat.numel() // tensor.shape[0] * share for share in shares]
    call = prepare_reduce_scatter(
        able.uneven_reduce_scatter, flat, target.view(-1), lengths, rank, group
    )
    finish = _then_average(op, target, axis.size, call.finish)
    return issue(
        name, axis, origin, call.start, result, size, tensors, tensor.dtype, call.keep, finish,
        shares,
    )  # fmt: skip


def all_reduce(
    tensor: Tensor,
    axis: MeshAxis,
    *,
    op: str = "sum",
    divisor: float = 1,
    scratch: Tensor | None = None,
    origin: Origin = NOBODY,
) -> Handle[Tensor]:
    """Reduces the ranks' tensors, in place on every rank.

    Args:
        tensor: contiguous, any shape.
        op: "sum", "avg", "max" or "min".
        divisor: what `wait()` divides a sum by.
        scratch: 1-D memory of `tensor`'s type and length, left alone until `wait()` returns. Some
            backends need it and take new memory if none is given.

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "all_reduce"
    able = check_tensor(name, tensor, axis, origin, True, False, True)
    if op != "sum":
        check_op(name, axis, origin, op, _ALL_OPS, tensor.dtype)
    if divisor != 1:
        if op != "sum":
            refuse(name, axis, origin, f"a divisor is of sums only, found op={op!r}")
        check_op(name, axis, origin, "avg", _ALL_OPS, tensor.dtype)
    if scratch is not None:
        check_scratch(name, axis, origin, scratch, tensor, tensor.view(-1)[:0])
    group = axis.process_group
    if group is None or not tensor.numel():
        return Handle(tensor if divisor == 1 else tensor.div_(divisor))
    if able is None:
        staged = all_reduce(carried(tensor, axis), axis, op=op, divisor=divisor, origin=origin)
        return brought_back(staged, tensor)
    target = overwritten(tensor)
    if op == "avg":
        divisor = axis.size
    if able.direct and axis.size == 2 and op in _SUMS:
        call = prepare_direct_exchange(target.view(-1), divisor, scratch, axis.rank, group, origin)
        return issue(
            name, axis, origin, call.start, tensor, tensor.nbytes, (tensor,), tensor.dtype,
            call.keep, call.finish,
        )  # fmt: skip
    return issue(
        name, axis, origin,
        lambda: (dist.all_reduce(target, op=_OPS[op], group=group, async_op=True),),
        tensor, tensor.nbytes, (tensor,), tensor.dtype, (),
        None if divisor == 1 else lambda: target.div_(divisor),
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
    able = check_tensor(name, tensor, axis, origin, writes=True)
    check_coordinate(name, axis, origin, "source", source)
    group = axis.process_group
    if group is None or not tensor.numel():
        return Handle(tensor)
    if able is None:
        staged = broadcast(carried(tensor, axis), axis, source=source, origin=origin)
        return brought_back(staged, tensor)
    target = transportable(overwritten(tensor), able)
    return issue(
        name, axis, origin,
        lambda: (dist.broadcast(target, group_src=source, group=group, async_op=True),),
        tensor, tensor.nbytes, (tensor,), tensor.dtype, parts=source,
    )  # fmt: skip


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
    able = check_tensor(name, tensor, axis, origin, True, False, True)
    if op != "sum":
        check_op(name, axis, origin, op, _ALL_OPS, tensor.dtype)
    check_coordinate(name, axis, origin, "destination", destination)
    group = axis.process_group
    if group is None or not tensor.numel():
        return Handle(tensor)
    if able is None:
        staged = reduce(carried(tensor, axis), axis, destination=destination, op=op, origin=origin)
        return brought_back(staged, tensor)
    target = overwritten(tensor)
    finish = _then_average(op, target, axis.size) if axis.rank == destination else None
    return issue(
        name, axis, origin,
        lambda: (
            dist.reduce(target, group_dst=destination, op=_OPS[op], group=group, async_op=True),
        ),
        tensor, tensor.nbytes, (tensor,), tensor.dtype, (), finish, destination,
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
        output: contiguous tensor, [received rows, ...], that receives the result; not in the
            memory of `tensor`.

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "all_to_all"
    able = check_tensor(name, tensor, axis, origin, rows=True)
    if (input_sizes is None) != (output_sizes is None):
        refuse(name, axis, origin, "give both input_sizes and output_sizes, or neither")
    rows = tensor.shape[0]
    into: list[int] | None = None  # without lengths the backend takes equal blocks
    out_of: list[int] | None = None
    if input_sizes is not None or rows % axis.size:
        out_of = list(cut_rows(name, axis, origin, "input_sizes", input_sizes, tensor))
    if output_sizes is not None and out_of is not None:
        into = list(check_shares(name, axis, origin, "output_sizes", output_sizes))
        if out_of[axis.rank] != into[axis.rank]:
            problem = f"this coordinate sends itself {out_of[axis.rank]} rows but expects "
            refuse(name, axis, origin, f"{problem}{into[axis.rank]}")
        rows = sum(into)
    result = make_output(name, axis, origin, output, rows, tensor)
    group = axis.process_group
    if group is None:
        return Handle(copied(tensor, result))
    if able is None:
        staged = all_to_all(
            carried(tensor, axis), axis,
            input_sizes=input_sizes, output_sizes=output_sizes, origin=origin,
        )  # fmt: skip
        return brought_back(staged, result)
    source, target = transportable(tensor, able), transportable(result, able)
    if source.dtype != tensor.dtype:
        # Lengths count in units of dim 0, which bytes have lost.
        unit = tensor.shape[1:].numel() * tensor.element_size()
        source, target = source.view(tensor.shape[0], unit), target.view(result.shape[0], unit)
    return issue(
        name, axis, origin,
        lambda: (
            dist.all_to_all_single(target, source, into, out_of, group=group, async_op=True),
        ),
        result, tensor.nbytes, (tensor, result), tensor.dtype, parts=out_of,
    )  # fmt: skip


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
