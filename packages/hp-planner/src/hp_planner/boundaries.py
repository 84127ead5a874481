"""Passes 2 and 3: parameters grouped by the module they belong to, and what each module is.

A group is a candidate boundary; its kind follows from the roles of its members. Layers and the
model itself are boundaries of structure: they own no parameter but say what their parts exchange.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve, frozen

from hp_dtensor.plan import BoundaryKind
from hp_planner.graph import MODULE_LIST, ModuleGraph, is_inside, parent
from hp_planner.manners import Manner, manner_of
from hp_planner.roles import NO_TEMPLATE, Role, RoleAssignment
from hp_planner.stream import stream_problem

_ATTENTION = (
    Role.HEAD_NORM,
    Role.QUERY,
    Role.KEY,
    Role.VALUE,
    Role.FUSED_QKV,
    Role.ATTENTION_GATE,
    Role.ATTENTION_OUTPUT,
    Role.QUERY_DOWN,
    Role.QUERY_UP,
    Role.KEY_VALUE_DOWN,
    Role.KEY_VALUE_UP,
    Role.LATENT_NORM,
    Role.SINK,
)

KIND_OF_ROLE: dict[Role, BoundaryKind] = {
    **dict.fromkeys(_ATTENTION, BoundaryKind.ATTENTION),
    Role.EMBEDDING: BoundaryKind.EMBEDDING,
    Role.POSITION: BoundaryKind.POSITION,
    Role.HEAD: BoundaryKind.HEAD,
    Role.NORM: BoundaryKind.NORM,
    Role.GATE: BoundaryKind.MLP,
    Role.UP: BoundaryKind.MLP,
    Role.FUSED_GATE_UP: BoundaryKind.MLP,
    Role.DOWN: BoundaryKind.MLP,
    Role.ACTIVATION: BoundaryKind.MLP,
    Role.ROUTER: BoundaryKind.MOE,
    Role.ROUTER_BIAS: BoundaryKind.MOE,
    Role.SHARED_EXPERT_GATE: BoundaryKind.MOE,
    Role.EXPERT_GATE_UP: BoundaryKind.EXPERTS,
    Role.EXPERT_DOWN: BoundaryKind.EXPERTS,
    Role.EXPERT_BIAS: BoundaryKind.EXPERTS,
    Role.STATE_SPACE: BoundaryKind.MIXER,
    Role.STATE_SPACE_IN: BoundaryKind.MIXER,
    Role.STATE_SPACE_OUT: BoundaryKind.MIXER,
    Role.INDEXER: BoundaryKind.MIXER,
    Role.AUXILIARY: BoundaryKind.MIXER,
}


@frozen
class Group:
    """Parameters that belong to one module."""

    module: str
    members: tuple[RoleAssignment, ...]


@frozen
class Boundary:
    """A module with its structural kind.

    Attributes:
        kind: None where no member has a role with a template.
        home: qualified name of the nearest enclosing boundary; None for the model itself.
        problem: for a block, why it is not sharded as one; for the model, why its hidden states
            stay whole between the blocks; empty if neither.
        manner: how the block's parameters are laid out.
    """

    module: str
    kind: BoundaryKind | None
    members: tuple[RoleAssignment, ...] = ()
    home: str | None = None
    problem: str = ""
    manner: Manner = Manner.SHARDED


def group_boundaries(graph: ModuleGraph, roles: Iterable[RoleAssignment]) -> tuple[Group, ...]:
    """Pass 2: members by module, in the graph's order."""
    members: dict[str, list[RoleAssignment]] = {}
    for assignment in roles:
        members.setdefault(assignment.boundary, []).append(assignment)
    order = (node.name for node in graph.modules)
    return tuple(Group(name, tuple(members[name])) for name in order if name in members)


def infer_boundary_types(graph: ModuleGraph, groups: Iterable[Group]) -> tuple[Boundary, ...]:
    """Pass 3: kinds from members' roles; layers and the model added, in the graph's order."""
    grouped = {group.module: group for group in groups}
    kinds: dict[str, BoundaryKind | None] = {"": BoundaryKind.MODEL}
    kinds |= dict.fromkeys(layer_names(graph), BoundaryKind.LAYER)
    found = {name: _member_kinds(group) for name, group in grouped.items()}
    for name, of_members in found.items():
        if name not in kinds:
            kinds[name] = _single_kind(of_members)
    boundaries = []
    for node in graph.modules:
        if node.name not in kinds:
            continue
        kind, home = kinds[node.name], _home(node.name, kinds)
        members = grouped[node.name].members if node.name in grouped else ()
        manner, problem = manner_of(graph, kind, node.name, members)
        boundaries.append(Boundary(node.name, kind, members, home, problem, manner))
    problem = stream_problem(graph, tuple(boundaries))
    return tuple(
        evolve(b, problem=problem) if b.kind is BoundaryKind.MODEL else b for b in boundaries
    )


def layer_names(graph: ModuleGraph) -> tuple[str, ...]:
    """Elements of the outermost module lists that hold parameters: the repeated layers."""
    names: list[str] = []
    for node in graph.modules:
        holder = graph.find(parent(node.name)) if node.name else None
        outermost = not any(is_inside(node.name, name) for name in names)
        if holder is not None and holder.is_a(MODULE_LIST) and outermost and node.children:
            names.append(node.name)
    return tuple(names)


def _member_kinds(group: Group) -> tuple[BoundaryKind, ...]:
    roles = (member.role for member in group.members if member.role not in NO_TEMPLATE)
    return tuple(dict.fromkeys(KIND_OF_ROLE[role] for role in roles))


def _single_kind(kinds: tuple[BoundaryKind, ...]) -> BoundaryKind | None:
    """The kind of a module; one whose parameters are of several kinds is a mixer, left whole."""
    if len(kinds) > 1:
        return BoundaryKind.MIXER
    return kinds[0] if kinds else None


def _home(name: str, kinds: dict[str, BoundaryKind | None]) -> str | None:
    while name:
        name = parent(name)
        if kinds.get(name) is not None:
            return name
    return None
