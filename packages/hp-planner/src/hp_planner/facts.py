"""What the lint checks look at, and what they find."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from attrs import frozen

from hp_dtensor.placements import Replicate, describe
from hp_dtensor.plan import BoundaryKind, BoundarySpec, Contract, ShardingPlan
from hp_planner.axis_specs import LEFT_WHOLE
from hp_planner.boundaries import Boundary, group_boundaries, infer_boundary_types
from hp_planner.graph import ModuleGraph, is_inside
from hp_planner.roles import RoleAssignment
from hp_planner.rules import classify_roles
from hp_planner.settings import TENSOR_AXIS
from hp_planner.stated_orders import as_stated


@frozen
class Violation:
    """One broken rule: which, where, what was expected, what was found, what to do."""

    rule: str
    where: str
    expected: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.where}: expected {self.expected}, found {self.found}"


@frozen
class Facts:
    """What the checks look at.

    Attributes:
        local: modules that the plan leaves whole.
        sequence_parallel: the hidden states between blocks are sharded along the sequence.
        size: ranks of the tensor-parallel axis.
    """

    graph: ModuleGraph
    plan: ShardingPlan
    boundaries: tuple[Boundary, ...]
    local: frozenset[str]
    sequence_parallel: bool
    size: int

    @cached_property
    def specs(self) -> dict[str, BoundarySpec]:
        return {spec.module: spec for spec in self.plan.boundaries}

    @property
    def members(self) -> dict[str, RoleAssignment]:
        return {member.name: member for b in self.boundaries for member in b.members}

    def whole(self, name: str) -> bool:
        """Whether this module is left whole, or lies in one that is."""
        return any(name == module or is_inside(name, module) for module in self.local)

    def sharded(self, *kinds: BoundaryKind) -> Iterator[Boundary]:
        """Boundaries of these kinds that are not left whole."""
        return (b for b in self.boundaries if b.kind in kinds and not self.whole(b.module))


def read_facts(graph: ModuleGraph, plan: ShardingPlan) -> Facts:
    """What `plan` says, beside what the graph alone gives."""
    graph = as_stated(graph, plan)
    groups = group_boundaries(graph, classify_roles(graph))
    boundaries = infer_boundary_types(graph, groups)
    size = plan.mesh.size(TENSOR_AXIS) if TENSOR_AXIS in plan.mesh.axis_names else 1
    layers = [s for s in plan.boundaries if s.kind is BoundaryKind.LAYER]
    streams = {t.outside.placement(TENSOR_AXIS) for spec in layers for t in spec.outputs}
    return Facts(
        graph=graph,
        plan=plan,
        boundaries=boundaries,
        local=_local(plan),
        sequence_parallel=not layers or streams != {Replicate()},
        size=size,
    )


def _local(plan: ShardingPlan) -> frozenset[str]:
    """Modules that an override leaves whole: their boundary says so."""
    return frozenset(
        spec.module
        for spec in plan.boundaries
        if spec.reason == LEFT_WHOLE and spec.kind is not BoundaryKind.EXPERTS
    )


def show_contract(contract: Contract) -> str:
    """Placement and gradient placement on the tensor-parallel axis, for messages."""
    placement = contract.placement(TENSOR_AXIS)
    grad = contract.grad_placement(TENSOR_AXIS)
    return f"{describe(placement)} (gradient {describe(grad)})"
