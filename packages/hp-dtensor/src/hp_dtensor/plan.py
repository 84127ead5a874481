"""The sharding plan as frozen data (paper section 4.1; decisions D3, D6).

A plan assigns every parameter a contract (placements of its value and of its gradient) and every
module boundary a pair of contracts for each tensor that crosses it: what the neighbours exchange
(`outside`) and what the module computes with (`inside`). The runtime compiles a transition from
one to the other. Nothing here needs a process group: axes are names and sizes.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import default_grad_placement


def _sizes(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(size) for size in value)


def _groups(value: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(names) for names in value)


AxisPlacements = tuple[tuple[str, Placement], ...]


def _axis_placements(value: Mapping[str, Placement] | AxisPlacements) -> AxisPlacements:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple(sorted(((axis, placement) for axis, placement in pairs), key=lambda pair: pair[0]))


def _sequence(value: Iterable[Any]) -> tuple[Any, ...]:
    """`tuple`, annotated: mypy's attrs plugin cannot solve the generic constructor."""
    return tuple(value)


@frozen
class Contract:
    """Declared layout of one tensor: placements of the value and of its gradient, by mesh axis.

    An axis that is not named is `Replicate`. A gradient placement that is not named follows D3:
    Shard has gradient Shard, Partial has Replicate, Replicate has Replicate. `Replicate` with
    gradient `Partial` is named explicitly: each rank holds a summand of the gradient.
    """

    placements: AxisPlacements = field(default=(), converter=_axis_placements)
    grad_placements: AxisPlacements = field(default=(), converter=_axis_placements)

    def __attrs_post_init__(self) -> None:
        kept = tuple((axis, p) for axis, p in self.placements if not isinstance(p, Replicate))
        object.__setattr__(self, "placements", kept)
        grads = tuple(
            (axis, g)
            for axis, g in self.grad_placements
            if g != default_grad_placement(self.placement(axis))
        )
        object.__setattr__(self, "grad_placements", grads)
        for axis, grad in grads:
            value = self.placement(axis)
            if not (isinstance(value, Replicate) and isinstance(grad, Partial)):
                raise ValueError(
                    f"mesh axis {axis!r}: a value placed {value} cannot have a gradient placed "
                    f"{grad}; only Replicate has a choice (Replicate or Partial)"
                )

    def placement(self, axis: str) -> Placement:
        return dict(self.placements).get(axis, Replicate())

    def grad_placement(self, axis: str) -> Placement:
        chosen = dict(self.grad_placements).get(axis)
        return default_grad_placement(self.placement(axis)) if chosen is None else chosen

    def on(self, mesh: AbstractMesh) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
        """Value and gradient placements as tuples in the mesh's axis order."""
        return (
            tuple(self.placement(axis) for axis in mesh.axis_names),
            tuple(self.grad_placement(axis) for axis in mesh.axis_names),
        )

    def axes(self) -> tuple[str, ...]:
        """Axes on which this contract differs from plain replication."""
        return tuple(sorted({a for a, _ in self.placements} | {a for a, _ in self.grad_placements}))


REPLICATED = Contract()


def replicated_with_partial_gradient(axis: str) -> Contract:
    """Value replicated over `axis`, each rank's gradient a summand."""
    return Contract({}, {axis: Partial()})


def sharded(axis: str, dim: int) -> Contract:
    return Contract({axis: Shard(dim)})


def partial_sum(axis: str) -> Contract:
    return Contract({axis: Partial()})


@frozen
class ParameterSpec:
    """One parameter: its role, where it belongs, and its contract.

    Attributes:
        name: qualified name in the module the plan is for.
        role: what the parameter is for, e.g. `column_projection`.
        shape: global shape.
        contract: value and gradient placements by mesh axis.
        boundary: qualified name of the module whose boundary the parameter belongs to.
        reason: the rule or override that decided, for a person to read.
    """

    name: str
    role: str
    shape: tuple[int, ...] = field(converter=_sizes)
    contract: Contract
    boundary: str
    reason: str = ""


class BoundaryKind(enum.Enum):
    """Structural type of a boundary."""

    MODEL = "model"
    EMBEDDING = "embedding"
    POSITION = "position"
    LAYER = "layer"
    NORM = "norm"
    ATTENTION = "attention"
    MLP = "mlp"
    MOE = "moe"
    EXPERTS = "experts"
    HEAD = "head"
    MIXER = "mixer"


@frozen
class BoundaryTensor:
    """One tensor (or tuple of tensors) that crosses a boundary.

    Attributes:
        where: for an input, the name of `forward`'s argument; for an output, `""` (the returned
            tensor itself), a tuple position such as `"0"`, or the field name of a returned mapping
            or model output such as `"logits"`.
        outside: what the neighbours exchange.
        inside: what the module computes with.
        plain: the tensor carries no layout by nature (ids, masks, position tables); validate mode
            takes an input as `outside` instead of calling it lost, and hands an output on as the
            plain local tensor.
        optional: the argument may be absent or None.
        like: for an output, the input (by `where`) whose global shape and dtype it has. Checked
            where the boundary is an opaque region, and what stands for running the region when
            tensors have no values.
    """

    where: str
    outside: Contract
    inside: Contract
    plain: bool = False
    optional: bool = False
    like: str = ""


@frozen
class LocalAttribute:
    """An attribute that holds a global size and is divided by the axis when the plan is applied.

    `name` is relative to the boundary's module (dots allowed), `value` the global value.
    """

    name: str
    axis: str
    value: int


class RegionKind(enum.Enum):
    """Transparent: outputs are checked operator by operator. Opaque: the declared contracts are
    obligations, the inside runs on plain local tensors."""

    TRANSPARENT = "transparent"
    OPAQUE = "opaque"


@frozen
class Region:
    """How the inside of a boundary is checked and run.

    Attributes:
        function: `"package.module:function"` of what exchanges data inside an opaque region, see
            `hp_dtensor.regions`; empty where the module's own code is all there is.
    """

    kind: RegionKind
    reason: str = ""
    function: str = ""


@frozen
class BoundarySpec:
    """What crosses one module's boundary, which way, and how its inside is checked."""

    module: str
    kind: BoundaryKind
    inputs: tuple[BoundaryTensor, ...] = field(default=(), converter=_sequence)
    outputs: tuple[BoundaryTensor, ...] = field(default=(), converter=_sequence)
    localize: tuple[LocalAttribute, ...] = field(default=(), converter=_sequence)
    region: Region | None = None
    reason: str = ""


@frozen
class ShardingPlan:
    """Placements for every parameter and contracts for every boundary of one model.

    Attributes:
        model: class name of the model the plan was made for.
        mesh: axis names and sizes.
        model_axes: the axes the plan may shard over (data axes are left to `fully_shard`).
        parameters, boundaries: in the module's own order.
        tied: groups of parameter names that are one tensor; each group is listed once in
            `parameters`, under its first name.
    """

    model: str
    mesh: AbstractMesh
    model_axes: tuple[str, ...] = field(converter=_sequence)
    parameters: tuple[ParameterSpec, ...] = field(converter=_sequence)
    boundaries: tuple[BoundarySpec, ...] = field(converter=_sequence)
    tied: tuple[tuple[str, ...], ...] = field(default=(), converter=_groups)

    @property
    def model_mesh(self) -> AbstractMesh:
        """The sub-mesh of the model axes, in mesh order."""
        names = tuple(name for name in self.mesh.axis_names if name in self.model_axes)
        return AbstractMesh(names, tuple(self.mesh.size(name) for name in names))

    def parameter(self, name: str) -> ParameterSpec:
        for spec in self.parameters:
            if spec.name == name:
                return spec
        raise KeyError(f"the plan has no parameter {name!r}")

    def boundary(self, module: str) -> BoundarySpec:
        for spec in self.boundaries:
            if spec.module == module:
                return spec
        raise KeyError(f"the plan has no boundary {module!r}")

    @property
    def digest(self) -> str:
        """Stable over processes, machines and Python's hash seed: SHA-256 of the canonical form."""
        from hp_dtensor.plan_yaml import canonical_bytes

        return hashlib.sha256(canonical_bytes(self)).hexdigest()[:16]

    def to_yaml(self) -> str:
        """The plan as YAML; `from_yaml` restores an equal plan."""
        from hp_dtensor.plan_yaml import to_yaml

        return to_yaml(self)

    @classmethod
    def from_yaml(cls, text: str) -> ShardingPlan:
        """Reads a plan written by `to_yaml`.

        Raises:
            ValueError: the text is not a plan, with the offending key named.
        """
        from hp_dtensor.plan_yaml import from_yaml

        return from_yaml(text)

    def __str__(self) -> str:
        return (
            f"plan {self.digest} for {self.model} on {self.mesh}: "
            f"{len(self.parameters)} parameters, {len(self.boundaries)} boundaries"
        )
