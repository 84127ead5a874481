"""What every coordinate of a mesh holds of a tensor, worked out from the cuts of its dims.

Two questions are answered: which indices (`Runs`), and how many. The second one needs no runs,
since all cuts but that into sections look at the number of indices alone; so layouts that are only
weighed against one another, on the way of a redistribution, stay cheap.

A *view* joins the first `flat_dims` dims to one (0 and 1: no change).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from hp_dtensor.cut_order import Cuts
from hp_dtensor.cuts import Cut, Ragged, Runs, Sectioned, flatten_runs, full_run, length, total

Coordinate = tuple[int, ...]


class Holdings:
    """Index runs and sizes by coordinate.

    They follow from shape and cuts alone, so that a layout and its dual have them in common. What
    has been worked out is kept: it is a pure function of values that do not change.

    Attributes:
        shape: the global shape.
        flat_dims: how many leading dims RaggedShards flatten; 0 without one.
        axes: the mesh axes that cut.
        own: every dim's cuts by itself, outermost first.
        flattening: the RaggedShards' cuts of the flattened dims together.
    """

    __slots__ = (
        "_bounds",
        "_runs",
        "_shapes",
        "axes",
        "flat_dims",
        "flattening",
        "own",
        "shape",
    )

    def __init__(self, shape: tuple[int, ...], cuts: Cuts, flat_dims: int) -> None:
        self.shape, self.flat_dims = shape, flat_dims
        self.axes = axes_of(cuts)
        self.own = cuts
        self.flattening: tuple[Ragged, ...] = ()
        if flat_dims > 1:
            self.own = tuple(
                tuple(cut for cut in each if type(cut) is not Ragged) if dim < flat_dims else each
                for dim, each in enumerate(cuts)
            )
            self.flattening = tuple(cut for cut in cuts[0] if isinstance(cut, Ragged))
        self._runs: dict[tuple[int, ...], Runs] = {}
        self._shapes: dict[Coordinate, tuple[int, ...]] = {}
        self._bounds: tuple[int, int] | None = None

    # -- how many indices ---------------------------------------------------------------------

    def local_shape(self, coord: Coordinate) -> tuple[int, ...]:
        # Coordinates that differ only on axes which cut nothing share the entry.
        key = tuple([coord[axis] for axis in self.axes])
        shape = self._shapes.get(key)
        if shape is None:
            sizes = [self._size(dim, coord) for dim in range(len(self.shape))]
            if self.flattening:
                sizes[: self.flat_dims] = [self.flattened_sizes(coord)[-1]]
            shape = self._shapes[key] = tuple(sizes)
        return shape

    def flattened_sizes(self, coord: Coordinate) -> list[int]:
        """Of the flattened dims together: before their cuts, and after each of them."""
        sizes = [math.prod([self._size(dim, coord) for dim in range(self.flat_dims)])]
        for cut in self.flattening:
            sizes.append(total(cut.spans(sizes[-1], coord[cut.axis])))
        return sizes

    def sizes(self, dim: int, coord: Coordinate) -> list[int]:
        """Of a dim by itself: before its cuts, and after each of them."""
        sizes, runs = [self.shape[dim]], None
        for number, cut in enumerate(self.own[dim]):
            if type(cut) is Sectioned and number:
                runs = self._kept(dim, coord, number)
            if runs is not None:
                runs = cut.keep(runs, coord[cut.axis])
                sizes.append(length(runs))
            else:
                sizes.append(total(cut.spans(sizes[-1], coord[cut.axis])))
        return sizes

    def _size(self, dim: int, coord: Coordinate) -> int:
        return self.sizes(dim, coord)[-1] if self.own[dim] else self.shape[dim]

    def bounds(self) -> tuple[int, int]:
        """Elements of the smallest and of the largest local tensor."""
        if self._bounds is None:
            found = self._all_sizes()
            smallest = math.prod([min(sizes) for sizes in found])
            self._bounds = smallest, math.prod([max(sizes) for sizes in found])
        return self._bounds

    def is_even(self) -> bool:
        """Whether all local tensors have one shape."""
        return all(len(sizes) == 1 for sizes in self._all_sizes())

    def _all_sizes(self) -> list[set[int]]:
        """Per dim of a local tensor, the sizes that it has somewhere.

        No axis cuts two of these dims, so each combination of their sizes is somewhere too.
        """
        found = [self._sizes_of(dim) for dim in range(len(self.shape))]
        if self.flattening:
            leading = [cut for cuts in self.own[: self.flat_dims] for cut in cuts]
            along = coordinates_along([*leading, *self.flattening])
            found[: self.flat_dims] = [{self.flattened_sizes(coord)[-1] for coord in along}]
        return found

    def _sizes_of(self, dim: int) -> set[int]:
        cuts = self.own[dim]
        if any(type(cut) is Sectioned for cut in cuts[1:]):
            return {self._size(dim, coord) for coord in coordinates_along(cuts)}
        sizes = {self.shape[dim]}
        for cut in cuts:
            sizes = set().union(*[cut.kept(size) for size in sizes])
        return sizes

    # -- which indices ------------------------------------------------------------------------

    def view_axes(self, flat_dims: int) -> tuple[tuple[int, ...], ...]:
        """The axes that cut each dim of a view."""
        flat = max(flat_dims, self.flat_dims)
        if flat <= 1:
            return tuple([axes_of([cuts]) for cuts in self.own])
        first = axes_of([*self.own[:flat], self.flattening])
        return (first, *[axes_of([cuts]) for cuts in self.own[flat:]])

    def view_runs(self, flat_dims: int, coord: Coordinate) -> tuple[Runs, ...]:
        """Of every dim of a view."""
        flat = max(flat_dims, self.flat_dims)
        if flat <= 1:
            return tuple([self.dim_runs(dim, coord) for dim in range(len(self.shape))])
        others = [self.dim_runs(dim, coord) for dim in range(flat, len(self.shape))]
        return (self._joined(flat, coord), *others)

    def runs(self, flat_dims: int, dim: int, coord: Coordinate) -> Runs:
        """Of one dim of a view that joins no fewer dims than are flattened."""
        if flat_dims <= 1:
            return self.dim_runs(dim, coord)
        return self.dim_runs(dim + flat_dims - 1, coord) if dim else self._joined(flat_dims, coord)

    def dim_runs(self, dim: int, coord: Coordinate) -> Runs:
        """Of a dim by itself, whatever RaggedShards that flatten it leave."""
        cuts = self.own[dim]
        if not cuts:
            return full_run(self.shape[dim])
        runs = self._runs.get((dim, *[coord[cut.axis] for cut in cuts]))
        return self._kept(dim, coord, len(cuts)) if runs is None else runs

    def _kept(self, dim: int, coord: Coordinate, number: int) -> Runs:
        """What the first `number` cuts of a dim leave."""
        if not number:
            return full_run(self.shape[dim])
        cuts = self.own[dim][:number]
        key = (dim, *[coord[cut.axis] for cut in cuts])
        runs = self._runs.get(key)
        if runs is None:
            last = cuts[-1]
            runs = last.keep(self._kept(dim, coord, number - 1), coord[last.axis])
            self._runs[key] = runs
        return runs

    def _joined(self, flat_dims: int, coord: Coordinate) -> Runs:
        key = (-flat_dims, *[coord[axis] for axis in self.axes])
        runs = self._runs.get(key)
        if runs is None:
            runs = self._runs[key] = self._join(flat_dims, coord)
        return runs

    def _join(self, flat_dims: int, coord: Coordinate) -> Runs:
        own = self.flat_dims if self.flattening else 0
        per_dim = [self.dim_runs(dim, coord) for dim in range(flat_dims)]
        if not own:
            return flatten_runs(per_dim, self.shape[:flat_dims])
        runs = flatten_runs(per_dim[:own], self.shape[:own])
        for cut in self.flattening:
            runs = cut.keep(runs, coord[cut.axis])
        if flat_dims == own:
            return runs
        sizes = (math.prod(self.shape[:own]), *self.shape[own:flat_dims])
        return flatten_runs([runs, *per_dim[own:]], sizes)


def axes_of(cuts: Sequence[Sequence[Cut]]) -> tuple[int, ...]:
    """The mesh axes of all these cuts, ascending."""
    return tuple(sorted({cut.axis for each in cuts for cut in each}))


def coordinates_along(cuts: Sequence[Cut]) -> Iterator[Coordinate]:
    """Coordinates, up to the last axis that matters, that differ along these cuts alone."""
    counts = {cut.axis: cut.count for cut in cuts}
    return product(*[range(counts.get(axis, 1)) for axis in range(max(counts, default=-1) + 1)])
