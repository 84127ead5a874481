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

from collections.abc import Callable

from hp_dtensor.plan import BoundaryKind, ParameterSpec, ShardingPlan
from hp_planner.axis_specs import LEFT_WHOLE, spec_without_axis
from hp_planner.boundaries import Boundary
from hp_planner.context_axis import add_context_axis
from hp_planner.expert_axis import add_expert_axis
from hp_planner.graph import ModuleGraph, is_inside
from hp_planner.loss_axis import keep_logits_sharded
from hp_planner.settings import TENSOR_AXIS, Settings
from hp_planner.templates.attention import attention
from hp_planner.templates.block import local
from hp_planner.templates.context import Context
from hp_planner.templates.contracts import Drafted, replicated
from hp_planner.templates.dropouts import add_dropouts
from hp_planner.templates.mixer import mixer
from hp_planner.templates.mlp import mlp
from hp_planner.templates.moe import experts, moe, whole_experts
from hp_planner.templates.norms import norm
from hp_planner.templates.structure import layer, model
from hp_planner.templates.vocabulary import embedding, head, position

__all__ = ["LEFT_WHOLE", "TEMPLATES", "Context", "instantiate_templates"]

TEMPLATES: dict[BoundaryKind, Callable[[Context, Boundary], Drafted]] = {
    BoundaryKind.MODEL: model,
    BoundaryKind.LAYER: layer,
    BoundaryKind.EMBEDDING: embedding,
    BoundaryKind.POSITION: position,
    BoundaryKind.NORM: norm,
    BoundaryKind.ATTENTION: attention,
    BoundaryKind.MLP: mlp,
    BoundaryKind.MOE: moe,
    BoundaryKind.EXPERTS: experts,
    BoundaryKind.MIXER: mixer,
    BoundaryKind.HEAD: head,
}


def instantiate_templates(
    graph: ModuleGraph,
    boundaries: tuple[Boundary, ...],
    settings: Settings,
    local: frozenset[str] = frozenset(),
) -> ShardingPlan:
    """Pass 4: the plan that the templates give, with the modules in `local` left whole.

    Parameters whose role has no template are left out unless they are inside a local module;
    lint reports them. With one tensor-parallel rank all parameters are replicated; boundaries are
    drawn only if another model axis has more ranks.
    """
    context = Context(graph, settings, boundaries, local)
    drafts = [_draft(context, boundary) for boundary in boundaries]
    drafts += [_local_draft(context, boundary) for boundary in _unnamed_local(context)]
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
    with_context = add_context_axis(graph, boundaries, settings, local, with_experts)
    return keep_logits_sharded(settings, add_dropouts(context, with_context))


def _unnamed_local(context: Context) -> tuple[Boundary, ...]:
    """Local modules that are no boundary by themselves: `none` on a block without a template."""
    named = {b.module for b in context.boundaries if b.kind is not None}
    found = []
    for name in context.local - named if context.settings.model_size > 1 else ():
        own = context.find(name)
        home = max((m for m in named if is_inside(name, m)), key=len)
        found.append(Boundary(name, None, own.members if own is not None else (), home))
    return tuple(found)


def _draft(context: Context, boundary: Boundary) -> Drafted:
    if context.settings.tensor_size == 1:
        contracts = replicated(boundary, "one tensor-parallel rank: replicated")
        drawn = _drawn(context, boundary) if context.settings.model_size > 1 else Drafted()
        specs = tuple(spec_without_axis(spec, TENSOR_AXIS) for spec in drawn.specs)
        return Drafted(contracts, specs)
    return _drawn(context, boundary)


def _drawn(context: Context, boundary: Boundary) -> Drafted:
    """What the templates give for more than one tensor-parallel rank."""
    if context.inside_local(boundary.module):
        inside = replicated(boundary, f"inside a module {LEFT_WHOLE}")
        opaque = boundary.kind is BoundaryKind.EXPERTS
        return Drafted(inside, (whole_experts(context, boundary),) if opaque else ())
    if boundary.kind is None:
        return Drafted()
    if boundary.module in context.local:
        return _local_draft(context, boundary)
    return TEMPLATES[boundary.kind](context, boundary)


_local_draft = local
