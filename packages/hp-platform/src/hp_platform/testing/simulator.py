"""Every rank of a mesh in one process: a distributed tensor is the list of all locals.

Collectives are plain tensor operations on such lists, so property tests can afford thousands
of them. They are pure, where the real ones work in place: arguments are left alone and no two
results share memory. Autograd flows through them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hp_platform.errors import CollectiveError

Sizes = Sequence[int] | Sequence[Sequence[int]]
"""Rows of every coordinate: one list for all ranks, or one list for each rank."""

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Simulator:
    """A mesh of simulated ranks, numbered row-major by coordinate.

    Args:
        mesh_shape: size of every mesh axis. Methods name an axis by its index.

    Every collective takes the list of all ranks' tensors and returns the list of results;
    it has the meaning of the function of the same name in `hp_platform.collectives` on each
    group of ranks along the axis.
    """

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        if not mesh_shape or min(mesh_shape) < 1:
            raise CollectiveError(f"a mesh needs positive axis sizes, got {mesh_shape}")
        self.mesh_shape = tuple(mesh_shape)
        self.world_size = math.prod(self.mesh_shape)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The coordinate of `rank` on every axis."""
        result = []
        for size in reversed(self.mesh_shape):
            rank, coordinate = divmod(rank, size)
            result.append(coordinate)
        return tuple(reversed(result))

    def groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks along `axis`, each in coordinate order."""
        if not -len(self.mesh_shape) <= axis < len(self.mesh_shape):
            raise CollectiveError(f"mesh {self.mesh_shape} has no axis {axis}")
        size, stride = self.mesh_shape[axis], math.prod(self.mesh_shape[axis:][1:])
        span = size * stride
        return tuple(
            tuple(range(first, first + span, stride))
            for start in range(0, self.world_size, span)
            for first in range(start, start + stride)
        )

    def peers(self, rank: int, axis: int) -> tuple[int, ...]:
        """The ranks of the group along `axis` that `rank` belongs to, in coordinate order."""
        return next(group for group in self.groups(axis) if rank in group)

    def all_gather(
        self, tensors: Sequence[Tensor], axis: int, sizes: Sizes | None = None
    ) -> list[Tensor]:
        """Concatenates along dim 0; `sizes` is only checked, equal shares when omitted."""
        self._check("all_gather", tensors)
        results = list(tensors)
        for group in self.groups(axis):
            locals_ = [tensors[rank] for rank in group]
            found = [t.shape[0] for t in locals_]
            expected = (
                [found[0]] * len(group)
                if sizes is None
                else self._sizes("all_gather", sizes, group, len(group))
            )
            if found != expected:
                raise CollectiveError(
                    f"all_gather: ranks {group} hold {found} rows, sizes says {expected}"
                )
            _give(results, group, torch.cat(locals_))
        return results

    def reduce_scatter(
        self, tensors: Sequence[Tensor], axis: int, sizes: Sizes | None = None, op: str = "sum"
    ) -> list[Tensor]:
        """Reduces, then gives every coordinate its rows of dim 0. `op`: "sum" or "avg"."""
        self._check("reduce_scatter", tensors)
        if op not in ("sum", "avg"):
            raise CollectiveError(f"reduce_scatter: op {op!r} is unknown; use sum or avg")
        results = list(tensors)
        for group in self.groups(axis):
            total = _reduced([tensors[rank] for rank in group], op)
            shares = (
                _equal(total, group)
                if sizes is None
                else self._sizes("reduce_scatter", sizes, group, len(group))
            )
            _check_sum("reduce_scatter", group, shares, total)
            # torch declares the result to be None, which holds with `out` alone.
            pieces: Sequence[Tensor] = torch.split_with_sizes_copy(total, shares)  # type: ignore[assignment, func-returns-value]
            for rank, piece in zip(group, pieces):
                results[rank] = piece
        return results

    def all_reduce(self, tensors: Sequence[Tensor], axis: int, op: str = "sum") -> list[Tensor]:
        """Reduces on every rank. `op`: "sum", "avg", "max" or "min"."""
        self._check("all_reduce", tensors)
        results = list(tensors)
        for group in self.groups(axis):
            _give(results, group, _reduced([tensors[rank] for rank in group], op))
        return results

    def broadcast(self, tensors: Sequence[Tensor], axis: int, source: int) -> list[Tensor]:
        """Gives every rank a copy of coordinate `source`'s tensor."""
        self._check("broadcast", tensors)
        results = list(tensors)
        for group in self.groups(axis):
            chosen = tensors[_member("broadcast", group, source)]
            for rank in group:
                results[rank] = chosen.clone()
        return results

    def reduce(
        self, tensors: Sequence[Tensor], axis: int, destination: int, op: str = "sum"
    ) -> list[Tensor]:
        """Reduces on coordinate `destination`; the others hold what they held."""
        self._check("reduce", tensors)
        results = [tensor.clone() for tensor in tensors]
        for group in self.groups(axis):
            rank = _member("reduce", group, destination)
            results[rank] = _reduced([tensors[peer] for peer in group], op)
        return results

    def all_to_all(
        self,
        tensors: Sequence[Tensor],
        axis: int,
        input_sizes: Sizes | None = None,
        output_sizes: Sizes | None = None,
    ) -> list[Tensor]:
        """Sends every coordinate its block of rows. `output_sizes` is only checked."""
        self._check("all_to_all", tensors)
        results = list(tensors)
        for group in self.groups(axis):
            blocks, rows = [], []
            for rank in group:
                sent = (
                    _equal(tensors[rank], group)
                    if input_sizes is None
                    else self._sizes("all_to_all", input_sizes, (rank,), len(group))
                )
                _check_sum("all_to_all", (rank,), sent, tensors[rank])
                blocks.append(torch.split_with_sizes(tensors[rank], sent))
                rows.append(sent)
            # Turned round: what every coordinate gets, from each in order.
            for rank, parts, sizes in zip(group, zip(*blocks), zip(*rows)):
                found = wanted = list(sizes)
                if output_sizes is not None:
                    wanted = self._sizes("all_to_all", output_sizes, (rank,), len(group))
                if found != wanted:
                    raise CollectiveError(
                        f"all_to_all: rank {rank} is sent {found} rows, its output_sizes says "
                        f"{wanted}"
                    )
                results[rank] = torch.cat(parts)
        return results

    def _check(self, operation: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.world_size:
            raise CollectiveError(
                f"{operation}: got {len(tensors)} tensors, mesh {self.mesh_shape} has "
                f"{self.world_size} ranks"
            )

    def _sizes(
        self, operation: str, sizes: Sizes, ranks: tuple[int, ...], length: int
    ) -> list[int]:
        """The shares that `ranks` agree on, one for each of `length` coordinates."""
        first = _row_of(sizes, ranks[0])
        if len(ranks) > 1 and not isinstance(sizes[0], int):
            rows = [_row_of(sizes, rank) for rank in ranks]
            if rows.count(first) != len(rows):
                raise CollectiveError(f"{operation}: ranks {ranks} disagree about sizes: {rows}")
        if len(first) != length or min(first) < 0:
            raise CollectiveError(
                f"{operation}: sizes {first} of ranks {ranks} must be {length} non-negative "
                "numbers of rows"
            )
        return first


def _row_of(sizes: Sizes, rank: int) -> list[int]:
    own = sizes[rank] if not isinstance(sizes[0], int) else sizes
    assert not isinstance(own, int)
    return list(map(int, own))  # type: ignore[arg-type]


def _give(results: list[Tensor], group: tuple[int, ...], value: Tensor) -> None:
    """A copy of `value`, which nobody else has, for every rank of the group."""
    if len(group) == 1:
        results[group[0]] = value
        return
    # torch declares the result to be None, which holds with `out` alone.
    everyone = value.expand(len(group), *value.shape)
    copies: Sequence[Tensor] = torch.unbind_copy(everyone)  # type: ignore[assignment, func-returns-value]
    for rank, copy in zip(group, copies):
        results[rank] = copy


def _equal(tensor: Tensor, group: tuple[int, ...]) -> list[int]:
    rows, rest = divmod(tensor.shape[0], len(group))
    if rest:
        raise CollectiveError(f"{tensor.shape[0]} rows do not divide by {len(group)}; give sizes")
    return [rows] * len(group)


def _check_sum(
    operation: str, ranks: tuple[int, ...], shares: Sequence[int], tensor: Tensor
) -> None:
    if sum(shares) != tensor.shape[0]:
        raise CollectiveError(
            f"{operation}: sizes {list(shares)} of ranks {ranks} add up to {sum(shares)}, the "
            f"tensor has {tensor.shape[0]} rows"
        )


def _member(operation: str, group: tuple[int, ...], coordinate: int) -> int:
    if not 0 <= coordinate < len(group):
        raise CollectiveError(f"{operation}: {coordinate} is not a coordinate of {group}")
    return group[coordinate]


def _reduced(tensors: Sequence[Tensor], op: str) -> Tensor:
    """A new tensor; summands are added in coordinate order, in their own dtype."""
    if op not in _REDUCTIONS:
        raise CollectiveError(f"op {op!r} is unknown; use one of {', '.join(_REDUCTIONS)}")
    if op == "avg" and not tensors[0].is_floating_point():
        raise CollectiveError(f"the average of {tensors[0].dtype} is not defined; use op='sum'")
    if len({(t.shape, t.dtype) for t in tensors}) != 1:
        shapes = [(tuple(t.shape), t.dtype) for t in tensors]
        raise CollectiveError(f"the tensors to reduce differ: {shapes}")
    total = functools.reduce(_REDUCTIONS[op], tensors)
    if op == "avg":
        return total / len(tensors)
    return total.clone() if len(tensors) == 1 else total
