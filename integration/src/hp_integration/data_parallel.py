"""Which rows of a batch this rank trains on, and averages over the data-parallel ranks."""

from __future__ import annotations

import torch
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh

from hp_platform.axis import MeshAxis
from hp_platform.collectives import Origin, all_reduce

DATA_AXES = ("dp_replicate", "dp_shard")
"""The mesh axes that belong to `fully_shard`, slowest first."""
BATCH_AXES = (*DATA_AXES, "ep")
"""The mesh axes whose ranks see different rows, slowest first: experts are shared among ranks that
each bring tokens of their own."""


@frozen
class DataParallel:
    """This rank's place among the ranks that see different rows.

    Attributes:
        axes: the mesh's data axes, slowest varying first; empty for a run in one process.
    """

    axes: tuple[MeshAxis, ...] = ()

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, axes: tuple[str, ...] = BATCH_AXES) -> DataParallel:
        """Of those of `axes` that the mesh has."""
        names = mesh.mesh_dim_names or ()
        return cls(tuple(MeshAxis.of_mesh(mesh, name) for name in axes if name in names))

    @property
    def ranks(self) -> int:
        product = 1
        for axis in self.axes:
            product *= axis.size
        return product

    @property
    def rank(self) -> int:
        """Position among the data-parallel ranks, row-major over the axes."""
        position = 0
        for axis in self.axes:
            position = position * axis.size + axis.rank
        return position

    def mean(self, value: torch.Tensor) -> float:
        """Mean of a scalar over the data-parallel ranks; for reports, nothing trains on it."""
        total = value.detach().to(torch.float64).reshape(1).clone()
        origin = Origin("hp_integration", "loss", "report")
        for axis in self.axes:
            all_reduce(total, axis, op="avg", origin=origin).wait()
        return float(total)
