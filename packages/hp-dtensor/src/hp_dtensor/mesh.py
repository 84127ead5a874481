"""A mesh as plain data: axis names and sizes, without process groups (decision D6)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import product
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from hp_platform.axis import MeshAxis


def _names(value: Iterable[str]) -> tuple[str, ...]:
    return tuple(str(name) for name in value)


def _sizes(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(size) for size in value)


@frozen
class AbstractMesh:
    """Named axes and their sizes, slowest varying first, as in `torch.distributed.device_mesh`.

    Raises:
        ValueError: names and sizes differ in number, a name is repeated, or a size is below 1.
    """

    axis_names: tuple[str, ...] = field(converter=_names)
    sizes: tuple[int, ...] = field(converter=_sizes)

    def __attrs_post_init__(self) -> None:
        if len(self.axis_names) != len(self.sizes):
            raise ValueError(
                f"a mesh needs one size per axis: {len(self.axis_names)} names "
                f"{self.axis_names}, {len(self.sizes)} sizes {self.sizes}"
            )
        if len(set(self.axis_names)) != len(self.axis_names):
            raise ValueError(f"mesh axis names must differ, found {self.axis_names}")
        for name, size in zip(self.axis_names, self.sizes):
            if size < 1:
                raise ValueError(f"mesh axis {name!r} has size {size}; sizes start at 1")

    @classmethod
    def of(cls, mesh: DeviceMesh | AbstractMesh | Mapping[str, int]) -> AbstractMesh:
        """The names and sizes of any mesh; unnamed axes are called `axis0`, `axis1`, ..."""
        if isinstance(mesh, AbstractMesh):
            return mesh
        if isinstance(mesh, Mapping):
            return cls(tuple(mesh), tuple(mesh.values()))
        names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
        return cls(names, tuple(mesh.shape))

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def axis_index(self, name: str) -> int:
        """Position of the axis called `name`.

        Raises:
            KeyError: the mesh has no such axis.
        """
        try:
            return self.axis_names.index(name)
        except ValueError:
            raise KeyError(f"mesh has no axis {name!r}; its axes are {self.axis_names}") from None

    def size(self, axis: str | int) -> int:
        return self.sizes[self.axis_index(axis) if isinstance(axis, str) else axis]

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Every rank's coordinate, in rank order."""
        return product(*(range(size) for size in self.sizes))

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.sizes))


class KeptAxes(dict[int, "MeshAxis"]):
    """Axes kept with a mesh; left out when the mesh is copied or pickled, as its groups are."""

    def __reduce__(self) -> tuple[type[KeptAxes], tuple[()]]:
        return KeptAxes, ()


def mesh_axis(mesh: DeviceMesh, axis: int) -> MeshAxis:
    """The axis of a real mesh on which collectives are called; all its ranks must ask for it.

    It is kept with the mesh object and made once: finding its tier asks the axis's other ranks.
    """
    from hp_platform.axis import MeshAxis

    known: KeptAxes = mesh.__dict__.setdefault("_hp_axes", KeptAxes())
    if axis not in known:
        known[axis] = MeshAxis.of_mesh(mesh, axis)
    return known[axis]
