"""Where every rank runs, exchanged once through the process group's store."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable, Mapping
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
SUPER_NODE_VARIABLE = "HP_PLATFORM_SUPER_NODE"
"""Environment variable that names the super-node of this process's host."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FOUND = "hp_platform/topology"
_DECLARED = f"{_FOUND}/declared"
_FIELDS = 5


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: a name that is distinct exactly when the host is.
        super_node: the super-node's name; "" where none is declared.
    """

    host: str
    super_node: str = ""


def exchange_places(
    ranks: Iterable[int], rank: int, world_size: int, store: Store | None = None
) -> dict[int, Place]:
    """The place of each of `ranks`; each of them must make this call, others need not.

    Nothing is exchanged where the launcher says that all ranks are on this host, unless
    something else was declared.

    A rank publishes the same value whenever it is asked, so any number of calls, by any
    subsets of ranks, may use the same store.

    Raises:
        TopologyError: a rank published nothing that can be read, or only some of `ranks` name
            a super-node. All of `ranks` see the same list and raise together.
    """
    wanted = list(ranks)
    if store is None and _is_one_host(rank, world_size):
        place = Place(os.environ.get(HOST_VARIABLE) or socket.gethostname())
        return dict.fromkeys(wanted, place)
    chosen = default_store() if store is None else store
    # Only this rank writes the key, so ranks that declare together also switch together.
    prefix = _DECLARED if chosen.check([f"{_DECLARED}/{rank}"]) else _FOUND
    if prefix == _FOUND:
        chosen.set(f"{_FOUND}/{rank}", "\n".join((*_identity(), "")))
    published = {peer: _read(chosen, prefix, peer, rank) for peer in wanted}
    hosts = _host_names(published)
    places = {peer: Place(hosts[peer], published[peer][3]) for peer in wanted}
    without = [peer for peer, place in places.items() if not place.super_node]
    if without and len(without) < len(places):
        raise TopologyError(
            f"ranks {without} name no super-node and the others do "
            f"({', '.join(f'{peer}: {p.super_node}' for peer, p in places.items() if p.super_node)}"
            f"); set {SUPER_NODE_VARIABLE} on every host or on none"
        )
    return places


def declare_place(
    place: Place, whole: str, rank: int, world_size: int, store: Store | None = None
) -> list[int]:
    """Publishes this rank's place by hand, and waits until every rank has done so.

    Args:
        whole: what this rank declares about all ranks.

    Returns:
        The ranks that declare another `whole` than rank 0, on every rank alike.

    Raises:
        TopologyError: this rank has declared something else before.
    """
    chosen = default_store() if store is None else store
    digest = hashlib.sha256(whole.encode()).hexdigest()
    value = "\n".join((place.host, "", "", place.super_node, digest))
    if chosen.compare_set(f"{_DECLARED}/{rank}", "", value).decode() != value:
        raise TopologyError(
            f"rank {rank}: another topology has been declared for this process group before; "
            "declare one, once"
        )
    digests = [_read(chosen, _DECLARED, peer, rank)[4] for peer in range(world_size)]
    return [peer for peer, found in enumerate(digests) if found != digests[0]]


def _read(store: Store, prefix: str, peer: int, rank: int) -> tuple[str, ...]:
    """Host name, boot id, node rank, super-node and digest of what `peer` declares."""
    try:
        fields = tuple(store.get(f"{prefix}/{peer}").decode().split("\n"))
    except RuntimeError as error:
        raise PeerError(
            f"rank {rank}: lost its peers while waiting for rank {peer}'s host name; the "
            f"store says: {error}"
        ) from error
    if len(fields) != _FIELDS:
        raise TopologyError(
            f"rank {peer} published {list(fields)!r} as its place, expected host name, boot id, "
            "node rank, super-node and digest: all ranks must run the same hp-platform version"
        )
    return fields


def _is_one_host(rank: int, world_size: int) -> bool:
    """Whether the answer is known without asking: no other rank, or none on another host."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return True
    # A host that is named by a variable may be named differently for every rank.
    named = HOST_VARIABLE in os.environ or SUPER_NODE_VARIABLE in os.environ
    launched_here = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    return launched_here and not named and not default_store().check([f"{_DECLARED}/{rank}"])


def _identity() -> tuple[str, str, str, str]:
    """Host name, boot id, the launcher's node rank and super-node of this process."""
    super_node = os.environ.get(SUPER_NODE_VARIABLE, "")
    named = os.environ.get(HOST_VARIABLE)
    if named:
        return named, "", "", super_node
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return socket.gethostname(), boot, os.environ.get("GROUP_RANK", "0"), super_node


def _host_names(published: Mapping[int, tuple[str, ...]]) -> dict[int, str]:
    """Host names that are distinct exactly when the hosts are.

    Machines may share a host name (then the boot ids differ), and two launcher agents may run on
    one machine as stand-ins for two hosts (then their node ranks differ).
    """
    keys = {rank: fields[:3] for rank, fields in published.items()}
    boots: dict[str, set[str]] = {}
    nodes: dict[tuple[str, str], set[str]] = {}
    for name, boot, node in keys.values():
        boots.setdefault(name, set()).add(boot)
        nodes.setdefault((name, boot), set()).add(node)
    labels = {}
    for rank, (name, boot, node) in keys.items():
        parts = [name]
        parts += [boot[:8]] if len(boots[name]) > 1 else []
        parts += [node] if len(nodes[name, boot]) > 1 else []
        labels[rank] = "/".join(parts)
    return labels
