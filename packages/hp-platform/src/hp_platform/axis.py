"""One axis of a mesh as this rank sees it: the unit on which collectives are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hp_platform.capabilities import GLOO, Capabilities, capabilities_of
from hp_platform.errors import TopologyError
from hp_platform.groups import group_of
from hp_platform.hccl import HcclGroupOptions
from hp_platform.lookout import keep_lookout
from hp_platform.places import exchange_places
from hp_platform.topology import Tier, Topology, tier_of_domains
from hp_platform.trail import Trail, trail_of

_BACKEND_DEVICES = {"nccl": "cuda", "hccl": "npu"}


@dataclass(frozen=True)
class MeshAxis:
    """A named group of ranks in coordinate order.

    Attributes:
        name: the mesh axis's name, shown in errors and in the ledger.
        size: number of ranks on the axis.
        rank: this rank's coordinate on the axis.
        ranks: global ranks, in coordinate order.
        tier: how these ranks reach one another.
        device: where collectives on the axis run.
        process_group: the group, or None exactly when `size` is 1.
        backend: the group's backend as `torch.distributed` names it; "" when `size` is 1.
        domains: the fast domain (super-node or host) of every coordinate. Made by hand without
            them, an axis has one domain where its tier is fast and one a rank where it is slow.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    tier: Tier
    device: torch.device
    process_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    backend: str = ""
    domains: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size != len(self.ranks) or not 0 <= self.rank < self.size:
            raise TopologyError(
                f"mesh axis {self.name!r}: size {self.size} and coordinate {self.rank} do not fit "
                f"its ranks {self.ranks}; make axes with MeshAxis.of_mesh or MeshAxis.of_group"
            )
        if (self.process_group is None) != (self.size == 1):
            raise TopologyError(
                f"mesh axis {self.name!r} of size {self.size}: a process group is needed exactly "
                "when the size is above 1; make axes with MeshAxis.of_mesh or MeshAxis.of_group"
            )

    @property
    def global_rank(self) -> int:
        """This process's global rank."""
        return self.ranks[self.rank]

    @cached_property
    def capabilities(self) -> Capabilities | None:
        """What the backend can do; None where it is unknown. Looked up once for every axis."""
        if self.process_group is None:  # nothing is sent
            return GLOO
        return capabilities_of(self.backend, self.device.type)

    @cached_property
    def trail(self) -> Trail | None:
        """What this rank has issued on the group; None where nothing is sent."""
        trail = trail_of(self)
        if trail is not None:
            keep_lookout()
        return trail

    @classmethod
    def of_mesh(
        cls,
        mesh: DeviceMesh,
        axis: str | int,
        topology: Topology | None = None,
        *,
        fast: bool = False,
    ) -> MeshAxis:
        """The axis `axis` (name or index) of `mesh`.

        Without `topology`, the ranks on the axis exchange their hosts through the store, so
        all of them must make this call.

        Args:
            fast: the axis must not cross a slow boundary, in any of its groups. All ranks of the
                world must then make this call, and where one group crosses all of them raise.

        Raises:
            TopologyError: no such axis, an axis that must be fast is not, this rank is outside
                the mesh, or the group numbers its ranks in another order than the mesh (a
                collective would then hand a coordinate the share of another).
        """
        index = _axis_index(mesh, axis)
        names = mesh.mesh_dim_names
        name = names[index] if names else f"axis{index}"
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise TopologyError(
                f"rank {dist.get_rank()} is not part of the mesh {mesh}; only the mesh's ranks "
                f"may use its axis {name!r}"
            )
        position = tuple(slice(None) if i == index else c for i, c in enumerate(coordinate))
        ranks = tuple(int(rank) for rank in mesh.mesh[position].tolist())
        if fast:
            lines = mesh.mesh.movedim(index, -1).reshape(-1, mesh.mesh.shape[index]).tolist()
            (topology or Topology.discover()).require_fast(lines, f"mesh axis {name!r}")
        device = _current_device(mesh.device_type)
        size = len(ranks)
        if size == 1:
            return cls(name, 1, 0, ranks, Tier.LOCAL, device)
        group = mesh.get_group(index)
        numbered = tuple(dist.get_process_group_ranks(group))
        if numbered != ranks:
            raise TopologyError(
                f"mesh axis {name!r} lists ranks {ranks} but its process group numbers them "
                f"{numbered}; build the mesh with ascending ranks along every axis"
            )
        domains = _domains(ranks, topology)
        tier, backend = tier_of_domains(domains), dist.get_backend(group)
        return cls(name, size, coordinate[index], ranks, tier, device, group, backend, domains)

    @classmethod
    def of_group(
        cls,
        group: dist.ProcessGroup | None = None,
        name: str = "world",
        topology: Topology | None = None,
    ) -> MeshAxis:
        """The axis made of `group`'s ranks; None means the default group.

        Raises:
            TopologyError: no process group exists, or this rank is not a member.
        """
        if not dist.is_initialized():
            raise TopologyError(
                f"mesh axis {name!r} needs a process group: call "
                "torch.distributed.init_process_group first, or use torchrun or run_ranks"
            )
        chosen = dist.group.WORLD if group is None else group
        rank = dist.get_rank(chosen)
        if chosen is None or rank < 0:
            raise TopologyError(
                f"rank {dist.get_rank()} is not a member of the group for mesh axis {name!r}"
            )
        ranks = tuple(dist.get_process_group_ranks(chosen))
        backend = dist.get_backend(chosen)
        device = _current_device(_device_type(backend))
        if len(ranks) == 1:
            return cls(name, 1, 0, ranks, Tier.LOCAL, device)
        domains = _domains(ranks, topology)
        tier = tier_of_domains(domains)
        return cls(name, len(ranks), rank, ranks, tier, device, chosen, backend, domains)

    def subset(
        self,
        subsets: Sequence[Sequence[int]],
        topology: Topology | None = None,
        options: HcclGroupOptions | None = None,
    ) -> MeshAxis:
        """The part of this axis that this rank falls into when its coordinates are divided.

        A process group is made for it where this axis has not been divided so before; all ranks
        of a subset must make this call, in the same order among the calls that make groups.

        Args:
            subsets: coordinates of this axis, every one exactly once.
            options: of the groups, for HCCL only.

        Raises:
            TopologyError: a coordinate is missing or occurs twice, or the options are for
                another backend.
        """
        if sorted(c for subset in subsets for c in subset) != list(range(self.size)):
            raise TopologyError(
                f"mesh axis {self.name!r}: subsets {[list(s) for s in subsets]} must hold each of "
                f"its {self.size} coordinates exactly once"
            )
        own = sorted(next(subset for subset in subsets if self.rank in subset))
        if len(own) == self.size:
            return self
        ranks = tuple(self.ranks[c] for c in own)
        rank = own.index(self.rank)
        if len(ranks) == 1:
            return MeshAxis(self.name, 1, 0, ranks, Tier.LOCAL, self.device)
        group = group_of(f"part of {self.name}", ranks, options)
        domains = _domains(ranks, topology)
        tier, backend = tier_of_domains(domains), dist.get_backend(group)
        return MeshAxis(
            self.name, len(ranks), rank, ranks, tier, self.device, group, backend, domains
        )


def _axis_index(mesh: DeviceMesh, axis: str | int) -> int:
    names = mesh.mesh_dim_names or ()
    if isinstance(axis, str):
        if axis not in names:
            raise TopologyError(f"the mesh has axes {names}, none is named {axis!r}")
        return names.index(axis)
    if not isinstance(axis, int):
        raise TopologyError(
            f"a mesh axis is one name or one index, found {axis!r}; the mesh has axes {names}"
        )
    if not -mesh.ndim <= axis < mesh.ndim:
        raise TopologyError(f"the mesh has {mesh.ndim} axes, there is no axis {axis}")
    return axis % mesh.ndim


def _domains(ranks: tuple[int, ...], topology: Topology | None) -> tuple[str, ...]:
    if topology is not None:
        return tuple(topology.domain_of(rank) for rank in ranks)
    places = exchange_places(ranks, dist.get_rank(), dist.get_world_size())
    return tuple(place.super_node or place.host for place in places.values())


def _device_type(backend: str) -> str:
    for part, device_type in _BACKEND_DEVICES.items():
        if part in backend:
            return device_type
    return "cpu"


def _current_device(device_type: str) -> torch.device:
    if device_type in ("cpu", "meta"):
        return torch.device(device_type)
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
