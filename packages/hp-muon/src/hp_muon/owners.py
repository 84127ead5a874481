"""Who does what: compute owners run Newton-Schulz, replica owners hold the momentum.

Both are spread by load, largest first, each to the least loaded coordinate, ties to the lower
index: a pure function of costs, so all ranks find the same owners without talking (paper
sections 6.4 and 6.5). Replica subgroups follow the real map from ranks to hosts and never cross
from one host to another.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from hp_muon.errors import MuonError
from hp_platform import Topology, TopologyError


def spread(costs: Sequence[float], loads: Sequence[float]) -> tuple[int, ...]:
    """The owner of each item: in descending cost, the least loaded coordinate so far.

    Args:
        costs: one per item.
        loads: what each coordinate already carries.
    """
    heap = [(load, owner) for owner, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, owner = heap[0]
        owners[item] = owner
        heapq.heapreplace(heap, (load + costs[item], owner))
    return tuple(owners)


def share_out(count: int, cost: float, loads: Sequence[float]) -> tuple[int, ...]:
    """Bounds of the runs of `count` equal matrices that each coordinate owns.

    The same numbers per coordinate as `spread` gives, made contiguous: coordinate r owns
    matrices bounds[r] to bounds[r + 1] and packs them without gaps.
    """
    owned = [0] * len(loads)
    for owner in spread([cost] * count, loads):
        owned[owner] += 1
    bounds = [0]
    for number in owned:
        bounds.append(bounds[-1] + number)
    return tuple(bounds)


def replica_subgroups(
    ranks: Tensor, axis: int, topology: Topology, axis_name: str
) -> tuple[tuple[int, ...], ...]:
    """How the coordinates of a replicate axis divide into subgroups that stay on one host.

    Args:
        ranks: global rank at every mesh coordinate.
        axis: the mesh axis.

    Returns:
        Subgroups of coordinates, sorted; one subgroup when every line along the axis is on one
        host.

    Raises:
        MuonError: equal subgroups would cross hosts, or the lines along the axis divide
            differently, so that shard groups would not agree on their replica owners.
    """
    lines = torch.movedim(ranks, axis, -1).reshape(-1, ranks.shape[axis]).tolist()
    found = set()
    for line in lines:
        try:
            groups = topology.subgroups(line)
        except TopologyError as error:
            raise MuonError(
                f"replica owners along mesh axis {axis_name!r}: {error}; or pass "
                "deduplicate_replicas=False"
            ) from error
        found.add(tuple(tuple(sorted(line.index(rank) for rank in group)) for group in groups))
    if len(found) > 1:
        raise MuonError(
            f"replica owners along mesh axis {axis_name!r}: its groups of ranks divide over hosts "
            f"in different ways {sorted(found)}; place every shard group alike on hosts, or pass "
            "deduplicate_replicas=False"
        )
    return tuple(sorted(found.pop()))
