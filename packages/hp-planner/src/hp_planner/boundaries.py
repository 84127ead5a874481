"""Passes 2 and 3: parameters grouped by the module they belong to, and what each module is.

A group is a candidate boundary; its kind follows from the roles of its members. Layers and the
model itself are boundaries of structure: they own no parameter but say what their parts exchange.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from hp_dtensor.plan import BoundaryKind
from hp_planner.graph import ModuleGraph, is_inside, parent
from hp_planner.roles import NO_TEMPLATE, SHARED_EXPERT, Role, RoleAssignment

MODULE_LIST = "torch.nn.modules.container.ModuleList"

KIND_OF_ROLE: dict[Role, BoundaryKind] = {
    Role.EMBEDDING: BoundaryKind.EMBEDDING,
    Role.HEAD: BoundaryKind.HEAD,
    Role.NORM: BoundaryKind.NORM,
    Role.HEAD_NORM: BoundaryKind.ATTENTION,
    Role.QUERY: BoundaryKind.ATTENTION,
    Role.KEY: BoundaryKind.ATTENTION,
    Role.VALUE: BoundaryKind.ATTENTION,
    Role.ATTENTION_OUTPUT: BoundaryKind.ATTENTION,
    Role.GATE: BoundaryKind.MLP,
    Role.UP: BoundaryKind.MLP,
    Role.DOWN: BoundaryKind.MLP,
    Role.ROUTER: BoundaryKind.MOE,
    Role.SHARED_EXPERT_GATE: BoundaryKind.MOE,
    Role.EXPERT_GATE_UP: BoundaryKind.EXPERTS,
    Role.EXPERT_DOWN: BoundaryKind.EXPERTS,
}

# Where a boundary may sit: the kinds its nearest enclosing boundary may have.
HOMES: dict[BoundaryKind, tuple[BoundaryKind, ...]] = {
    BoundaryKind.EMBEDDING: (BoundaryKind.MODEL,),
    BoundaryKind.HEAD: (BoundaryKind.MODEL,),
    BoundaryKind.NORM: (BoundaryKind.LAYER, BoundaryKind.MODEL),
    BoundaryKind.ATTENTION: (BoundaryKind.LAYER, BoundaryKind.MODEL),
    BoundaryKind.MLP: (BoundaryKind.LAYER, BoundaryKind.MODEL, BoundaryKind.MOE),
    BoundaryKind.MOE: (BoundaryKind.LAYER, BoundaryKind.MODEL),
    BoundaryKind.EXPERTS: (BoundaryKind.MOE,),
    BoundaryKind.LAYER: (BoundaryKind.MODEL,),
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
        problem: why the kind cannot be trusted; empty if it can.
    """

    module: str
    kind: BoundaryKind | None
    members: tuple[RoleAssignment, ...] = ()
    home: str | None = None
    problem: str = ""


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
    layers = layer_names(graph)
    kinds: dict[str, BoundaryKind | None] = {"": BoundaryKind.MODEL}
    kinds |= dict.fromkeys(layers, BoundaryKind.LAYER)
    found = {name: _member_kinds(group) for name, group in grouped.items()}
    for name, of_members in found.items():
        if name not in kinds:
            kinds[name] = of_members[0] if len(of_members) == 1 else None
    boundaries = []
    for node in graph.modules:
        if node.name not in kinds:
            continue
        home = _home(node.name, kinds)
        members = grouped[node.name].members if node.name in grouped else ()
        problem = _problem(node.name, kinds, home, found.get(node.name, ()), layers)
        boundaries.append(Boundary(node.name, kinds[node.name], members, home, problem))
    return tuple(boundaries)


def layer_names(graph: ModuleGraph) -> tuple[str, ...]:
    """Elements of the outermost module lists that hold parameters: the repeated layers."""
    names: list[str] = []
    for node in graph.modules:
        holder = graph.find(parent(node.name)) if node.name else None
        outermost = not any(is_inside(node.name, name) for name in names)
        if holder is not None and holder.is_a(MODULE_LIST) and outermost:
            names.append(node.name)
    return tuple(names)


def _member_kinds(group: Group) -> tuple[BoundaryKind, ...]:
    roles = (member.role for member in group.members if member.role not in NO_TEMPLATE)
    return tuple(dict.fromkeys(KIND_OF_ROLE[role] for role in roles))


def _home(name: str, kinds: dict[str, BoundaryKind | None]) -> str | None:
    while name:
        name = parent(name)
        if kinds.get(name) is not None:
            return name
    return None


def _problem(
    name: str,
    kinds: dict[str, BoundaryKind | None],
    home: str | None,
    of_members: tuple[BoundaryKind, ...],
    layers: tuple[str, ...],
) -> str:
    kind = kinds[name]
    if kind in (BoundaryKind.LAYER, BoundaryKind.MODEL) and of_members:
        roles = ", ".join(member.value for member in of_members)
        return f"parameters of {roles} lie in the {kind.value} itself, not in a module of theirs"
    if len(of_members) > 1:
        return f"its parameters belong to several kinds: {', '.join(k.value for k in of_members)}"
    if kind is None or home is None:
        return ""
    around = kinds[home]
    if around is None or around not in HOMES[kind]:
        inside = around.value if around else "an unknown block"
        return f"{kind.value} inside {inside} ({home}) is not a known structure"
    if kinds[home] is BoundaryKind.LAYER and parent(name) != home:
        return f"{kind.value} lies deeper in {home} than one of its direct parts"
    if kind is BoundaryKind.MLP and kinds[home] is BoundaryKind.MOE:
        known = name.rpartition(".")[2] in SHARED_EXPERT
        return "" if known else "an MLP among experts that is not named as a shared expert"
    if kind is BoundaryKind.LAYER and len({parent(layer) for layer in layers}) > 1:
        lists = ", ".join(dict.fromkeys(parent(layer) for layer in layers))
        return f"layers lie in several lists ({lists}); one stream through one list is planned"
    return _doubled(kinds, home, kind, bool(layers))


def _doubled(
    kinds: dict[str, BoundaryKind | None], home: str, kind: BoundaryKind, has_layers: bool
) -> str:
    """Outside the layers there is one embedding, one head and, after the layers, one norm."""
    single = (BoundaryKind.EMBEDDING, BoundaryKind.HEAD, BoundaryKind.NORM)
    if kind not in single or kinds[home] is not BoundaryKind.MODEL:
        return ""
    if kind is BoundaryKind.NORM and not has_layers:
        return ""
    alike = [other for other, its in kinds.items() if its is kind and _home(other, kinds) == home]
    if len(alike) == 1:
        return ""
    return f"the model has {len(alike)} boundaries of kind {kind.value}: {', '.join(alike)}"
