"""Pass 6: everything that can be known to be wrong before a process group exists.

Each check is a function from the same frozen facts to violations; all of them run, and all
violations are reported together. A plan made or changed by hand is held to the same rules: a
parameter or a contract that no template gives is a violation unless an override declared it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from attrs import frozen
from torch import nn

from hp_dtensor.placements import SectionedShard, Shard, describe
from hp_dtensor.plan import (
    BoundaryKind,
    BoundarySpec,
    Contract,
    ParameterSpec,
    ShardingPlan,
)
from hp_planner.boundaries import Boundary, group_boundaries, infer_boundary_types
from hp_planner.folding import fold
from hp_planner.graph import ModuleGraph, ModuleNode, is_inside, read_module
from hp_planner.heads import Heads, attention_heads
from hp_planner.overrides import DECLARED
from hp_planner.roles import NO_TEMPLATE, Role, RoleAssignment, classify_roles
from hp_planner.settings import TENSOR_AXIS, Settings
from hp_planner.templates import instantiate_templates

# Names of attributes that hold a number of heads or of features over all heads. A forward that
# reads one views its tensors with the global size, which a rank's share does not have.
GLOBAL_SIZES = frozenset(
    {
        "num_heads",
        "num_attention_heads",
        "n_heads",
        "n_head",
        "num_key_value_heads",
        "num_kv_heads",
        "hidden_size",
        "embed_dim",
        "all_head_size",
        "hidden_dim",
        "intermediate_size",
        "inner_dim",
    }
)
# Arguments of a layer's or an attention's forward that are no hidden states of their own.
KNOWN_ARGUMENTS = frozenset(
    {
        "attention_mask",
        "position_ids",
        "position_embeddings",
        "cache",
        "past_key_values",
        "past_key_value",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_router_logits",
        "layer_idx",
    }
)
# Methods that read or change the sequence dim of the hidden states.
SEQUENCE_METHODS = frozenset(
    {"shape", "size", "view", "reshape", "cat", "roll", "chunk", "split", "unbind"}
)


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
    """What the checks look at."""

    graph: ModuleGraph
    plan: ShardingPlan
    boundaries: tuple[Boundary, ...]
    local: frozenset[str]
    sequence_parallel: bool
    size: int

    @property
    def specs(self) -> dict[str, BoundarySpec]:
        return {spec.module: spec for spec in self.plan.boundaries}

    @property
    def members(self) -> dict[str, RoleAssignment]:
        return {member.name: member for b in self.boundaries for member in b.members}

    def whole(self, name: str) -> bool:
        """Whether this module is left whole, or lies in one that is."""
        return any(name == module or is_inside(name, module) for module in self.local)

    def sharded(self, *kinds: BoundaryKind) -> Iterator[Boundary]:
        return (b for b in self.boundaries if b.kind in kinds and not self.whole(b.module))


Check = Callable[[Facts], Iterator[Violation]]


def lint(model: nn.Module | ModuleGraph, plan: ShardingPlan) -> tuple[Violation, ...]:
    """Pass 6: every violation of a plan for a model; empty when there is none."""
    graph = model if isinstance(model, ModuleGraph) else read_module(model)
    facts = _facts(graph, plan)
    checks: tuple[Check, ...] = (check_coverage, check_axes)
    if facts.size > 1:
        checks += (
            check_structure,
            check_heads,
            check_divisibility,
            check_code,
            check_tied,
            check_templates,
            check_neighbours,
        )
    return tuple(violation for check in checks for violation in check(facts))


def report(graph: ModuleGraph, plan: ShardingPlan, violations: Iterable[Violation]) -> str:
    """All violations as text, those of repeated layers folded into one."""
    found = tuple(violations)
    groups = fold(found, lambda v: v.where, lambda v: (v.rule, v.expected, v.found, v.remedy))
    family = f" (model_type {graph.model_type!r})" if graph.model_type else ""
    lines = [
        f"{graph.model}{family} cannot be planned on {plan.mesh}: {len(groups)} "
        f"{'kind' if len(groups) == 1 else 'kinds'} of violation, {len(found)} in all"
    ]
    for where, (first, *_) in groups:
        lines.append(f"  [{first.rule}] {where or 'the model'}")
        lines.append(f"      expected {first.expected}; found {first.found}")
        lines.append(f"      remedy: {first.remedy}")
    return "\n".join(lines)


def _facts(graph: ModuleGraph, plan: ShardingPlan) -> Facts:
    groups = group_boundaries(graph, classify_roles(graph))
    boundaries = infer_boundary_types(graph, groups)
    size = plan.mesh.size(TENSOR_AXIS) if TENSOR_AXIS in plan.mesh.axis_names else 1
    layers = [s for s in plan.boundaries if s.kind is BoundaryKind.LAYER]
    streams = {tensor.outside for spec in layers for tensor in spec.outputs}
    return Facts(
        graph=graph,
        plan=plan,
        boundaries=boundaries,
        local=_local(graph, plan),
        sequence_parallel=not layers or streams != {Contract()},
        size=size,
    )


def _local(graph: ModuleGraph, plan: ShardingPlan) -> frozenset[str]:
    """Modules that the plan leaves whole: hidden states replicated inside, gradients too."""
    found = set()
    attention = [s.module for s in plan.boundaries if s.kind is BoundaryKind.ATTENTION]
    for spec in plan.boundaries:
        flow = [t for t in (*spec.inputs, *spec.outputs) if not t.plain]
        if spec.kind in (BoundaryKind.MODEL, BoundaryKind.POSITION) or not flow:
            continue
        if any(tensor.inside != Contract() for tensor in flow):
            continue
        if spec.kind is BoundaryKind.LAYER and any(is_inside(m, spec.module) for m in attention):
            continue
        found.add(spec.module)
    return frozenset(found)


def check_coverage(facts: Facts) -> Iterator[Violation]:
    """Every parameter has exactly one entry, of its own shape; no entry is of something else."""
    counts = Counter(spec.name for spec in facts.plan.parameters)
    aliases = facts.graph.aliases
    nodes = {p.name: p for p in facts.graph.parameters if p.name not in aliases}
    members = facts.members
    for name, node in nodes.items():
        if name in counts:
            continue
        kind = "trainable parameter" if node.requires_grad else "parameter"
        yield Violation(
            "coverage",
            name,
            f"a role with a template for this {kind} of shape {list(node.shape)}",
            _no_entry(members[name]),
            f"override {_glob(name)!r} with its placement, such as {{{TENSOR_AXIS}: R grad P}}, "
            "or the block around it with none",
        )
    for spec in facts.plan.parameters:
        if spec.name not in nodes:
            text = "the model has no such parameter, or it is tied to one listed before"
            yield Violation("coverage", spec.name, "a parameter of the model", text, "plan again")
        elif spec.shape != nodes[spec.name].shape:
            yield Violation(
                "coverage",
                spec.name,
                f"shape {list(nodes[spec.name].shape)}",
                f"shape {list(spec.shape)} in the plan",
                "make the plan for this model",
            )
    for name, count in counts.items():
        if count > 1:
            yield Violation("one boundary", name, "one entry", f"{count}", "remove the others")


def _no_entry(member: RoleAssignment) -> str:
    if member.role in NO_TEMPLATE:
        return member.reason
    return f"no entry in the plan for this {member.label}"


def _glob(name: str) -> str:
    """The name with its numbers opened, as an override would write it."""
    return ".".join("*" if segment.isdecimal() else segment for segment in name.split("."))


def check_axes(facts: Facts) -> Iterator[Violation]:
    """Contracts name model axes of the mesh only."""
    allowed = set(facts.plan.model_axes)
    for where, contract in _contracts(facts.plan):
        stray = [axis for axis in contract.axes() if axis not in allowed]
        if stray:
            yield Violation(
                "axes",
                where,
                f"model axes of the mesh ({', '.join(sorted(allowed)) or 'none'})",
                ", ".join(stray),
                "leave data axes to fully_shard and name axes that the mesh has",
            )


def _contracts(plan: ShardingPlan) -> Iterator[tuple[str, Contract]]:
    for parameter in plan.parameters:
        yield parameter.name, parameter.contract
    for spec in plan.boundaries:
        for tensor in (*spec.inputs, *spec.outputs):
            yield spec.module, tensor.outside
            yield spec.module, tensor.inside


def check_structure(facts: Facts) -> Iterator[Violation]:
    """Every boundary sits where its template expects it, and the stream ends in one norm."""
    for boundary in facts.boundaries:
        if boundary.problem and not facts.whole(boundary.module):
            yield Violation(
                "structure",
                boundary.module,
                "a block that a template knows",
                boundary.problem,
                f"override {_glob(boundary.module)!r} with none",
            )
    layers = [b for b in facts.boundaries if b.kind is BoundaryKind.LAYER]
    model = {b.module for b in facts.boundaries if b.kind is BoundaryKind.MODEL}
    final = [b for b in facts.boundaries if b.kind is BoundaryKind.NORM and b.home in model]
    if layers and not final and facts.sequence_parallel:
        yield Violation(
            "structure",
            "",
            "a norm after the layers, which makes the hidden states whole again",
            "none",
            "plan with sequence_parallel=False",
        )


def check_heads(facts: Facts) -> Iterator[Violation]:
    """Whole heads on every rank, query and key/value."""
    for boundary in facts.sharded(BoundaryKind.ATTENTION):
        heads = attention_heads(facts.graph, boundary.module)
        if not isinstance(heads, Heads):
            continue
        counts = {"query": heads.query, "key/value": heads.key_value}
        for kind, count in counts.items():
            if count % facts.size:
                yield Violation(
                    "heads",
                    boundary.module,
                    f"{kind} heads in a multiple of {TENSOR_AXIS}={facts.size}",
                    f"{count} {kind} heads of {heads.dim}",
                    f"use a smaller {TENSOR_AXIS} that divides {count}, or override "
                    f"{_glob(boundary.module)!r} with none",
                )


HEAD_ROLES = (Role.QUERY, Role.KEY, Role.VALUE)


def check_divisibility(facts: Facts) -> Iterator[Violation]:
    """Equal shares on every rank: production gathers and slices even shards only."""
    members = facts.members
    for spec in facts.plan.parameters:
        member = members.get(spec.name)
        if member is not None and member.role in HEAD_ROLES:
            continue
        placement = spec.contract.placement(TENSOR_AXIS)
        if not isinstance(placement, Shard | SectionedShard):
            continue
        if placement.dim >= len(spec.shape):
            found = f"{describe(placement)} of shape {list(spec.shape)}"
            yield Violation("divisibility", spec.name, "a dim it has", found, "correct the plan")
            continue
        if (
            member is not None
            and member.role is Role.ATTENTION_OUTPUT
            and placement.dim == len(spec.shape) - 1
            and not member.is_bias
        ):
            continue
        sections = (
            placement.sections
            if isinstance(placement, SectionedShard)
            else (spec.shape[placement.dim],)
        )
        if sum(sections) != spec.shape[placement.dim]:
            yield Violation(
                "divisibility",
                spec.name,
                f"sections that add up to dim {placement.dim} of {list(spec.shape)}",
                describe(placement),
                "correct the sections",
            )
        for section in sorted({s for s in sections if s % facts.size}):
            yield _uneven(facts, spec, placement.dim, section)


def _uneven(facts: Facts, spec: ParameterSpec, dim: int, length: int) -> Violation:
    vocabulary = spec.role in ("embedding", "head", "head_bias")
    what = "vocabulary" if vocabulary else f"dim {dim}"
    remedy = (
        f"pad the vocabulary to a multiple of {facts.size}, or override the module with none"
        if vocabulary
        else f"use a {TENSOR_AXIS} that divides {length}, or override the module with none"
    )
    expected = f"{what} in a multiple of {TENSOR_AXIS}={facts.size}"
    return Violation("divisibility", spec.name, expected, f"{length}", remedy)


def check_code(facts: Facts) -> Iterator[Violation]:
    """Forwards that view with global sizes, take unknown tensors, or need the whole sequence."""
    for boundary in facts.sharded(BoundaryKind.ATTENTION, BoundaryKind.MLP):
        node = facts.graph.module(boundary.module)
        hard_coded = _hard_coded(node)
        if hard_coded:
            yield Violation(
                "code",
                node.name,
                "a forward that takes sizes from its tensors",
                f"{node.class_name}.forward reads {', '.join(hard_coded)}, global sizes",
                f"override {_glob(node.name)!r} with none",
            )
    for boundary in facts.sharded(BoundaryKind.ATTENTION, BoundaryKind.LAYER):
        node = facts.graph.module(boundary.module)
        unknown = [a for a in node.forward.arguments[1:] if a not in KNOWN_ARGUMENTS]
        if unknown:
            yield Violation(
                "code",
                node.name,
                "arguments whose layout is known",
                f"{node.class_name}.forward takes {', '.join(unknown)}",
                f"override {_glob(node.name)!r} with none",
            )
    yield from _sequence_code(facts)
    yield from _router_loss(facts)


def _hard_coded(node: ModuleNode) -> list[str]:
    return sorted(GLOBAL_SIZES & node.forward.names & {name for name, _ in node.attributes})


def _sequence_code(facts: Facts) -> Iterator[Violation]:
    for boundary in facts.sharded(BoundaryKind.LAYER) if facts.sequence_parallel else ():
        node = facts.graph.module(boundary.module)
        used = sorted(SEQUENCE_METHODS & node.forward.names)
        if used:
            yield Violation(
                "code",
                node.name,
                "a layer that treats every position alike outside its blocks",
                f"{node.class_name}.forward uses {', '.join(used)}",
                "plan with sequence_parallel=False",
            )


def _router_loss(facts: Facts) -> Iterator[Violation]:
    """The router's gradient inside a block is a partial sum; a loss on its logits is not."""
    if dict(facts.graph.config).get("output_router_logits") and any(
        facts.sharded(BoundaryKind.MOE)
    ):
        yield Violation(
            "code",
            "",
            "no loss on the router's logits",
            "config.output_router_logits is set, whose loss every rank computes in full",
            "set config.output_router_logits = False, or override the MoE blocks with none",
        )


def check_tied(facts: Facts) -> Iterator[Violation]:
    """One tensor under several names is placed alike under each, and is embedding or head."""
    members = facts.members
    expected = _expected(facts, untied=True)
    by_name = {spec.name: spec for spec in expected.parameters}
    for names in facts.plan.tied:
        roles = {members[name].role for name in names if name in members}
        if not roles <= {Role.EMBEDDING, Role.HEAD}:
            yield Violation(
                "tied",
                names[0],
                "tied parameters to be embedding and head",
                f"tied with {', '.join(names[1:])}",
                "untie them, or override the modules that hold them with none",
            )
            continue
        contracts = {name: by_name[name].contract for name in names if name in by_name}
        if len(set(contracts.values())) > 1:
            found = ", ".join(f"{n} {_show(c)}" for n, c in contracts.items())
            yield Violation(
                "tied",
                names[0],
                "one placement under all names of a tied parameter",
                found,
                f"override all of {', '.join(n.rpartition('.')[0] for n in names)} alike",
            )


def _expected(facts: Facts, untied: bool = False) -> ShardingPlan:
    """What the templates give for this plan's mesh, options and local modules."""
    graph = facts.graph
    if untied:
        graph = ModuleGraph(graph.model, graph.model_type, graph.modules, graph.config)
    settings = Settings(facts.plan.mesh, facts.sequence_parallel)
    return instantiate_templates(graph, facts.boundaries, settings, facts.local)


def check_templates(facts: Facts) -> Iterator[Violation]:
    """Parameters and boundaries are as their template gives them, or declared."""
    expected = _expected(facts)
    found = {spec.name: spec for spec in facts.plan.parameters}
    members = facts.members
    for spec in expected.parameters:
        other = found.get(spec.name)
        if other is None or members[spec.name].role in NO_TEMPLATE or other.role == DECLARED:
            continue
        if other.contract != spec.contract:
            yield Violation(
                "template",
                spec.name,
                f"{_show(spec.contract)}, as its boundary {spec.boundary} computes",
                f"{_show(other.contract)} ({other.reason})",
                f"override {_glob(spec.boundary)!r} as a whole",
            )
    yield from _boundary_differences(expected, facts.plan)


def _boundary_differences(expected: ShardingPlan, plan: ShardingPlan) -> Iterator[Violation]:
    found = {spec.module: spec for spec in plan.boundaries}
    for spec in expected.boundaries:
        other = found.pop(spec.module, None)
        if other is None:
            yield Violation(
                "template", spec.module, f"a boundary ({spec.kind.value})", "none", "plan again"
            )
            continue
        for side, want, have in (
            ("inputs", spec.inputs, other.inputs),
            ("outputs", spec.outputs, other.outputs),
            ("localized attributes", spec.localize, other.localize),
            ("region", spec.region, other.region),
            ("kind", spec.kind, other.kind),
        ):
            if want != have:
                yield Violation(
                    "template", spec.module, f"{side} {_brief(want)}", _brief(have), "plan again"
                )
    for name in found:
        yield Violation("template", name, "no boundary here", "one", "plan again")


def _brief(value: object) -> str:
    if isinstance(value, tuple):
        return "; ".join(_brief(item) for item in value) or "none"
    outside, inside = getattr(value, "outside", None), getattr(value, "inside", None)
    if isinstance(outside, Contract) and isinstance(inside, Contract):
        where = getattr(value, "where", "") or "result"
        return f"{where} {_show(outside)} -> {_show(inside)}"
    return str(value)


def _show(contract: Contract) -> str:
    placement = contract.placement(TENSOR_AXIS)
    grad = contract.grad_placement(TENSOR_AXIS)
    return f"{describe(placement)} (gradient {describe(grad)})"


def check_neighbours(facts: Facts) -> Iterator[Violation]:
    """What one boundary gives is what the next takes, gradient included, along the stream."""
    for giver, given, taker, taken in _edges(facts):
        if given != taken:
            yield Violation(
                "neighbours",
                taker,
                f"{_show(given)}, what {giver or 'the model'} gives",
                _show(taken),
                "make both sides of the exchange agree",
            )


Edge = tuple[str, Contract, str, Contract]


def _edges(facts: Facts) -> Iterator[Edge]:
    """Pairs of contracts that meet: along the layers, and inside each layer with its stream."""
    specs = facts.specs
    chain = [
        specs[b.module]
        for kind in (BoundaryKind.EMBEDDING, BoundaryKind.LAYER)
        for b in facts.boundaries
        if b.kind is kind and b.module in specs
    ]
    layered = any(spec.kind is BoundaryKind.LAYER for spec in chain)
    tail = (BoundaryKind.NORM, BoundaryKind.HEAD) if layered else ()
    for kind in tail:
        for boundary in facts.boundaries:
            in_model = boundary.home == "" and boundary.module in specs
            if boundary.kind is kind and in_model:
                chain.append(specs[boundary.module])
    for giver, taker in pairwise(chain):
        yield (
            giver.module,
            giver.outputs[0].outside,
            taker.module,
            taker.inputs[0].outside,
        )
    for boundary in facts.boundaries:
        home = specs.get(boundary.home) if boundary.home else None
        spec = specs.get(boundary.module)
        if home is None or spec is None or home.kind is BoundaryKind.MODEL:
            continue
        entry, result = home.inputs[0].inside, home.outputs[0].inside
        yield home.module, entry, spec.module, spec.inputs[0].outside
        yield home.module, result, spec.module, spec.outputs[0].outside
