"""The packages put together in their order: plan, parallelize, fully_shard, Muon."""

from __future__ import annotations

from typing import Any

from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from hp_dtensor.parallelize import parallelize
from hp_dtensor.plan import ShardingPlan
from hp_fsdp import fully_shard
from hp_integration.data_parallel import DATA_AXES
from hp_integration.models import decoder_layers
from hp_integration.options import NS_DTYPES, Options
from hp_muon import Muon, split_parameters


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
    shard_over_data_axes(model, mesh)
    return Assembly(model, make_optimizer(model, options))


def assemble_single(model: nn.Module, options: Options) -> Assembly:
    """The same training in one process: no plan, no mesh, plain parameters."""
    return Assembly(model, make_optimizer(model, options))


def shard_over_data_axes(model: nn.Module, mesh: DeviceMesh) -> None:
    """One unit a decoder layer; what is left (embedding, last norm, head) is the root's unit."""
    data_mesh = data_axes_of(mesh)
    for _, layer in decoder_layers(model):
        fully_shard(layer, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)


def data_axes_of(mesh: DeviceMesh) -> DeviceMesh:
    """The slice of `mesh` that holds its data axes, replicas first."""
    return mesh[tuple(name for name in DATA_AXES if name in (mesh.mesh_dim_names or ()))]


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
