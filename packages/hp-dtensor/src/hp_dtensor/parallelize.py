"""One plan, two modes (paper section 4.3; decisions D7, D8)."""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor.contracts import ModelAxes
from hp_dtensor.dropouts import replace_dropouts
from hp_dtensor.mesh import AbstractMesh, mesh_axis
from hp_dtensor.plan import ShardingPlan
from hp_dtensor.plan_checks import PARALLELIZED, check_plan
from hp_dtensor.production import apply_production
from hp_dtensor.validate import apply_validate
from hp_platform.agreement import agree

__all__ = ["parallelize"]

M = TypeVar("M", bound=nn.Module)


def parallelize(
    module: M,
    plan: ShardingPlan,
    mesh: DeviceMesh | AbstractMesh,
    *,
    mode: Literal["production", "validate"] = "production",
    settlement_dtype: torch.dtype | None = None,
    dropout_seed: int = 0,
) -> M:
    """Applies a plan to a module, in place. Every rank of the mesh makes the call.

    Every rank holds the full module, with the same values, and keeps its own part; parameters on
    the meta device become meta parts. Call it before the optimizer is built and before
    `hp_fsdp.fully_shard`.

    In production, parameters are plain local `nn.Parameter`s that remember their layout on the
    whole mesh (`layout_of`), and hooks replay the boundaries' collectives. In validate mode,
    parameters and activations are `DTensor`s on the model axes, every operator is checked, and
    every boundary compares what it is given with its contract and with what the neighbour that
    made it declared. Both modes run the same collectives.

    Args:
        module: the module that the plan is for.
        plan: what to apply.
        mesh: holds the plan's axes by name and size, and may have others; with a single process,
            an `AbstractMesh` of sizes 1.
        mode: "production" or "validate".
        settlement_dtype: in which gradients of replicated parameters are summed over the model
            axes, e.g. `torch.float32` for bfloat16 parameters; None for each gradient's own.
            `fully_shard` takes over the sums of the parameters it shards.
        dropout_seed: `nn.Dropout` modules become `hp_dtensor.random.Dropout`s seeded by this, their
            names and the rank's place on the data axes. Their state is in the module's state dict.

    Returns:
        The module.

    Raises:
        PlanError: plan, module and mesh do not fit; all findings at once, before any
            communication.
        AgreementError: ranks were given different plans or modes.
    """
    check_plan(module, plan, mesh, mode)
    _agree(plan, mesh, mode)
    axes = ModelAxes.of(plan, mesh)
    replace_dropouts(module, plan, axes, mesh, dropout_seed)
    if mode == "production":
        apply_production(module, plan, mesh, axes, settlement_dtype)
    else:
        apply_validate(module, plan, axes, settlement_dtype)
    setattr(module, PARALLELIZED, mode)
    return module


def _agree(plan: ShardingPlan, mesh: DeviceMesh | AbstractMesh, mode: str) -> None:
    """Nothing to agree about without a process group."""
    if isinstance(mesh, AbstractMesh) or not dist.is_initialized():
        return
    for axis in range(mesh.ndim):
        agree("the sharding plan", (plan.digest, mode), mesh_axis(mesh, axis))
