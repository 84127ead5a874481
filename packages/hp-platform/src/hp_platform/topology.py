"""Which rank runs on which host, and what follows from it: tiers and replica subgroups.

Nothing is inferred from the numbering of ranks. The map is either given (`from_hosts`) or
exchanged once through the process group's store (`discover`), so every rank checks the same
list and all of them fail together when it is unusable.
"""

from __future__ import annotations

import enum
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from hp_platform.errors import PeerError, TopologyError
from hp_platform.store import default_store

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__

HOST_VARIABLE = "HP_PLATFORM_HOST"
"""Environment variable that names this process's host, overriding what the machine says."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STORE_PREFIX = "hp_platform/topology"


class Tier(enum.Enum):
    """How the ranks of a group reach one another."""

    LOCAL = "local"
    """One rank only: nothing is sent."""
    FAST = "fast"
    """All ranks on one host."""
    SLOW = "slow"
    """At least two hosts."""


@dataclass(frozen=True)
class Topology:
    """The host of every global rank.

    Attributes:
        hosts: `hosts[rank]` is the name of the host that runs global rank `rank`.
    """

    hosts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.hosts:
            raise TopologyError("a topology needs at least one rank, got an empty list of hosts")

    @classmethod
    def from_hosts(cls, hosts: Sequence[str]) -> Topology:
        """Takes the host of every global rank as given.

        Raises:
            TopologyError: one string was passed instead of a list of host names.
        """
        if isinstance(hosts, str):
            raise TopologyError(
                f"from_hosts takes one host name per rank, found the single string {hosts!r}; "
                f"pass [{hosts!r}] for one rank"
            )
        return cls(tuple(hosts))

    @classmethod
    def discover(cls, store: Store | None = None) -> Topology:
        """Exchanges every rank's host through `store`; every rank of the world must call it.

        `store` is the default process group's when omitted. Without a process group and
        without a store the answer is one rank on this host. Under PyTorch's `fake` backend,
        where no other rank exists, all ranks are taken to share this host.

        Raises:
            TopologyError: a rank published nothing that can be read.
        """
        rank, world_size = _rank_and_world_size()
        return cls(tuple(exchange_hosts(range(world_size), rank, world_size, store).values()))

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

    def tier(self, ranks: Iterable[int]) -> Tier:
        """How the global ranks `ranks` reach one another."""
        return tier_of_hosts([self.host_of(rank) for rank in ranks])

    def subgroups(
        self, ranks: Iterable[int], limit: int | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Splits `ranks` into equal subgroups that never leave a host.

        A subgroup is a block of consecutive entries of the sorted `ranks`: all of a host's
        ranks or, where `limit` is given, as many of them as the largest divisor of their
        number that is not above `limit`.

        Raises:
            TopologyError: equal blocks would cross a host boundary, because the hosts hold
                different numbers of `ranks` or because the ranks of hosts are interleaved.
        """
        members = sorted(set(ranks))
        if limit is not None and limit < 1:
            raise TopologyError(f"a subgroup needs at least one rank, got limit={limit}")
        per_host: dict[str, list[int]] = {}
        for rank in members:
            per_host.setdefault(self.host_of(rank), []).append(rank)
        counts = {len(found) for found in per_host.values()}
        if len(counts) > 1:
            raise TopologyError(
                f"replica subgroups of ranks {members} would cross hosts: hosts hold different "
                f"numbers of them ({_describe(per_host)}); give every host the same number"
            )
        if [rank for found in per_host.values() for rank in found] != members:
            raise TopologyError(
                f"replica subgroups of ranks {members} would cross hosts: ranks are interleaved "
                f"over hosts ({_describe(per_host)}); number each host's ranks consecutively"
            )
        if not members:
            return ()
        size = _largest_divisor(counts.pop(), limit)
        return tuple(tuple(members[start : start + size]) for start in range(0, len(members), size))


def tier_of_hosts(hosts: Sequence[str]) -> Tier:
    """The tier of a group whose members run on `hosts`, one entry a member."""
    if len(hosts) <= 1:
        return Tier.LOCAL
    return Tier.FAST if len(set(hosts)) == 1 else Tier.SLOW


def exchange_hosts(
    ranks: Iterable[int], rank: int, world_size: int, store: Store | None = None
) -> dict[int, str]:
    """The host of each of `ranks`; each of them must make this call, others need not.

    Nothing is exchanged where the launcher says that all ranks are on this host.

    A rank publishes the same value whenever it is asked, so any number of calls, by any
    subsets of ranks, may use the same store.
    """
    wanted = list(ranks)
    if store is None and _is_one_host(world_size):
        name = os.environ.get(HOST_VARIABLE) or socket.gethostname()
        return dict.fromkeys(wanted, name)
    chosen = default_store() if store is None else store
    chosen.set(f"{_STORE_PREFIX}/{rank}", "\n".join(_identity()))
    published = {}
    for peer in wanted:
        try:
            fields = chosen.get(f"{_STORE_PREFIX}/{peer}").decode().split("\n")
        except RuntimeError as error:
            raise PeerError(
                f"rank {rank}: lost its peers while waiting for rank {peer}'s host name; the "
                f"store says: {error}"
            ) from error
        if len(fields) != 4:
            raise TopologyError(
                f"rank {peer} published {fields!r} as its host, expected host name, boot id, "
                "node rank and local rank: all ranks must run the same hp-platform version"
            )
        published[peer] = (fields[0], fields[1], fields[2], fields[3])
    return _host_names(published)


def _is_one_host(world_size: int) -> bool:
    """Whether the answer is known without asking: no other rank, or none on another host."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return True
    # A host that is named by the variable may be named differently for every rank.
    launched_here = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    return launched_here and HOST_VARIABLE not in os.environ


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _identity() -> tuple[str, str, str, str]:
    """Host name, boot id, node rank and local rank of this process, as the launcher set them."""
    node, local = os.environ.get("GROUP_RANK", "0"), os.environ.get("LOCAL_RANK", "")
    named = os.environ.get(HOST_VARIABLE)
    if named:
        return named, "", "", ""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return socket.gethostname(), boot, node, local


def _host_names(published: Mapping[int, tuple[str, str, str, str]]) -> dict[int, str]:
    """Host names that are distinct exactly when the hosts are.

    Machines may share a host name (then the boot ids differ), and two launcher agents may
    run on one machine as stand-ins for two hosts: then a local rank occurs twice, and the
    agents' node ranks tell them apart.
    """
    locals_seen = Counter(
        (name, boot, local) for name, boot, _, local in published.values() if local
    )
    shared = {(name, boot) for (name, boot, _), count in locals_seen.items() if count > 1}
    keys: dict[int, tuple[str, ...]] = {
        rank: (name, boot, node) if (name, boot) in shared else (name, boot)
        for rank, (name, boot, node, _) in published.items()
    }
    boots: dict[str, set[str]] = {}
    for name, boot, *_ in keys.values():
        boots.setdefault(name, set()).add(boot)
    labels = {}
    for rank, (name, boot, *node) in keys.items():
        parts = [name, *([boot[:8]] if len(boots[name]) > 1 else []), *node]
        labels[rank] = "/".join(parts)
    return labels


def _largest_divisor(number: int, limit: int | None) -> int:
    bound = number if limit is None else min(limit, number)
    return next(size for size in range(bound, 0, -1) if number % size == 0)


def _describe(per_host: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{host}: {list(ranks)}" for host, ranks in per_host.items())
