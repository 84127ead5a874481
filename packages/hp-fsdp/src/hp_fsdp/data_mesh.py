"""The data-parallel mesh of one `fully_shard` call: a shard axis and, with two tiers, replicas.

The last axis shards and is meant for the fast tier; the axis before it, if there is one,
replicates and is meant for the slow tier (paper section 5.2).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims

from hp_dtensor.mesh import mesh_axis
from hp_fsdp.errors import AssertedError, NotAvailableError, ShardingError
from hp_platform import MeshAxis, Origin, agree, all_reduce
from hp_platform.links import Link, link_of
from hp_platform.meeting import share_memory


@frozen
class DataMesh:
    """A checked mesh and its axes as this rank sees them.

    Attributes:
        mesh: one axis (shard) or two (replicate, shard).
        axis_names: names of the mesh's axes, in its order.
        shard: the axis over which parameters are cut.
        replicate: the axis over which shards are repeated, or None.
    """

    mesh: DeviceMesh
    axis_names: tuple[str, ...]
    shard: MeshAxis
    replicate: MeshAxis | None

    @classmethod
    def of(cls, mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> DataMesh:
        """Checks `mesh`; None makes a mesh of one axis without a name over all ranks, as FSDP2.

        Args:
            mesh: the data-parallel mesh, or, with `dims`, one that has its axes among others.
            dims: names of the axes of `mesh` that shard and replicate.

        Raises:
            ShardingError: there are more than two axes, or two without names; or `dims` names
                what `mesh` does not have.
        """
        if mesh is None:
            mesh = _world_mesh()
        if dims is not None:
            mesh = _data_slice(mesh, dims)
        if mesh.ndim not in (1, 2):
            raise ShardingError(
                f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: one axis (shard) or "
                f"two (replicate, shard), not {mesh.ndim}; pass a slice of it, such as "
                "mesh['dp_replicate', 'dp_shard']"
            )
        names = mesh.mesh_dim_names
        if names is None and mesh.ndim == 2:
            raise AssertedError(
                "Please init the 2D mesh for HSDP with mesh_dim_names specified, such as "
                f"('dp_replicate', 'dp_shard'), found {mesh} without: axes are named in layouts, "
                "and the last one shards"
            )
        shard = mesh_axis(mesh, mesh.ndim - 1)
        share_memory(shard)
        replicate = mesh_axis(mesh, 0) if mesh.ndim == 2 else None
        return cls(mesh, tuple(names or ("axis0",)), shard, replicate)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that each contribute a gradient: the product of the axes' sizes."""
        return self.shard.size * (self.replicate.size if self.replicate else 1)

    @property
    def has_replicas(self) -> bool:
        return self.replicate is not None and self.replicate.size > 1

    def link(self) -> Link:
        """Latency and bandwidth of the shard axis: the same on all data-parallel ranks.

        Measured once for a process group, whatever meshes have it; all its ranks must ask for it.
        """
        known: dict[str, Link] = self.mesh.__dict__.setdefault("_hp_links", {})
        if self.shard.name not in known:
            link = link_of(self.shard)
            if self.has_replicas:
                assert self.replicate is not None
                link = _slowest(link, self.replicate)
            known[self.shard.name] = link
        return known[self.shard.name]

    def agree(self, name: str, value: object) -> None:
        """Checks that all data-parallel ranks hold the same `value`; all must make this call.

        Raises:
            AgreementError: they do not.
        """
        agree(name, value, self.shard)
        if self.has_replicas:
            assert self.replicate is not None
            agree(name, value, self.replicate)


def _data_slice(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    if len(dims.shard_names) != 1 or len(dims.replicate_names) > 1:
        raise NotAvailableError(
            f"dp_mesh_dims={dims!r} is not available: name one axis to shard over and at most one "
            "to replicate over; flatten several into one with DeviceMesh._flatten, or make a mesh "
            "that has them as one"
        )
    names = (*dims.replicate_names, *dims.shard_names)
    present = mesh.mesh_dim_names
    if present is None:
        raise ShardingError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in names:
        if name not in present:
            raise ShardingError(
                f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {present}; name axes of "
                "the mesh in dp_mesh_dims"
            )
    if sorted(names, key=present.index) != list(names):
        raise ShardingError(
            f"dp_mesh_dims={dims!r}: axis {names[0]!r} must come before {names[1]!r} in the mesh, "
            f"found {present}; replicas are outside, shards inside"
        )
    return mesh[names]


def _slowest(link: Link, axis: MeshAxis) -> Link:
    """What the slowest of the coordinates of `axis` has found."""
    found = torch.tensor([link.latency, 1 / link.bandwidth], dtype=torch.float64).to(axis.device)
    origin = Origin("hp_fsdp", "links", "calibration")
    latency, inverse = all_reduce(found, axis, op="max", origin=origin).wait().tolist()
    return Link(latency, 1 / inverse)


def _world_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise ShardingError(
            "fully_shard needs a process group: call torch.distributed.init_process_group first, "
            "start the program with torchrun, or pass mesh="
        )
    world = MeshAxis.of_group(name="dp_shard")
    return init_device_mesh(world.device.type, (world.size,))
