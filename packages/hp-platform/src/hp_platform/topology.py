"""Which rank runs on which host, and what follows from it: tiers and replica subgroups.

Hosts that a fast network joins form a super-node. Ranks are in one fast domain when they share
a super-node, or a host where no super-nodes are declared.

Nothing is inferred from the numbering of ranks. The map is either given (`from_hosts`, `regular`)
or exchanged once through the process group's store (`discover`), so every rank checks the same
list and all of them fail together when it is unusable.
"""

from __future__ import annotations

import enum
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from hp_platform.errors import TopologyError
from hp_platform.places import HOST_VARIABLE, Place, declare_place, exchange_places

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__

__all__ = ["HOST_VARIABLE", "Tier", "Topology", "tier_of_domains"]


class Tier(enum.Enum):
    """How the ranks of a group reach one another."""

    LOCAL = "local"
    """One rank only: nothing is sent."""
    FAST = "fast"
    """All ranks in one super-node, or on one host where super-nodes are not declared."""
    SLOW = "slow"
    """At least two super-nodes or hosts."""


@dataclass(frozen=True)
class Topology:
    """The host of every global rank.

    Attributes:
        hosts: `hosts[rank]` is the name of the host that runs global rank `rank`.
        super_nodes: `super_nodes[rank]` is the name of its host's super-node; empty where none
            are declared, and then every host is a fast domain by itself.
    """

    hosts: tuple[str, ...]
    super_nodes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.hosts:
            raise TopologyError("a topology needs at least one rank, got an empty list of hosts")
        for kind, names in (("host", self.hosts), ("super-node", self.super_nodes)):
            for rank, name in enumerate(names):
                # Names go through the store as lines; "" would stand for an undeclared super-node.
                if not isinstance(name, str) or not name or "\n" in name:
                    raise TopologyError(
                        f"rank {rank} has the {kind} {name!r}, expected a name of one line; name "
                        f"the {kind} of every rank{', or of none' * (kind == 'super-node')}"
                    )
        if not self.super_nodes:
            return
        if len(self.super_nodes) != len(self.hosts):
            raise TopologyError(
                f"a topology of {len(self.hosts)} ranks needs the super-node of each, got "
                f"{len(self.super_nodes)}; leave super_nodes out where there are none"
            )
        found: dict[str, set[str]] = {}
        for host, super_node in zip(self.hosts, self.super_nodes):
            found.setdefault(host, set()).add(super_node)
        torn = {host: sorted(names) for host, names in found.items() if len(names) > 1}
        if torn:
            raise TopologyError(
                f"a host is in one super-node, but the ranks of {_describe(torn)} name several; "
                "declare the same super-node on all ranks of a host"
            )

    @classmethod
    def from_hosts(cls, hosts: Sequence[str], super_nodes: Sequence[str] = ()) -> Topology:
        """Takes the host, and optionally the super-node, of every global rank as given.

        Raises:
            TopologyError: one string was passed instead of a list of names.
        """
        for names in (hosts, super_nodes):
            if isinstance(names, str):
                raise TopologyError(
                    f"from_hosts takes one host name per rank, found the single string {names!r}; "
                    f"pass [{names!r}] for one rank"
                )
        return cls(tuple(hosts), tuple(super_nodes))

    @classmethod
    def regular(
        cls, hosts: int, devices_per_host: int, hosts_per_super_node: int | None = None
    ) -> Topology:
        """Equal hosts of consecutive ranks, in equal super-nodes of consecutive hosts.

        Raises:
            TopologyError: a number is not positive, or the hosts do not divide evenly.
        """
        if not _is_positive(hosts) or not _is_positive(devices_per_host):
            raise TopologyError(
                "hosts and devices per host must be positive integers, got "
                f"{hosts} and {devices_per_host}"
            )
        of_rank = [rank // devices_per_host for rank in range(hosts * devices_per_host)]
        names = tuple(f"host{host}" for host in of_rank)
        if hosts_per_super_node is None:
            return cls(names)
        if not _is_positive(hosts_per_super_node) or hosts % hosts_per_super_node:
            raise TopologyError(
                f"{hosts} hosts do not divide into super-nodes of {hosts_per_super_node}"
            )
        return cls(names, tuple(f"super-node{host // hosts_per_super_node}" for host in of_rank))

    @classmethod
    def discover(cls, store: Store | None = None) -> Topology:
        """Exchanges every rank's host through `store`; every rank of the world must call it.

        `store` is the default process group's when omitted. Without a process group and
        without a store the answer is one rank on this host. Under PyTorch's `fake` backend,
        where no other rank exists, all ranks are taken to share this host. What `declare` has
        put into the store takes precedence over what the machines say.

        Raises:
            TopologyError: a rank published nothing that can be read, or some ranks name a
                super-node and others do not.
        """
        rank, world_size = _rank_and_world_size()
        places = exchange_places(range(world_size), rank, world_size, store)
        super_nodes = tuple(place.super_node for place in places.values())
        hosts = tuple(place.host for place in places.values())
        return cls(hosts, super_nodes if any(super_nodes) else ())

    def declare(self, store: Store | None = None) -> None:
        """Makes every axis and every `discover` of this process group take this topology.

        All ranks must call it with the same topology. Axes that exist already keep what they
        have. What is declared is kept in the store, and ends with it.

        Raises:
            TopologyError: the numbers of ranks differ; another topology has been declared
                before; or, on all ranks together, some ranks declare something else.
        """
        rank, world_size = _rank_and_world_size()
        if world_size != self.world_size:
            raise TopologyError(
                f"the declared topology has {self.world_size} ranks, this run has {world_size}"
            )
        own = Place(self.hosts[rank], self.super_nodes[rank] if self.super_nodes else "")
        others = declare_place(own, repr(self), rank, world_size, store)
        if others:
            raise TopologyError(
                f"ranks {others} declare another topology than rank 0; declare the same on all"
            )

    @property
    def world_size(self) -> int:
        """The number of global ranks."""
        return len(self.hosts)

    @property
    def devices_per_host(self) -> int:
        """The largest number of ranks that share a host."""
        return max(Counter(self.hosts).values())

    def host_of(self, rank: int) -> str:
        """The name of the host of global rank `rank`."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(
                f"rank {rank} is outside this topology of {self.world_size} ranks; "
                "make the topology after all ranks have joined"
            )
        return self.hosts[rank]

    @property
    def domains(self) -> tuple[str, ...]:
        """The fast domain of every rank: its super-node, or its host where none are declared."""
        return self.super_nodes or self.hosts

    def domain_and_host(self, rank: int) -> str:
        """Where a rank runs, for messages."""
        host = self.host_of(rank)
        return f"{host} in {self.super_nodes[rank]}" if self.super_nodes else host

    def domain_of(self, rank: int) -> str:
        """The name of the fast domain of global rank `rank`."""
        self.host_of(rank)
        return self.domains[rank]

    def tier(self, ranks: Iterable[int]) -> Tier:
        """How the global ranks `ranks` reach one another."""
        return tier_of_domains([self.domain_of(rank) for rank in ranks])

    def require_regular(self) -> None:
        """Checks that every host runs the same number of consecutive ranks.

        Raises:
            TopologyError: on every rank alike, with all ranks and hosts listed.
        """
        per_host = self._divided(range(self.world_size), self.hosts)
        if len({len(ranks) for ranks in per_host.values()}) > 1:
            raise TopologyError(
                f"hosts run different numbers of ranks ({_describe(per_host)}); start the same "
                "number on every host"
            )
        if [rank for ranks in per_host.values() for rank in ranks] != list(range(self.world_size)):
            raise TopologyError(
                f"ranks are interleaved over hosts ({_describe(per_host)}); number each host's "
                "ranks consecutively"
            )

    def require_fast(self, groups: Iterable[Sequence[int]], what: str) -> None:
        """Checks that no group leaves its fast domain.

        Give all groups of an axis, not only this rank's: then every rank raises, and the same.

        Args:
            groups: global ranks of each group.
            what: the groups' name for the message, such as "mesh axis 'tp'".

        Raises:
            TopologyError: names every group that crosses a slow boundary, with its hosts.
        """
        crossing = [
            f"ranks {list(group)} ({_describe(self._divided(group, self._places()))})"
            for group in groups
            if self.tier(group) is Tier.SLOW
        ]
        if crossing:
            boundary = "super-nodes" if self.super_nodes else "hosts"
            raise TopologyError(
                f"{what} must be fast but crosses {boundary}: {'; '.join(crossing)}. Arrange the "
                f"mesh so that these ranks share one, or choose a smaller axis"
            )

    def subgroups(
        self, ranks: Iterable[int], limit: int | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Splits `ranks` into equal subgroups that never leave a fast domain.

        A subgroup is a block of consecutive entries of the sorted `ranks`: all of a domain's
        ranks or, where `limit` is given, as many of them as the largest divisor of their
        number that is not above `limit`.

        Raises:
            TopologyError: equal blocks would cross a slow boundary, because the domains hold
                different numbers of `ranks` or because their ranks are interleaved.
        """
        members = sorted(set(ranks))
        if limit is not None and limit < 1:
            raise TopologyError(f"a subgroup needs at least one rank, got limit={limit}")
        for rank in members:
            self.host_of(rank)
        boundary = "super-nodes" if self.super_nodes else "hosts"
        per_host = self._divided(members, self.domains)
        counts = {len(found) for found in per_host.values()}
        if len(counts) > 1:
            raise TopologyError(
                f"replica subgroups of ranks {members} would cross {boundary}: {boundary} hold "
                f"different numbers of them ({_describe(per_host)}); give each the same number"
            )
        if [rank for found in per_host.values() for rank in found] != members:
            raise TopologyError(
                f"replica subgroups of ranks {members} would cross {boundary}: ranks are "
                f"interleaved over {boundary} ({_describe(per_host)}); number the ranks of each "
                "consecutively"
            )
        if not members:
            return ()
        size = _largest_divisor(counts.pop(), limit)
        return tuple(tuple(members[start : start + size]) for start in range(0, len(members), size))

    def _places(self) -> list[str]:
        return [self.domain_and_host(rank) for rank in range(self.world_size)]

    @staticmethod
    def _divided(ranks: Iterable[int], names: Sequence[str]) -> dict[str, list[int]]:
        """The ranks of each name, in the order in which they come."""
        found: dict[str, list[int]] = {}
        for rank in ranks:
            found.setdefault(names[rank], []).append(rank)
        return found


def tier_of_domains(domains: Sequence[str]) -> Tier:
    """The tier of a group whose members are in `domains`, one entry a member."""
    if len(domains) <= 1:
        return Tier.LOCAL
    return Tier.FAST if len(set(domains)) == 1 else Tier.SLOW


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _is_positive(number: object) -> bool:
    return isinstance(number, int) and number > 0


def _largest_divisor(number: int, limit: int | None) -> int:
    bound = number if limit is None else min(limit, number)
    return next(size for size in range(bound, 0, -1) if number % size == 0)


def _describe(per_host: Mapping[str, Sequence[object]]) -> str:
    return ", ".join(f"{host}: {list(ranks)}" for host, ranks in per_host.items())
