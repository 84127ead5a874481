"""Pass 5: what a user states where the derived plan should differ.

A file or mapping from names to values. A name is the exact qualified name of a module or a
parameter, or a glob (`*` crosses dots). Values:

- `auto`: as derived;
- `none`: leave whole on every rank (for a block, hidden states are gathered around it);
- `{tp: S(0)}`, `{tp: R grad P}`: placement of a parameter, and of its gradient where it differs;
- `{when: {axis: tp, min: 2, boundary: moe, config: {model_type: qwen3_moe}}, use: none}`, or with
  placements in place of `use`: only where every condition holds.

Order: an exact name beats every glob; among globs the first in the file whose condition holds
wins. A name that matches nothing is an error, and so is a glob that reaches modules of several
kinds (or parameters of several roles) without saying which one it means.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from attrs import evolve, frozen

from hp_dtensor.placements import Placement, sharded_dims
from hp_dtensor.plan import REPLICATED, BoundaryKind, Contract, ParameterSpec, ShardingPlan
from hp_dtensor.plan_yaml import parse_placement
from hp_planner.boundaries import Boundary
from hp_planner.errors import PlanError
from hp_planner.folding import fold
from hp_planner.graph import ConfigValue, ModuleGraph, is_inside
from hp_planner.roles import NO_TEMPLATE, RoleAssignment
from hp_planner.settings import DATA_AXES, MODEL_AXES, Settings
from hp_planner.templates import instantiate_templates

DECLARED = "declared"
WHEN_KEYS = ("axis", "min", "boundary", "config")


class Sentinel(enum.Enum):
    """Values that are words."""

    AUTO = "auto"
    NONE = "none"


Value = Sentinel | Contract


@frozen
class Condition:
    """All given parts must hold. `axis` alone means at least 2 ranks on it."""

    axis: str | None = None
    minimum: int = 2
    boundary: BoundaryKind | None = None
    config: tuple[tuple[str, ConfigValue], ...] = ()


@frozen
class Override:
    """One entry of an override file."""

    key: str
    value: Value
    condition: Condition = Condition()

    @property
    def is_glob(self) -> bool:
        return any(character in self.key for character in "*?[")


Overrides = tuple[Override, ...]


class _UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses a repeated key, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
        if repeated:
            raise PlanError(f"overrides: {', '.join(repeated)} is given more than once")
        return super().construct_mapping(node, deep)


def read_overrides(source: Mapping[str, Any] | str | Path | None) -> Overrides:
    """Overrides from a mapping or a YAML file.

    Raises:
        PlanError: the file cannot be read, or a value is not one of the documented forms.
    """
    if source is None:
        return ()
    if isinstance(source, str | Path):
        source = _read_file(Path(source))
    if not isinstance(source, Mapping):
        raise PlanError(f"overrides: expected a mapping of names, found {type(source).__name__}")
    return tuple(_read_entry(str(key), value) for key, value in source.items())


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        loaded = yaml.load(path.read_text(), Loader=_UniqueKeys)
    except OSError as error:
        raise PlanError(f"overrides: cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise PlanError(f"overrides: {path} is not YAML: {error}") from error
    return {} if loaded is None else loaded


def _read_entry(key: str, value: Any) -> Override:
    if not (isinstance(value, Mapping) and "when" in value):
        return Override(key, _read_value(key, value))
    rest = {name: part for name, part in value.items() if name != "when"}
    if "use" in rest and len(rest) > 1:
        raise PlanError(f"override {key!r}: give either `use` or placements beside `when`")
    inner = rest.get("use", rest)
    return Override(key, _read_value(key, inner), _read_condition(key, value["when"]))


def _read_value(key: str, value: Any) -> Value:
    if value in ("auto", "none"):
        return Sentinel(value)
    if value is None:
        raise PlanError(f"override {key!r} is empty; write `none` (as a word) to leave it whole")
    if not isinstance(value, Mapping) or not value:
        raise PlanError(
            f"override {key!r}: expected auto, none, placements such as {{tp: S(0)}}, or a "
            f"mapping with `when`; found {value!r}"
        )
    placements: dict[str, Placement] = {}
    gradients: dict[str, Placement] = {}
    for axis, text in value.items():
        if axis not in MODEL_AXES:
            raise PlanError(
                f"override {key!r}: {axis!r} is not a model axis; placements are given for "
                f"{', '.join(MODEL_AXES)} (data axes belong to fully_shard)"
            )
        placement, _, gradient = str(text).partition(" grad ")
        placements[axis] = _placement(key, placement)
        if gradient:
            gradients[axis] = _placement(key, gradient)
    try:
        return Contract(placements, gradients)
    except ValueError as error:
        raise PlanError(f"override {key!r}: {error}") from error


def _placement(key: str, text: str) -> Placement:
    """`R`, `P`, `S(0)`, `Sec(0,[4,2,2])`: as in a plan's YAML, where `P` is short for `P(sum)`."""
    short = text.strip()
    try:
        return parse_placement("P(sum)" if short == "P" else short)
    except ValueError as error:
        raise PlanError(f"override {key!r}: {error}") from error


def _read_condition(key: str, when: Any) -> Condition:
    if not isinstance(when, Mapping) or not when:
        raise PlanError(f"override {key!r}: `when` takes {', '.join(WHEN_KEYS)}; found {when!r}")
    unknown = [name for name in when if name not in WHEN_KEYS]
    if unknown:
        raise PlanError(
            f"override {key!r}: `when` knows {', '.join(WHEN_KEYS)}; found {', '.join(unknown)}"
        )
    axis, minimum = when.get("axis"), when.get("min", 2)
    if axis is not None and axis not in (*DATA_AXES, *MODEL_AXES):
        known = ", ".join((*DATA_AXES, *MODEL_AXES))
        raise PlanError(f"override {key!r}: unknown axis {axis!r}; the planner knows {known}")
    if "min" in when and axis is None:
        raise PlanError(f"override {key!r}: `min` needs an `axis`")
    if not isinstance(minimum, int):
        raise PlanError(f"override {key!r}: `min` is a number of ranks, found {minimum!r}")
    kind = when.get("boundary")
    kinds = [member.value for member in BoundaryKind]
    if kind is not None and kind not in kinds:
        raise PlanError(f"override {key!r}: no boundary kind {kind!r}; kinds: {', '.join(kinds)}")
    config = when.get("config", {})
    if not isinstance(config, Mapping):
        raise PlanError(f"override {key!r}: `config` takes names and values, found {config!r}")
    return Condition(
        axis, minimum, None if kind is None else BoundaryKind(kind), tuple(sorted(config.items()))
    )


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
        text = key.replace("*", "").strip(".")
        folded = {name: _some([name]) for name in names}
        near = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
        near += [n for n in names if text and n.endswith(text)][: 3 - len(near)]
        tails = {name.rpartition(".")[2]: name for name in reversed(names)}
        wanted = difflib.get_close_matches(text.rpartition(".")[2], list(tails), n=3, cutoff=0.6)
        near += [tails[tail] for tail in wanted if tails[tail] not in near]
        shown = ", ".join(folded[name] for name in near[:3]) or "(no similar name)"
        return f"override {key!r} matches no module and no parameter; nearest: {shown}"


def _some(names: Iterable[str], limit: int = 4) -> str:
    folded = [text for text, _ in fold(names, lambda name: name, lambda _: 0)]
    rest = f" and {len(folded) - limit} more" if len(folded) > limit else ""
    return ", ".join(folded[:limit]) + rest


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
        return plan
    targets = Targets.of(graph, boundaries)
    chosen, problems = _choose(targets, settings, overrides)
    if not problems:
        problems = _unusable(targets, settings, chosen)
    if problems:
        raise PlanError("\n".join(problems))
    local = _local_modules(targets, boundaries, chosen)
    merged = instantiate_templates(graph, boundaries, settings, local) if local else plan
    return _with_parameters(targets, settings, merged, chosen, local)


Chosen = dict[str, Override]


def _choose(targets: Targets, settings: Settings, overrides: Overrides) -> tuple[Chosen, list[str]]:
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
    if settings.tensor_size == 1:
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
        if settings.tensor_size == 1 or name in targets.graph.aliases:
            continue
        specs[name] = _declared(targets, member, override, specs.get(name))
    order = [p.name for p in targets.graph.parameters if p.name in specs]
    return evolve(plan, parameters=tuple(specs[name] for name in dict.fromkeys(order)))


def _declared(
    targets: Targets, member: RoleAssignment, override: Override, spec: ParameterSpec | None
) -> ParameterSpec:
    contract = override.value if isinstance(override.value, Contract) else REPLICATED
    reason = f"override {override.key!r}"
    if spec is not None:
        return evolve(spec, contract=contract, reason=reason)
    return ParameterSpec(
        name=member.name,
        role=DECLARED,
        shape=member.parameter.shape,
        contract=contract,
        boundary=targets.home(member.name),
        reason=reason,
    )
