"""Collectives out of sends and receives between every two ranks: all-gathers and reduce-scatters of
equal shares, and the all-reduce of two ranks.

Nothing is staged: every share travels from the memory it lies in to the memory it is meant for.
Calls of one origin match in the order in which they are issued. Those of different origins do not
match at all: where ranks issue different collectives they wait, until `lookout` finds out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform.division import divide_
from hp_platform.records import Origin
from hp_platform.topology import Tier
from hp_platform.uneven import Prepared

if TYPE_CHECKING:
    from hp_platform.axis import MeshAxis

_GATHER, _SCATTER, _EXCHANGE, _NEVER = 0x40000001, 0x40000002, 0x40000003, 0x40000004
"""Added to tags: messages of different operations do not meet, nor do they meet those that a
program itself sends over the same group."""

_BLOCK = 1 << 16
"""Elements."""


def prepare_direct_all_gather(
    source: Tensor, target: Tensor, rank: int, group: Any, sends_first: bool
) -> Callable[[Origin], list[Any]]:
    """Fills flat `target` with every coordinate's flat `source`, one after another.

    Args:
        sends_first: see `sends_first_on`.

    Returns:
        What starts it, as often as one likes.
    """
    parts = target.split(source.numel())
    senders = [(_receive, parts[peer], peer) for peer in _before(rank, len(parts))]
    receivers = [(_send, source, peer) for peer in _after(rank, len(parts))]
    messages = receivers + senders if sends_first else senders + receivers

    def start(origin: Origin) -> list[Any]:
        tag = origin.tag + _GATHER
        works = [begin(part, peer, group, tag) for begin, part, peer in messages]
        if parts[rank].data_ptr() != source.data_ptr():
            parts[rank].copy_(source)
        return works

    return start


def prepare_direct_reduce_scatter(
    source: Tensor,
    scratch: Tensor | None,
    rank: int,
    size: int,
    group: Any,
    sends_first: bool,
) -> Callable[[Tensor, Origin], Prepared]:
    """Fills a flat target with this coordinate's share of the sum of all flat `source`s.

    Its own share comes first and the others follow in coordinate order, whatever arrives first.

    Args:
        scratch: as long as the others' shares, or longer; made for every call when None.
        sends_first: see `sends_first_on`.

    Returns:
        What prepares a call into a given target, as often as one likes.
    """
    length = source.numel() // size
    own, others = source.split(length)[rank], source.numel() - length
    receivers = [(_send, source.split(length)[peer], peer) for peer in _after(rank, size)]

    def prepare(target: Tensor, origin: Origin) -> Prepared:
        memory = source.new_empty(others) if scratch is None else scratch
        peers = [peer for peer in range(size) if peer != rank]
        received = dict(zip(peers, memory.split(length)))
        senders = [(_receive, received[peer], peer) for peer in _before(rank, size)]
        messages = receivers + senders if sends_first else senders + receivers
        tag = origin.tag + _SCATTER

        def start() -> list[Any]:
            return [begin(part, peer, group, tag) for begin, part, peer in messages]

        def finish() -> None:
            first, *rest = received.values()
            torch.add(own, first, out=target)
            for other in rest:
                target.add_(other)

        return Prepared(start, finish, (memory,))

    return prepare


def prepare_direct_exchange(
    target: Tensor,
    divisor: float,
    scratch: Tensor | None,
    rank: int,
    group: Any,
    origin: Origin,
) -> Prepared:
    """Adds the other rank's flat `target` to this one's, on a group of two, and divides the sum.

    Sums of two do not depend on their order, so both ranks get the same bits.

    Args:
        divisor: 1 for none.
        scratch: as long as `target`, or longer; made when None.
    """
    length = target.numel()
    received = target.new_empty(length) if scratch is None else scratch[:length]
    tag, peer = origin.tag + _EXCHANGE, 1 - rank

    def start() -> list[Any]:
        return [_receive(received, peer, group, tag), _send(target, peer, group, tag)]

    def finish() -> None:
        if divisor == 1:
            target.add_(received)
            return
        # Block by block, so that the division finds the sum in the core's own cache.
        for summed, other in zip(target.split(_BLOCK), received.split(_BLOCK)):
            divide_(summed.add_(other), divisor)

    return Prepared(start, finish, (received,))


def sends_first_on(axis: MeshAxis) -> bool:
    """Whether to start sends before receives.

    A rank that is ready to receive asks for the data over the same connection. On a slow tier the
    request must not wait behind this rank's own data, or only one direction is used at a time. On a
    fast one the calling thread writes at once what has been asked for, and should do so before
    anything comes in: gloo's thread cannot read meanwhile, for the connection has one lock, and
    tries again and again, on a core that others need.
    """
    return axis.tier is Tier.FAST


def break_off(group: Any, peers: Iterable[int]) -> None:
    """Makes every wait on a gloo group raise, whatever thread is in it; it is of no use afterwards.

    gloo closes all connections of a group one of whose messages times out, unless that message's
    own connection had been closed before.
    """
    for peer in peers:
        with contextlib.suppress(RuntimeError, ValueError):
            _receive(torch.empty(1), peer, group, _NEVER).wait(timedelta(milliseconds=1))


def _send(tensor: Tensor, peer: int, group: Any, tag: int) -> Any:
    return dist.isend(tensor, group=group, group_dst=peer, tag=tag)


def _receive(tensor: Tensor, peer: int, group: Any, tag: int) -> Any:
    return dist.irecv(tensor, group=group, group_src=peer, tag=tag)


def _before(rank: int, size: int) -> list[int]:
    """The other coordinates, nearest first, from which a rank receives."""
    return [(rank - step) % size for step in range(1, size)]


def _after(rank: int, size: int) -> list[int]:
    """Those to which it sends: when all do so in this order, all receive in that of `_before`."""
    return [(rank + step) % size for step in range(1, size)]
