"""What is checked before training: one validate-mode step, and gradients against one process."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor.equivalence import GradientReport, check_gradients
from hp_dtensor.mesh import mesh_axis
from hp_dtensor.parallelize import parallelize
from hp_dtensor.plan import ShardingPlan
from hp_integration.data import Batch
from hp_integration.data_parallel import DataParallel
from hp_integration.trainer import next_token_loss
from hp_platform.axis import MeshAxis

# fp32 sums in another order: a relative error near 1e-6 for one reduction, more through layers.
_RTOL, _ATOL = 1e-3, 1e-5


def validate_step(
    make_model: Callable[[], nn.Module],
    plan: ShardingPlan,
    mesh: DeviceMesh,
    batch: Batch,
    data: DataParallel,
) -> float:
    """Forward and backward with every operator and boundary checked; returns the batch's loss.

    Raises:
        Exception: the first operator or boundary whose layout is not what the plan says.
    """
    model = parallelize(make_model(), plan, mesh, mode="validate")
    loss = next_token_loss(model, batch, vocabulary_axis(mesh))
    loss.backward()
    return data.mean(loss)


def gradient_check(
    make_model: Callable[[], nn.Module], plan: ShardingPlan, mesh: DeviceMesh, batch: Batch
) -> GradientReport:
    """Every parameter's gradient under the plan against the unsharded model's."""
    loss_fn = functools.partial(next_token_loss, vocabulary=vocabulary_axis(mesh))
    return check_gradients(make_model, plan, mesh, batch, loss_fn, rtol=_RTOL, atol=_ATOL)


def vocabulary_axis(mesh: DeviceMesh) -> MeshAxis | None:
    """The axis over which a plan may leave logits sharded."""
    names = mesh.mesh_dim_names or ()
    return mesh_axis(mesh, names.index("tp")) if "tp" in names else None
