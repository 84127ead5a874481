"""In which order the axes of a mesh cut the dims of a tensor (see `hp_dtensor.layout`)."""

from __future__ import annotations

from collections.abc import Sequence

from hp_dtensor.cuts import (
    Chunk,
    Cut,
    Ragged,
    Sectioned,
    Strided,
    following_shards,
    sections_to_bounds,
)
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import (
    Placement,
    RaggedShard,
    SectionedShard,
    StridedShard,
    describe,
    is_sharding,
    sharded_dims,
)

Cuts = tuple[tuple[Cut, ...], ...]
"""Every dim's cuts, outermost first."""


def flattened(placements: Sequence[Placement]) -> int:
    """How many leading dims the RaggedShards among `placements` flatten; 0 without one."""
    ragged = [p.dims for p in placements if type(p) is RaggedShard]
    return max((len(dims) for dims in ragged if dims[0] == 0), default=0)


def ordered_cuts(
    mesh: AbstractMesh, placements: Sequence[Placement], shape: tuple[int, ...]
) -> Cuts:
    """Every dim's cuts, outermost first. Axes of one rank cut nothing.

    A RaggedShard's cut is in the list of each dim that it flattens, last.

    Raises:
        ValueError: two RaggedShards flatten different leading dims.
    """
    ordered: list[list[Cut]] = [[] for _ in shape]
    for axis in reversed(range(len(mesh.sizes))):
        placement, size = placements[axis], mesh.sizes[axis]
        if size == 1 or not is_sharding(placement) or type(placement) is RaggedShard:
            continue
        position, dim = 0, sharded_dims(placement)[0]
        cut: Cut
        if type(placement) is SectionedShard:
            cut = Sectioned(axis, size, sections_to_bounds(placement.sections))
        else:
            cut = Chunk(axis, size)
        if type(placement) is StridedShard:
            after = following_shards(ordered[dim], placement.split_factor)
            position = after or 0
            if after is None:
                cut = Strided(axis, size, placement.split_factor)
        ordered[dim].insert(position, cut)
    _append_ragged(mesh, placements, ordered)
    return tuple(tuple(cuts) for cuts in ordered)


def _append_ragged(
    mesh: AbstractMesh, placements: Sequence[Placement], ordered: list[list[Cut]]
) -> None:
    flat_dims = flattened(placements)
    for axis, placement in enumerate(placements):
        if type(placement) is not RaggedShard:
            continue
        inside = placement.dims[0] < flat_dims
        if inside and len(placement.dims) != flat_dims:
            raise ValueError(
                f"{describe(placements)}: two RaggedShard placements must flatten the same dims"
            )
        for dim in placement.dims:
            ordered[dim].append(
                Ragged(axis, mesh.sizes[axis], len(placement.dims), placement.local_units)
            )
