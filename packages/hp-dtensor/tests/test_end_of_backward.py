"""Gradients that are summands are summed once per backward pass, whatever the pass looks like."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_dtensor.end_of_backward import EndOfBackward, SettledGradient, queue_at_end_of_backward
from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial, Replicate
from hp_dtensor.settlement import Settlement
from hp_platform import ledger
from hp_platform.testing import run_ranks


def test_the_engine_runs_a_queued_callback_once_when_the_pass_has_ended() -> None:
    events: list[str] = []
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    first.register_hook(
        lambda _: (events.append("hook"), queue_at_end_of_backward(lambda: events.append("end")))[0]
    )
    second.register_post_accumulate_grad_hook(lambda _: events.append("accumulated"))
    (first * second).sum().backward()
    assert events == ["hook", "accumulated", "end"]
    assert first.grad is not None


def settled(*leaves: Tensor) -> EndOfBackward:
    """Leaves that are replicated over two ranks, whose gradients are summands."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    hooks = EndOfBackward(
        [
            SettledGradient(
                leaf, Layout(mesh, [Replicate()], tuple(leaf.shape), [Partial()]), f"leaf{index}"
            )
            for index, leaf in enumerate(leaves)
        ]
    )
    hooks.install()
    return hooks


def on_two_ranks(body: Callable[[int], None]) -> None:
    run_ranks(body, 2)


def collectives(run: Callable[[], object]) -> int:
    with ledger() as log:
        run()
    return len([record for record in log.records if record.operation == "all_reduce"])


@pytest.mark.ranks
def test_every_shape_of_a_backward_pass_sums_once() -> None:
    def body(rank: int) -> None:
        own = torch.full((3,), float(rank + 1))
        a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        settled(a, b)

        # Two leaves, one of them used twice: one fused collective, worked out beforehand.
        with mock.patch.object(Settlement, "of", side_effect=AssertionError):
            assert collectives(lambda: ((a * own).sum() + (a * b * own).sum()).backward()) == 1
        assert a.grad is not None
        assert a.grad.tolist() == [6.0] * 3
        assert b.grad is not None
        assert b.grad.tolist() == [3.0] * 3

        # A second pass adds its own sum; the tensor that holds the gradient stays the same.
        held = a.grad
        (a * own).sum().backward()
        assert a.grad is held
        assert a.grad.tolist() == [9.0] * 3

        # A graph that is kept and run twice.
        a.grad = None
        loss = (a * own).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert a.grad.tolist() == [6.0] * 3

        # torch.autograd.grad leaves accumulated gradients as they are.
        (given,) = torch.autograd.grad((a * own).sum(), [a])
        assert given.tolist() == own.tolist()
        assert a.grad.tolist() == [6.0] * 3

    on_two_ranks(body)


@pytest.mark.ranks
def test_a_checkpointed_part_sums_once() -> None:
    def checkpointed(rank: int, reentrant: bool) -> None:
        own = torch.full((3,), float(rank + 1))
        a = torch.ones(3, requires_grad=True)
        settled(a)
        x = own.clone().requires_grad_(True)
        inner = checkpoint(lambda t: t * a, x, use_reentrant=reentrant)
        outer = inner * a  # the outer pass reaches the leaf before the inner one does
        for times in (1.0, 2.0):
            outer.sum().backward(retain_graph=True)
            assert a.grad is not None
            assert a.grad.tolist() == [6.0 * times] * 3

        second = torch.ones(3, requires_grad=True)
        settled(second)
        checkpoint(lambda t: t * second, x, use_reentrant=reentrant).sum().backward()
        assert second.grad is not None
        assert second.grad.tolist() == [3.0] * 3

    def body(rank: int) -> None:
        checkpointed(rank, True)
        checkpointed(rank, False)

    on_two_ranks(body)


@pytest.mark.ranks
def test_a_pass_that_failed_leaves_the_earlier_gradient() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            raise ArithmeticError("planted")

    def body(rank: int) -> None:
        own = torch.full((3,), float(rank + 1))
        a = torch.ones(3, requires_grad=True)
        settled(a)
        (a * own).sum().backward()
        late = torch.ones(3, requires_grad=True)
        broken = (a * Fails.apply(late)).sum()
        with pytest.raises(ArithmeticError):
            broken.backward()
        (a * own).sum().backward()
        assert a.grad is not None
        assert a.grad.tolist() == [6.0] * 3

    on_two_ranks(body)


@pytest.mark.ranks
def test_a_leaf_that_is_unfrozen_later_is_settled() -> None:
    def body(rank: int) -> None:
        a = torch.ones(3, requires_grad=False)
        settled(a)
        assert not a.requires_grad
        a.requires_grad_(True)
        (a * float(rank + 1)).sum().backward()
        assert a.grad is not None
        assert a.grad.tolist() == [3.0] * 3

    on_two_ranks(body)


@pytest.mark.ranks
def test_a_gradient_that_must_be_differentiable_is_refused() -> None:
    def body(rank: int) -> None:
        a = torch.ones(3, requires_grad=True)
        settled(a)
        with pytest.raises(RuntimeError, match="'leaf0': create_graph=True"):
            (a * a).sum().backward(create_graph=True)

    on_two_ranks(body)
