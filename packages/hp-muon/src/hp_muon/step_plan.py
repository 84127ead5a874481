"""The static plan of a step: every batch, owner, buffer and collective, fixed before the first one.

Parameters whose matrices have the same shape, and whose shards and replicas lie on the same mesh
axes, form batches in descending matrix size (paper sections 6.4 to 6.7). A batch has one part per
replica owner: different replicas orthogonalize different parameters at the same time. The plan is
pure data, a function of layouts and shapes, so it can be built and read for any rank of any mesh
without process groups.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen
from torch import Tensor

from hp_dtensor import AbstractMesh, Layout
from hp_muon.grouping import Geometry
from hp_muon.newton_schulz import newton_schulz_operations, uses_gram
from hp_muon.views import ResolvedView
from hp_muon.wording import counted
from hp_platform import BufferLayout

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
        gram: whether to iterate in Gram space; None leaves it to the shape.
        normuon_beta2: decay of NorMuon's second moment of rows; None for plain Muon.
    """

    steps: int
    coefficients: str | tuple[tuple[float, ...], ...]
    eps: float
    dtype: torch.dtype
    gram: bool | None = None
    normuon_beta2: float | None = None

    def operations(self, rows: int, cols: int) -> float:
        """Floating-point operations to orthogonalize one matrix."""
        gram = self.gram
        if gram is None:
            gram = uses_gram(rows, cols, self.steps, self.coefficients)
        return newton_schulz_operations(rows, cols, self.steps, gram=gram)


@frozen(eq=False)
class Entry:
    """One Muon parameter's matrices of one kind, as the plan needs them.

    Attributes:
        index: the parameter's position among the optimizer's parameters.
        kind: which of the view's kinds of matrices; 0 where there is one only.
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
    kind: int = 0

    def __str__(self) -> str:
        where = "local" if self.layout is None else repr(self.layout)
        kind = f" kind {self.kind}" if self.kind else ""
        return f"{self.name}{kind}: {self.view.view} {where} {self.dtype} {self.orthogonalization}"


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
    """A parameter's matrices of one kind in a part: `first` to `first + count` of the part."""

    index: int
    kind: int
    name: str
    geometry: Geometry
    first: int

    @property
    def key(self) -> tuple[int, int]:
        """What tells it from every other member of a plan."""
        return (self.index, self.kind)

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
        publication: where a flag for every matrix, 1 where its update is finite, and the members'
            updated local tensors lie when sent to the replicas.
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

    @property
    def staging_numel(self) -> int:
        """Elements of the staging buffer, alike on every rank of the shard group."""
        return sum(segment.total for segment in self.own.segments)

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """Bytes of every buffer this batch needs on this rank, by its role."""
        exchanged = self.orthogonalization.dtype.itemsize
        published = sum(part.publication.total for part in self.parts)
        return {
            "staging": self.staging_numel * exchanged,
            "updates": sum(self.own.chunks) * exchanged,
            "publication": published * self.dtype.itemsize * (self.domain.replica_size > 1),
        }

    def __str__(self) -> str:
        members = sum(len(part.members) for part in self.parts)
        matrices = sum(part.count for part in self.parts)
        shares = [stop - start for start, stop in pairwise(self.own.bounds)]
        return (
            f"{self.rows:>6} x {self.cols:<6} {counted(members, 'parameter')}, "
            f"{self.domain.label}: {counted(matrices, 'matrix', 'matrices')}"
            + (f", {self.own.count} of them in this replica" if len(self.parts) > 1 else "")
            + (f", {_span(shares)} on each compute owner" if len(shares) > 1 else "")
            + f"; staging {counted(self.workspace_bytes['staging'], 'byte')}"
        )


@frozen(eq=False)
class StepPlan:
    """Batches in the order of execution, and who carries how much.

    Attributes:
        owned: indices of the parameters whose momentum this rank holds.
        loads: per mesh, the cost of Newton-Schulz on the rank at every mesh coordinate.
        agreed: what all ranks must have in common, as text; the same on every rank.
    """

    batches: tuple[Batch, ...]
    owned: frozenset[int]
    loads: Mapping[str, Tensor]
    agreed: str = field(repr=False)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.agreed.encode()).hexdigest()

    def domains(self) -> tuple[Domain, ...]:
        """Every domain once, in order of first use."""
        return tuple({id(batch.domain): batch.domain for batch in self.batches}.values())

    def balance(self, mesh: str) -> float:
        """Largest load over mean load of a mesh's ranks; 1 is perfect."""
        loads = self.loads[mesh]
        mean = float(loads.mean())
        return float(loads.max()) / mean if mean else 1.0

    @property
    def operations(self) -> float:
        """Newton-Schulz floating-point operations of this rank in a step."""
        return sum(
            batch.matrices_here * batch.orthogonalization.operations(batch.rows, batch.cols)
            for batch in self.batches
        )

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """Bytes of the buffers that this rank keeps between steps, by role.

        Each is as large as its largest batch. Two update buffers alternate.
        """
        found = {"staging": 0, "updates": 0, "publication": 0}
        for batch in self.batches:
            for role, size in batch.workspace_bytes.items():
                found[role] = max(found[role], size)
        found["updates"] *= 2
        return found

    def __str__(self) -> str:
        lines = [
            f"Muon step plan {self.digest[:12]}: {counted(len(self.batches), 'batch', 'batches')}"
        ]
        lines += [str(batch) for batch in self.batches]
        buffers = ", ".join(f"{role} {size}" for role, size in self.workspace_bytes.items())
        lines += [f"bytes of buffers: {buffers}"]
        lines += [
            f"balance on {mesh}: largest load {self.balance(mesh):.3f} x mean"
            for mesh in self.loads
        ]
        return "\n".join(lines)


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"
