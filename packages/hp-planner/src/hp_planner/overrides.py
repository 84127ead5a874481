"""Pass 5: overrides laid over the derived plan, refused where they cannot mean what they say."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from attrs import evolve, frozen
from torch.distributed.tensor import Partial

from hp_dtensor.placements import sharded_dims
from hp_dtensor.plan import REPLICATED, BoundaryKind, Contract, ParameterSpec, ShardingPlan
from hp_planner.axis_specs import on_axis, without_axis
from hp_planner.boundaries import Boundary
from hp_planner.errors import PlanError
from hp_planner.expert_axis import BATCH_AVERAGE
from hp_planner.folding import fold, split_numbers
from hp_planner.graph import ModuleGraph, is_inside
from hp_planner.order import Order
from hp_planner.override_file import DECLARED, Override, Overrides, Sentinel
from hp_planner.roles import NO_TEMPLATE, RoleAssignment
from hp_planner.settings import CONTEXT_AXIS, EXPERT_AXIS, TENSOR_AXIS, Settings
from hp_planner.templates import instantiate_templates
from hp_planner.templates.moe import add_whole_experts


@frozen
class Targets:
    """What overrides can name: modules with their kinds, parameters with their roles."""

    graph: ModuleGraph
    kinds: Mapping[str, BoundaryKind | None]
    roles: Mapping[str, RoleAssignment]

    @classmethod
    def of(cls, graph: ModuleGraph, boundaries: Iterable[Boundary]) -> Targets:
        kinds = {boundary.module: boundary.kind for boundary in boundaries}
        roles = {member.name: member for b in boundaries for member in b.members}
        return cls(graph, kinds, roles)

    def home(self, name: str) -> str:
        """The nearest enclosing module with a kind."""
        enclosing = (m for m, kind in self.kinds.items() if kind and is_inside(name, m))
        return max(enclosing, key=len)

    def kind(self, name: str) -> BoundaryKind | None:
        """Kind of a module, or of the boundary that a parameter belongs to."""
        if name in self.roles:
            return self.kinds.get(self.roles[name].boundary)
        return self.kinds.get(name)

    def matching(self, override: Override) -> tuple[tuple[str, ...], bool]:
        """Names the key reaches, and whether they are modules.

        Raises:
            PlanError: none, or modules and parameters mixed.
        """
        modules = [node.name for node in self.graph.modules if node.name]
        if not override.is_glob:
            for names, are_modules in ((modules, True), (list(self.roles), False)):
                if override.key in names:
                    return (override.key,), are_modules
            raise PlanError(self._nothing(override.key, [*modules, *self.roles]))
        hit = tuple(name for name in modules if fnmatchcase(name, override.key))
        parameters = tuple(name for name in self.roles if fnmatchcase(name, override.key))
        stray = [p for p in parameters if not any(is_inside(p, module) for module in hit)]
        if hit and stray:
            raise PlanError(
                f"override {override.key!r} reaches modules ({_some(hit)}) and parameters outside "
                f"of them ({_some(stray)}); write two keys"
            )
        if not hit and not parameters:
            raise PlanError(self._nothing(override.key, [*modules, *self.roles]))
        return (hit, True) if hit else (parameters, False)

    def _nothing(self, key: str, names: list[str]) -> str:
        shown = ", ".join(nearest_names(key, names))
        return f"override {key!r} matches no module and no parameter; nearest: {shown}"


def _some(names: Iterable[str], limit: int = 4) -> str:
    folded = [text for text, _ in fold(names, lambda name: name, lambda _: 0)]
    rest = f" and {len(folded) - limit} more" if len(folded) > limit else ""
    return ", ".join(folded[:limit]) + rest


def nearest_names(key: str, names: Sequence[str], count: int = 3) -> list[str]:
    """The names most like a key, best first; there are always some.

    A key is compared with the last segments of a name, as many as it spells out itself. Names that
    differ in layer numbers only count once; of those the one most like the key is told.
    """
    spelled = [part for segment in key.split(".") if (part := segment.strip("*?[]!"))]
    text = ".".join("#" if part.isdecimal() else part for part in spelled)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(split_numbers(name)[0], []).append(name)

    def likeness(pattern: str) -> float:
        segments = pattern.split(".")
        tail = ".".join(segments[-max(len(spelled), 1) :])
        last = _ratio(spelled[-1] if spelled else text, segments[-1])
        return 0.5 * _ratio(text, tail) + 0.5 * last

    best = sorted(groups, key=lambda pattern: (-likeness(pattern), pattern.count("."), pattern))
    return [max(groups[pattern], key=lambda name: _ratio(key, name)) for pattern in best[:count]]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()


def merge_overrides(
    graph: ModuleGraph,
    boundaries: tuple[Boundary, ...],
    settings: Settings,
    plan: ShardingPlan,
    overrides: Overrides,
) -> ShardingPlan:
    """Pass 5: `plan` with the overrides laid over it.

    Raises:
        PlanError: lists every override that matches nothing, reaches too far, or asks for what
            no template can do.
    """
    if not overrides:
        return add_whole_experts(graph, plan)
    targets = Targets.of(graph, boundaries)
    chosen, problems = choose(targets, settings, overrides)
    chosen = {name: o for name, o in chosen.items() if not isinstance(o.value, Order)}
    if not problems:
        problems = _unusable(targets, settings, chosen)
    if problems:
        raise PlanError("\n".join(problems))
    local = _local_modules(targets, boundaries, chosen)
    merged = instantiate_templates(graph, boundaries, settings, local) if local else plan
    declared = _with_parameters(targets, settings, merged, chosen, local)
    return add_whole_experts(graph, declared)


Chosen = dict[str, Override]


def choose(targets: Targets, settings: Settings, overrides: Overrides) -> tuple[Chosen, list[str]]:
    """The one override that counts for every name reached, exact names first."""
    chosen: Chosen = {}
    problems: list[str] = []
    for override in sorted(overrides, key=lambda entry: entry.is_glob):
        try:
            names, are_modules = targets.matching(override)
            _check_reach(targets, override, names, are_modules)
            holds = _holds(targets.graph, settings, override)
        except PlanError as error:
            problems.append(str(error))
            continue
        wanted = override.condition.boundary
        for name in names if holds else ():
            if wanted is None or targets.kind(name) is wanted:
                chosen.setdefault(name, override)
    return chosen, problems


def _check_reach(
    targets: Targets, override: Override, names: tuple[str, ...], are_modules: bool
) -> None:
    """A glob must mean one kind of module or one role of parameter, or name the kind."""
    if not override.is_glob or override.value is Sentinel.AUTO:
        return
    if are_modules and override.condition.boundary is not None:
        return
    groups: dict[str, list[str]] = {}
    for name in names:
        kind = targets.kinds.get(name)
        label = (kind.value if kind else "no kind") if are_modules else targets.roles[name].label
        groups.setdefault(label, []).append(name)
    if len(groups) > 1:
        found = "; ".join(f"{label}: {_some(members)}" for label, members in groups.items())
        what = "modules of several kinds" if are_modules else "parameters of several roles"
        remedy = "add `when: {boundary: KIND}`" if are_modules else "narrow the name"
        raise PlanError(f"override {override.key!r} reaches {what} ({found}); {remedy}")


def _holds(graph: ModuleGraph, settings: Settings, override: Override) -> bool:
    condition, config = override.condition, dict(graph.config)
    for name, _ in condition.config:
        if name not in config:
            near = ", ".join(difflib.get_close_matches(name, list(config), n=3)) or "none"
            raise PlanError(
                f"override {override.key!r}: the config has no plain value {name!r}; "
                f"nearest: {near}"
            )
    sizes = dict(zip(settings.mesh.axis_names, settings.mesh.sizes))
    large = condition.axis is None or sizes.get(condition.axis, 1) >= condition.minimum
    return large and all(config[name] == value for name, value in condition.config)


def _unusable(targets: Targets, settings: Settings, chosen: Chosen) -> list[str]:
    if settings.model_size == 1:
        return []
    problems = []
    for name, override in chosen.items():
        if override.value is Sentinel.AUTO:
            continue
        known = name in targets.roles
        text = _bad_parameter(targets, name, override) if known else _bad_module(targets, name)
        if not known and isinstance(override.value, Contract):
            text = "placements belong to parameters; a module takes auto or none"
        if text:
            problems.append(f"override {override.key!r} on {name}: {text}")
    return problems


def _bad_module(targets: Targets, name: str) -> str:
    home = targets.home(name)
    if any(is_inside(other, name) and targets.kinds[other] for other in targets.kinds):
        inner = targets.kinds.get(name)
        if inner not in (BoundaryKind.LAYER, BoundaryKind.MOE, BoundaryKind.ATTENTION):
            return "it holds several boundaries; name those instead"
    if targets.kinds[home] in (BoundaryKind.LAYER, BoundaryKind.MODEL):
        return ""
    return f"it works inside {home}, whose parts are sharded together; use none on {home}"


def _bad_parameter(targets: Targets, name: str, override: Override) -> str:
    member = targets.roles[name]
    if isinstance(override.value, Contract):
        if name in targets.graph.aliases:
            return f"it is tied to {targets.graph.aliases[name]}; override that name"
        dims = [dim for _, p in override.value.placements for dim in sharded_dims(p)]
        if any(dim >= len(member.parameter.shape) for dim in dims):
            return f"its shape is {list(member.parameter.shape)}, it has no such dim"
        return ""
    if member.role in NO_TEMPLATE:
        return (
            "what a whole copy's gradient is cannot be known here; say it: {tp: R grad P} if each "
            "rank holds a summand, {tp: R} if each computes all of it; or use none on the module "
            "around it"
        )
    return ""


def _local_modules(
    targets: Targets, boundaries: tuple[Boundary, ...], chosen: Chosen
) -> frozenset[str]:
    """Modules overridden with `none`, and boundaries all of whose parameters are."""
    whole = {name for name, override in chosen.items() if override.value is Sentinel.NONE}
    modules = {name for name in whole if name not in targets.roles}
    for boundary in boundaries:
        names = {member.name for member in boundary.members}
        single = boundary.kind in (BoundaryKind.EMBEDDING, BoundaryKind.HEAD, BoundaryKind.NORM)
        if names and names <= whole and (single or boundary.kind is BoundaryKind.MLP):
            modules.add(boundary.module)
    return frozenset(modules)


def _with_parameters(
    targets: Targets,
    settings: Settings,
    plan: ShardingPlan,
    chosen: Chosen,
    local: frozenset[str],
) -> ShardingPlan:
    specs = {spec.name: spec for spec in plan.parameters}
    for name, override in chosen.items():
        member = targets.roles.get(name)
        value = override.value
        inside = any(is_inside(name, module) for module in local)
        if member is None or value is Sentinel.AUTO or (value is Sentinel.NONE and inside):
            continue
        if name in targets.graph.aliases or not _says_something(settings, override):
            continue
        specs[name] = _declared(targets, settings, member, override, specs.get(name))
    order = [p.name for p in targets.graph.parameters if p.name in specs]
    return evolve(plan, parameters=tuple(specs[name] for name in dict.fromkeys(order)))


def _says_something(settings: Settings, override: Override) -> bool:
    """Whether an override of a parameter is about an axis of more than one rank."""
    if isinstance(override.value, Contract):
        return any(settings.size(axis) > 1 for axis in override.axes)
    return settings.tensor_size > 1


def _declared(
    targets: Targets,
    settings: Settings,
    member: RoleAssignment,
    override: Override,
    spec: ParameterSpec | None,
) -> ParameterSpec:
    """The parameter with what the override says on the axes it names, and as it was on others."""
    home = targets.home(member.name)
    base = _undeclared(settings, targets.kinds[home]) if spec is None else spec.contract
    contract = without_axis(base, TENSOR_AXIS)
    if isinstance(override.value, Contract):
        contract = base
        for axis in override.axes:
            contract = without_axis(contract, axis)
            if settings.size(axis) > 1:
                gradient = dict(override.value.grad_placements).get(axis)
                contract = on_axis(contract, axis, override.value.placement(axis), gradient)
    reason = f"override {override.key!r}"
    if spec is not None:
        return evolve(spec, contract=contract, reason=reason)
    return ParameterSpec(
        name=member.name,
        role=DECLARED,
        shape=member.parameter.shape,
        contract=contract,
        boundary=home,
        reason=reason,
    )


def _undeclared(settings: Settings, kind: BoundaryKind | None) -> Contract:
    """A parameter of no role on the axes that an override need not name: batches are averaged
    over, and parts of the sequence summed."""
    contract = REPLICATED
    if settings.expert_size > 1:
        contract = on_axis(contract, EXPERT_AXIS, gradient=BATCH_AVERAGE)
    outside = (
        BoundaryKind.EMBEDDING,
        BoundaryKind.POSITION,
        BoundaryKind.HEAD,
        BoundaryKind.MODEL,
    )
    if settings.context_size > 1 and kind not in outside:
        contract = on_axis(contract, CONTEXT_AXIS, gradient=Partial())
    return contract
