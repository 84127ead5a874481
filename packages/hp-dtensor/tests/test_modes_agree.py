"""Training in production and in validate mode: the same losses, gradients and collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from dtensor_block import SEQUENCE, VOCABULARY, Tiny, loss_of, tiny_plan
from test_dropouts import model as dropping_model
from test_dropouts import plan_of as dropping_plan
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor.parallelize import parallelize
from hp_dtensor.plan import Region, RegionKind, ShardingPlan
from hp_dtensor.testing.lockstep import run_lockstep
from hp_platform import ledger
from hp_platform.testing import run_ranks

Trace = tuple[list[float], list[float], list[tuple[str, str, int, str]]]


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        ids = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=generator)
        made.append({"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()})
    return made


def trained(mode: Any, mesh: Any, plan: ShardingPlan, make: Any, steps: int) -> Trace:
    """Losses, norms of this rank's gradients, and this rank's collectives."""
    model = parallelize(make(), plan, mesh, mode=mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    with ledger() as log:
        for data in batches(steps):
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            losses.append(float(loss.detach()))
            gradients = [getattr(p.grad, "_local", p.grad) for p in model.parameters()]
            norms.append(sum(float(g.double().pow(2).sum()) for g in gradients) ** 0.5)
            optimizer.step()
    shown = [(r.operation, r.axis, r.bytes, str(r.origin)) for r in log.records]
    return losses, norms, shown


def both(mesh: Any, plan: ShardingPlan, make: Any, steps: int) -> tuple[Trace, Trace]:
    return (
        trained("production", mesh, plan, make, steps),
        trained("validate", mesh, plan, make, steps),
    )


def compare(results: list[tuple[Trace, Trace]], steps: int) -> None:
    for production, validate in results:
        assert production[0] == validate[0]
        assert production[1] == validate[1]
        assert production[2] == validate[2]
        assert len(production[0]) == steps
        assert len(production[2]) >= 10 * steps
        assert production[0][-1] != production[0][0]


@pytest.mark.parametrize("kind", ["sequence", "tensor", "four", "data", "dropout", "opaque"])
def test_a_few_steps_are_bitwise_the_same(kind: str) -> None:
    sizes = {"four": {"tp": 4}, "data": {"dp": 2, "tp": 2}}.get(kind, {"tp": 2})
    plan = tiny_plan(sizes, sequence_parallel=kind != "tensor")
    make: Any = Tiny
    if kind == "dropout":
        make, plan = dropping_model, dropping_plan(sizes)
    if kind == "opaque":
        opaque = Region(RegionKind.OPAQUE)
        plan = evolve(
            plan,
            boundaries=[
                evolve(b, region=opaque) if "attention" in b.module else b for b in plan.boundaries
            ],
        )
    compare(run_lockstep(lambda mesh: both(mesh, plan, make, 4), sizes), 4)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_sixty_steps_on_real_ranks_are_bitwise_the_same(sequence_parallel: bool) -> None:
    plan = tiny_plan({"tp": 2}, sequence_parallel=sequence_parallel)

    def body() -> tuple[Trace, Trace]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return both(mesh, plan, Tiny, 60)

    compare(run_ranks(body, 2, timeout=500), 60)
