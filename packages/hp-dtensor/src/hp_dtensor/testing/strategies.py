"""Hypothesis strategies for meshes, placements and layouts, and checks that use them.

A distributed tensor is held here as the list of all ranks' local tensors, in rank order, so that
one process stands for a whole mesh. `spread` and `collect` go from a dense tensor to such a list
and back by `Layout.owned_indices` alone: they are the reference that redistribution is held to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product

import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import Tensor

from hp_dtensor.adjoint import dual, end_to_end, has_adjoint, pairing
from hp_dtensor.cuts import all_indices, taken
from hp_dtensor.layout import Coordinate, Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import (
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    SectionedShard,
    Shard,
    StridedShard,
    is_partial,
    is_replicate,
)
from hp_dtensor.transition import Transition

__all__ = [
    "DistributedValue",
    "check_redistribute",
    "collect",
    "distributed_tensors",
    "layouts",
    "meshes",
    "placements",
    "shapes",
    "spread",
]

AXIS_NAMES = ("pp", "dp", "cp", "tp")


@frozen(eq=False)
class DistributedValue:
    """A dense tensor, a layout, and the local tensors of all ranks in rank order."""

    layout: Layout
    dense: Tensor
    locals: tuple[Tensor, ...]


def meshes(
    *, min_axes: int = 1, max_axes: int = 4, max_ranks: int = 8
) -> st.SearchStrategy[AbstractMesh]:
    """Meshes of at most `max_ranks` ranks; axes of one rank are among them."""
    return (
        st.lists(
            st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8][:max_ranks]),
            min_size=min_axes,
            max_size=max_axes,
        )
        .filter(lambda sizes: math.prod(sizes) <= max_ranks)
        .map(lambda sizes: AbstractMesh(AXIS_NAMES[-len(sizes) :], tuple(sizes)))
    )


def shapes(*, max_dims: int = 3, max_size: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    """Global shapes, from 0-dimensional to `max_dims`; dims of size 0 and 1 are among them."""
    return st.lists(st.integers(0, max_size), max_size=max_dims).map(tuple)


@st.composite
def placements(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    axis_size: int,
    *,
    reductions: Sequence[str] = ("sum",),
    ragged: bool = True,
) -> Placement:
    """A placement of a tensor of `shape` on one axis, of every kind.

    `reductions` are those of Partial (empty: no Partial). `ragged` is off where another axis
    already has a RaggedShard.
    """
    kinds = ["replicate"] + ["partial"] * bool(reductions)
    kinds += ["shard", "shard", "strided", "sectioned"] * bool(shape)
    kinds += ["ragged"] * bool(shape and ragged)
    kind = draw(st.sampled_from(kinds))
    if kind == "replicate":
        return Replicate()
    if kind == "partial":
        return Partial(draw(st.sampled_from(list(reductions))))
    if kind == "ragged":
        return draw(_ragged(shape, axis_size))
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "shard":
        return Shard(dim)
    if kind == "strided":
        return StridedShard(dim, draw(st.integers(1, 4)))
    cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=2)))
    bounds = [0, *cuts, shape[dim]]
    return SectionedShard(dim, [b - a for a, b in pairwise(bounds)])


@st.composite
def _ragged(draw: st.DrawFn, shape: tuple[int, ...], axis_size: int) -> RaggedShard:
    dims = tuple(range(draw(st.integers(1, len(shape)))))
    if draw(st.booleans()):
        dims = (draw(st.integers(0, len(shape) - 1)),)
    flat = math.prod(shape[dim] for dim in dims)
    total = draw(st.sampled_from([n for n in range(1, max(flat, 1) + 1) if flat % n == 0]))
    ends = sorted(
        draw(st.lists(st.integers(0, total), min_size=axis_size - 1, max_size=axis_size - 1))
    )
    bounds = [0, *ends, total]
    return RaggedShard(dims, [b - a for a, b in pairwise(bounds)])


@st.composite
def layouts(
    draw: st.DrawFn,
    mesh: AbstractMesh | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    reductions: Sequence[str] = ("sum",),
    gradients: bool = False,
) -> Layout:
    """Layouts of every kind, uneven and empty ones included.

    Args:
        mesh, shape: fixed, or drawn when None.
        reductions: as for `placements`; one of them is used in a layout.
        gradients: also draw Partial gradients of replicated values.
    """
    mesh = draw(meshes()) if mesh is None else mesh
    shape = draw(shapes()) if shape is None else shape
    reduction = [draw(st.sampled_from(list(reductions)))] if reductions else []
    chosen: list[Placement] = []
    for size in mesh.sizes:
        ragged = not any(type(p) is RaggedShard for p in chosen)
        chosen.append(draw(placements(shape, size, reductions=reduction, ragged=ragged)))
    chosen = _made_whole(mesh, chosen, shape)
    if not gradients:
        return Layout(mesh, chosen, shape)
    grads = [
        draw(st.sampled_from([Replicate(), Partial()]))
        if is_replicate(p)
        else Replicate()
        if is_partial(p)
        else p
        for p in chosen
    ]
    return Layout(mesh, chosen, shape, grads)


def _made_whole(
    mesh: AbstractMesh, chosen: list[Placement], shape: tuple[int, ...]
) -> list[Placement]:
    """Ragged units must stay whole after the other axes' cuts; replicate the latter where not."""
    try:
        Layout(mesh, chosen, shape)
    except ValueError:
        return [p if type(p) is RaggedShard or is_partial(p) else Replicate() for p in chosen]
    return chosen


@st.composite
def distributed_tensors(
    draw: st.DrawFn, layout: Layout | None = None, *, dtype: torch.dtype = torch.float64
) -> DistributedValue:
    """Integer-valued tensors, so that sums are exact in any order, spread over all ranks."""
    layout = draw(layouts()) if layout is None else layout
    seed = draw(st.integers(0, 2**16))
    dense = _integers(layout.shape, dtype, torch.Generator().manual_seed(seed))
    return DistributedValue(layout, dense, tuple(spread(dense, layout, seed=seed)))


def _integers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_complex:  # there is no torch.randint of these
        real = torch.randint(-8, 9, (*shape, 2), generator=generator, dtype=dtype.to_real())
        return torch.view_as_complex(real)
    return torch.randint(-8, 9, shape, generator=generator, dtype=dtype)


def spread(dense: Tensor, layout: Layout, *, seed: int = 0) -> list[Tensor]:
    """Every rank's local tensor. Partial values are split into random parts that reduce to it."""
    return _spread(dense, layout, _owned(layout), seed)


def _spread(dense: Tensor, layout: Layout, owned: Sequence[Tensor], seed: int) -> list[Tensor]:
    parts, partial = dense.reshape(1, -1), layout.partial_axes()
    if partial:
        generator = torch.Generator().manual_seed(seed)
        for axis in partial:
            size, placement = layout.abstract_mesh.sizes[axis], layout.placements[axis]
            assert is_partial(placement)
            parts = _parts(parts, size, placement.reduce_op, generator)
    everything = parts.reshape(-1).index_select(0, _held(layout, partial, owned))
    shapes_ = [layout.holdings.local_shape(coord) for coord in layout.abstract_mesh.coordinates()]
    sizes = [math.prod(shape) for shape in shapes_]
    # torch declares the result to be None, which holds with `out` alone.
    locals_: Sequence[Tensor] = torch.split_with_sizes_copy(everything, sizes)  # type: ignore[assignment, func-returns-value]
    if len(layout.shape) == 1:
        return list(locals_)
    return [local.view(shape) for local, shape in zip(locals_, shapes_)]


def _owned(layout: Layout) -> list[Tensor]:
    """Every rank's `owned_indices`. Ranks that hold the same share a tensor."""
    known: dict[object, Tensor] = {}
    every, indices = [], all_indices(layout.view_shape(layout.flat_dims))
    for coord in layout.abstract_mesh.coordinates():
        runs = layout.holdings.view_runs(0, coord)
        own = known.get(runs)
        if own is None:
            own = known[runs] = taken(runs, indices)
        every.append(own)
    return every


def _held(layout: Layout, partial: Sequence[int], owned: Sequence[Tensor]) -> Tensor:
    """What all ranks hold, in rank order: 1-D int64 positions in the parts of a pending reduction.

    One after the other these are numbered by their coordinates on the `partial` axes.
    """
    if not partial:
        return torch.cat(list(owned))
    sizes = layout.abstract_mesh.sizes
    every = []
    for coord, own in zip(layout.abstract_mesh.coordinates(), owned):
        number = 0
        for axis in partial:
            number = number * sizes[axis] + coord[axis]
        every.append(own + number * layout.numel if number else own)
    return torch.cat(every)


def _parts(wholes: Tensor, size: int, reduction: str, generator: torch.Generator) -> Tensor:
    """`size` rows, one after the other, for each row of `wholes`: they reduce to it."""
    count, numel = wholes.shape
    offsets = _integers((count, size - 1, numel), wholes.dtype, generator)
    whole = wholes.unsqueeze(1)
    if reduction in ("max", "min"):
        sign = 1 if reduction == "max" else -1
        parts = [whole, whole - sign * offsets.abs()]
    else:
        scale = size if reduction == "avg" else 1
        parts = [offsets, whole * scale - offsets.sum(1, keepdim=True, dtype=wholes.dtype)]
    return torch.cat(parts, 1).view(count * size, numel)


def collect(layout: Layout, locals_: Sequence[Tensor]) -> Tensor:
    """The dense tensor that the ranks' local tensors stand for.

    Raises:
        AssertionError: a local shape is wrong, replicas differ, or an element is missing.
    """
    return _collect(layout, locals_, _owned(layout))


def _collect(layout: Layout, locals_: Sequence[Tensor], owned: Sequence[Tensor]) -> Tensor:
    mesh, partial = layout.abstract_mesh, layout.partial_axes()
    for coord, local in zip(mesh.coordinates(), locals_):
        expected = layout.holdings.local_shape(coord)
        assert local.shape == expected, (
            f"{layout} at {coord}: local shape {tuple(local.shape)}, expected {expected}"
        )
    sizes = [mesh.sizes[axis] for axis in partial]
    held = _held(layout, partial, owned)
    values = end_to_end(locals_)
    parts = values.new_zeros(math.prod(sizes) * layout.numel)
    parts.index_copy_(0, held, values)
    # Of several ranks that hold an element one has written it: all must read what they hold.
    found = parts.index_select(0, held)
    assert torch.equal(found, values), (
        f"{layout} at {_first(layout, found != values)}: replicas differ"
    )
    known = torch.zeros(parts.shape, dtype=torch.bool).index_fill_(0, held, True)
    assert known.all(), f"{layout}: elements are missing"
    return _reduced(layout, parts.reshape(*sizes, layout.numel)).reshape(layout.shape)


def _first(layout: Layout, elements: Tensor) -> Coordinate:
    """The coordinate of the rank that holds the first marked one of all ranks' elements."""
    position = int(elements.nonzero()[0])
    for coord in layout.abstract_mesh.coordinates():
        position -= layout.local_numel(coord)
        if position < 0:
            return coord
    raise AssertionError(f"{layout} has fewer elements than marks")


def _reduced(layout: Layout, parts: Tensor) -> Tensor:
    """The leading dims, one per partial axis in order, reduced from the last to the first."""
    for axis in reversed(layout.partial_axes()):
        placement = layout.placements[axis]
        assert is_partial(placement)
        dim = parts.ndim - 2
        if placement.reduce_op == "avg":
            parts = parts.sum(dim) / parts.shape[dim]
        elif placement.reduce_op == "sum":
            parts = parts.sum(dim)
        else:
            parts = parts.amax(dim) if placement.reduce_op == "max" else parts.amin(dim)
    return parts


def check_redistribute(source: Layout, target: Layout, *, seed: int = 0) -> Transition:
    """Checks a redistribution on simulated ranks and returns it.

    Values: every rank ends with what `target` says of the dense tensor. Gradients, where both
    ends have them: <T x, y> = <x, T* y> for a random gradient y laid out as the target's.

    Raises:
        AssertionError: one of these does not hold; the message shows the transition.
    """
    source, target = source.abstract, target.abstract
    transition = Transition.compile(source, target)
    generator = torch.Generator().manual_seed(seed)
    dense = _integers(source.shape, torch.float64, generator)
    # What a rank holds is looked up once for a value and its gradient, which is cut alike.
    owned = _owned(target)
    values = spread(dense, source, seed=seed)
    results = transition.simulate(values)
    found = _collect(target, results, owned)
    assert torch.equal(found, dense), f"{transition}\nexpected {dense}\nfound {found}"
    if has_adjoint(source) and has_adjoint(target):
        gradient = _integers(source.shape, torch.float64, generator)
        incoming = _spread_gradient(gradient, target, owned, seed)
        outgoing = transition.adjoint.simulate(incoming)
        above = float(pairing(target, results, incoming))
        below = float(pairing(source, values, outgoing))
        # As torch.isclose; a NaN is close to nothing.
        assert abs(above - below) <= 1e-12 * (1 + abs(below)), (
            f"{transition}\n{transition.adjoint}\n<Tx, y> = {above}, <x, T*y> = {below}"
        )
    return transition


def _spread_gradient(
    gradient: Tensor, layout: Layout, owned: Sequence[Tensor], seed: int
) -> list[Tensor]:
    """A gradient's local tensors; each summand of an averaged value has its share of it."""
    sizes = layout.abstract_mesh.sizes
    share = math.prod(
        sizes[axis]
        for axis in layout.partial_axes()
        if getattr(layout.placements[axis], "reduce_op", "") == "avg"
    )
    spread_ = _spread(gradient, dual(layout), owned, seed + 1)
    return spread_ if share == 1 else [local / share for local in spread_]


def every_placement(shape: tuple[int, ...], axis_size: int) -> list[Placement]:
    """One placement of every kind, for exhaustive tests over small meshes."""
    kinds: list[Placement] = [Replicate(), Partial()]
    for dim, size in enumerate(shape):
        first = size // 2
        kinds += [Shard(dim), StridedShard(dim, 2), SectionedShard(dim, (first, size - first))]
    if shape:
        kinds.append(RaggedShard((0,), _all_to_last(shape[0], axis_size)))
        whole = tuple(range(len(shape)))
        kinds.append(RaggedShard(whole, _all_to_last(math.prod(shape), axis_size)))
    return kinds


def _all_to_last(size: int, count: int) -> list[int]:
    units = [0] * count
    units[-1] = max(size, 1)
    return units


def pairs_of(mesh: AbstractMesh, shape: tuple[int, ...]) -> list[tuple[Layout, Layout]]:
    """Every pair of layouts made of `every_placement`."""
    made = []
    for chosen in product(*(every_placement(shape, size) for size in mesh.sizes)):
        try:
            made.append(Layout(mesh, chosen, shape))
        except ValueError:
            continue  # two ragged shards that flatten different dims, or units that are not whole
    return list(product(made, made))
