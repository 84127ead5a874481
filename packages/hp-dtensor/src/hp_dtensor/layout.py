"""Layout: mesh, placements and global shape, and which global indices a rank holds (decision D2).

`Layout.owned_indices` is the ground truth that local shapes, redistribution, checkpoint chunks and
Muon's gathers agree with. The order in which axes cut a dim is:

1. left to right in mesh-axis order, each cutting what the previous ones left;
2. except that `StridedShard(dim, f)` comes after those axes to its right that cut the same dim
   into `f` pieces (FSDP over tensor parallelism); where no axes to its right do, it cuts the dim
   into `f` chunks and takes its own chunk of each;
3. `RaggedShard` comes last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_dtensor.cut_order import Cuts, flattened, ordered_cuts
from hp_dtensor.cuts import Runs, indices_of, runs_to_indices
from hp_dtensor.holdings import Coordinate as Coordinate
from hp_dtensor.holdings import Holdings
from hp_dtensor.layout_checks import (
    as_gradients,
    as_mesh,
    as_placements,
    as_shape,
    check_count,
    check_placement,
    check_reductions,
    check_whole_units,
    may_be_gradient,
    normalized,
    partial_extreme,
)
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import (
    Placement,
    RaggedShard,
    SectionedShard,
    StridedShard,
    default_grad_placement,
    describe,
    is_partial,
    is_replicate,
    is_sharding,
    sharded_dims,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_IRREGULAR = frozenset({RaggedShard, SectionedShard, StridedShard})


@frozen(repr=False, cache_hash=True, slots=False)
class Layout:
    """Where every element of a tensor is. An immutable, hashable value.

    Args:
        mesh: a `DeviceMesh`, an `AbstractMesh`, or a mapping of axis names to sizes.
        placements: one per mesh axis; negative dims are normalised.
        shape: the global shape.
        grad_placements: placements of the gradient, one per mesh axis, or None for the defaults
            of D3: a sharded value has a gradient sharded alike, Partial has Replicate, Replicate
            has Replicate. Replicate may instead have Partial: each rank holds a summand.

    Raises:
        ValueError: a count, dim, section, share or gradient placement does not fit; the message
            names the mesh axis.
        TypeError: a placement is of a kind this package does not know.
    """

    mesh: DeviceMesh | AbstractMesh = field(converter=as_mesh)
    placements: tuple[Placement, ...] = field(converter=as_placements)
    shape: tuple[int, ...] = field(converter=as_shape)
    grad_placements: tuple[Placement, ...] = field(default=None, converter=as_gradients)

    def __attrs_post_init__(self) -> None:
        mesh = self.abstract_mesh
        check_count("placements", self.placements, mesh)
        fitting = tuple(
            normalized(placement, axis, len(self.shape))
            for placement, axis in zip(self.placements, mesh.axis_names)
        )
        object.__setattr__(self, "placements", fitting)
        object.__setattr__(self, "grad_placements", self._resolved_gradients())
        check_reductions(fitting)
        for axis, placement in enumerate(fitting):
            check_placement(placement, mesh.axis_names[axis], mesh.sizes[axis], self.shape)
        self._cut()

    # One ordered list of cuts per tensor dim; the flattening cut of a RaggedShard over several
    # dims is in the list of each of them, last.
    cuts: Cuts = field(init=False, eq=False)

    # What each coordinate holds. It follows from the cuts alone, so a layout has it in common
    # with its dual.
    holdings: Holdings = field(init=False, eq=False)

    def _cut(self) -> None:
        """Works out the cuts.

        Raises:
            ValueError: placements do not fit together.
        """
        cuts = ordered_cuts(self.abstract_mesh, self.placements, self.shape)
        object.__setattr__(self, "cuts", cuts)
        holdings = Holdings(self.shape, cuts, flattened(self.placements))
        object.__setattr__(self, "holdings", holdings)
        if any(type(placement) is RaggedShard for placement in self.placements):
            check_whole_units(holdings, self.abstract_mesh, self.placements)

    def _of_same_tensor(self, placements: tuple[Placement, ...]) -> Layout:
        """Other placements, each of which some layout of this mesh and shape has on its axis.

        So they are known to fit one by one; whether they fit together is all that is looked at.

        Raises:
            ValueError: they do not.
        """
        check_reductions(placements)
        made = self._unchecked(
            placements, tuple([default_grad_placement(placement) for placement in placements])
        )
        made._cut()
        return made

    def _unchecked(
        self, placements: tuple[Placement, ...], gradients: tuple[Placement, ...]
    ) -> Layout:
        """A layout on the same mesh and of the same shape, without cuts."""
        made = Layout.__new__(Layout)
        # In attrs' own order; cached_property would find these under the same names.
        vars(made).update(
            mesh=self.mesh,
            placements=placements,
            shape=self.shape,
            grad_placements=gradients,
            _attrs_cached_hash=None,
            abstract_mesh=self.abstract_mesh,
        )
        return made

    def _resolved_gradients(self) -> tuple[Placement, ...]:
        if self.grad_placements is None:
            return tuple(default_grad_placement(placement) for placement in self.placements)
        names = self.abstract_mesh.axis_names
        check_count("grad_placements", self.grad_placements, self.abstract_mesh)
        gradients = tuple(
            normalized(placement, axis, len(self.shape))
            for placement, axis in zip(self.grad_placements, names)
        )
        for name, value, gradient in zip(names, self.placements, gradients):
            if not may_be_gradient(value, gradient):
                raise ValueError(
                    f"mesh axis {name!r}: a value placed {describe(value)} cannot have a gradient "
                    f"placed {describe(gradient)}; a sharded value's gradient is sharded alike, "
                    "Partial's is Replicate, Replicate's is Replicate or Partial"
                )
        return gradients

    # -- what the layout is ------------------------------------------------------------------

    @cached_property
    def abstract_mesh(self) -> AbstractMesh:
        return AbstractMesh.of(self.mesh)

    @cached_property
    def abstract(self) -> Layout:
        """The same layout on names and sizes only."""
        if isinstance(self.mesh, AbstractMesh):
            return self
        return Layout(self.abstract_mesh, self.placements, self.shape, self.grad_placements)

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return math.prod(self.shape)

    @property
    def flat_dims(self) -> int:
        """How many leading dims a RaggedShard flattens; 0 without one."""
        return self.holdings.flat_dims

    @cached_property
    def is_replicated(self) -> bool:
        """Every rank holds the whole value: each axis is Replicate or has size 1."""
        sizes = self.abstract_mesh.sizes
        return all(is_replicate(p) or n == 1 for p, n in zip(self.placements, sizes))

    @cached_property
    def is_even(self) -> bool:
        """All ranks hold local tensors of the same shape."""
        return self.holdings.is_even()

    def sharding_axes(self) -> dict[int, tuple[int, ...]]:
        """Mesh axes (of more than one rank) that cut the tensor, with the dims each cuts."""
        sizes = self.abstract_mesh.sizes
        return {
            axis: sharded_dims(placement)
            for axis, placement in enumerate(self.placements)
            if is_sharding(placement) and sizes[axis] > 1
        }

    def replicating_axes(self) -> tuple[int, ...]:
        """Mesh axes whose placement is Replicate."""
        return tuple(i for i, p in enumerate(self.placements) if is_replicate(p))

    def partial_axes(self) -> tuple[int, ...]:
        """Mesh axes whose placement is Partial."""
        return tuple(i for i, p in enumerate(self.placements) if is_partial(p))

    @cached_property
    def has_sums(self) -> bool:
        """The value, or its gradient, is a pending sum on some mesh axis."""
        return any(is_partial(p) for p in (*self.placements, *self.grad_placements))

    def with_placements(
        self,
        placements: Iterable[Placement],
        grad_placements: Iterable[Placement] | None = None,
    ) -> Layout:
        """Other placements of the same tensor; gradients take their defaults unless given."""
        return evolve(self, placements=placements, grad_placements=grad_placements)

    @cached_property
    def of_dual(self) -> Layout:
        """The gradient's layout, whose own gradient is laid out as this value (decision D3)."""
        if partial_extreme(self.placements):  # refused, with the reason
            return Layout(self.mesh, self.grad_placements, self.shape, self.placements)
        made = self._unchecked(self.grad_placements, self.placements)
        # A gradient is cut where its value is cut, and nowhere else.
        object.__setattr__(made, "cuts", self.cuts)
        object.__setattr__(made, "holdings", self.holdings)
        return made

    @property
    def of_gradient(self) -> Layout:
        """Where a gradient is: the gradient placements as placements of a value."""
        # Usually the same; one object is found equal to itself faster.
        return self._other_of_gradient or self

    @cached_property
    def _other_of_gradient(self) -> Layout | None:
        """`of_gradient`, or None for this layout itself, which must not hold on to itself: with it
        go the mesh and its process groups."""
        made = self.with_placements(self.grad_placements)
        return None if made == self else made

    def with_shape(self, shape: Iterable[int]) -> Layout:
        """The same placements for a tensor of another global shape."""
        return evolve(self, shape=shape)

    # -- what a rank holds -------------------------------------------------------------------

    def local_shape(self, coord: Coordinate | None = None) -> tuple[int, ...]:
        """Shape of the local tensor at `coord` (None: this rank's, which needs a DeviceMesh)."""
        return self.holdings.local_shape(self.coordinate(coord))

    def local_numel(self, coord: Coordinate | None = None) -> int:
        return math.prod(self.local_shape(coord))

    def owned_indices(self, coord: Coordinate | None = None) -> Tensor:
        """Row-major global flat indices held at `coord`, in local storage order: 1-D int64.

        The order is always ascending. Replicate and Partial hold the whole tensor.
        """
        return indices_of(self.view_runs(0, coord), self.view_shape(self.flat_dims))

    def dim_indices(self, dim: int, coord: Coordinate | None = None) -> Tensor:
        """Global indices along `dim` held at `coord`: 1-D int64.

        Raises:
            ValueError: the dim is flattened with others by a RaggedShard, so that what a rank
                holds is not a product over dims.
        """
        return runs_to_indices(self.dim_runs(dim, coord))

    def dim_runs(self, dim: int, coord: Coordinate | None = None) -> Runs:
        """`dim_indices` as ascending `(start, stop)` intervals."""
        dim %= max(self.ndim, 1)
        if self.flat_dims > 1 and dim < self.flat_dims:
            raise ValueError(
                f"dim {dim} of {self} is flattened with dims 0 to {self.flat_dims - 1}; "
                "use owned_indices"
            )
        return self.holdings.dim_runs(dim, self.coordinate(coord))

    def view_runs(self, flat_dims: int, coord: Coordinate | None = None) -> tuple[Runs, ...]:
        """What `coord` holds, with the first `flat_dims` dims seen as one (0 and 1: no change)."""
        return self.holdings.view_runs(flat_dims, self.coordinate(coord))

    def view_shape(self, flat_dims: int) -> tuple[int, ...]:
        """The global shape with the first `flat_dims` dims seen as one."""
        if flat_dims <= 1:
            return self.shape
        return (math.prod(self.shape[:flat_dims]), *self.shape[flat_dims:])

    @property
    def numel_bounds(self) -> tuple[int, int]:
        """Elements of the smallest and of the largest local tensor."""
        return self.holdings.bounds()

    @property
    def largest_numel(self) -> int:
        """Elements of the largest local tensor."""
        return self.holdings.bounds()[1]

    @property
    def is_chunked(self) -> bool:
        """Every cut makes chunks, none sections or ragged shares."""
        return not any(type(placement) in _IRREGULAR for placement in self.placements)

    def coordinate(self, coord: Coordinate | None = None) -> Coordinate:
        """`coord`, or this rank's coordinate on the DeviceMesh.

        Raises:
            ValueError: None is given and the layout is on an abstract mesh, or this rank is not
                in the mesh.
        """
        if coord is not None:
            return coord
        if isinstance(self.mesh, AbstractMesh):
            raise ValueError(
                f"{self} is on an abstract mesh, where there is no own rank; pass a coordinate"
            )
        own = self.mesh.get_coordinate()
        if own is None:
            raise ValueError(f"this rank is not in the mesh of {self}; pass a coordinate")
        return tuple(own)

    # -- as text, and as a value that is never duplicated ------------------------------------

    def __repr__(self) -> str:
        gradient = ""
        if self.grad_placements != tuple(default_grad_placement(p) for p in self.placements):
            gradient = f", gradient {describe(self.grad_placements)}"
        return (
            f"Layout({list(self.shape)} {describe(self.placements)}{gradient} "
            f"on {self.abstract_mesh})"
        )

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: object) -> Layout:
        return self

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return Layout, (self.mesh, self.placements, self.shape, self.grad_placements)


def layout_of(tensor: Tensor) -> Layout | None:
    """The layout of a tensor: remembered on a plain one, or that of a DTensor (ours, PyTorch's).

    None for a plain tensor without one.
    """
    remembered = getattr(tensor, "_hp_layout", None)
    if isinstance(remembered, Layout):
        return remembered
    own: Any = getattr(tensor, "layout", None)  # torch.strided, if it is not a DTensor of ours
    if isinstance(own, Layout):
        return own
    if isinstance(tensor, TorchDTensor):
        return Layout(tensor.device_mesh, tensor.placements, tuple(tensor.shape))
    return None


def attach_layout(tensor: Tensor, layout: Layout) -> Tensor:
    """Remembers `layout` on a plain local tensor and returns the tensor.

    Raises:
        ValueError: the tensor's shape is not the layout's local shape on this rank.
    """
    if not isinstance(layout.mesh, AbstractMesh) and layout.mesh.get_coordinate() is not None:
        expected = layout.local_shape()
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"attach_layout: the local tensor has shape {tuple(tensor.shape)}, but {layout} "
                f"gives this rank {expected}"
            )
    tensor._hp_layout = layout  # type: ignore[attr-defined]
    return tensor
