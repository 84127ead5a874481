"""Optimizers, norms, clipping and gradient scaling on DTensors, on several meshes at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it in their first step: here once, before forking
from dtensor_checks import integers, mesh_of, spread
from torch import Tensor, nn

from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout
from hp_dtensor.placements import RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.rules.engine import OperatorError
from hp_platform import ledger
from hp_platform.testing import run_ranks

pytestmark = pytest.mark.ranks


def parameter(value: Tensor, layout: Layout) -> Any:
    return nn.Parameter(spread(value, layout))


def _layouts() -> list[tuple[Layout, tuple[int, ...]]]:
    """Uneven, empty, two axes, a mesh of its own, ragged."""
    line, plane = mesh_of(4), mesh_of(2, 2)
    return [
        (Layout(line, [Shard(0)], (2, 4)), (2, 4)),
        (Layout(line, [Shard(0)], (5, 3)), (5, 3)),
        (Layout(plane, [StridedShard(0, 2), Shard(0)], (5,)), (5,)),
        (Layout(plane, [Shard(1), Replicate()], (3, 3)), (3, 3)),
        (Layout(line, [RaggedShard((0, 1), (0, 3, 1, 0))], (2, 4)), (2, 4)),
        (Layout(line, [Replicate()], ()), ()),
    ]


OPTIMIZERS: list[Any] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
]

FUSED: list[Any] = [(each, options | {"fused": True}) for each, options in OPTIMIZERS[:4]]


@pytest.mark.parametrize("foreach", [False, True, None])
def test_optimizers_do_on_shards_what_they_do_on_whole_tensors(foreach: bool | None) -> None:
    """Case 15: uneven and empty shards, parameters of several meshes in one optimizer."""

    def check(pairs: Any, optimizer: Any, options: dict[str, Any]) -> None:
        dense = [nn.Parameter(integers(shape, i)) for i, (_, shape) in enumerate(pairs)]
        placed = [parameter(w.detach(), layout) for w, (layout, _) in zip(dense, pairs)]
        ours = optimizer(placed, foreach=foreach, **options)
        theirs = optimizer(dense, foreach=foreach, **options)
        for step in range(3):
            for i, (one, other) in enumerate(zip(dense, placed)):
                one.grad = integers(one.shape, 100 + i + step)
                other.grad = spread(one.grad, other.grad_layout)
            norms = [
                nn.utils.clip_grad_norm_(each, 2.0, foreach=foreach) for each in (dense, placed)
            ]
            torch.testing.assert_close(torch.as_tensor(norms[1].item()), norms[0].detach().float())
            theirs.step()
            ours.step()
            for one, other in zip(dense, placed):
                torch.testing.assert_close(other.detach().full_tensor(), one.detach())
            ours.zero_grad()
            theirs.zero_grad()
        assert all(each.grad is None for each in placed)

    def body() -> None:
        pairs = _layouts()
        for optimizer, options in OPTIMIZERS + (FUSED if foreach is None else []):
            check(pairs, optimizer, options)

    run_ranks(body, 4)


@pytest.mark.parametrize("order", [0.0, 1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("foreach", [False, True])
def test_the_norm_of_gradients_on_several_meshes_is_the_global_one(
    order: float, foreach: bool
) -> None:
    """Case 37, with a plain tensor among them."""

    def body() -> None:
        plane, line = mesh_of(2, 2), mesh_of(4)
        a = torch.full((8,), 3.0)
        b = torch.cat([torch.full((4,), 2.0), torch.full((4,), 4.0)])
        c = torch.ones(2)
        tensors = [
            spread(a, Layout(line, [Shard(0)], (8,))),
            spread(b, Layout(plane, [StridedShard(0, 2), Shard(0)], (8,))),
            c,
        ]
        for chosen in ((0, 1), (0, 2), (0, 1, 2)):
            whole = [(a, b, c)[i] for i in chosen]
            expected = nn.utils.get_total_norm(whole, order)
            found = nn.utils.get_total_norm([tensors[i] for i in chosen], order, foreach=foreach)
            torch.testing.assert_close(torch.tensor(found.item()), expected)
        if order == 2.0:
            assert math.isclose(
                nn.utils.get_total_norm(tensors[:2], foreach=foreach).item(),
                12.328828,
                rel_tol=1e-6,
            )

    run_ranks(body, 4)


@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_scales_gradients_of_every_mesh_and_plain_ones(foreach: bool) -> None:
    def body() -> None:
        plane, line = mesh_of(2, 2), mesh_of(4)
        weights: list[Any] = [
            parameter(torch.zeros(8), Layout(line, [Shard(0)], (8,))),
            parameter(torch.zeros(8), Layout(plane, [StridedShard(0, 2), Shard(0)], (8,))),
            nn.Parameter(torch.zeros(2)),
        ]
        for weight in weights:
            value = torch.full(weight.shape, 3.0)
            placed = isinstance(weight, DTensor)
            weight.grad = spread(value, weight.layout) if placed else value
        norm = nn.utils.clip_grad_norm_(weights, 1.0, foreach=foreach)
        expected = 3.0 / (norm.item() + 1e-6)
        for weight in weights:
            gradient = weight.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(whole, torch.full(weight.shape, expected))

    run_ranks(body, 4)


def test_scalars_of_a_smaller_mesh_must_agree_on_its_copies() -> None:
    def body(rank: int) -> None:
        plane = mesh_of(2, 2)
        whole = spread(torch.ones(4), Layout(plane, [Shard(0), Replicate()], (4,)))
        same = spread(torch.ones(4), Layout(plane["dp"], [Shard(0)], (4,)))
        assert nn.utils.get_total_norm([whole, same]).item() == pytest.approx(math.sqrt(8))
        expert = spread(torch.ones(4) * (1 + rank % 2), Layout(plane["dp"], [Shard(0)], (4,)))
        with pytest.raises(OperatorError, match="differ between its copies"):
            nn.utils.get_total_norm([whole, expert])

    run_ranks(body, 4)


def test_norms_of_one_mesh_take_one_reduction_for_all_tensors() -> None:
    def body() -> int:
        mesh = mesh_of(2)
        tensors = [spread(integers((5, 3), i), Layout(mesh, [Shard(0)], (5, 3))) for i in range(7)]
        nn.utils.get_total_norm(tensors)
        with ledger() as log:
            nn.utils.get_total_norm(tensors)
        return len(log.records)

    assert run_ranks(body, 2) == [1, 1]


def test_optimizer_steps_communicate_nothing() -> None:
    def body() -> int:
        weight = parameter(integers((5, 3)), Layout(mesh_of(2), [Shard(0)], (5, 3)))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        with ledger() as log:
            weight.grad = spread(integers((5, 3), 1), weight.layout)
            optimizer.step()
        return len(log.records)

    assert run_ranks(body, 2) == [0, 0]


def test_gradient_scaling_finds_on_every_rank_what_is_not_finite_on_one() -> None:
    def body() -> None:
        layout = Layout(mesh_of(2), [Shard(0)], (4,))
        weight = parameter(torch.zeros(4), layout)
        for bad in (False, True):
            value = torch.tensor([1.0, 1.0, 1.0, math.inf if bad else 1.0])
            weight.grad = spread(value, layout)
            found = torch.zeros(1)
            torch._amp_foreach_non_finite_check_and_unscale_(
                [weight.grad], found, torch.tensor(0.5)
            )
            assert found.item() == float(bad)
            assert weight.grad.full_tensor()[0] == 0.5

    run_ranks(body, 2)


def test_grad_scaler_skips_the_step_on_every_rank_when_one_overflows() -> None:
    def body() -> None:
        layout = Layout(mesh_of(2), [Shard(0)], (4,))
        weight = parameter(torch.zeros(4), layout)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for last, expected in ((math.inf, 0.0), (2.0, -1.0)):
            scaler.scale(torch.ones(()))
            scale = scaler.get_scale()
            weight.grad = spread(torch.tensor([scale, scale, scale, last * scale / 2]), layout)
            scaler.step(optimizer)
            scaler.update()
            assert weight.detach().full_tensor()[0] == expected

    run_ranks(body, 2)
