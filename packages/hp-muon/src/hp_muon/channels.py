"""Process groups behind a plan: its mesh axes and replica subgroups, compiled to exchanges."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hp_dtensor import AbstractMesh
from hp_muon.errors import MuonError
from hp_muon.relay import hops
from hp_muon.step import Channel
from hp_muon.step_plan import Batch, Domain, ReplicaAxis, StepPlan
from hp_platform import MeshAxis, Topology, agree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Channels:
    """The axes of every domain of a plan. Making one is collective: groups may be created.

    Raises:
        MuonError: a layout is on an abstract mesh, which has no process groups.
    """

    def __init__(self, plan: StepPlan, topology: Topology | None) -> None:
        self._topology = topology
        self._axes: list[tuple[DeviceMesh, int, tuple[int, ...] | None, MeshAxis]] = []
        self._by_domain = {
            id(domain): (self._shard_axes(domain), self._replica_axes(domain))
            for domain in plan.domains()
        }
        self.compiled: tuple[Channel, ...] = tuple(map(self._compile, plan.batches))

    def replica_axes(self, domain: Domain) -> tuple[MeshAxis, ...]:
        return self._by_domain[id(domain)][1]

    def sharing_axes(self, domain: Domain, sharding: Sequence[int]) -> tuple[MeshAxis, ...]:
        """The mesh axes `sharding` and the replica axes: who holds parts of one parameter."""
        return (*(self._axis(domain, axis) for axis in sharding), *self.replica_axes(domain))

    def agree(self, plan: StepPlan) -> None:
        """Stops all ranks if their plans differ; silent where nothing is communicated.

        Raises:
            AgreementError: names the ranks that differ.
        """
        for *_, axis in self._axes:
            agree("the Muon step plan (parameters, layouts, options)", plan.digest, axis)

    @functools.cached_property
    def agreement(self) -> tuple[MeshAxis, ...] | None:
        """Axes over which a maximum reaches all ranks that this plan makes exchange anything.

        None where several meshes are in use and none of them has all ranks of the others: there
        the ranks that exchange with one another, over some others, are not known.
        """
        for mesh in dict.fromkeys(mesh for mesh, *_ in self._axes):
            own = {index: found for m, index, subgroup, found in self._axes if m == mesh}
            # A whole axis reaches further than a subgroup of it.
            own |= {i: found for m, i, subgroup, found in self._axes if m == mesh and not subgroup}
            if all(other == mesh for other, *_ in self._axes) or self._covers(mesh):
                return tuple(own[index] for index in sorted(own))
        return () if not self._axes else None

    def _covers(self, mesh: DeviceMesh) -> bool:
        """Whether a maximum over this mesh's axes in use reaches all ranks of all meshes in use."""
        whole = {index for m, index, subgroup, _ in self._axes if m == mesh and subgroup is None}
        ranks = set(mesh.mesh.flatten().tolist())
        return all(size == 1 or axis in whole for axis, size in enumerate(mesh.shape)) and all(
            ranks.issuperset(other.mesh.flatten().tolist()) for other, *_ in self._axes
        )

    def _compile(self, batch: Batch) -> Channel:
        shard_axes, replica_axes = self._by_domain[id(batch.domain)]
        part = batch.own
        return Channel(
            gather=hops([segment.total for segment in part.segments], shard_axes),
            relay=hops(part.chunks, shard_axes),
            publish=hops([part.publication.total for part in batch.parts], replica_axes),
        )

    def _shard_axes(self, domain: Domain) -> tuple[MeshAxis, ...]:
        return tuple(self._axis(domain, axis) for axis in domain.shard_axes)

    def _replica_axes(self, domain: Domain) -> tuple[MeshAxis, ...]:
        return tuple(self._subgroup(domain, axis) for axis in domain.replica_axes)

    def _axis(self, domain: Domain, axis: int) -> MeshAxis:
        found = self._known(domain, axis, None)
        if found is None:
            if domain.mesh is None or isinstance(domain.mesh, AbstractMesh):
                raise MuonError(
                    f"parameters {domain.label} are on an abstract mesh, which has no process "
                    "groups; give their layouts a torch.distributed DeviceMesh"
                )
            found = MeshAxis.of_mesh(domain.mesh, axis, self._topology)
            self._axes.append((domain.mesh, axis, None, found))
        return found

    def _subgroup(self, domain: Domain, replica: ReplicaAxis) -> MeshAxis:
        if len(replica.subgroups) == 1:
            return self._axis(domain, replica.axis)
        found = self._known(domain, replica.axis, replica.members)
        if found is None:
            whole = MeshAxis.of_mesh(domain.mesh, replica.axis, self._topology)  # type: ignore[arg-type]
            found = whole.subset(replica.subgroups, self._topology)
            self._axes.append((domain.mesh, replica.axis, replica.members, found))  # type: ignore[arg-type]
        return found

    def _known(self, domain: Domain, axis: int, members: Sequence[int] | None) -> MeshAxis | None:
        for mesh, index, subgroup, found in self._axes:
            if mesh == domain.mesh and index == axis and subgroup == members:
                return found
        return None
