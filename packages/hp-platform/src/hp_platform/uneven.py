"""Collectives with shares of different lengths, made out of what a backend has.

Every function gets flat tensors and the length of every coordinate's share, and returns a
`Prepared` call. Which one is used is decided by `capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hp_platform.capabilities import Uneven

# torch 2.13 renamed these two; 2.12 has the old names only.
all_gather_even = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_even = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Prepared:
    """A call that is ready to be made.

    Attributes:
        start: makes it and returns the backend's works.
        finish: what remains once these have been waited for; None if nothing does.
        keep: scratch tensors that must live until then.
    """

    start: Callable[[], Sequence[Any]]
    finish: Callable[[], None] | None = None
    keep: tuple[Tensor, ...] = ()


def prepare_all_gather(
    how: Uneven, source: Tensor, target: Tensor, lengths: Sequence[int], rank: int, group: Any
) -> Prepared:
    """Fills `target` with every coordinate's `source`, one after another."""
    parts = target.split(list(lengths))
    if how is Uneven.LIST:
        return Prepared(lambda: [dist.all_gather(list(parts), source, group=group, async_op=True)])
    if how is Uneven.ROOTED:
        return _gather_by_broadcasts(source, parts, rank, group)
    return _gather_padded(source, parts, group)


def prepare_reduce_scatter(
    how: Uneven, source: Tensor, target: Tensor, lengths: Sequence[int], rank: int, group: Any
) -> Prepared:
    """Fills `target` with this coordinate's share of the sum of all `source`s."""
    parts = source.split(list(lengths))
    if how is Uneven.LIST:
        return Prepared(
            lambda: [dist.reduce_scatter(target, list(parts), group=group, async_op=True)]
        )
    if how is Uneven.ROOTED:
        return _scatter_by_reduces(parts, target, rank, group)
    return _scatter_padded(parts, target, group)


def _gather_by_broadcasts(
    source: Tensor, parts: Sequence[Tensor], rank: int, group: Any
) -> Prepared:
    def start() -> list[Any]:
        if parts[rank].data_ptr() != source.data_ptr():
            parts[rank].copy_(source)
        return [
            dist.broadcast(part, group_src=peer, group=group, async_op=True)
            for peer, part in enumerate(parts)
            if part.numel()
        ]

    return Prepared(start)


def _gather_padded(source: Tensor, parts: Sequence[Tensor], group: Any) -> Prepared:
    longest = max(part.numel() for part in parts)
    padded = source.new_zeros(longest)
    gathered = source.new_empty(longest * len(parts))

    def start() -> list[Any]:
        padded[: source.numel()].copy_(source)
        return [all_gather_even(gathered, padded, group=group, async_op=True)]

    def finish() -> None:
        for part, piece in zip(parts, gathered.split(longest)):
            part.copy_(piece[: part.numel()])

    return Prepared(start, finish, (padded, gathered))


def _scatter_by_reduces(parts: Sequence[Tensor], target: Tensor, rank: int, group: Any) -> Prepared:
    # A reduce may leave partial sums in its tensor on any rank, and the input must stay.
    scratch = tuple(part.clone() for part in parts)

    def start() -> list[Any]:
        return [
            dist.reduce(piece, group_dst=peer, group=group, async_op=True)
            for peer, piece in enumerate(scratch)
            if piece.numel()
        ]

    return Prepared(start, lambda: _fill(target, scratch[rank]), scratch)


def _scatter_padded(parts: Sequence[Tensor], target: Tensor, group: Any) -> Prepared:
    longest = max(part.numel() for part in parts)
    padded = target.new_zeros(len(parts), longest)
    reduced = target.new_empty(longest)

    def start() -> list[Any]:
        for line, part in zip(padded, parts):
            line[: part.numel()].copy_(part)
        return [reduce_scatter_even(reduced, padded.view(-1), group=group, async_op=True)]

    return Prepared(start, lambda: _fill(target, reduced[: target.numel()]), (padded, reduced))


def _fill(target: Tensor, values: Tensor) -> None:
    target.copy_(values)
