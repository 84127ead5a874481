"""How parameters are cut over the shard axis, decided once.

A parameter that travels alone (paper section 5.1) is cut into chunks of `ceil(rows / world)` rows:
if every rank's piece is padded to a whole chunk, the pieces laid end to end hold the full tensor in
their first elements and padding only in their tail, so the gathered parameter is a view of the
buffer and nothing is unpacked. Dims that are not leading are cut likewise, but their pieces have to
be concatenated.

Parameters that travel together lie end to end in one buffer, which is cut evenly between the ranks
(`SharedCut`). What falls into a rank's part is its share of each parameter: often all or nothing,
which is what `RaggedShard` describes. The gathered buffer holds every parameter whole, as a view.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from attrs import frozen
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.placements import (
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    is_sharding,
    sharded_dims,
)
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.errors import ShardingError
from hp_platform.buffers import ALIGNMENT

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

    @property
    def offset(self) -> int:
        """Element of the gathered buffer at which it begins, which is its own."""
        return 0

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

    @cached_property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def placement(self) -> Shard:
        return Shard(self.dim)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's piece of the whole tensor, in `local_shape`: a view."""
        return whole.narrow(self.dim, self.start, self.length(self.rank))

    def _with(self, length: int) -> Shape:
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


@frozen(slots=False)
class SharedCut:
    """A tensor that begins at element `offset` of a buffer cut into parts of `part` elements.

    Seen from coordinate `rank`, as `Cut` is. Shares are counted in the largest blocks of trailing
    dims whose borders all cuts meet: rows where they can, else elements; leading dims down to a
    block are flattened in the local tensor.
    """

    shape: Shape
    offset: int
    part: int
    world: int
    rank: int

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Elements that fall into the part of every coordinate."""
        bounds = [
            min(max(rank * self.part - self.offset, 0), self.numel)
            for rank in range(self.world + 1)
        ]
        return tuple(stop - start for start, stop in pairwise(bounds))

    @cached_property
    def start(self) -> int:
        """First element of this rank's share."""
        return sum(self.shares[: self.rank])

    @cached_property
    def local_start(self) -> int:
        """Where the share begins in this rank's part."""
        return max(self.offset - self.rank * self.part, 0)

    @cached_property
    def local_numel(self) -> int:
        return self.shares[self.rank]

    @cached_property
    def _flattened(self) -> int:
        """Number of leading dims that are flattened."""
        for dims in range(1, len(self.shape)):
            block = math.prod(self.shape[dims:])
            if block and all(share % block == 0 for share in self.shares):
                return dims
        return len(self.shape)

    @cached_property
    def local_shape(self) -> Shape:
        rest = self.shape[self._flattened :]
        return (self.local_numel // math.prod(rest), *rest)

    @cached_property
    def placement(self) -> RaggedShard:
        divisor = math.gcd(*self.shares)
        units = [share // divisor for share in self.shares]
        return RaggedShard(range(self._flattened), units)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's share of the whole tensor, in `local_shape`."""
        flat = whole.reshape(-1)[self.start : self.start + self.local_numel]
        return flat.view(self.local_shape)


@frozen(slots=False)
class Uncut:
    """A 0-dimensional tensor, which has no dim to be cut along: every rank holds it.

    It is gathered and reduced all the same, as one element of every rank, and stays equal on all.
    """

    world: int
    rank: int

    shape: Shape = ()
    local_shape: Shape = ()
    numel: int = 1
    padded_numel: int = 1
    local_numel: int = 1
    offset: int = 0

    @property
    def placement(self) -> Replicate:
        return Replicate()

    def take(self, whole: Tensor) -> Tensor:
        """The tensor itself."""
        return whole


AnyCut = Cut | SharedCut | Uncut


@frozen
class SharedLayout:
    """Where tensors lie in a buffer that is cut evenly between ranks.

    Attributes:
        offsets: first element of every tensor, in the order in which they were given.
        part: elements of one rank's part; whole 512-byte units.
    """

    offsets: tuple[int, ...]
    part: int

    @classmethod
    def of(cls, shapes: Sequence[Shape], itemsize: int, world: int) -> SharedLayout:
        """Lays tensors out so that the cuts fall between rows, where that costs little padding.

        Long rows come first, and all tensors begin at multiples of their row's length: if a part
        is such a multiple too, every cut meets a row's border.
        """
        rows = [math.prod(shape[1:]) for shape in shapes]
        offsets, end = [0] * len(shapes), 0
        for index in sorted(range(len(shapes)), key=lambda i: -rows[i]):
            offsets[index] = _rounded_up(end, _start_unit(rows[index], itemsize))
            end = offsets[index] + math.prod(shapes[index])
        unit = ALIGNMENT // itemsize
        by_rows = math.lcm(unit, *rows)
        if by_rows * world * _MOST_PADDING <= end:
            unit = by_rows
        return cls(tuple(offsets), _rounded_up(-(-end // world), unit))


_MOST_PADDING = 16
"""Parts end at a common multiple of all row lengths if that adds at most this fraction."""
_KERNEL_ALIGNMENT = 64
"""Bytes: what PyTorch's CPU allocator gives, and kernels are fast with."""
_MOST_SKIPPED = 1 << 16
"""Elements that may be left out before a tensor for the sake of its alignment."""


def _start_unit(row: int, itemsize: int) -> int:
    """Starts are multiples of it: of the row and, where that wastes little, of 64 bytes."""
    both = math.lcm(row, _KERNEL_ALIGNMENT // itemsize)
    return both if both <= _MOST_SKIPPED else row


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def sharded_layout(name: str, cut: AnyCut, source: Layout | None, data: DataMesh) -> Layout:
    """Layout of a parameter after its local tensor has been cut over `data`.

    Args:
        name: the parameter's, for errors.
        cut: the cut of its local tensor.
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
        return Layout(data.mesh, (*placements, cut.placement), cut.shape)
    check_source(name, source, data)
    mesh = source.abstract_mesh
    axis = mesh.axis_index(data.axis_names[-1])
    placements = list(source.placements)
    if not isinstance(cut, Cut):
        placements[axis] = cut.placement
        return source.with_placements(placements)
    dim = cut.dim
    factor = math.prod(
        mesh.sizes[later]
        for later in range(axis + 1, mesh.ndim)
        if is_sharding(source.placements[later]) and dim in sharded_dims(source.placements[later])
    )
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


def check_source(name: str, source: Layout, data: DataMesh) -> None:
    """Checks that a layout leaves the data axes to `fully_shard`.

    Raises:
        ShardingError: it does not.
    """
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
