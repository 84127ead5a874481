"""The contracts that templates are made of, and small parts of boundaries that they share."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve, frozen

from hp_dtensor.plan import (
    REPLICATED,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    partial_sum,
    replicated_with_partial_gradient,
    sharded,
)
from hp_planner.boundaries import Boundary
from hp_planner.graph import ModuleNode
from hp_planner.roles import NO_TEMPLATE, Role, RoleAssignment
from hp_planner.settings import TENSOR_AXIS

Tensors = tuple[BoundaryTensor, ...]
Members = tuple[tuple[RoleAssignment, Contract], ...]

PARTIAL = partial_sum(TENSOR_AXIS)
SUMMED_GRADIENT = replicated_with_partial_gradient(TENSOR_AXIS)
SEQUENCE = sharded(TENSOR_AXIS, 1)
ROWS = sharded(TENSOR_AXIS, 0)
COLUMNS = sharded(TENSOR_AXIS, 1)
LAST = sharded(TENSOR_AXIS, -1)

# Arguments that carry no layout: ids, masks, position tables. The model's masks and positions are
# not declared: transformers mixes them with tensors that it makes itself, and what comes of them
# is declared where a layer takes it.
MODEL_INPUTS = ("input_ids", "labels")
PLAIN_INPUTS = ("position_embeddings", "attention_mask", "position_ids")


@frozen
class Drafted:
    """What a template makes of one boundary."""

    contracts: Members = ()
    specs: tuple[BoundarySpec, ...] = ()


def first_argument(node: ModuleNode) -> str:
    return node.forward.arguments[0] if node.forward.arguments else "hidden_states"


def result(node: ModuleNode) -> str:
    """Where the hidden states are in what the module returns."""
    return "0" if node.forward.returns_tuple else ""


def plain(node: ModuleNode, names: Iterable[str] = PLAIN_INPUTS) -> Tensors:
    return tuple(
        BoundaryTensor(name, REPLICATED, REPLICATED, plain=True, optional=True)
        for name in names
        if name in node.forward.arguments
    )


def by_role(boundary: Boundary, table: dict[Role, Contract]) -> Members:
    """Every member with a template and the contract of its role; replicated if not in `table`."""
    return tuple(
        (member, table.get(member.role, REPLICATED))
        for member in boundary.members
        if member.role not in NO_TEMPLATE
    )


def replicated(boundary: Boundary, reason: str) -> Members:
    """All members replicated, those without a role too."""
    return tuple((_explained(member, reason), REPLICATED) for member in boundary.members)


def known_replicated(boundary: Boundary, reason: str) -> Members:
    """The members that have a role, replicated."""
    return tuple(
        (_explained(member, reason), REPLICATED)
        for member in boundary.members
        if member.role not in NO_TEMPLATE
    )


def _explained(member: RoleAssignment, reason: str) -> RoleAssignment:
    return evolve(member, reason=f"{member.reason}; {reason}") if reason else member
