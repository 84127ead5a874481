"""Every collective of the project, on plain tensors: the only caller of communication.

Each function checks its arguments, issues an asynchronous call and returns a `Handle`.
Nothing is valid before `Handle.wait()`: some backends write results only there. Backends
give no order between calls in flight, so a call whose input is another's result must be
issued after that other's wait.

An axis of size 1 has no group: its collectives copy locally, send nothing and are not
entered in the ledger. The same holds for messages without elements.
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform.axis import MeshAxis
from hp_platform.capabilities import TABLE, Capabilities, Uneven, capabilities_of
from hp_platform.errors import CollectiveError, PeerError
from hp_platform.ledger import Entries, Origin, enter_completion, enter_issue, enter_wait

T = TypeVar("T")

_logger = logging.getLogger("hp_platform")

_NOBODY = Origin("unknown")
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# torch 2.13 renamed these two; 2.12 has the old names only.
_all_gather_even = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_even = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle(Generic[T]):
    """A collective in flight.

    Keeps every tensor the call reads or writes alive until `wait()` has returned, so callers
    may drop theirs. A handle that is dropped without `wait()` warns, naming who asked, and
    waits: its buffers must not be reused while the backend still works on them.
    """

    __slots__ = (
        "__weakref__", "_axis", "_entries", "_error", "_finish", "_keep", "_operation",
        "_origin", "_result", "_works", "done",
    )  # fmt: skip

    def __init__(
        self,
        result: T,
        works: Sequence[Any] = (),
        *,
        operation: str = "",
        axis: MeshAxis | None = None,
        origin: Origin = _NOBODY,
        keep: Sequence[Tensor] = (),
        finish: Callable[[], None] | None = None,
        entries: Entries = (),
    ) -> None:
        self._result = result
        self._works = works
        self._operation = operation
        self._axis = axis
        self._origin = origin
        self._keep = keep
        self._finish = finish
        self._entries = entries
        self._error: PeerError | None = None
        self.done = axis is None

    def wait(self) -> T:
        """Returns the result once it is valid; further calls return it again.

        On accelerators the result is valid for work queued on the current stream afterwards.

        Raises:
            PeerError: the backend failed, with operation, axis and origin named.
        """
        if self._error is not None:
            raise self._error
        if not self.done:
            self._settle()
        return self._result

    def _settle(self) -> None:
        if self._entries:
            enter_wait(self._entries)
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            assert self._axis is not None
            self._error = _peer_error(self._operation, self._axis, self._origin, error)
            self.done = True
            raise self._error from error
        if self._finish is not None:
            self._finish()
        self.done = True
        self._works, self._keep, self._finish = (), (), None
        if self._entries:
            enter_completion(self._entries)

    def __repr__(self) -> str:
        state = "done" if self.done else "in flight"
        return f"<Handle {self._operation} {state}, asked by {self._origin}>"

    def __del__(self) -> None:
        if getattr(self, "done", True) or self._axis is None:
            return
        message = (
            f"the handle of {_where(self._operation, self._axis, self._origin)} was dropped "
            "without wait(); its result is lost. Keep the handle and call wait()"
        )
        # ResourceWarning is hidden by Python's default filters; the log line is not.
        _logger.warning(message)
        warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
        self._settle()


def all_gather(
    tensor: Tensor,
    axis: MeshAxis,
    *,
    output: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    origin: Origin = _NOBODY,
) -> Handle[Tensor]:
    """Concatenates the ranks' tensors along dim 0, in coordinate order.

    Args:
        tensor: this rank's share, [rows, ...], contiguous.
        output: contiguous tensor, [all rows, ...], that receives the result; a view into a
            larger buffer will do, and so will one that holds `tensor` at its place.
        sizes: rows of every coordinate, zeros allowed; equal when omitted.

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "all_gather"
    row = _check(name, tensor, axis, origin, reduces=False, minimum_ndim=1)
    shares = _shares(name, axis, origin, sizes, tensor.shape[0])
    if shares[axis.rank] != tensor.shape[0]:
        problem = f"sizes says {shares[axis.rank]} rows for this coordinate, the tensor has "
        _refuse(name, axis, origin, f"{problem}{tensor.shape[0]}")
    shape = (sum(shares), *tensor.shape[1:])
    result = _output(name, axis, origin, output, shape, tensor)
    if result.numel() == 0:
        return Handle(result)
    if axis.process_group is None:
        return Handle(_copy_into(result, tensor))
    source, target = _as_transportable(tensor, row), _as_transportable(result, row)
    group, parts = axis.process_group, list(target.split(_flat(shares, target)))
    keep: list[Tensor] = [source, target]
    finish = None
    even = len(set(shares)) == 1
    if even:

        def start() -> list[Any]:
            return [_all_gather_even(target, source, group=group, async_op=True)]
    elif row.uneven_all_gather is Uneven.LIST:

        def start() -> list[Any]:
            return [dist.all_gather(parts, source, group=group, async_op=True)]
    elif row.uneven_all_gather is Uneven.ROOTED:

        def start() -> list[Any]:
            _copy_into(parts[axis.rank], source)
            return [
                dist.broadcast(part, group_src=peer, group=group, async_op=True)
                for peer, part in enumerate(parts)
                if part.numel()
            ]
    else:
        longest = max(part.numel() for part in parts)
        padded = source.new_zeros(longest)
        gathered = source.new_empty(longest * axis.size)
        keep += [padded, gathered]

        def start() -> list[Any]:
            padded[: source.numel()].copy_(source)
            return [_all_gather_even(gathered, padded, group=group, async_op=True)]

        def finish() -> None:
            for part, piece in zip(parts, gathered.split(longest)):
                part.copy_(piece[: part.numel()])

    return _issue(name, axis, origin, start, result, result.nbytes, (tensor, result), keep, finish)


def reduce_scatter(
    tensor: Tensor,
    axis: MeshAxis,
    *,
    output: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    op: str = "sum",
    origin: Origin = _NOBODY,
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
    row = _check(name, tensor, axis, origin, reduces=True, minimum_ndim=1)
    _check_op(name, axis, origin, op, ("sum", "avg"), tensor.dtype)
    if sizes is None and tensor.shape[0] % axis.size:
        problem = f"{tensor.shape[0]} rows do not divide by {axis.size}; give sizes"
        _refuse(name, axis, origin, problem)
    shares = _shares(name, axis, origin, sizes, tensor.shape[0] // axis.size)
    if sum(shares) != tensor.shape[0]:
        problem = f"sizes {list(shares)} add up to {sum(shares)}, the tensor has "
        _refuse(name, axis, origin, f"{problem}{tensor.shape[0]} rows")
    shape = (shares[axis.rank], *tensor.shape[1:])
    result = _output(name, axis, origin, output, shape, tensor)
    if tensor.numel() == 0:
        return Handle(result)
    if axis.process_group is None:
        return Handle(_copy_into(result, tensor))
    source, target = _plain(tensor), _plain(result).view(-1)
    group, parts = axis.process_group, list(source.view(-1).split(_flat(shares, source.view(-1))))
    sum_op = dist.ReduceOp.SUM
    keep: list[Tensor] = [source, target]
    unpack: Callable[[], None] | None = None
    even = len(set(shares)) == 1
    if even:
        flat = source.view(-1)

        def start() -> list[Any]:
            return [_reduce_scatter_even(target, flat, op=sum_op, group=group, async_op=True)]
    elif row.uneven_reduce_scatter is Uneven.LIST:

        def start() -> list[Any]:
            return [dist.reduce_scatter(target, parts, op=sum_op, group=group, async_op=True)]
    elif row.uneven_reduce_scatter is Uneven.ROOTED:
        # A reduce may scribble over its tensor on every rank, and the input must stay.
        scratch = [part.clone() for part in parts]
        keep += scratch

        def start() -> list[Any]:
            return [
                dist.reduce(piece, group_dst=peer, op=sum_op, group=group, async_op=True)
                for peer, piece in enumerate(scratch)
                if piece.numel()
            ]

        def unpack() -> None:
            target.copy_(scratch[axis.rank])
    else:
        longest = max(part.numel() for part in parts)
        padded = source.new_zeros(axis.size, longest)
        reduced = source.new_empty(longest)
        keep += [padded, reduced]

        def start() -> list[Any]:
            for line, part in zip(padded, parts):
                line[: part.numel()].copy_(part)
            flat = padded.view(-1)
            return [_reduce_scatter_even(reduced, flat, op=sum_op, group=group, async_op=True)]

        def unpack() -> None:
            target.copy_(reduced[: target.numel()])

    finish = _finish_average(op, target, axis.size, unpack)
    return _issue(name, axis, origin, start, result, tensor.nbytes, (tensor, result), keep, finish)


def all_reduce(
    tensor: Tensor, axis: MeshAxis, *, op: str = "sum", origin: Origin = _NOBODY
) -> Handle[Tensor]:
    """Reduces the ranks' tensors, in place on every rank. `op`: "sum", "avg", "max", "min".

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "all_reduce"
    _check(name, tensor, axis, origin, reduces=True)
    _check_op(name, axis, origin, op, tuple(_OPS), tensor.dtype)
    if axis.process_group is None or tensor.numel() == 0:
        return Handle(tensor)
    target, group = _plain(tensor), axis.process_group

    def start() -> list[Any]:
        return [dist.all_reduce(target, op=_OPS[op], group=group, async_op=True)]

    finish = _finish_average(op, target, axis.size)
    return _issue(name, axis, origin, start, tensor, tensor.nbytes, (tensor,), (target,), finish)


def broadcast(
    tensor: Tensor, axis: MeshAxis, *, source: int, origin: Origin = _NOBODY
) -> Handle[Tensor]:
    """Copies the tensor of coordinate `source` over those of all others, in place.

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "broadcast"
    row = _check(name, tensor, axis, origin, reduces=False)
    _check_coordinate(name, axis, origin, "source", source)
    if axis.process_group is None or tensor.numel() == 0:
        return Handle(tensor)
    target, group = _as_transportable(tensor, row), axis.process_group

    def start() -> list[Any]:
        return [dist.broadcast(target, group_src=source, group=group, async_op=True)]

    return _issue(name, axis, origin, start, tensor, tensor.nbytes, (tensor,), (target,))


def reduce(
    tensor: Tensor,
    axis: MeshAxis,
    *,
    destination: int,
    op: str = "sum",
    origin: Origin = _NOBODY,
) -> Handle[Tensor]:
    """Reduces the ranks' tensors into that of coordinate `destination`, in place.

    On the other coordinates the tensor is scratch space afterwards: its values depend on the
    backend. `op`: "sum", "avg", "max", "min".

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "reduce"
    _check(name, tensor, axis, origin, reduces=True)
    _check_op(name, axis, origin, op, tuple(_OPS), tensor.dtype)
    _check_coordinate(name, axis, origin, "destination", destination)
    if axis.process_group is None or tensor.numel() == 0:
        return Handle(tensor)
    target, group = _plain(tensor), axis.process_group

    def start() -> list[Any]:
        return [dist.reduce(target, group_dst=destination, op=_OPS[op], group=group, async_op=True)]

    finish = _finish_average(op, target, axis.size) if axis.rank == destination else None
    return _issue(name, axis, origin, start, tensor, tensor.nbytes, (tensor,), (target,), finish)


def all_to_all(
    tensor: Tensor,
    axis: MeshAxis,
    *,
    input_sizes: Sequence[int] | None = None,
    output_sizes: Sequence[int] | None = None,
    output: Tensor | None = None,
    origin: Origin = _NOBODY,
) -> Handle[Tensor]:
    """Sends every coordinate its block of rows and receives one block from each.

    Args:
        tensor: [rows, ...], contiguous: blocks along dim 0 in coordinate order.
        input_sizes: rows sent to every coordinate; output_sizes: rows received from each.
            Both or neither: without them all blocks are equal.
        output: contiguous tensor, [received rows, ...], that receives the result.

    Raises:
        CollectiveError: an argument cannot be used; nothing has been sent.
    """
    name = "all_to_all"
    row = _check(name, tensor, axis, origin, reduces=False, minimum_ndim=1)
    if (input_sizes is None) != (output_sizes is None):
        _refuse(name, axis, origin, "give both input_sizes and output_sizes, or neither")
    if input_sizes is None and tensor.shape[0] % axis.size:
        problem = f"{tensor.shape[0]} rows do not divide by {axis.size}; give input_sizes"
        _refuse(name, axis, origin, f"{problem} and output_sizes")
    sent = _shares(name, axis, origin, input_sizes, tensor.shape[0] // axis.size)
    received = _shares(name, axis, origin, output_sizes, tensor.shape[0] // axis.size)
    if sum(sent) != tensor.shape[0]:
        problem = f"input_sizes {list(sent)} add up to {sum(sent)}, the tensor has "
        _refuse(name, axis, origin, f"{problem}{tensor.shape[0]} rows")
    if sent[axis.rank] != received[axis.rank]:
        problem = f"this coordinate sends itself {sent[axis.rank]} rows but receives "
        _refuse(name, axis, origin, f"{problem}{received[axis.rank]}")
    shape = (sum(received), *tensor.shape[1:])
    result = _output(name, axis, origin, output, shape, tensor)
    # A rank that sends and receives nothing still takes part: others cannot know it.
    if axis.process_group is None:
        return Handle(_copy_into(result, tensor))
    source, target = _as_transportable(tensor, row), _as_transportable(result, row)
    group = axis.process_group
    row_length = _row_length(tensor.shape, tensor, source)
    out_lengths = [rows * row_length for rows in received]
    in_lengths = [rows * row_length for rows in sent]

    def start() -> list[Any]:
        return [
            dist.all_to_all_single(
                target, source, out_lengths, in_lengths, group=group, async_op=True
            )
        ]

    keep = (source, target)
    return _issue(name, axis, origin, start, result, tensor.nbytes, (tensor, result), keep)


def gather_objects(value: Any, axis: MeshAxis, *, origin: Origin = _NOBODY) -> list[Any]:
    """Every coordinate's value, in coordinate order. For small picklable values; blocks."""
    if axis.process_group is None:
        return [value]
    group = axis.process_group
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(axis.device)
    length = torch.tensor([payload.numel()], dtype=torch.int64, device=axis.device)
    lengths = torch.empty(axis.size, dtype=torch.int64, device=axis.device)

    def start() -> list[Any]:
        return [_all_gather_even(lengths, length, group=group, async_op=True)]

    name = "gather_objects"
    _issue(name, axis, origin, start, lengths, lengths.nbytes, (), (length,)).wait()
    sizes = lengths.tolist()
    longest = max(sizes)
    padded, gathered = payload.new_zeros(longest), payload.new_empty(longest * axis.size)
    padded[: payload.numel()].copy_(payload)

    def start_payload() -> list[Any]:
        return [_all_gather_even(gathered, padded, group=group, async_op=True)]

    _issue(name, axis, origin, start_payload, gathered, gathered.nbytes, (), (padded,)).wait()
    pieces = gathered.cpu().split(longest)
    return [pickle.loads(bytes(p[:size].tolist())) for p, size in zip(pieces, sizes)]


def barrier(axis: MeshAxis, *, origin: Origin = _NOBODY) -> None:
    """Returns once every coordinate has entered it."""
    if axis.process_group is None:
        return
    token, group = torch.zeros(1, device=axis.device), axis.process_group

    def start() -> list[Any]:
        return [dist.all_reduce(token, group=group, async_op=True)]

    _issue("barrier", axis, origin, start, token, 0, (), (token,)).wait().cpu()


def _issue(
    operation: str,
    axis: MeshAxis,
    origin: Origin,
    start: Callable[[], list[Any]],
    result: Tensor,
    size: int,
    tensors: Sequence[Tensor],
    keep: Sequence[Tensor],
    finish: Callable[[], None] | None = None,
) -> Handle[Tensor]:
    """Enters the call in the ledger, makes it, and wraps what is in flight."""
    dtype = tensors[0].dtype if tensors else None
    entries = enter_issue(operation, axis.name, axis.size, axis.tier, size, tensors, dtype, origin)
    try:
        works = start()
    except RuntimeError as error:
        raise _peer_error(operation, axis, origin, error) from error
    return Handle(
        result,
        works,
        operation=operation,
        axis=axis,
        origin=origin,
        keep=(*tensors, *keep),
        finish=finish,
        entries=entries,
    )


def _finish_average(
    op: str, target: Tensor, size: int, unpack: Callable[[], None] | None = None
) -> Callable[[], None] | None:
    if op != "avg":
        return unpack

    def finish() -> None:
        if unpack is not None:
            unpack()
        target.div_(size)

    return finish


def _check(
    operation: str,
    tensor: Tensor,
    axis: MeshAxis,
    origin: Origin,
    *,
    reduces: bool,
    minimum_ndim: int = 0,
) -> Capabilities:
    """Refuses what a backend would corrupt, misread or hang on; returns the backend's row."""
    if type(tensor) is not Tensor and not isinstance(tensor, Tensor):
        _refuse(operation, axis, origin, f"expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        problem = f"the tensor of shape {tuple(tensor.shape)} is not contiguous"
        if tensor.layout == torch.strided:
            problem = f"{problem} (strides {tensor.stride()})"
        _refuse(operation, axis, origin, f"{problem}; call .contiguous()")
    if tensor.ndim < minimum_ndim:
        _refuse(operation, axis, origin, "the tensor is 0-dimensional and has no rows")
    if tensor.device != axis.device:
        problem = f"the tensor is on {tensor.device}, the axis communicates on {axis.device}"
        _refuse(operation, axis, origin, f"{problem}; move it there")
    if axis.process_group is None:
        return TABLE["gloo"]
    row = capabilities_of(axis.backend, axis.device.type)
    if row is None:
        problem = f"backend {axis.backend!r} on {axis.device.type} is not supported"
        _refuse(operation, axis, origin, f"{problem}; known are {', '.join(TABLE)}")
    if reduces and tensor.dtype not in row.dtypes:
        known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in row.dtypes))
        problem = f"{row.backend} cannot reduce {tensor.dtype}; convert to one of {known}"
        _refuse(operation, axis, origin, problem)
    return row


def _check_op(
    operation: str,
    axis: MeshAxis,
    origin: Origin,
    op: str,
    known: tuple[str, ...],
    dtype: torch.dtype,
) -> None:
    if op not in known:
        _refuse(operation, axis, origin, f"op {op!r} is unknown; use one of {', '.join(known)}")
    if op == "avg" and not dtype.is_floating_point:
        _refuse(operation, axis, origin, f"the average of {dtype} is not defined; use op='sum'")


def _check_coordinate(
    operation: str, axis: MeshAxis, origin: Origin, what: str, coordinate: int
) -> None:
    if not 0 <= coordinate < axis.size:
        problem = f"{what}={coordinate} is not a coordinate of the axis"
        _refuse(operation, axis, origin, f"{problem}; use 0 to {axis.size - 1}")


def _shares(
    operation: str, axis: MeshAxis, origin: Origin, sizes: Sequence[int] | None, equal: int
) -> tuple[int, ...]:
    if sizes is None:
        return (equal,) * axis.size
    shares = tuple(int(size) for size in sizes)
    if len(shares) != axis.size or min(shares) < 0:
        problem = f"sizes {list(shares)} must be {axis.size} non-negative numbers, one a rank"
        _refuse(operation, axis, origin, problem)
    return shares


def _output(
    operation: str,
    axis: MeshAxis,
    origin: Origin,
    output: Tensor | None,
    shape: tuple[int, ...],
    tensor: Tensor,
) -> Tensor:
    if output is None:
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    if tuple(output.shape) != shape:
        found = tuple(output.shape)
        _refuse(operation, axis, origin, f"output has shape {found}, the result {shape}")
    if output.dtype != tensor.dtype or output.device != tensor.device:
        problem = f"output is {output.dtype} on {output.device}, the tensor {tensor.dtype}"
        _refuse(operation, axis, origin, f"{problem} on {tensor.device}; they must agree")
    if not output.is_contiguous():
        problem = f"output of shape {shape} is not contiguous (strides {output.stride()})"
        _refuse(operation, axis, origin, f"{problem}; give a contiguous view")
    return output


def _copy_into(target: Tensor, source: Tensor) -> Tensor:
    if target.data_ptr() != source.data_ptr():
        _plain(target).copy_(_plain(source))
    return target


def _plain(tensor: Tensor) -> Tensor:
    """The same storage outside autograd: communication is never part of a graph."""
    return tensor.detach() if tensor.requires_grad else tensor


def _as_transportable(tensor: Tensor, row: Capabilities) -> Tensor:
    """The tensor as one dimension, as bytes where the backend does not know its type."""
    flat = _plain(tensor).view(-1)
    return flat if tensor.dtype in row.dtypes else flat.view(torch.uint8)


def _flat(shares: Sequence[int], flat: Tensor) -> list[int]:
    """Elements of `flat` that each share of rows has."""
    rows = sum(shares)
    return [flat.numel() // rows * share for share in shares]


def _row_length(shape: Sequence[int], tensor: Tensor, flat: Tensor) -> int:
    """Elements of the transported form that one row has."""
    elements = list(accumulate([1, *shape[1:]], lambda a, b: a * b))[-1]
    return elements * tensor.element_size() // flat.element_size()


def _where(operation: str, axis: MeshAxis, origin: Origin) -> str:
    place = f"rank {axis.global_rank}, coordinate {axis.rank} of {axis.size}"
    return f"{operation} on mesh axis {axis.name!r} ({place}), asked by {origin}"


def _refuse(operation: str, axis: MeshAxis, origin: Origin, problem: str) -> NoReturn:
    raise CollectiveError(f"{_where(operation, axis, origin)}: {problem}")


def _peer_error(operation: str, axis: MeshAxis, origin: Origin, error: RuntimeError) -> PeerError:
    return PeerError(
        f"rank {axis.global_rank}: lost its peers while waiting in {operation} on axis "
        f"{axis.name} (ranks {list(axis.ranks)}), asked by {origin}; the backend says: {error}"
    )
