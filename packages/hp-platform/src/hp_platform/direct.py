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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform.records import Origin
from hp_platform.uneven import Prepared

_GATHER, _SCATTER, _EXCHANGE, _NEVER = 0x40000001, 0x40000002, 0x40000003, 0x40000004
"""Added to tags: messages of different operations do not meet, nor do they meet those that a
program itself sends over the same group."""


def prepare_direct_all_gather(
    source: Tensor, target: Tensor, rank: int, group: Any
) -> Callable[[Origin], list[Any]]:
    """Fills flat `target` with every coordinate's flat `source`, one after another.

    Returns:
        What starts it, as often as one likes.
    """
    parts = target.split(source.numel())
    senders = [(peer, parts[peer]) for peer in _before(rank, len(parts))]
    receivers = _after(rank, len(parts))

    def start(origin: Origin) -> list[Any]:
        tag = origin.tag + _GATHER
        works = [_receive(part, peer, group, tag) for peer, part in senders]
        works += [_send(source, peer, group, tag) for peer in receivers]
        if parts[rank].data_ptr() != source.data_ptr():
            parts[rank].copy_(source)
        return works

    return start


def prepare_direct_reduce_scatter(
    source: Tensor,
    target: Tensor,
    rank: int,
    group: Any,
    scratch: Tensor | None,
    origin: Origin,
) -> Prepared:
    """Fills flat `target` with this coordinate's share of the sum of all flat `source`s.

    Its own share comes first and the others follow in coordinate order, whatever arrives first.

    Args:
        scratch: at least as long as `source`; made when None.
    """
    length = target.numel()
    parts = source.split(length)
    if scratch is None:
        scratch = source.new_empty(source.numel() - length)
    peers = [peer for peer in range(len(parts)) if peer != rank]
    received = dict(zip(peers, scratch.split(length)))
    tag = origin.tag + _SCATTER

    def start() -> list[Any]:
        works = [_receive(received[peer], peer, group, tag) for peer in _before(rank, len(parts))]
        works += [_send(parts[peer], peer, group, tag) for peer in _after(rank, len(parts))]
        return works

    def finish() -> None:
        first, *others = received.values()
        torch.add(parts[rank], first, out=target)
        for other in others:
            target.add_(other)

    return Prepared(start, finish, (scratch,))


def prepare_direct_exchange(target: Tensor, rank: int, group: Any, origin: Origin) -> Prepared:
    """Adds the other rank's flat `target` to this one's, on a group of two.

    Sums of two do not depend on their order, so both ranks get the same bits.
    """
    received = target.new_empty(target.numel())
    tag, peer = origin.tag + _EXCHANGE, 1 - rank

    def start() -> list[Any]:
        return [_receive(received, peer, group, tag), _send(target, peer, group, tag)]

    def finish() -> None:
        target.add_(received)

    return Prepared(start, finish, (received,))


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
