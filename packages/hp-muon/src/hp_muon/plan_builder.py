"""Builds the step plan from layouts: domains, batches, owners and buffers (paper section 6)."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from hp_dtensor import AbstractMesh, Layout
from hp_muon.errors import MuonError
from hp_muon.grouping import Coordinate, Geometry, geometry_of, whole
from hp_muon.loads import Loads
from hp_muon.owners import replica_subgroups, share_out, spread
from hp_muon.step_plan import (
    MAX_BATCH_ELEMENTS,
    Batch,
    Domain,
    Entry,
    Member,
    Overlap,
    Part,
    ReplicaAxis,
    StepPlan,
)
from hp_platform import BufferLayout, Topology, pad_to_alignment

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Costs = Mapping[tuple[int, int], float]
"""Cost of one matrix by (rows, cols), in any unit, the same on every rank."""

_Pairs = Sequence[tuple[Entry, Geometry]]


def build_plan(
    entries: Sequence[Entry],
    *,
    topology: Topology | None = None,
    deduplicate: bool = True,
    coordinate: Coordinate | None = None,
    costs: Costs | None = None,
    max_batch_elements: int = MAX_BATCH_ELEMENTS,
) -> StepPlan:
    """Plans a step.

    Args:
        entries: Muon parameters in the optimizer's order, the same on every rank.
        topology: hosts of the ranks, for replica subgroups; None takes one host.
        deduplicate: whether replicas share the work.
        coordinate: whose plan, on the entries' only mesh; None is this rank's own.
        costs: measured costs; floating-point operations when omitted.
        max_batch_elements: cap on a batch, see `batch_capacity`.

    Raises:
        MuonError: a layout cannot be stepped, replica subgroups would cross hosts, or a shape
            has no cost.
    """
    builder = _Builder(topology, deduplicate, coordinate, costs, max_batch_elements)
    classes: dict[tuple[int, int, str, str, str, str], list[tuple[Entry, Geometry]]] = {}
    for entry in entries:
        geometry = builder.geometry(entry)
        domain = builder.domain(entry, geometry)
        key = (
            -entry.view.rows * entry.view.cols,
            -entry.view.rows,
            domain.label,
            str(entry.dtype),
            str(entry.device),
            str(entry.orthogonalization),
        )
        classes.setdefault(key, []).append((entry, geometry))
    batches = [batch for key in sorted(classes) for batch in builder.batches(classes[key])]
    agreed = "\n".join(
        [
            *map(str, entries),
            f"deduplicate_replicas={deduplicate}",
            f"hosts={None if topology is None else topology.hosts}",
            f"costs={None if costs is None else sorted(costs.items())}",
            f"max_batch_elements={max_batch_elements}",
        ]
    )
    owned = frozenset(member.index for batch in batches for member in batch.own.members)
    return StepPlan(tuple(batches), owned, builder.loads(), agreed)


class _Builder:
    """What is shared while one plan is built: known domains, geometries and loads."""

    def __init__(
        self,
        topology: Topology | None,
        deduplicate: bool,
        coordinate: Coordinate | None,
        costs: Costs | None,
        max_batch_elements: int,
    ) -> None:
        self.topology = topology
        self.deduplicate = deduplicate
        self.coordinate = coordinate
        self.costs = costs
        self.max_batch_elements = max_batch_elements
        self._loads: list[Loads] = []
        self._domains: dict[tuple[object, ...], Domain] = {}
        self._geometries: dict[tuple[object, ...], Geometry] = {}
        self._meshes: list[DeviceMesh | AbstractMesh] = []
        self._local = Loads(())
        # Replica owner of every parameter, in this rank's group and in the one at coordinate 0.
        self._owners: tuple[dict[int, int], dict[int, int]] = ({}, {})

    def loads(self) -> dict[str, torch.Tensor]:
        """The loads of every mesh, by a name for it."""
        found = {}
        for number, (mesh, loads) in enumerate(zip(self._meshes, self._loads)):
            abstract = mesh if isinstance(mesh, AbstractMesh) else AbstractMesh.of(mesh)
            axes = " x ".join(f"{n}:{s}" for n, s in zip(abstract.axis_names, abstract.sizes))
            found[f"mesh{number} ({axes})"] = loads.values
        return found or {"this rank": self._local.values}

    def geometry(self, entry: Entry, coord: Coordinate | None = None) -> Geometry:
        if entry.layout is None:
            return whole(entry.view)
        coord = entry.layout.coordinate(self.coordinate) if coord is None else coord
        key = (entry.layout, entry.view, coord)
        if key not in self._geometries:
            self._geometries[key] = geometry_of(entry.layout, entry.view, entry.name, coord)
        return self._geometries[key]

    def domain(self, entry: Entry, geometry: Geometry) -> Domain:
        if entry.layout is None:
            return self._domains.setdefault((), Domain("local", None, (), (), 0, (), 0))
        mesh = entry.layout.mesh
        number = self._mesh_number(mesh)
        key = (number, geometry.cutting, geometry.replicated)
        if key not in self._domains:
            self._domains[key] = self._new_domain(entry.layout, geometry, number)
        return self._domains[key]

    def _mesh_number(self, mesh: DeviceMesh | AbstractMesh) -> int:
        if mesh not in self._meshes:
            self._meshes.append(mesh)
            self._loads.append(Loads(tuple(_ranks(mesh).shape)))
        return self._meshes.index(mesh)

    def _new_domain(self, layout: Layout, geometry: Geometry, number: int) -> Domain:
        names, sizes = layout.abstract_mesh.axis_names, layout.abstract_mesh.sizes
        coord = layout.coordinate(self.coordinate)
        replica_axes = self._replica_axes(layout, geometry, coord) if self.deduplicate else ()
        cut = " x ".join(names[axis] for axis in geometry.cutting) or "no axis"
        replicas = " x ".join(
            f"{len(axis.members)} along {names[axis.axis]}" for axis in replica_axes
        )
        mesh_label = f"mesh{number} " if number else ""
        return Domain(
            label=f"{mesh_label}cut by {cut}"
            + (f", divided among replicas ({replicas})" if replicas else ""),
            mesh=layout.mesh,
            shard_axes=geometry.cutting,
            shard_sizes=tuple(sizes[axis] for axis in geometry.cutting),
            shard_rank=geometry.own,
            replica_axes=replica_axes,
            replica_rank=_row_major(
                [axis.rank for axis in replica_axes], [len(axis.members) for axis in replica_axes]
            ),
        )

    def _replica_axes(
        self, layout: Layout, geometry: Geometry, coord: Coordinate
    ) -> tuple[ReplicaAxis, ...]:
        ranks = _ranks(layout.mesh)
        topology = self.topology or Topology.from_hosts(["one host"] * (int(ranks.max()) + 1))
        found = []
        for axis in geometry.replicated:
            name = layout.abstract_mesh.axis_names[axis]
            groups = replica_subgroups(ranks, axis, topology, name)
            members = next(group for group in groups if coord[axis] in group)
            if len(members) > 1:
                found.append(ReplicaAxis(axis, groups, members, members.index(coord[axis])))
        return tuple(found)

    def batches(self, pairs: _Pairs) -> list[Batch]:
        """The batches of one class; every replica owner's list is cut where the cap is reached."""
        entry, geometry = pairs[0]
        domain = self.domain(entry, geometry)
        loads = self._local
        if domain.mesh is not None:
            loads = self._loads[self._mesh_number(domain.mesh)]
        before = loads.of(domain)
        added = [[0.0] * domain.shard_size for _ in before]
        batches = self._batches(pairs, domain, before, added, self._owners[0])
        # Groups that hold other numbers of matrices divide them otherwise; all must still add
        # the same to the loads, those of the group at coordinate 0.
        canonical = [(entry, self._canonical(entry, geometry)) for entry, geometry in pairs]
        if any(own.count != other.count for (_, own), (_, other) in zip(pairs, canonical)):
            added = [[0.0] * domain.shard_size for _ in before]
            self._batches(canonical, domain, before, added, self._owners[1])
        else:
            for entry, _ in pairs:
                self._owners[1].setdefault(entry.index, self._owners[0][entry.index])
        loads.add(domain, added)
        return batches

    def _canonical(self, entry: Entry, geometry: Geometry) -> Geometry:
        """The geometry of the same parameter in the group at coordinate 0 of all other axes."""
        if entry.layout is None:
            return geometry
        coord = entry.layout.coordinate(self.coordinate)
        other = tuple(c if axis in geometry.cutting else 0 for axis, c in enumerate(coord))
        return self.geometry(entry, other)

    def _batches(
        self,
        pairs: _Pairs,
        domain: Domain,
        before: list[list[float]],
        added: list[list[float]],
        known: dict[int, int],
    ) -> list[Batch]:
        """Batches of one group; what each of its ranks has to do is added to `added`.

        Kinds of matrices of one parameter share its momentum, so they have one replica owner.
        """
        entry, _ = pairs[0]
        cost = self._cost(entry)
        lines = [sum(line) for line in before]
        new = [pair for pair in pairs if pair[0].index not in known]
        for entry, geometry in pairs:
            if entry.index in known:
                lines[known[entry.index]] += geometry.count * cost
        owners = spread([geometry.count * cost for _, geometry in new], lines)
        known.update({pair[0].index: owner for pair, owner in zip(new, owners)})
        capacity = batch_capacity(
            entry.view.rows * entry.view.cols, domain.shard_size, self.max_batch_elements
        )
        lists = [
            _capped([pair for pair in pairs if known[pair[0].index] == replica], capacity)
            for replica in range(domain.replica_size)
        ]
        return [
            Batch(
                rows=entry.view.rows,
                cols=entry.view.cols,
                dtype=entry.dtype,
                device=entry.device,
                orthogonalization=entry.orthogonalization,
                domain=domain,
                parts=tuple(
                    self._part(chunks[slot] if slot < len(chunks) else [], entry, domain, *loads)
                    for chunks, loads in zip(lists, zip(before, added))
                ),
            )
            for slot in range(max(map(len, lists)))
        ]

    def _cost(self, entry: Entry) -> float:
        rows, cols = entry.view.rows, entry.view.cols
        if self.costs is None:
            return entry.orthogonalization.operations(rows, cols)
        if (rows, cols) not in self.costs:
            raise MuonError(
                f"parameter {entry.name!r} holds {rows} x {cols} matrices, for which costs has no "
                f"entry; it has {sorted(self.costs)}"
            )
        return self.costs[rows, cols]

    def _part(
        self,
        pairs: _Pairs,
        first: Entry,
        domain: Domain,
        before: list[float],
        added: list[float],
    ) -> Part:
        members: list[Member] = []
        count = 0
        for entry, geometry in pairs:
            members.append(Member(entry.index, entry.kind, entry.name, geometry, count))
            count += geometry.count
        cost = self._cost(first)
        bounds = share_out(count, cost, [a + b for a, b in zip(before, added)])
        for owner, (start, stop) in enumerate(pairwise(bounds)):
            added[owner] += (stop - start) * cost
        dtype = first.orthogonalization.dtype
        area = first.view.rows * first.view.cols
        return Part(
            members=tuple(members),
            bounds=bounds,
            overlaps=_overlaps(members, bounds),
            segments=tuple(
                BufferLayout.of(
                    [len(members), *(m.geometry.pieces[shard].numel for m in members)], dtype
                )
                for shard in range(domain.shard_size)
            ),
            chunks=tuple(
                pad_to_alignment((stop - start) * area, dtype) for start, stop in pairwise(bounds)
            ),
            publication=BufferLayout.of(
                [count, *(m.geometry.pieces[domain.shard_rank].numel for m in members)],
                first.dtype,
            ),
        )


def batch_capacity(area: int, shard_size: int, limit: int = MAX_BATCH_ELEMENTS) -> int:
    """Matrices of `area` elements in a batch, unless one parameter alone has more.

    The paper caps a batch at 2^29 elements over the shard-group size. Two things are added. A
    batch smaller than the shard group would leave compute owners idle while the next gather
    waits for the busy ones, so a batch holds one matrix per owner as long as all of it stays
    below the limit; and it holds whole rounds, the same number for every owner.
    """
    if area == 0:
        return 1
    cap = max(limit // shard_size, min(shard_size * area, limit))
    capacity = max(cap // area, 1)
    return capacity - capacity % shard_size if capacity > shard_size else capacity


def _capped(pairs: _Pairs, capacity: int) -> list[list[tuple[Entry, Geometry]]]:
    """Cuts a list of parameters where they would hold more than `capacity` matrices together."""
    chunks: list[list[tuple[Entry, Geometry]]] = []
    filled = 0
    for entry, geometry in pairs:
        if not chunks or filled + geometry.count > capacity:
            chunks.append([])
            filled = 0
        chunks[-1].append((entry, geometry))
        filled += geometry.count
    return chunks


def _overlaps(members: Sequence[Member], bounds: Sequence[int]) -> tuple[Overlap, ...]:
    found = []
    for position, member in enumerate(members):
        at = member.first
        stop = member.first + member.count
        while at < stop:
            owner = bisect.bisect_right(bounds, at) - 1
            end = min(stop, bounds[owner + 1])
            lo, hi = at - member.first, end - member.first
            found.append(Overlap(position, owner, lo, hi, at - bounds[owner]))
            at = end
    return tuple(found)


def _ranks(mesh: DeviceMesh | AbstractMesh) -> torch.Tensor:
    if isinstance(mesh, AbstractMesh):
        return torch.arange(mesh.world_size).reshape(mesh.shape)
    return mesh.mesh


def _row_major(position: Sequence[int], sizes: Sequence[int]) -> int:
    index = 0
    for place, size in zip(position, sizes):
        index = index * size + place
    return index
