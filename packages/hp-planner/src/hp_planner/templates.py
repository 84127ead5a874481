"""Pass 4: placements and contracts for every boundary, from one template per kind.

Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019), with sequence parallelism as in
Korthikanti et al. 2022: between blocks the hidden states are sharded along the sequence (dim 1),
inside attention and MLP the weights are sharded and the sequence is whole. Every contract names
the gradient's placement too: what sharded weights consume replicated has a partial gradient, and
so has every replicated parameter used on a shard of heads or of the sequence.

A boundary can also be *local*: its parameters are replicated, and it computes on the whole
hidden states on every rank. That is what the override `none` asks for.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve, field, frozen

from hp_dtensor.placements import SectionedShard
from hp_dtensor.plan import (
    REPLICATED,
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    LocalAttribute,
    ParameterSpec,
    Region,
    RegionKind,
    ShardingPlan,
    partial_sum,
    replicated_with_partial_gradient,
    sharded,
)
from hp_planner.boundaries import Boundary
from hp_planner.context_axis import add_context_axis
from hp_planner.expert_axis import add_expert_axis
from hp_planner.graph import ModuleGraph, ModuleNode, is_inside
from hp_planner.heads import OUTPUT, child
from hp_planner.roles import DOWN, NO_TEMPLATE, Role, RoleAssignment
from hp_planner.settings import TENSOR_AXIS, Settings

Tensors = tuple[BoundaryTensor, ...]

PARTIAL = partial_sum(TENSOR_AXIS)
SUMMED_GRADIENT = replicated_with_partial_gradient(TENSOR_AXIS)
SEQUENCE = sharded(TENSOR_AXIS, 1)
ROWS = sharded(TENSOR_AXIS, 0)
COLUMNS = sharded(TENSOR_AXIS, 1)
LAST_OF_THREE = sharded(TENSOR_AXIS, 2)

# Arguments that carry no layout: ids, masks, position tables. The model's masks and positions are
# not declared: transformers mixes them with tensors that it makes itself, and what comes of them
# is declared where a layer takes it.
MODEL_INPUTS = ("input_ids", "labels")
PLAIN_INPUTS = ("position_embeddings", "attention_mask", "position_ids")

EXPERT_REGION = Region(RegionKind.OPAQUE, "grouped expert kernels on plain local tensors")
LEFT_WHOLE = "left whole by an override"

EXPERT_SIZES = ("intermediate_dim", "intermediate_size", "expert_dim", "moe_intermediate_size")


@frozen
class Context:
    """What the templates share: the graph, the boundaries, and which of them stay local."""

    graph: ModuleGraph
    settings: Settings
    boundaries: tuple[Boundary, ...]
    local: frozenset[str]
    layers: tuple[Boundary, ...] = field(init=False)
    _by_name: dict[str, Boundary] = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        layers = tuple(b for b in self.boundaries if b.kind is BoundaryKind.LAYER)
        object.__setattr__(self, "layers", layers)
        by_name = {boundary.module: boundary for boundary in self.boundaries}
        object.__setattr__(self, "_by_name", by_name)

    def find(self, module: str | None) -> Boundary | None:
        return None if module is None else self._by_name.get(module)

    def inside_local(self, name: str) -> bool:
        """Whether an enclosing module is local, so that nothing here is sharded."""
        return any(is_inside(name, module) for module in self.local)

    @property
    def stream(self) -> Contract:
        """Layout of the hidden states between the parts of a layer."""
        sequence = self.settings.sequence_parallel and self.layers
        return SEQUENCE if sequence else REPLICATED

    @property
    def after_final_norm(self) -> Contract:
        """What the final norm hands on: a sharded head makes its gradient a partial sum."""
        head = next((b for b in self.boundaries if b.kind is BoundaryKind.HEAD), None)
        shards = head is not None and head.module not in self.local
        return SUMMED_GRADIENT if shards and self.stream != REPLICATED else REPLICATED

    def exchange(self, boundary: Boundary) -> tuple[Contract, Contract]:
        """Hidden states as the neighbours hand them to this boundary, and as they take them.

        The first layer takes what the embedding gives, whole; the final norm takes the stream
        and gives what the head wants; parts of a layer exchange the stream.
        """
        home = self.find(boundary.home)
        in_model = home is not None and home.kind is BoundaryKind.MODEL
        if boundary.kind is BoundaryKind.LAYER:
            first = boundary.module == self.layers[0].module
            return (REPLICATED if first else self.stream), self.stream
        if boundary.kind is BoundaryKind.HEAD:
            return self.after_final_norm, REPLICATED
        if boundary.kind is BoundaryKind.NORM and in_model and self.layers:
            return self.stream, self.after_final_norm
        if home is not None and home.kind is BoundaryKind.MOE:
            return SUMMED_GRADIENT, PARTIAL
        around = REPLICATED if home is None or in_model else self.stream
        return around, around


@frozen
class Drafted:
    """What a template makes of one boundary."""

    contracts: tuple[tuple[RoleAssignment, Contract], ...] = ()
    specs: tuple[BoundarySpec, ...] = ()


def instantiate_templates(
    graph: ModuleGraph,
    boundaries: tuple[Boundary, ...],
    settings: Settings,
    local: frozenset[str] = frozenset(),
) -> ShardingPlan:
    """Pass 4: the plan that the templates give, with the modules in `local` left whole.

    Parameters whose role has no template are left out unless they are inside a local module;
    lint reports them. With one tensor-parallel rank everything is replicated and there are no
    boundaries.
    """
    context = Context(graph, settings, boundaries, local)
    drafts = [_draft(context, boundary) for boundary in boundaries]
    drafts += [_local(context, boundary) for boundary in _unnamed_local(context)]
    aliases = graph.aliases
    parameters = {
        member.name: ParameterSpec(
            name=member.name,
            role=member.label,
            shape=member.parameter.shape,
            contract=contract,
            boundary=member.boundary,
            reason=member.reason,
        )
        for draft in drafts
        for member, contract in draft.contracts
        if member.name not in aliases
    }
    specs = {spec.module: spec for draft in drafts for spec in draft.specs}
    made = ShardingPlan(
        model=graph.model,
        mesh=settings.mesh,
        model_axes=settings.model_axes,
        parameters=tuple(parameters[p.name] for p in graph.parameters if p.name in parameters),
        boundaries=tuple(specs[node.name] for node in graph.modules if node.name in specs),
        tied=graph.tied,
    )
    with_experts = add_expert_axis(graph, boundaries, settings, local, made)
    return add_context_axis(graph, boundaries, settings, local, with_experts)


def _unnamed_local(context: Context) -> tuple[Boundary, ...]:
    """Local modules that are no boundary by themselves: `none` on a block without a template."""
    named = {b.module for b in context.boundaries if b.kind is not None}
    found = []
    for name in context.local - named if context.settings.tensor_size > 1 else ():
        own = context.find(name)
        home = max((m for m in named if is_inside(name, m)), key=len)
        found.append(Boundary(name, None, own.members if own is not None else (), home))
    return tuple(found)


def _draft(context: Context, boundary: Boundary) -> Drafted:
    if context.settings.tensor_size == 1:
        return Drafted(_replicated(boundary, "one tensor-parallel rank: replicated"))
    if context.inside_local(boundary.module):
        inside = _replicated(boundary, f"inside a module {LEFT_WHOLE}")
        opaque = boundary.kind is BoundaryKind.EXPERTS
        return Drafted(inside, (_whole_experts(context, boundary),) if opaque else ())
    if boundary.kind is None:
        return Drafted()
    if boundary.module in context.local:
        return _local(context, boundary)
    return TEMPLATES[boundary.kind](context, boundary)


def _replicated(boundary: Boundary, reason: str) -> tuple[tuple[RoleAssignment, Contract], ...]:
    return tuple(
        (evolve(member, reason=f"{member.reason}; {reason}"), REPLICATED)
        for member in boundary.members
    )


def _first_argument(node: ModuleNode) -> str:
    return node.forward.arguments[0] if node.forward.arguments else "hidden_states"


def _result(node: ModuleNode) -> str:
    """Where the hidden states are in what the module returns."""
    return "0" if node.forward.returns_tuple else ""


def _plain(node: ModuleNode, names: Iterable[str]) -> Tensors:
    return tuple(
        BoundaryTensor(name, REPLICATED, REPLICATED, plain=True, optional=True)
        for name in names
        if name in node.forward.arguments
    )


def _local(context: Context, boundary: Boundary) -> Drafted:
    """Whole on every rank: hidden states are gathered on entry and cut again on exit."""
    node = context.graph.module(boundary.module)
    before, after = context.exchange(boundary)
    ids = boundary.kind is BoundaryKind.EMBEDDING
    spec = BoundarySpec(
        module=node.name,
        kind=boundary.kind or _likely_kind(node),
        inputs=(
            BoundaryTensor(_first_argument(node), before, REPLICATED, plain=ids),
            *_plain(node, PLAIN_INPUTS),
        ),
        outputs=(BoundaryTensor(_result(node), after, REPLICATED),),
        reason=LEFT_WHOLE,
    )
    return Drafted(_replicated(boundary, LEFT_WHOLE), (spec,))


def _likely_kind(node: ModuleNode) -> BoundaryKind:
    attention = "attention" in node.class_name.lower() or "attn" in node.name.lower()
    return BoundaryKind.ATTENTION if attention else BoundaryKind.MLP


def _by_role(
    boundary: Boundary, table: dict[Role, Contract]
) -> tuple[tuple[RoleAssignment, Contract], ...]:
    return tuple(
        (member, table[member.role])
        for member in boundary.members
        if member.role not in NO_TEMPLATE
    )


def _model(context: Context, boundary: Boundary) -> Drafted:
    node = context.graph.module(boundary.module)
    inputs = _plain(node, MODEL_INPUTS)
    spec = BoundarySpec("", BoundaryKind.MODEL, inputs, reason="the model's own inputs")
    return Drafted(_by_role(boundary, {}), (spec,))


def _layer(context: Context, boundary: Boundary) -> Drafted:
    node = context.graph.module(boundary.module)
    before, after = context.exchange(boundary)
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.LAYER,
        inputs=(
            BoundaryTensor(_first_argument(node), before, context.stream),
            *_plain(node, PLAIN_INPUTS),
        ),
        outputs=(BoundaryTensor(_result(node), after, context.stream),),
        reason="element of the list of layers",
    )
    return Drafted((), (spec,))


def _embedding(context: Context, boundary: Boundary) -> Drafted:
    """Vocabulary rows sharded; whole on exit, because models read the sequence length there."""
    node = context.graph.module(boundary.module)
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.EMBEDDING,
        inputs=(BoundaryTensor(_first_argument(node), REPLICATED, REPLICATED, plain=True),),
        outputs=(BoundaryTensor("", REPLICATED, PARTIAL),),
        reason="every rank looks up its own rows of the vocabulary",
    )
    return Drafted(_by_role(boundary, {Role.EMBEDDING: ROWS}), (spec,))


def _norm(context: Context, boundary: Boundary) -> Drafted:
    """On a shard of the sequence, where the weight's gradient is a partial sum."""
    node = context.graph.module(boundary.module)
    before, after = context.exchange(boundary)
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.NORM,
        inputs=(BoundaryTensor(_first_argument(node), before, before),),
        outputs=(BoundaryTensor("", after, before),),
        reason="norm over the hidden size, on what each rank holds of the sequence",
    )
    weight = REPLICATED if before == REPLICATED else SUMMED_GRADIENT
    return Drafted(_by_role(boundary, {Role.NORM: weight}), (spec,))


def _attention(context: Context, boundary: Boundary) -> Drafted:
    """Heads sharded: q, k and v by rows, the output projection by columns."""
    node = context.graph.module(boundary.module)
    inner = child(context.graph, boundary.module, OUTPUT)
    biased = inner is not None and inner.parameter("bias") is not None
    before, after = context.exchange(boundary)
    table = {
        Role.QUERY: ROWS,
        Role.KEY: ROWS,
        Role.VALUE: ROWS,
        Role.HEAD_NORM: SUMMED_GRADIENT,
        Role.ATTENTION_OUTPUT: ROWS if biased else COLUMNS,
    }
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.ATTENTION,
        inputs=(
            BoundaryTensor(_first_argument(node), before, SUMMED_GRADIENT),
            *_plain(node, PLAIN_INPUTS),
        ),
        outputs=(BoundaryTensor(_result(node), after, _block_result(biased)),),
        reason="every rank computes its own heads",
    )
    extra = (_biased_output(inner, boundary),) if biased and inner is not None else ()
    return Drafted(_by_role(boundary, table), (spec, *extra))


def _mlp(context: Context, boundary: Boundary) -> Drafted:
    """Intermediate features sharded: gate and up by rows, down by columns."""
    node = context.graph.module(boundary.module)
    inner = child(context.graph, boundary.module, DOWN)
    biased = inner is not None and inner.parameter("bias") is not None
    before, after = context.exchange(boundary)
    table = {Role.GATE: ROWS, Role.UP: ROWS, Role.DOWN: ROWS if biased else COLUMNS}
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.MLP,
        inputs=(BoundaryTensor(_first_argument(node), before, SUMMED_GRADIENT),),
        outputs=(BoundaryTensor(_result(node), after, _block_result(biased)),),
        reason="every rank computes its own features",
    )
    extra = (_biased_output(inner, boundary),) if biased and inner is not None else ()
    return Drafted(_by_role(boundary, table), (spec, *extra))


def _block_result(biased: bool) -> Contract:
    return LAST_OF_THREE if biased else PARTIAL


def _biased_output(node: ModuleNode, block: Boundary) -> BoundarySpec:
    """An output projection with a bias: cut by rows, so that every bias element is added once.

    Cut by columns, every rank would add the whole bias to its summand.
    """
    return BoundarySpec(
        module=node.name,
        kind=block.kind or BoundaryKind.MLP,
        inputs=(BoundaryTensor(_first_argument(node), LAST_OF_THREE, SUMMED_GRADIENT),),
        outputs=(BoundaryTensor("", LAST_OF_THREE, LAST_OF_THREE),),
        reason="output projection with a bias: cut by rows, so the bias is added once",
    )


def _moe(context: Context, boundary: Boundary) -> Drafted:
    """Router replicated; what experts return is a summand, so its gradient is a partial sum."""
    node = context.graph.module(boundary.module)
    before, after = context.exchange(boundary)
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.MOE,
        inputs=(BoundaryTensor(_first_argument(node), before, SUMMED_GRADIENT),),
        outputs=(BoundaryTensor(_result(node), after, PARTIAL),),
        reason="every rank routes all tokens and computes its own features of every expert",
    )
    table = {Role.ROUTER: SUMMED_GRADIENT, Role.SHARED_EXPERT_GATE: SUMMED_GRADIENT}
    return Drafted(_by_role(boundary, table), (spec,))


def _experts(context: Context, boundary: Boundary) -> Drafted:
    """Gate and up halves each cut by rows, down by columns, in an opaque region."""
    node = context.graph.module(boundary.module)
    before, after = context.exchange(boundary)
    down = next(m.parameter for m in boundary.members if m.role is Role.EXPERT_DOWN)
    intermediate = down.shape[2]
    halves = Contract({TENSOR_AXIS: SectionedShard(1, (intermediate, intermediate))})
    table = {Role.EXPERT_GATE_UP: halves, Role.EXPERT_DOWN: sharded(TENSOR_AXIS, 2)}
    sizes = dict(node.attributes)
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.EXPERTS,
        inputs=_expert_inputs(node, before, SUMMED_GRADIENT),
        outputs=(BoundaryTensor("", after, PARTIAL),),
        localize=tuple(
            LocalAttribute(name, TENSOR_AXIS, intermediate)
            for name in EXPERT_SIZES
            if sizes.get(name) == intermediate
        ),
        region=EXPERT_REGION,
        reason="fused experts, each rank its own features of all of them",
    )
    return Drafted(_by_role(boundary, table), (spec,))


def _whole_experts(context: Context, boundary: Boundary) -> BoundarySpec:
    """Experts of a block that is left whole: an opaque region still, with nothing cut."""
    return BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.EXPERTS,
        inputs=_expert_inputs(context.graph.module(boundary.module), REPLICATED, REPLICATED),
        outputs=(BoundaryTensor("", REPLICATED, REPLICATED),),
        region=EXPERT_REGION,
        reason=LEFT_WHOLE,
    )


def _expert_inputs(node: ModuleNode, before: Contract, inside: Contract) -> Tensors:
    hidden, index, weights = (*node.forward.arguments, "", "", "")[:3]
    return (
        BoundaryTensor(hidden, before, inside),
        BoundaryTensor(index, REPLICATED, REPLICATED, plain=True),
        BoundaryTensor(weights, before, inside),
    )


def _head(context: Context, boundary: Boundary) -> Drafted:
    """Vocabulary rows sharded; logits gathered."""
    node = context.graph.module(boundary.module)
    before, after = context.exchange(boundary)
    spec = BoundarySpec(
        module=boundary.module,
        kind=BoundaryKind.HEAD,
        inputs=(BoundaryTensor(_first_argument(node), before, SUMMED_GRADIENT),),
        outputs=(BoundaryTensor("", after, LAST_OF_THREE),),
        reason="every rank scores its own rows of the vocabulary",
    )
    return Drafted(_by_role(boundary, {Role.HEAD: ROWS}), (spec,))


TEMPLATES = {
    BoundaryKind.MODEL: _model,
    BoundaryKind.LAYER: _layer,
    BoundaryKind.EMBEDDING: _embedding,
    BoundaryKind.NORM: _norm,
    BoundaryKind.ATTENTION: _attention,
    BoundaryKind.MLP: _mlp,
    BoundaryKind.MOE: _moe,
    BoundaryKind.EXPERTS: _experts,
    BoundaryKind.HEAD: _head,
}
