"""How one parameter is cut over the shard axis and how its pieces travel, decided once.

Every parameter travels alone (paper section 5.1). For a leading dim the cut is by chunks of
`ceil(rows / world)` rows: if every rank's piece is padded to a whole chunk, the pieces laid end to
end hold the full tensor in their first elements and padding only in their tail, so the gathered
parameter is a view of the buffer and nothing is unpacked. Other dims are cut likewise, but their
pieces have to be concatenated.
"""

from __future__ import annotations

import math
from functools import cached_property

from attrs import frozen

from hp_dtensor.layout import Layout
from hp_dtensor.placements import (
    Placement,
    Replicate,
    Shard,
    StridedShard,
    is_sharding,
    sharded_dims,
)
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.errors import ShardingError

Shape = tuple[int, ...]


@frozen(slots=False)
class Cut:
    """A tensor of `shape` cut along `dim` into `world` chunks, seen from coordinate `rank`.

    `shape` is what one rank holds before data-parallel sharding: the whole parameter, or its
    part on this rank where tensor parallelism has cut it already.
    """

    shape: Shape
    dim: int
    world: int
    rank: int

    @cached_property
    def chunk(self) -> int:
        """Length of a whole chunk along `dim`."""
        return -(-self.shape[self.dim] // self.world)

    def length(self, rank: int) -> int:
        """Length of the piece of coordinate `rank`: short or empty for the last ones."""
        return max(min(self.chunk, self.shape[self.dim] - rank * self.chunk), 0)

    @cached_property
    def start(self) -> int:
        return min(self.rank * self.chunk, self.shape[self.dim])

    @cached_property
    def local_shape(self) -> Shape:
        return self._with(self.length(self.rank))

    @cached_property
    def padded_shape(self) -> Shape:
        """Shape of a whole chunk: what travels."""
        return self._with(self.chunk)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def padded_numel(self) -> int:
        return math.prod(self.padded_shape)

    @cached_property
    def gathered_numel(self) -> int:
        """Elements of all chunks together: at least `numel`."""
        return self.world * self.padded_numel

    @cached_property
    def is_leading(self) -> bool:
        """The gathered chunks are the full tensor as they lie."""
        return math.prod(self.shape[: self.dim]) == 1

    @cached_property
    def is_even(self) -> bool:
        return self.gathered_numel == self.numel

    def _with(self, length: int) -> Shape:
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


def sharded_layout(
    name: str, shape: Shape, source: Layout | None, dim: int, data: DataMesh
) -> Layout:
    """Layout of a parameter after its local tensor has been cut along `dim` over `data`.

    Args:
        name: the parameter's, for errors.
        shape: shape of the local tensor before the cut.
        source: layout the parameter came with, on a mesh that contains the axes of `data`; None
            for a parameter that every rank holds whole.

    Returns:
        A layout on `source`'s mesh, otherwise on that of `data`. Where later axes already cut
        `dim`, the data axis cuts what they left: `StridedShard(dim, product of their sizes)`.

    Raises:
        ShardingError: `source` does not have these axes, or is not replicated over them.
    """
    if source is None:
        placements: list[Placement] = [Replicate()] * (len(data.axis_names) - 1)
        return Layout(data.mesh, (*placements, Shard(dim)), shape)
    _check_source(name, source, data)
    mesh = source.abstract_mesh
    axis = mesh.axis_index(data.axis_names[-1])
    factor = math.prod(
        mesh.sizes[later]
        for later in range(axis + 1, mesh.ndim)
        if is_sharding(source.placements[later]) and dim in sharded_dims(source.placements[later])
    )
    placements = list(source.placements)
    placements[axis] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    return source.with_placements(placements)


def partial_gradient_layout(layout: Layout, source: Layout | None) -> Layout | None:
    """`layout` with the partial gradients that `source` declares, or None if it declares none.

    A parameter that is replicated over a model axis may have a gradient of which each rank holds
    a summand; it is summed over that axis once, on shards, at the end of backward.
    """
    if (
        source is None
        or source.grad_placements == source.with_placements(source.placements).grad_placements
    ):
        return None
    gradients = list(layout.grad_placements)
    for axis, (value, gradient) in enumerate(zip(source.placements, source.grad_placements)):
        if isinstance(value, Replicate) and not isinstance(gradient, Replicate):
            gradients[axis] = gradient
    return layout.with_placements(layout.placements, gradients)


def _check_source(name: str, source: Layout, data: DataMesh) -> None:
    mesh = source.abstract_mesh
    sizes = [data.replicate.size, data.shard.size] if data.replicate else [data.shard.size]
    for axis_name, size in zip(data.axis_names, sizes):
        if axis_name not in mesh.axis_names or mesh.size(axis_name) != size:
            raise ShardingError(
                f"parameter {name!r} has a layout on the mesh {mesh}, which has no axis "
                f"{axis_name!r} of size {size}; pass fully_shard a slice of that mesh, such as "
                "mesh['dp_replicate', 'dp_shard']"
            )
        axis = mesh.axis_index(axis_name)
        if not isinstance(source.placements[axis], Replicate):
            raise ShardingError(
                f"parameter {name!r} is already placed {source.placements[axis]} on mesh axis "
                f"{axis_name!r}; fully_shard can only cut what is replicated there. Shard it over "
                "another axis, or list it in ignored_params"
            )
        if not isinstance(source.grad_placements[axis], Replicate):
            raise ShardingError(
                f"parameter {name!r} declares a gradient placed {source.grad_placements[axis]} on "
                f"data axis {axis_name!r}; fully_shard reduces gradients over that axis itself. "
                "Leave data axes out of the parameter's contract"
            )
