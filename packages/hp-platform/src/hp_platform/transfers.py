"""Messages from one rank of an axis to another, alone or in a batch.

The k-th message from one rank to another meets the k-th that the other receives from it. A
backend may hold a send back until the other side receives, so two ranks that each wait for a
send before they receive wait for ever: `exchange` is for that, it starts everything first.

On NCCL and HCCL the first use of a group must be made by all its ranks; call `barrier` before
a few of them alone exchange something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from hp_platform.arguments import check_coordinate, check_tensor, refuse_overlaps
from hp_platform.axis import MeshAxis
from hp_platform.capabilities import Capabilities
from hp_platform.handle import NOBODY, Handle, issue, refuse
from hp_platform.ledger import Origin
from hp_platform.staging import brought_back, carried, overwritten, transportable

T = TypeVar("T")


@dataclass(frozen=True)
class Send:
    """`tensor`, contiguous, goes to coordinate `destination`."""

    tensor: Tensor
    destination: int


@dataclass(frozen=True)
class Receive:
    """`tensor`, contiguous, is overwritten by what coordinate `source` sends."""

    tensor: Tensor
    source: int


def send(
    tensor: Tensor, axis: MeshAxis, *, destination: int, origin: Origin = NOBODY
) -> Handle[Tensor]:
    """Sends `tensor` to coordinate `destination`, which must call `receive` or `exchange`.

    The tensor must not be written before `wait()` has returned, which may be not before the
    other side receives.

    Raises:
        CollectiveError: an argument cannot be used, or the destination is this rank; nothing
            has been sent.
    """
    name = "send"
    able = check_tensor(name, tensor, axis, origin)
    check_coordinate(name, axis, origin, "destination", destination)
    _refuse_self(name, axis, origin, destination)
    if not tensor.numel():
        return Handle(tensor)
    if able is None:
        staged = send(carried(tensor, axis), axis, destination=destination, origin=origin)
        return staged.delivering(tensor, lambda: None)
    return _start(name, [Send(tensor, destination)], [able], axis, origin, tensor)


def receive(
    tensor: Tensor, axis: MeshAxis, *, source: int, origin: Origin = NOBODY
) -> Handle[Tensor]:
    """Receives into `tensor` what coordinate `source` sends: as many elements of the same type.

    Raises:
        CollectiveError: an argument cannot be used, or the source is this rank; nothing has
            been sent.
    """
    name = "receive"
    able = check_tensor(name, tensor, axis, origin, writes=True)
    check_coordinate(name, axis, origin, "source", source)
    _refuse_self(name, axis, origin, source)
    if not tensor.numel():
        return Handle(tensor)
    if able is None:
        staged = receive(carried(tensor, axis), axis, source=source, origin=origin)
        return brought_back(staged, tensor)
    return _start(name, [Receive(tensor, source)], [able], axis, origin, tensor)


def exchange(
    transfers: Sequence[Send | Receive], axis: MeshAxis, *, origin: Origin = NOBODY
) -> Handle[list[Tensor]]:
    """Makes all transfers at once, in whatever order the ranks list them, and cannot deadlock.

    Only the order of messages between the same two ranks in the same direction counts. A rank
    may send to itself. One entry in the ledger, with the bytes sent and received together.

    Returns:
        A handle of the received tensors, in the order of their `Receive`s.

    Raises:
        CollectiveError: an argument cannot be used, a received tensor shares memory with
            another tensor of the batch, or what this rank sends to itself is not what it
            receives from itself; nothing has been sent.
    """
    name = "exchange"
    abilities = []
    for transfer in transfers:
        if not isinstance(transfer, Send | Receive):
            problem = f"expected Send or Receive, got {type(transfer).__name__}"
            refuse(name, axis, origin, problem)
        writes = isinstance(transfer, Receive)
        able = check_tensor(name, transfer.tensor, axis, origin, writes=writes)
        if able is None:
            problem = f"a tensor is on {transfer.tensor.device}, the axis communicates on "
            refuse(name, axis, origin, f"{problem}{axis.device}; move it there")
        abilities.append(able)
        side = "source" if writes else "destination"
        check_coordinate(name, axis, origin, side, _peer(transfer))
    received = [t.tensor for t in transfers if isinstance(t, Receive)]
    sent = [t.tensor for t in transfers if isinstance(t, Send)]
    refuse_overlaps(name, axis, origin, written=received, read=sent)
    own = _own_pairs(name, transfers, axis, origin)
    for source, target in own:
        overwritten(target).copy_(source.detach())
    away = [
        (transfer, able)
        for transfer, able in zip(transfers, abilities)
        if _peer(transfer) != axis.rank and transfer.tensor.numel()
    ]
    if not away:
        return Handle(received)
    kept, able_of = [t for t, _ in away], [able for _, able in away]
    return _start(name, kept, able_of, axis, origin, received)


def _start(
    name: str,
    transfers: Sequence[Send | Receive],
    abilities: Sequence[Capabilities],
    axis: MeshAxis,
    origin: Origin,
    result: T,
) -> Handle[T]:
    group = axis.process_group
    tensors = tuple(transfer.tensor for transfer in transfers)

    def start() -> list[Any]:
        operations = []
        for transfer, able in zip(transfers, abilities):
            if isinstance(transfer, Send):
                tensor, peer = transportable(transfer.tensor, able), transfer.destination
                operations.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=peer))
            else:
                tensor, peer = transportable(overwritten(transfer.tensor), able), transfer.source
                operations.append(dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer))
        return dist.batch_isend_irecv(operations)

    size = sum(tensor.nbytes for tensor in tensors)
    parts = [0] * axis.size
    for transfer in transfers:
        if isinstance(transfer, Send):
            parts[transfer.destination] += transfer.tensor.nbytes
    return issue(
        name, axis, origin, start, result, size, tensors, tensors[0].dtype, parts=parts, alike=False
    )


def _peer(transfer: Send | Receive) -> int:
    return transfer.destination if isinstance(transfer, Send) else transfer.source


def _refuse_self(name: str, axis: MeshAxis, origin: Origin, peer: int) -> None:
    if peer == axis.rank:
        problem = "a rank cannot send to itself alone, for nothing would receive; use exchange"
        refuse(name, axis, origin, f"{problem}, or copy")


def _own_pairs(
    name: str, transfers: Sequence[Send | Receive], axis: MeshAxis, origin: Origin
) -> list[tuple[Tensor, Tensor]]:
    """What this rank sends to itself, with where it goes."""
    own = [t for t in transfers if _peer(t) == axis.rank]
    sent = [t.tensor for t in own if isinstance(t, Send)]
    received = [t.tensor for t in own if isinstance(t, Receive)]
    found = [(tuple(t.shape), t.dtype) for t in sent]
    wanted = [(tuple(t.shape), t.dtype) for t in received]
    if found != wanted:
        problem = f"this rank sends itself {found} but receives {wanted} from itself"
        refuse(name, axis, origin, f"{problem}; they must agree")
    return list(zip(sent, received))
