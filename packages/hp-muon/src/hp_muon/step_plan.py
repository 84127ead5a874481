"""The static plan of a step: every batch, owner, buffer and collective, fixed before the first one.

Parameters whose matrices have the same shape, and whose shards and replicas lie on the same mesh
axes, form batches in descending matrix size (paper sections 6.4 to 6.7). A batch has one part per
replica owner: different replicas orthogonalize different parameters at the same time. The plan is
pure data, a function of layouts and shapes, so it can be built and read for any rank of any mesh
without process groups.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen

from hp_dtensor import AbstractMesh, Layout
from hp_muon.grouping import Coordinate, Geometry, geometry_of, whole
from hp_muon.owners import newton_schulz_cost, replica_subgroups, share_out, spread
from hp_muon.views import ResolvedView
from hp_platform import BufferLayout, Topology, pad_to_alignment

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MAX_BATCH_ELEMENTS = 2**29
"""Cap on the elements of a batch's matrices, over the shard-group size; see `batch_capacity`."""


@frozen
class Orthogonalization:
    """How matrices are orthogonalized; batches never mix two of them.

    Attributes:
        coefficients: name of a set, or triples.
        dtype: of staging buffers, Newton-Schulz iteration and updates.
    """

    steps: int
    coefficients: str | tuple[tuple[float, ...], ...]
    eps: float
    dtype: torch.dtype


@frozen(eq=False)
class Entry:
    """One Muon parameter as the plan needs it.

    Attributes:
        index: position among the optimizer's parameters.
        layout: None for a tensor that no mesh knows.
        view: of the global shape.
        dtype, device: of the local tensor.
    """

    index: int
    name: str
    layout: Layout | None
    view: ResolvedView
    dtype: torch.dtype
    device: torch.device
    orthogonalization: Orthogonalization

    def __str__(self) -> str:
        where = "local" if self.layout is None else repr(self.layout)
        return f"{self.name}: {self.view.view} {where} {self.dtype} {self.orthogonalization}"


@frozen(eq=False)
class ReplicaAxis:
    """A mesh axis along which momentum is held once per subgroup.

    Attributes:
        axis: index of the mesh axis.
        subgroups: all subgroups of its coordinates.
        members: the subgroup this rank is in.
        rank: this rank's place in it.
    """

    axis: int
    subgroups: tuple[tuple[int, ...], ...]
    members: tuple[int, ...]
    rank: int


@frozen(eq=False)
class Domain:
    """The ranks that step a batch together.

    Attributes:
        mesh: None for tensors that no mesh knows.
        shard_axes: mesh axes that cut the matrices, gathered over.
        shard_sizes: their sizes; shard_rank: this rank's row-major place among them.
        replica_axes: axes with replica owners; replica_rank: this rank's row-major place.
    """

    label: str
    mesh: DeviceMesh | AbstractMesh | None
    shard_axes: tuple[int, ...]
    shard_sizes: tuple[int, ...]
    shard_rank: int
    replica_axes: tuple[ReplicaAxis, ...]
    replica_rank: int

    @property
    def shard_size(self) -> int:
        return math.prod(self.shard_sizes)

    @property
    def replica_sizes(self) -> tuple[int, ...]:
        return tuple(len(axis.members) for axis in self.replica_axes)

    @property
    def replica_size(self) -> int:
        return math.prod(self.replica_sizes)


@frozen(eq=False)
class Member:
    """A parameter in a part; its matrices are `first` to `first + count` of the part."""

    index: int
    name: str
    geometry: Geometry
    first: int

    @property
    def count(self) -> int:
        return self.geometry.count


@frozen(eq=False)
class Overlap:
    """Matrices `lo` to `hi` of a member, owned by one compute owner, `at` in that owner's chunk."""

    member: int
    owner: int
    lo: int
    hi: int
    at: int


@frozen(eq=False, slots=False)
class Part:
    """One replica owner's share of a batch.

    Attributes:
        members: its parameters.
        bounds: compute owner s orthogonalizes matrices bounds[s] to bounds[s + 1].
        overlaps: members' matrices by compute owner, in order.
        segments: per shard coordinate, where its presence flags (one element a member) and
            then its members' shards lie in its segment of the staging buffer.
        chunks: elements of every compute owner's packed updates, padded to 512 bytes.
        publication: where the members' updated local tensors lie when sent to the replicas.
    """

    members: tuple[Member, ...]
    bounds: tuple[int, ...]
    overlaps: tuple[Overlap, ...]
    segments: tuple[BufferLayout, ...]
    chunks: tuple[int, ...]
    publication: BufferLayout

    @property
    def count(self) -> int:
        """Matrices of all members."""
        return self.bounds[-1]

    @functools.cached_property
    def overlaps_of(self) -> tuple[tuple[Overlap, ...], ...]:
        """`overlaps` of every member."""
        found: list[list[Overlap]] = [[] for _ in self.members]
        for overlap in self.overlaps:
            found[overlap.member].append(overlap)
        return tuple(map(tuple, found))


@frozen(eq=False)
class Batch:
    """Matrices of one shape, stepped together.

    Attributes:
        parts: one per replica owner; this rank works on `own`, and receives the others' results.
    """

    rows: int
    cols: int
    dtype: torch.dtype
    device: torch.device
    orthogonalization: Orthogonalization
    domain: Domain
    parts: tuple[Part, ...]

    @property
    def own(self) -> Part:
        return self.parts[self.domain.replica_rank]

    @property
    def matrices_here(self) -> int:
        """Matrices this rank is compute owner of."""
        bounds, rank = self.own.bounds, self.domain.shard_rank
        return bounds[rank + 1] - bounds[rank]

    def __str__(self) -> str:
        part = self.own
        members = sum(len(part.members) for part in self.parts)
        staged = sum(layout.total for layout in part.segments)
        shares = [stop - start for start, stop in pairwise(part.bounds)]
        gathered = staged * self.orthogonalization.dtype.itemsize
        return (
            f"{self.rows:>6} x {self.cols:<6} {members:>5} parameters  {self.domain.label:<28} "
            f"this replica {part.count:>5} matrices, {min(shares)} to {max(shares)} a compute "
            f"owner; staging {gathered} bytes"
        )


@frozen(eq=False)
class StepPlan:
    """Batches in the order of execution, and who carries how much.

    Attributes:
        owned: indices of the parameters whose momentum this rank holds.
        loads: per domain label, Newton-Schulz operations of every (replica, shard) coordinate.
        agreed: what all ranks must have in common, as text; the same on every rank.
    """

    batches: tuple[Batch, ...]
    owned: frozenset[int]
    loads: dict[str, tuple[tuple[float, ...], ...]]
    agreed: str = field(repr=False)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.agreed.encode()).hexdigest()

    def domains(self) -> tuple[Domain, ...]:
        """Every domain once, in order of first use."""
        return tuple({id(batch.domain): batch.domain for batch in self.batches}.values())

    def balance(self, label: str) -> float:
        """Largest load over mean load of a domain's coordinates; 1 is perfect."""
        flat = [load for line in self.loads[label] for load in line]
        return max(flat) * len(flat) / sum(flat) if sum(flat) else 1.0

    @property
    def operations(self) -> float:
        """Newton-Schulz floating-point operations of this rank in a step."""
        return sum(
            batch.matrices_here
            * newton_schulz_cost(batch.rows, batch.cols, batch.orthogonalization.steps)
            for batch in self.batches
        )

    def __str__(self) -> str:
        lines = [f"Muon step plan {self.digest[:12]}: {len(self.batches)} batches"]
        lines += [str(batch) for batch in self.batches]
        lines += [
            f"balance on {label}: largest load {self.balance(label):.3f} x mean"
            for label in self.loads
        ]
        return "\n".join(lines)


def build_plan(
    entries: Sequence[Entry],
    *,
    topology: Topology | None = None,
    deduplicate: bool = True,
    coordinate: Coordinate | None = None,
) -> StepPlan:
    """Plans a step.

    Args:
        entries: Muon parameters in the optimizer's order, the same on every rank.
        topology: hosts of the ranks, for replica subgroups; None takes one host.
        deduplicate: whether replicas share the work.
        coordinate: whose plan, on the entries' only mesh; None is this rank's own.

    Raises:
        MuonError: a layout cannot be stepped, or replica subgroups would cross hosts.
    """
    builder = _Builder(topology, deduplicate, coordinate)
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
    owned = frozenset(member.index for batch in batches for member in batch.own.members)
    agreed = "\n".join(
        [
            *map(str, entries),
            f"deduplicate_replicas={deduplicate}",
            f"hosts={None if topology is None else topology.hosts}",
        ]
    )
    loads = {label: tuple(map(tuple, table)) for label, table in builder.loads.items()}
    return StepPlan(tuple(batches), owned, loads, agreed)


class _Builder:
    """What is shared while one plan is built: known domains, geometries and loads."""

    def __init__(
        self, topology: Topology | None, deduplicate: bool, coordinate: Coordinate | None
    ) -> None:
        self.topology = topology
        self.deduplicate = deduplicate
        self.coordinate = coordinate
        self.loads: dict[str, list[list[float]]] = {}
        self._domains: dict[tuple[object, ...], Domain] = {}
        self._geometries: dict[tuple[object, ...], Geometry] = {}
        self._meshes: list[DeviceMesh | AbstractMesh] = []

    def geometry(self, entry: Entry) -> Geometry:
        if entry.layout is None:
            return whole(entry.view)
        coord = entry.layout.coordinate(self.coordinate)
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
        return self._meshes.index(mesh)

    def _new_domain(self, layout: Layout, geometry: Geometry, number: int) -> Domain:
        names, sizes = layout.abstract_mesh.axis_names, layout.abstract_mesh.sizes
        coord = layout.coordinate(self.coordinate)
        replica_axes = self._replica_axes(layout, geometry, coord) if self.deduplicate else ()
        cut = " x ".join(names[axis] for axis in geometry.cutting) or "-"
        spread_over = " x ".join(f"{names[axis.axis]}:{len(axis.members)}" for axis in replica_axes)
        mesh_label = f"mesh{number} " if number else ""
        return Domain(
            label=f"{mesh_label}cut by {cut}, owners over {spread_over or '-'}",
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

    def batches(self, entries: Sequence[tuple[Entry, Geometry]]) -> list[Batch]:
        """The batches of one class; every replica owner's list is cut where the cap is reached."""
        first, geometry = entries[0]
        domain = self.domain(first, geometry)
        cost = newton_schulz_cost(first.view.rows, first.view.cols, first.orthogonalization.steps)
        loads = self.loads.setdefault(
            domain.label, [[0.0] * domain.shard_size for _ in range(domain.replica_size)]
        )
        owners = spread([g.count * cost for _, g in entries], [sum(line) for line in loads])
        capacity = batch_capacity(first.view.rows * first.view.cols, domain.shard_size)
        lists: list[list[list[tuple[Entry, Geometry]]]] = []
        for replica in range(domain.replica_size):
            mine = [pair for pair, owner in zip(entries, owners) if owner == replica]
            lists.append(_capped(mine, capacity))
        batches = []
        for slot in range(max(len(chunks) for chunks in lists)):
            parts = tuple(
                self._part(chunks[slot] if slot < len(chunks) else [], first, domain, cost, line)
                for chunks, line in zip(lists, loads)
            )
            batches.append(
                Batch(
                    rows=first.view.rows,
                    cols=first.view.cols,
                    dtype=first.dtype,
                    device=first.device,
                    orthogonalization=first.orthogonalization,
                    domain=domain,
                    parts=parts,
                )
            )
        return batches

    def _part(
        self,
        pairs: Sequence[tuple[Entry, Geometry]],
        first: Entry,
        domain: Domain,
        cost: float,
        loads: list[float],
    ) -> Part:
        members: list[Member] = []
        count = 0
        for entry, geometry in pairs:
            members.append(Member(entry.index, entry.name, geometry, count))
            count += geometry.count
        bounds = share_out(count, cost, loads)
        for owner, (start, stop) in enumerate(pairwise(bounds)):
            loads[owner] += (stop - start) * cost
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
                [m.geometry.pieces[domain.shard_rank].numel for m in members], first.dtype
            ),
        )


def batch_capacity(area: int, shard_size: int) -> int:
    """Matrices of `area` elements in a batch, unless one parameter alone has more.

    The paper caps a batch at 2^29 elements over the shard-group size. Two things are added. A
    batch smaller than the shard group would leave compute owners idle while the next gather
    waits for the busy ones, so a batch holds one matrix per owner as long as all of it stays
    below 2^29 elements; and it holds whole rounds, the same number for every owner.
    """
    if area == 0:
        return 1
    cap = max(MAX_BATCH_ELEMENTS // shard_size, min(shard_size * area, MAX_BATCH_ELEMENTS))
    capacity = max(cap // area, 1)
    return capacity - capacity % shard_size if capacity > shard_size else capacity


def _capped(
    pairs: Sequence[tuple[Entry, Geometry]], capacity: int
) -> list[list[tuple[Entry, Geometry]]]:
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
