"""What every rank of a mesh has to compute, over all communication domains that it is in.

Parameters are cut and replicated along different axes, so a rank is in several domains, each of
which gives out its own matrices. Every domain starts from what its ranks carry already. All ranks
of a group must see the same loads without talking, so a load is a function of the position on the
domain's axes: along the other axes, and over replica subgroups, it is the mean.
"""

from __future__ import annotations

import torch

from hp_muon.step_plan import Domain


class Loads:
    """Cost at every coordinate of one mesh, float64."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.values = torch.zeros(shape, dtype=torch.float64)

    def of(self, domain: Domain) -> list[list[float]]:
        """[replica position][shard position]: what the ranks of a group carry."""
        replica = [axis.axis for axis in domain.replica_axes]
        values = self.values
        for axis in domain.replica_axes:
            order = torch.tensor([c for group in axis.subgroups for c in group])
            size = (len(axis.subgroups), len(axis.members))
            values = values.index_select(axis.axis, order).unflatten(axis.axis, size)
            values = values.mean(axis.axis)  # over subgroups; axes keep their numbers
        kept = (*replica, *domain.shard_axes)
        others = [axis for axis in range(values.ndim) if axis not in kept]
        if others:
            values = values.mean(others, keepdim=True)
        values = values.permute((*kept, *others))
        found: list[list[float]] = values.reshape(domain.replica_size, domain.shard_size).tolist()
        return found

    def add(self, domain: Domain, costs: list[list[float]]) -> None:
        """Adds `costs`, by replica and shard position, to every group of the domain."""
        replica = [axis.axis for axis in domain.replica_axes]
        kept = (*replica, *domain.shard_axes)
        others = [axis for axis in range(self.values.ndim) if axis not in kept]
        sizes = [*domain.replica_sizes, *domain.shard_sizes, *[1] * len(others)]
        added = torch.tensor(costs, dtype=torch.float64).reshape(sizes)
        order = (*kept, *others)
        added = added.permute([order.index(axis) for axis in range(self.values.ndim)])
        for axis in domain.replica_axes:
            positions = {c: p for group in axis.subgroups for p, c in enumerate(group)}
            index = torch.tensor([positions[c] for c in range(self.values.shape[axis.axis])])
            added = added.index_select(axis.axis, index)
        self.values += added
