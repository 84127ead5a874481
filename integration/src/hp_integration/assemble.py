"""The packages put together in their order: plan, parallelize, fully_shard, Muon."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from hp_dtensor.contracts import layout_under
from hp_dtensor.layout import attach_layout
from hp_dtensor.parallelize import parallelize
from hp_dtensor.plan import Contract, ShardingPlan
from hp_fsdp import fully_shard
from hp_integration.data_parallel import DATA_AXES
from hp_integration.errors import InputError
from hp_integration.models import decoder_layers
from hp_integration.options import NS_DTYPES, Options
from hp_integration.regions.expert_parallel import EXPERT_AXIS
from hp_muon import Muon, split_parameters
from hp_planner.cost import SHARD_AXIS, WIDE_AXIS
from hp_platform.mesh import make_mesh


@frozen(eq=False)
class Assembly:
    """A model ready to train and the optimizer that holds its parameters."""

    model: nn.Module
    optimizer: Optimizer


def assemble(model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, options: Options) -> Assembly:
    """Turns a full model, equal on every rank, into this rank's part of it.

    The order matters: the plan says what tensor parallelism cuts, `fully_shard` cuts what is
    left over the data axes, and the optimizer reads the layouts that both have left behind.
    """
    parallelize(model, plan, mesh, mode="production")
    shard_over_data_axes(model, plan, mesh)
    return Assembly(model, make_optimizer(model, options))


def assemble_single(model: nn.Module, options: Options) -> Assembly:
    """The same training in one process: no plan, no mesh, plain parameters."""
    return Assembly(model, make_optimizer(model, options))


def shard_over_data_axes(model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> None:
    """One unit a decoder layer; what is left (embedding, last norm, head) is the root's unit.

    Ranks of the expert axis see different batches, so for all but the experts they are data
    ranks: their parameters are cut over `dp_shard` and `ep` together, and the experts of a layer,
    of which each of those ranks has others, are a unit of their own over `dp_shard`.
    """
    data_mesh = data_axes_of(mesh)
    experts = expert_modules(plan)
    wide = with_experts_as_data(mesh) if experts else mesh
    if experts:
        lay_out_on(model, plan, wide, experts)
    for name in experts:
        fully_shard(model.get_submodule(name), mesh=data_mesh)
    for _, layer in decoder_layers(model):
        fully_shard(layer, mesh=data_axes_of(wide))
    fully_shard(model, mesh=data_axes_of(wide))


def expert_modules(plan: ShardingPlan) -> list[str]:
    """The modules whose parameters the expert axis cuts."""
    cut = (s.boundary for s in plan.parameters if EXPERT_AXIS in dict(s.contract.placements))
    return list(dict.fromkeys(cut))


def with_experts_as_data(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh with `dp_shard` and `ep` as one axis, `dp_shard_ep`.

    Raises:
        InputError: the two axes are not neighbours, `dp_shard` first.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape))
    names = list(sizes)
    place = names.index(EXPERT_AXIS)
    if place == 0 or names[place - 1] != SHARD_AXIS:
        raise InputError(
            f"mesh axes {', '.join(names)}: {EXPERT_AXIS} must come right after {SHARD_AXIS}, "
            "because parameters that are no experts are cut over both"
        )
    shards = sizes[SHARD_AXIS] * sizes.pop(EXPERT_AXIS)
    wide = {
        (WIDE_AXIS if name == SHARD_AXIS else name): (shards if name == SHARD_AXIS else size)
        for name, size in sizes.items()
    }
    return make_mesh(wide, device_type=mesh.device_type)


def lay_out_on(
    model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, but: Collection[str]
) -> None:
    """Parameters outside the modules `but` have their layout on a mesh without the expert axis.

    What is averaged over that axis is left to `fully_shard`, whose axis holds its ranks.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for spec in plan.parameters:
        if spec.boundary not in but:
            kept = {axis: p for axis, p in spec.contract.placements if axis != EXPERT_AXIS}
            grads = {axis: g for axis, g in spec.contract.grad_placements if axis != EXPERT_AXIS}
            layout = layout_under(Contract(kept, grads), mesh, spec.shape)
            attach_layout(parameters[spec.name], layout)


def data_axes_of(mesh: DeviceMesh) -> DeviceMesh:
    """The slice of `mesh` that holds its data axes, replicas first."""
    names = (*DATA_AXES, WIDE_AXIS)
    return mesh[tuple(name for name in names if name in (mesh.mesh_dim_names or ()))]


def make_optimizer(model: nn.Module, options: Options) -> Optimizer:
    """Muon for the matrices, AdamW for embedding, head, norms and biases, in one optimizer."""
    groups: list[dict[str, Any]] = split_parameters(
        model, lr=options.lr, adamw_lr=options.adamw_lr, weight_decay=options.weight_decay
    )
    return Muon(
        groups,
        lr=options.lr,
        weight_decay=options.weight_decay,
        ns_dtype=NS_DTYPES[options.ns_dtype],
    )
