"""Collectives out of sends and receives between every two ranks: all-gathers and reduce-scatters of
equal shares, and the all-reduce of two ranks.

Nothing is staged: every share travels from the memory it lies in to the memory it is meant for.
Calls on one group match in the order in which they are issued, as those of other collectives do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform.uneven import Prepared

_TAG = 0x4850
"""Keeps these messages apart from those that a program itself sends over the same group."""


def prepare_direct_all_gather(source: Tensor, target: Tensor, rank: int, group: Any) -> Prepared:
    """Fills flat `target` with every coordinate's flat `source`, one after another."""
    parts = target.split(source.numel())

    def start() -> list[Any]:
        works = [_receive(parts[peer], peer, group) for peer in _before(rank, len(parts))]
        works += [_send(source, peer, group) for peer in _after(rank, len(parts))]
        if parts[rank].data_ptr() != source.data_ptr():
            parts[rank].copy_(source)
        return works

    return Prepared(start)


def prepare_direct_reduce_scatter(
    source: Tensor, target: Tensor, rank: int, group: Any, scratch: Tensor | None
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

    def start() -> list[Any]:
        works = [_receive(received[peer], peer, group) for peer in _before(rank, len(parts))]
        works += [_send(parts[peer], peer, group) for peer in _after(rank, len(parts))]
        return works

    def finish() -> None:
        first, *others = received.values()
        torch.add(parts[rank], first, out=target)
        for other in others:
            target.add_(other)

    return Prepared(start, finish, (scratch,))


def prepare_direct_exchange(target: Tensor, rank: int, group: Any) -> Prepared:
    """Adds the other rank's flat `target` to this one's, on a group of two.

    Sums of two do not depend on their order, so both ranks get the same bits.
    """
    received = target.new_empty(target.numel())

    def start() -> list[Any]:
        return [_receive(received, 1 - rank, group), _send(target, 1 - rank, group)]

    def finish() -> None:
        target.add_(received)

    return Prepared(start, finish, (received,))


def _send(tensor: Tensor, peer: int, group: Any) -> Any:
    return dist.isend(tensor, group=group, group_dst=peer, tag=_TAG)


def _receive(tensor: Tensor, peer: int, group: Any) -> Any:
    return dist.irecv(tensor, group=group, group_src=peer, tag=_TAG)


def _before(rank: int, size: int) -> list[int]:
    """The other coordinates, nearest first, from which a rank receives."""
    return [(rank - step) % size for step in range(1, size)]


def _after(rank: int, size: int) -> list[int]:
    """Those to which it sends: when all do so in this order, all receive in that of `_before`."""
    return [(rank + step) % size for step in range(1, size)]
