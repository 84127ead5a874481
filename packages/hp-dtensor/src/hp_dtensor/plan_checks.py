"""Everything about a plan, a module and a mesh that can be known before the first collective.

All findings are reported in one error, so that a plan is mended in one go (decision D13).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor.contracts import Argument, PlanError, layout_under
from hp_dtensor.layout import Layout, layout_of
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import RaggedShard, sharded_dims
from hp_dtensor.plan import BoundarySpec, Contract, LocalAttribute, ParameterSpec, ShardingPlan
from hp_dtensor.regions import region_findings
from hp_dtensor.vocabulary import is_vocabulary_sharded, vocabulary_findings

__all__ = ["MODES", "PARALLELIZED", "check_plan", "read_attribute", "tied_names"]

MODES = ("production", "validate")
PARALLELIZED = "_hp_parallelized"
"""Attribute that marks a module to which a plan has been applied."""


def check_plan(
    module: nn.Module, plan: ShardingPlan, mesh: DeviceMesh | AbstractMesh, mode: str
) -> None:
    """Compares plan, module and mesh.

    Raises:
        PlanError: with every finding, one a line.
    """
    findings = list(_mode(mode))
    findings += _not_applied_before(module)
    findings += _mesh(plan, mesh)
    findings += _ranks(module, mesh, mode)
    findings += _contract_axes(plan)
    findings += _parameters(module, plan)
    findings += _layouts(module, plan)
    findings += _ties(module, plan)
    findings += _boundaries(module, plan)
    findings += _dropouts(module, plan)
    if findings:
        lines = "\n  - ".join(findings)
        raise PlanError(
            f"the sharding plan for {plan.model} does not fit {type(module).__name__}:\n  - {lines}"
        )


def _mode(mode: str) -> Iterator[str]:
    if mode not in MODES:
        yield f"mode is {mode!r}; use 'production' or 'validate'"


def _not_applied_before(module: nn.Module) -> Iterator[str]:
    for name, child in module.named_modules():
        if PARALLELIZED in child.__dict__:
            yield (
                f"module {name or '(root)'} is parallelized already; build a new module for "
                "another plan or mode"
            )
    for name, parameter in module.named_parameters():
        if layout_of(parameter) is not None:
            yield (
                f"parameter {name} is distributed already ({layout_of(parameter)}); parallelize "
                "comes before fully_shard"
            )
        elif parameter.grad is not None:
            yield f"parameter {name} has a gradient; call zero_grad() before parallelize"


def _mesh(plan: ShardingPlan, mesh: DeviceMesh | AbstractMesh) -> Iterator[str]:
    if isinstance(mesh, DeviceMesh) and not mesh.mesh_dim_names:
        yield (
            f"the device mesh has no axis names; the plan is for {plan.mesh}: pass "
            "mesh_dim_names to init_device_mesh"
        )
        return
    found = AbstractMesh.of(mesh)
    sizes = dict(zip(found.axis_names, found.sizes))
    for name, size in zip(plan.mesh.axis_names, plan.mesh.sizes):
        if name not in sizes:
            yield (
                f"the plan's mesh axis {name!r} is not in the mesh {found}; pass the mesh that the "
                "plan was made for"
            )
        elif sizes[name] != size:
            yield (
                f"mesh axis {name!r} has size {sizes[name]}, the plan is for size {size}; make the "
                "plan for this mesh"
            )
    common = [name for name in found.axis_names if name in plan.mesh.axis_names]
    if common != [name for name in plan.mesh.axis_names if name in sizes]:
        yield (f"the mesh orders its axes {found}, the plan {plan.mesh}; give both the same order")
    for name in plan.model_axes:
        if name not in plan.mesh.axis_names:
            yield (
                f"model axis {name!r} is not an axis of the plan's mesh {plan.mesh}; take it out "
                "of model_axes, or add it to the mesh"
            )


def _dropouts(module: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    # Here, so that the planner, which takes names from this module, does not load the rules.
    from hp_dtensor.dropouts import dropout_findings

    return dropout_findings(module, plan)


def _ranks(module: nn.Module, mesh: DeviceMesh | AbstractMesh, mode: str) -> Iterator[str]:
    """An abstract mesh of several ranks has no groups: only shapes can be checked on it."""
    if not isinstance(mesh, AbstractMesh) or mesh.world_size == 1:
        return
    if mode == "production":
        yield (
            f"{mesh} is an abstract mesh of {mesh.world_size} ranks, which cannot communicate; "
            "pass a DeviceMesh, or validate on meta tensors"
        )
        return
    real = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    if real:
        yield (
            f"{mesh} is an abstract mesh, on which a module has no values, but {real[0]} and "
            f"{len(real) - 1} others have; use hp_dtensor.validate_on_meta, which moves a copy to "
            "the meta device, or pass a DeviceMesh"
        )


def _contract_axes(plan: ShardingPlan) -> Iterator[str]:
    def foreign(contract: Contract) -> list[str]:
        return [axis for axis in contract.axes() if axis not in plan.model_axes]

    for spec in plan.parameters:
        if foreign(spec.contract):
            yield (
                f"parameter {spec.name} is placed on {foreign(spec.contract)}, no model axes; "
                f"place it on {plan.model_axes}"
            )
    for boundary in plan.boundaries:
        for tensor in (*boundary.inputs, *boundary.outputs):
            axes = sorted({*foreign(tensor.outside), *foreign(tensor.inside)})
            if axes:
                yield (
                    f"boundary {boundary.module or '(root)'}, tensor {tensor.where!r} is placed "
                    f"on {axes}, no model axes; place it on {plan.model_axes}"
                )
            for contract in (tensor.outside, tensor.inside):
                if any(isinstance(p, RaggedShard) for _, p in contract.placements):
                    yield (
                        f"boundary {boundary.module or '(root)'}, tensor {tensor.where!r}: "
                        "RaggedShard is for parameters; a boundary needs equal pieces"
                    )


def _parameters(module: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    found = dict(module.named_parameters(remove_duplicate=False))
    listed: set[str] = set()
    for spec in plan.parameters:
        if spec.name in listed:
            yield f"parameter {spec.name} is in the plan twice; list it once"
        listed.add(spec.name)
        if spec.name not in found:
            yield (
                f"parameter {spec.name} is in the plan, but not in the module; make the plan for "
                "this module"
            )
        elif tuple(found[spec.name].shape) != spec.shape:
            yield (
                f"parameter {spec.name} has shape {tuple(found[spec.name].shape)}, the plan "
                f"expects {spec.shape}; make the plan for this module"
            )
    covered = {id(found[name]) for name in listed if name in found}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in covered:
            yield (
                f"parameter {name} is trainable, but not in the plan; list it, replicated if no "
                "axis cuts it, or freeze it"
            )


def _layouts(module: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    modules = dict(module.named_modules(remove_duplicate=False))
    for spec in plan.parameters:
        try:
            layout = layout_under(spec.contract, plan.mesh, spec.shape)
        except (TypeError, ValueError) as error:
            yield f"parameter {spec.name}: {error}"
            continue
        owner = modules.get(spec.name.rpartition(".")[0])
        if isinstance(owner, nn.Embedding) and is_vocabulary_sharded(owner, layout):
            for text in vocabulary_findings(owner, layout):
                yield f"parameter {spec.name}, {layout}: {text}"
        uneven = _uneven_dims(layout)
        if uneven and not _only_looks_up_rows(module, plan, spec, uneven):
            yield (
                f"parameter {spec.name} of shape {spec.shape}: dim {uneven[0]} cannot be cut into "
                f"equal pieces by {layout.placements} on {plan.mesh}; pad it, or replicate it"
            )


def _uneven_dims(layout: Layout) -> list[int]:
    if layout.is_even:
        return []
    mesh = layout.abstract_mesh
    return [
        dim
        for axis, placement in enumerate(layout.placements)
        if mesh.sizes[axis] > 1
        for dim in sharded_dims(placement)
    ]


def _only_looks_up_rows(
    module: nn.Module, plan: ShardingPlan, spec: ParameterSpec, dims: list[int]
) -> bool:
    """An embedding's rows may be uneven: no activation has the vocabulary as a dim. A tied head's
    activation has it."""
    owners = {spec.name, *(n for group in plan.tied if spec.name in group for n in group)}
    modules = dict(module.named_modules())
    return set(dims) == {0} and all(
        isinstance(modules.get(name.rpartition(".")[0]), nn.Embedding) for name in owners
    )


def tied_names(module: nn.Module) -> list[tuple[str, ...]]:
    """Groups of qualified names under which the module holds one and the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def _ties(module: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    real = {frozenset(group) for group in tied_names(module)}
    planned = {frozenset(group) for group in plan.tied}
    for group in sorted(real - planned, key=sorted):
        yield (
            f"parameters {sorted(group)} are one tensor in the module; the plan has them apart; "
            "name them in the plan's tied, or untie them"
        )
    for group in sorted(planned - real, key=sorted):
        yield (
            f"parameters {sorted(group)} are tied in the plan, but not in the module; tie them "
            "before parallelize, or take them out of the plan's tied"
        )
    for group in real & planned:
        named = [spec.name for spec in plan.parameters if spec.name in group]
        if len(named) > 1:
            yield f"tied parameters {named} are one tensor; list it once in the plan"


def _boundaries(module: nn.Module, plan: ShardingPlan) -> Iterator[str]:
    modules = dict(module.named_modules(remove_duplicate=False))
    seen: set[str] = set()
    for spec in plan.boundaries:
        where = f"boundary {spec.module or '(root)'}"
        if spec.module in seen:
            yield f"{where} is in the plan twice; merge the two"
        seen.add(spec.module)
        yield from region_findings(spec)
        if spec.module not in modules:
            yield (
                f"{where} is in the plan, but the module has no such submodule; make the plan for "
                "this module"
            )
            continue
        yield from (f"{where}{text}" for text in _boundary(modules[spec.module], spec, plan))


def _boundary(module: nn.Module, spec: BoundarySpec, plan: ShardingPlan) -> Iterator[str]:
    for direction, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        names = [tensor.where for tensor in tensors]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f": {direction} {name!r} is declared twice; declare it once"
    if "" in (names := [tensor.where for tensor in spec.outputs]) and len(names) > 1:
        yield ": output '' is the whole result and excludes other outputs; declare it alone"
    for tensor in spec.inputs:
        if Argument.of(module, tensor.where) is None:
            known = list(inspect.signature(module.forward).parameters)
            yield (
                f": {type(module).__name__}.forward takes no argument {tensor.where!r}; it takes "
                f"{known}"
            )
    for attribute in spec.localize:
        yield from _attribute(module, attribute, plan)


def read_attribute(module: nn.Module, name: str) -> tuple[object, str]:
    """The object that holds the attribute with the dotted name `name`, and its last part.

    Raises:
        AttributeError: there is none.
    """
    *path, last = name.split(".")
    holder: object = module
    for part in path:
        holder = getattr(holder, part)
    getattr(holder, last)
    return holder, last


def _attribute(module: nn.Module, attribute: LocalAttribute, plan: ShardingPlan) -> Iterator[str]:
    try:
        holder, last = read_attribute(module, attribute.name)
    except AttributeError:
        yield f": attribute {attribute.name!r} to localize does not exist; take it out of localize"
        return
    if getattr(holder, last) != attribute.value:
        yield (
            f": attribute {attribute.name!r} is {getattr(holder, last)!r}, the plan expects the "
            f"global value {attribute.value}; make the plan for this module"
        )
    if attribute.axis not in plan.model_axes:
        yield (
            f": attribute {attribute.name!r} is localized over {attribute.axis!r}, no model axis; "
            f"use one of {plan.model_axes}"
        )
    elif attribute.value % plan.mesh.size(attribute.axis):
        yield (
            f": attribute {attribute.name!r} of value {attribute.value} is not divisible by mesh "
            f"axis {attribute.axis!r} of size {plan.mesh.size(attribute.axis)}; use a smaller "
            "axis, or replicate what the attribute counts"
        )
