"""`check_plan`: gradient equivalence of a model and a plan, in one call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor.equivalence import GradientReport, check_gradients
from hp_dtensor.plan import ShardingPlan
from hp_dtensor.testing.group import on_ranks

__all__ = ["check_plan"]

Batch = Mapping[str, Any]
LossFunction = Callable[[nn.Module, Batch], Tensor]


def check_plan(
    model: nn.Module | Callable[[], nn.Module],
    plan: ShardingPlan,
    batch: Batch,
    *,
    loss_fn: LossFunction | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    timeout: float = 120,
) -> GradientReport:
    """Compares one step of the dense model with the plan's validate and production modes.

    Inside a process group, which all its ranks must call this in, the group is used; otherwise
    ranks are forked, one for each place on the plan's model axes (its data axes, on which nothing
    is cut, are left out).

    Args:
        model: the whole model, on real memory, which is copied and not changed; or a function
            that makes it, with the same values on every rank.
        plan: what is checked.
        batch: arguments of the model's forward by name, the same on every rank.
        loss_fn: scalar loss of a model and a batch, without random numbers. By default the
            output's `loss` where there is one, else the sum of the cosines of its `logits` or of
            the output tensor: a plain sum gives every element the same gradient, so that
            elements in the wrong place would not show.
        rtol, atol: as in `check_gradients`.
        timeout: seconds for forked ranks.

    Returns:
        The report, equal in every part.

    Raises:
        EquivalenceError: values or collectives differ; an AssertionError whose message is the
            report.
        PlanError, ContractError, OperatorError: found before values are compared; these name the
            parameter, boundary or operator.
        TypeError, ValueError: the arguments cannot be checked.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"check_plan: batch is the mapping of the forward arguments by name, found "
            f"{type(batch).__name__}"
        )
    small = evolve(plan, mesh=plan.model_mesh) if plan.model_axes else plan
    make = _factory(model)
    loss = _default_loss if loss_fn is None else loss_fn

    def run(chosen: ShardingPlan) -> GradientReport:
        mesh: Any = chosen.mesh
        if dist.is_initialized():
            kind = _device(batch)
            mesh = init_device_mesh(kind, mesh.sizes, mesh_dim_names=mesh.axis_names)
        report = check_gradients(make, chosen, mesh, batch, loss, rtol=rtol, atol=atol)
        return report.raise_if_failed()

    if not dist.is_initialized():
        if small.mesh.world_size == 1:
            return run(small)
        return on_ranks(lambda: run(small), small.mesh.world_size, timeout)
    for chosen in (plan, small):
        if chosen.mesh.world_size == dist.get_world_size():
            return run(chosen)
    raise ValueError(
        f"check_plan: the plan is for {plan.mesh}, which needs {plan.mesh.world_size} ranks, or "
        f"{small.mesh.world_size} for its model axes alone; the process group has "
        f"{dist.get_world_size()}"
    )


def _factory(model: nn.Module | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    if isinstance(model, nn.Module):
        return lambda: copy.deepcopy(model)
    if not callable(model):
        raise TypeError(
            f"check_plan: model is a module or a function that makes it, found "
            f"{type(model).__name__}"
        )
    return model


def _device(batch: Batch) -> str:
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    return tensors[0].device.type if tensors else "cpu"


def _default_loss(model: nn.Module, batch: Batch) -> Tensor:
    output: Any = model(**batch)
    for name in ("loss", "logits"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value if name == "loss" else value.cos().sum()
    if isinstance(output, Tensor):
        return output.cos().sum()
    raise TypeError(
        f"check_plan: the model gives a {type(output).__name__} without loss or logits; "
        "pass loss_fn"
    )
