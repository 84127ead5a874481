"""Validate mode: tensors carry their layouts, and every boundary checks them (decisions D5, D8).

Parameters become `DTensor`s on the model axes. At each boundary the declared inputs must arrive as
the contract says, and as the neighbour that made them declared; the transition is the one that
production replays. An operator that would have to communicate by itself is an error: production
would not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hp_dtensor.checked_boundary import CheckedEntry, CheckedExit, Likes
from hp_dtensor.contracts import (
    Argument,
    Crossing,
    ModelAxes,
    global_shape,
    layout_under,
    map_tensors,
)
from hp_dtensor.dtensor import DTensor
from hp_dtensor.end_of_backward import EndOfBackward, SettledGradient, settled_placements
from hp_dtensor.implicit import implicit
from hp_dtensor.known_at_start import KnownAtStart
from hp_dtensor.late_bias import install_late_bias
from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial
from hp_dtensor.plan import BoundaryKind, BoundarySpec, Contract, RegionKind, ShardingPlan
from hp_dtensor.production import (
    crossings,
    cut_parameter,
    install_boundary,
    install_vocabulary,
    local_part,
    localize,
    remember_cuts,
)
from hp_dtensor.region_contracts import unvalued
from hp_dtensor.regions import install_region
from hp_dtensor.settlement import needs_settlement
from hp_dtensor.whole_values import WholeValues, current_values, following

__all__ = ["apply_validate", "opaque_regions", "trace_places"]


def apply_validate(
    module: nn.Module,
    plan: ShardingPlan,
    axes: ModelAxes,
    settlement_dtype: torch.dtype | None = None,
) -> None:
    """Wraps the parameters in place and installs checking boundaries."""
    opaque = opaque_regions(plan)
    valued = not any(parameter.is_meta for parameter in module.parameters())
    settled = _wrap_parameters(module, plan, axes, opaque)
    _follow(module, plan, axes, opaque, valued)
    for boundary in plan.boundaries:
        target = module.get_submodule(boundary.module)
        if _inside(boundary.module, opaque - {boundary.module}):
            localize(target, boundary, axes)
            install_boundary(target, boundary, plan, axes)
        else:
            _install(target, boundary, plan, axes, boundary.module in opaque, valued)
    EndOfBackward(settled, settlement_dtype).install()
    for child in module.modules():
        vars(child)["__deepcopy__"] = _refuse_copy


def _refuse_copy(memo: object) -> Any:
    raise TypeError(
        "a module in validate mode cannot be copied: its forwards are bound to its own modules. "
        "Build another module and parallelize it, or copy before parallelize"
    )


def opaque_regions(plan: ShardingPlan) -> frozenset[str]:
    """Names of the modules whose inside runs on plain local tensors."""
    return frozenset(
        spec.module
        for spec in plan.boundaries
        if spec.region is not None and spec.region.kind is RegionKind.OPAQUE
    )


def _inside(name: str, regions: frozenset[str]) -> bool:
    return any(not r or name == r or name.startswith(f"{r}.") for r in regions)


def _wrap_parameters(
    module: nn.Module,
    plan: ShardingPlan,
    axes: ModelAxes,
    opaque: frozenset[str],
) -> list[SettledGradient]:
    """Parameters outside opaque regions become DTensors; those inside stay plain and local."""
    named = dict(module.named_parameters(remove_duplicate=False))
    planned = {spec.name: spec for spec in plan.parameters}
    settled = []
    replaced: dict[int, nn.Parameter] = {}
    for name, parameter in named.items():
        if id(parameter) in replaced:
            continue
        spec = planned.get(name)
        contract = spec.contract if spec is not None else Contract()
        shape = tuple(parameter.shape)
        layout = layout_under(contract, axes.mesh, shape)
        abstract = layout_under(contract, axes.abstract, shape)
        if _inside(name, opaque):
            cut_parameter(parameter, layout, abstract, axes)
            replaced[id(parameter)] = parameter
            leaf: Tensor = parameter
            told = None
        else:
            local = local_part(parameter.detach(), abstract, axes.coordinate)
            carried = layout_under(_of_own_batch(contract), axes.mesh, shape)
            made = nn.Parameter(DTensor.of_layout(local, carried), parameter.requires_grad)
            replaced[id(parameter)] = made
            leaf = made.to_local()  # type: ignore[attr-defined]
            told = functools.partial(_mark_settled, made, layout)
        if needs_settlement(layout):
            settled.append(SettledGradient(leaf, layout, name, told))
    for owner in module.modules():
        for leaf_name, held in list(owner._parameters.items()):
            if held is not None:
                owner._parameters[leaf_name] = replaced[id(held)]
    return settled


def _of_own_batch(contract: Contract) -> Contract:
    """The contract as operators see it: an average over an axis is over batches.

    Ranks along such an axis each compute the whole gradient of their own batch, as they would
    without the axis; the average is taken at the end of backward.
    """
    kept = {axis: g for axis, g in contract.grad_placements if g != Partial("avg")}
    return Contract(contract.placements, kept)


def _mark_settled(parameter: Any, layout: Layout) -> None:
    """The gradient is the sum now, and says so."""
    whole = layout.with_placements(settled_placements(layout))
    parameter.grad = DTensor.of_layout(parameter.to_local().grad, whole)


def trace_places(module: nn.Module) -> None:
    """Errors inside a module's forward name the module."""
    for name, child in module.named_modules():
        child.forward = _placed(child.forward, name)


def _placed(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            if not getattr(error, "_hp_placed", False):
                error.add_note(f"in module {name or '(root)'}")
                error._hp_placed = True  # type: ignore[attr-defined]
            raise

    return call


def _follow(
    module: nn.Module, plan: ShardingPlan, axes: ModelAxes, opaque: frozenset[str], valued: bool
) -> None:
    """Within any forward of the module, an operator that would have to communicate by itself is an
    error, and what is known to be the same on every rank is followed.

    A mesh of one rank takes any plain tensor for the whole one that it is.
    """
    values = WholeValues(axes.mesh, valued)
    outside = [child for name, child in module.named_modules() if not _inside(name, opaque)]
    start = KnownAtStart(module, outside, plan, axes, values)
    alone = axes.abstract.world_size == 1
    for name, child in module.named_modules():
        known = start if child is module else None
        child.forward = _placed(_followed(child.forward, values, known, alone), name)


def _followed(
    forward: Callable[..., Any], values: WholeValues, start: KnownAtStart | None, alone: bool
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A part of the module may be run by itself, as recomputation in backward does.
        if current_values() is values:
            return forward(*args, **kwargs)
        with implicit(reductions=False, adjoints=False, plain=alone), following(values):
            if start is not None:
                start.begin(args, kwargs)
            result = forward(*args, **kwargs)
            map_tensors(_in_graph, result)
            if start is not None:
                start.end()
            return result

    return call


def _in_graph(tensor: Tensor) -> Tensor:
    """What an autograd.Function gave has its gradient while the forward's rules hold."""
    if isinstance(tensor, DTensor):
        tensor.to_local()
    return tensor


def _install(
    module: nn.Module,
    boundary: BoundarySpec,
    plan: ShardingPlan,
    axes: ModelAxes,
    opaque: bool,
    valued: bool,
) -> None:
    name = boundary.module or "(root)"
    inputs = _arguments(module, boundary, axes)
    entry = CheckedEntry(name, inputs, axes, opaque, valued)
    module.register_forward_pre_hook(entry, with_kwargs=True)
    if opaque:
        localize(module, boundary, axes)
        install_vocabulary(module, boundary, plan, axes)
        install_region(module, boundary, axes)
    else:
        remember_cuts(module, boundary, axes)
    outputs = list(crossings(boundary, "output", axes))
    likes = _likes(boundary, inputs)
    leave = CheckedExit(name, outputs, axes, opaque, valued, likes, entry)
    module.register_forward_hook(leave, with_kwargs=True)
    install_late_bias(module, boundary, axes)
    if opaque and likes and not valued:
        module.forward = _stand_in(module, inputs, outputs, likes)


Inputs = Sequence[tuple[Argument, Crossing]]


def _arguments(module: nn.Module, boundary: BoundarySpec, axes: ModelAxes) -> Inputs:
    return [
        (argument, crossing)
        for crossing in crossings(boundary, "input", axes)
        if (argument := Argument.of(module, crossing.spec.where)) is not None
    ]


def _likes(boundary: BoundarySpec, inputs: Inputs) -> Likes:
    """By output, the input whose shape it has. Experts give back what they are given."""
    by_name = {crossing.spec.where: (argument, crossing) for argument, crossing in inputs}
    default = boundary.inputs[0].where if _gives_back(boundary) else ""
    found = {spec.where: spec.like or default for spec in boundary.outputs}
    return {where: by_name[name] for where, name in found.items() if name in by_name}


def _gives_back(boundary: BoundarySpec) -> bool:
    return (
        boundary.kind is BoundaryKind.EXPERTS
        and len(boundary.inputs) > 0
        and len(boundary.outputs) == 1
    )


def _stand_in(
    module: nn.Module, inputs: Inputs, outputs: Sequence[Crossing], likes: Likes
) -> Callable[..., Any]:
    """An opaque region without values is not run: its outputs have the shapes it declares."""
    run = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [argument.read(args, kwargs) for argument, _ in inputs]
        sources = [each for each in given if isinstance(each, Tensor)]
        sources += list(module.parameters())
        owed = [crossing for crossing in outputs if not crossing.spec.optional]
        if not any(each.is_meta for each in sources) or set(likes) != {
            crossing.spec.where for crossing in owed
        }:
            return run(*args, **kwargs)
        made = {}
        for crossing in owed:
            argument, source = likes[crossing.spec.where]
            model = argument.read(args, kwargs)
            shape = global_shape(source.target, source.abstract, tuple(model.shape))
            layout = layout_under(crossing.source, crossing.mesh, shape)
            made[crossing.spec.where] = unvalued(layout, model.dtype, sources)
        if "" in made:
            return made[""]
        if all(where.isdecimal() for where in made):
            # What is optional is None, at its place in the tuple.
            size = 1 + max(int(crossing.spec.where) for crossing in outputs)
            return tuple(made.get(str(index)) for index in range(size))
        return made

    return forward
