"""From a layout: which mesh axes cut a parameter's matrices, and which rank holds what of them.

The one predicate (paper section 6.3): does a sharding axis intersect the matrix plane? An axis
that separates whole matrices (the expert axis of `[experts, rows, cols]`) needs no communication;
along a cutting axis the shards of a matrix are gathered. Both are decided from the global shape,
alike on every rank, and for any view.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import product
from types import EllipsisType

import torch
from attrs import frozen
from torch import Tensor

from hp_dtensor import Layout
from hp_muon.errors import MuonError
from hp_muon.sections import Runs, Selection
from hp_muon.views import ResolvedView

Selector = slice | Tensor
Coordinate = tuple[int, ...]


@frozen(eq=False, slots=False)
class ShardPiece:
    """What one coordinate of the cutting axes holds of the group's tensor.

    Attributes:
        shape: of its local tensor.
        index: one selector per dim of `Geometry.flat_shape`.
    """

    shape: tuple[int, ...]
    index: tuple[Selector, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @functools.cached_property
    def block(self) -> tuple[Selector, ...]:
        """Index of this piece in the group's flat tensor."""
        return outer_index(self.index)

    @functools.cached_property
    def plane(self) -> tuple[slice | Tensor | EllipsisType, ...]:
        """Index of this piece in matrices [..., rows, cols]: its rows and cols."""
        return (..., *outer_index(self.index[-2:]))


@frozen(eq=False, slots=False)
class Geometry:
    """One parameter's matrices on a mesh, as seen by the ranks that share its matrices.

    Attributes:
        cutting: mesh axes that cut matrices, in mesh order.
        replicated: mesh axes along which every rank holds the same.
        flat_shape: shape of the tensor that the cutting group holds together, with dims that a
            RaggedShard flattens seen as one.
        view: the view of that tensor.
        pieces: what each coordinate of the cutting axes holds, row-major.
        own: this rank's position in `pieces`.
        selection: which part of this rank's local tensor it is.
        unions: what the cutting group holds of every dim of the flattened storage.
        origin: the view of the whole parameter.
    """

    cutting: tuple[int, ...]
    replicated: tuple[int, ...]
    flat_shape: tuple[int, ...]
    view: ResolvedView
    pieces: tuple[ShardPiece, ...]
    own: int
    selection: Selection
    unions: tuple[Runs, ...]
    origin: ResolvedView

    @functools.cached_property
    def count(self) -> int:
        """Number of matrices the cutting group holds."""
        return self.view.count

    @functools.cached_property
    def numbers(self) -> Tensor:
        """[count]: the numbers of the group's matrices among all of the parameter's."""
        if not self.count:
            return torch.empty(0, dtype=torch.int64)
        runs = list(self.unions)
        positions = [[p for start, stop in per_dim for p in range(start, stop)] for per_dim in runs]
        if len(runs) < len(self.origin.shape):  # the first dims are seen as one
            flattened = len(self.origin.shape) - len(runs) + 1
            inner = math.prod(self.origin.shape[1:flattened])
            outer = [p // inner for p in positions[0][::inner]]
            inside = [list(range(length)) for length in self.origin.shape[1:flattened]]
            positions = [outer, *inside, *positions[1:]]
        return self.origin.matrix_numbers(positions)

    @functools.cached_property
    def is_direct(self) -> bool:
        """Whether every piece is a block of rows and cols of every matrix."""
        plain = self.view.keeps_storage_order and self.flat_shape == self.view.shape
        return plain and all(
            isinstance(selector, slice) and selector == slice(0, length)
            for piece in self.pieces
            if piece.numel
            for selector, length in zip(piece.index[:-2], self.flat_shape[:-2])
        )


def whole(view: ResolvedView) -> Geometry:
    """The geometry of a tensor that no mesh knows: this rank holds all of it."""
    full = tuple(slice(0, length) for length in view.shape)
    runs = tuple(((0, length),) for length in view.shape)
    selection = Selection()
    if view.section is not None:
        periods = view.shape[view.section.dim] // view.section.width
        selection = view.section.select(((0, periods * view.section.period),))
    piece = ShardPiece(view.shape, full)
    return Geometry((), (), view.shape, view, (piece,), 0, selection, runs, view)


def geometry_of(layout: Layout, view: ResolvedView, name: str, coord: Coordinate) -> Geometry:
    """Reads a layout: see `Geometry`.

    Args:
        coord: the coordinate on `layout.mesh` from which it is seen.

    Raises:
        MuonError: the parameter is Partial on an axis: it has no value to update.
    """
    if layout.partial_axes():
        raise MuonError(
            f"parameter {name!r} is {layout}: a Partial parameter has no values of its own; "
            "redistribute it to Replicate or Shard"
        )
    sizes = layout.abstract_mesh.sizes
    cutting = cutting_axes(layout.abstract, view)
    coords = list(_vary(coord, cutting, sizes))
    held = [_held(layout, view, c) for c in coords]
    unions = tuple(_union(runs) for runs in zip(*held))
    pieces = tuple(
        ShardPiece(
            layout.local_shape(c) if view.section is None else tuple(map(_length, per_dim)),
            tuple(_selector(u, runs) for u, runs in zip(unions, per_dim)),
        )
        for c, per_dim in zip(coords, held)
    )
    flat_shape = tuple(_length(union) for union in unions)
    return Geometry(
        cutting=cutting,
        replicated=tuple(axis for axis in layout.replicating_axes() if sizes[axis] > 1),
        flat_shape=flat_shape,
        view=view.localise(_unflatten(flat_shape, view, layout.flat_dims)),
        pieces=pieces,
        own=coords.index(coord),
        selection=_selection(layout, view, coord),
        unions=unions,
        origin=view,
    )


def _held(layout: Layout, view: ResolvedView, coord: Coordinate) -> tuple[Runs, ...]:
    """What a coordinate holds of every dim of the view's flattened storage."""
    runs = list(layout.view_runs(layout.flat_dims, coord))
    if view.section is not None:
        section = view.section.flattened(layout.shape, layout.flat_dims)
        runs[section.dim] = section.compact(runs[section.dim])
    return tuple(runs)


def _selection(layout: Layout, view: ResolvedView, coord: Coordinate) -> Selection:
    if view.section is None:
        return Selection()
    section = view.section.flattened(layout.shape, layout.flat_dims)
    return section.select(layout.view_runs(layout.flat_dims, coord)[section.dim])


def cutting_axes(layout: Layout, view: ResolvedView) -> tuple[int, ...]:
    """The mesh axes that must be gathered over so that every rank sees whole matrices.

    The smallest set, found by leaving out one axis after the other as long as the ranks along
    the remaining ones still hold whole matrices together, whatever their other coordinates.
    """
    sizes = layout.abstract_mesh.sizes
    sharding = tuple(layout.sharding_axes())
    needed = list(sharding)
    for axis in sharding:
        rest = [other for other in needed if other != axis]
        fixed = [other for other in sharding if other not in rest]
        starts = _vary((0,) * len(sizes), fixed, sizes)
        if all(_holds_whole_matrices(layout, view, start, rest) for start in starts):
            needed = rest
    return tuple(needed)


def outer_index(index: Sequence[Selector]) -> tuple[Selector, ...]:
    """Per-dim selectors as one index: index tensors are shaped to select their outer product."""
    tensors = [dim for dim, selector in enumerate(index) if isinstance(selector, Tensor)]
    if not tensors:
        return tuple(index)
    # Mixed slices and tensors would permute dims; from the first tensor on, all become tensors.
    shaped: list[Selector] = list(index[: tensors[0]])
    rest = index[tensors[0] :]
    for position, selector in enumerate(rest):
        if isinstance(selector, slice):
            selector = torch.arange(selector.start, selector.stop)
        shaped.append(selector.reshape([-1] + [1] * (len(rest) - position - 1)))
    return tuple(shaped)


def _holds_whole_matrices(
    layout: Layout, view: ResolvedView, start: Coordinate, axes: Sequence[int]
) -> bool:
    coords = _vary(start, axes, layout.abstract_mesh.sizes)
    held = [_held(layout, view, c) for c in coords]
    unions = [_union(runs) for runs in zip(*held)]
    if not all(unions):
        return True
    lengths = _flatten(view.shape, layout.flat_dims)
    blocks = [_block(view, layout.flat_dims, dim) for dim in range(len(lengths))]
    return all(
        union == ((0, length),)
        if block is None
        else all(start % block == 0 and stop % block == 0 for start, stop in union)
        for union, length, block in zip(unions, lengths, blocks)
    )


def _block(view: ResolvedView, flat_dims: int, dim: int) -> int | None:
    """`ResolvedView.block` of a dim after flattening."""
    flattened = max(flat_dims, 1)
    if dim > 0:
        return view.block(dim + flattened - 1)
    block = view.block(0)
    # A run of whole entries of dim 0 holds the other flattened dims whole.
    return None if block is None else block * math.prod(view.shape[1:flattened])


def _flatten(shape: tuple[int, ...], flat_dims: int) -> tuple[int, ...]:
    if flat_dims <= 1:
        return shape
    return (math.prod(shape[:flat_dims]), *shape[flat_dims:])


def _unflatten(flat_shape: tuple[int, ...], view: ResolvedView, flat_dims: int) -> tuple[int, ...]:
    if flat_dims <= 1:
        return flat_shape
    inner = view.shape[1:flat_dims]
    per_entry = math.prod(inner)
    outer = flat_shape[0] // per_entry if per_entry else view.shape[0]
    return (outer, *inner, *flat_shape[1:])


def _vary(coord: Coordinate, axes: Sequence[int], sizes: Sequence[int]) -> Iterator[Coordinate]:
    """Every coordinate that differs from `coord` on `axes` only, row-major over them."""
    for values in product(*(range(sizes[axis]) for axis in axes)):
        chosen = dict(zip(axes, values))
        yield tuple(chosen.get(axis, own) for axis, own in enumerate(coord))


def _union(many: Sequence[Runs]) -> Runs:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted({run for runs in many for run in runs if run[0] < run[1]}):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def _selector(union: Runs, runs: Runs) -> Selector:
    """Where `runs` lie in the concatenation of `union`: a slice if they are adjacent there."""
    positions: list[tuple[int, int]] = []
    offset = 0
    starts = []
    for start, stop in union:
        starts.append((start, stop, offset))
        offset += stop - start
    for start, stop in runs:
        if start >= stop:
            continue
        base, shift = next((first, at) for first, last, at in starts if first <= start < last)
        positions.append((start - base + shift, stop - base + shift))
    joined = _union([tuple(positions)])
    if len(joined) <= 1:
        return slice(*joined[0]) if joined else slice(0, 0)
    return torch.cat([torch.arange(start, stop) for start, stop in joined])


def _length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)
