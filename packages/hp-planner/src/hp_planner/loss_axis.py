"""Loss parallelism: logits stay sharded over the vocabulary, and the loss is computed on the parts.

The logits are the largest activation of a step. Without loss parallelism every rank gathers all of
them; with it the head's output is handed on as it is, and the loss exchanges three numbers a
position instead (`hp_integration.vocabulary_cross_entropy`, or cross-entropy on a DTensor).
"""

from __future__ import annotations

from attrs import evolve

from hp_dtensor.placements import is_sharding
from hp_dtensor.plan import BoundaryKind, BoundarySpec, ShardingPlan
from hp_planner.errors import PlanError
from hp_planner.settings import TENSOR_AXIS, Settings


def keep_logits_sharded(settings: Settings, plan: ShardingPlan) -> ShardingPlan:
    """The plan with the head's output handed on in shards, if the settings ask for it.

    Raises:
        PlanError: no head of the plan is sharded over the vocabulary.
    """
    if not settings.loss_parallel or settings.tensor_size == 1:
        return plan
    heads = [spec.module for spec in plan.boundaries if _gives_shards(spec)]
    if not heads:
        raise PlanError(
            "loss_parallel=True: the plan has no head that is sharded over the vocabulary, whose "
            "logits could stay so; plan without loss_parallel"
        )
    boundaries = tuple(_kept(s) if s.module in heads else s for s in plan.boundaries)
    return evolve(plan, boundaries=boundaries)


def is_loss_parallel(plan: ShardingPlan) -> bool:
    """Whether the plan hands on sharded logits."""
    return any(
        spec.kind is BoundaryKind.HEAD
        and any(is_sharding(t.outside.placement(TENSOR_AXIS)) for t in spec.outputs)
        for spec in plan.boundaries
    )


def _gives_shards(spec: BoundarySpec) -> bool:
    return spec.kind is BoundaryKind.HEAD and any(
        is_sharding(tensor.inside.placement(TENSOR_AXIS)) for tensor in spec.outputs
    )


def _kept(spec: BoundarySpec) -> BoundarySpec:
    return evolve(spec, outputs=tuple(evolve(t, outside=t.inside) for t in spec.outputs))
