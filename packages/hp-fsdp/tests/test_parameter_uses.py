"""Gradients equal the dense ones however a model uses its parameters."""

import pytest
import torch
from small_networks import Block, Stack, data, each_child, meshes, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DTensor
from hp_fsdp import fully_shard
from hp_fsdp.testing import (
    assert_same,
    full_gradients,
)
from hp_platform.testing import run_ranks


class Twice(nn.Module):
    """The same layer twice, the second time on the first's result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.layer(torch.tanh(self.layer(x))))


class Lora(nn.Module):
    """A frozen base beside trainable adapters, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a = nn.Linear(8, 2, bias=False)
        self.b = nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.b(self.a(x)))


class FrozenAfterTrainable(nn.Module):
    """The frozen layer is still needed in backward when the trainable bias is long done."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.frozen(torch.tanh(self.frozen(x))) + self.bias


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)


class Tuple(nn.Module):
    """Several outputs in a nested structure, of which the loss uses two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x, *, scale):
        return {"a": self.first(x) * scale, "rest": (self.second(x), x.sum())}


class PartlyCheckpointed(nn.Module):
    """A unit that checkpoints a layer of its own, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return x * self.scale


class FrozenBehindAUnit(nn.Module):
    """The root's trainable bias is done before its frozen weight has served the inner unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.first(x) @ self.frozen + self.bias


class ReusedInCheckpoints(nn.Module):
    """The root's weight gets a gradient from two backwards inside the outer one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(y @ self.weight), x, use_reentrant=True)
        return x


def one_unit(model, mesh):
    fully_shard(model, mesh=mesh)


def check_backward(make, shard, run, world, rank, *, passes=2, zero_is_none=False):
    """`run(model, rank, scale)` does forwards and backwards; the dense model does all ranks'."""
    model, dense = seeded(make)(), seeded(make)()
    shard(model)
    for _ in range(passes):
        run(model, rank, 1.0)
        for other in range(world):
            run(dense, other, 1.0 / world)
        expected = {name: p.grad for name, p in dense.named_parameters()}
        assert_same(full_gradients(model), expected, zero_is_none=zero_is_none)
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor), "a gathered parameter was left behind"
        model.zero_grad()
        dense.zero_grad()


def simple(model, rank, scale, requires_grad=False):
    (model(data(rank, requires_grad=requires_grad)).square().mean() * scale).backward()


def with_input_gradient(model, rank, scale):
    simple(model, rank, scale, requires_grad=True)


def two_forwards(model, rank, scale):
    first = model(data(rank)).square().mean()
    second = model(data(rank, seed=1)).sin().sum()
    (first * scale).backward()
    (second * scale).backward()


def two_forwards_together(model, rank, scale):
    ((model(data(rank)) * model(data(rank))).sum() * scale).backward()


def twice_through_the_graph(model, rank, scale):
    loss = model(data(rank)).square().mean() * scale
    loss.backward(retain_graph=True)
    loss.backward()


def after_no_grad(model, rank, scale):
    with torch.no_grad():
        model(data(rank, seed=2))
    with torch.inference_mode():
        model(data(rank, seed=3))
    simple(model, rank, scale)


def nested_outputs(model, rank, scale):
    found = model(data(rank), scale=2.0)
    ((found["a"].sum() + found["rest"][0].square().sum()) * scale).backward()


CHECKPOINTING = [f"{kind} {how}" for kind in ("each", "whole") for how in ("reentrant", "saved")]
CASES = {
    "twice": (Twice, [simple, with_input_gradient, two_forwards, two_forwards_together]),
    "lora": (lambda: Stack(Lora), [simple, with_input_gradient, two_forwards_together]),
    "frozen after trainable": (
        lambda: Stack(FrozenAfterTrainable),
        [simple, with_input_gradient, two_forwards_together],
    ),
    "frozen unit": (
        lambda: nn.Sequential(
            nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        ),
        [simple, two_forwards_together, twice_through_the_graph],
    ),
    "plain": (
        lambda: Stack(lambda: Block(8)),
        [twice_through_the_graph, after_no_grad, two_forwards],
    ),
    "nested outputs": (Tuple, [nested_outputs]),
    **{
        f"checkpoint {how}": (
            lambda how=how: Stack(lambda: Block(8), how=how),
            # Reentrant checkpointing needs an input that requires a gradient.
            [with_input_gradient, two_forwards_together]
            if how.endswith("saved")
            else [with_input_gradient],
        )
        for how in CHECKPOINTING
    },
    "frozen behind a unit": (FrozenBehindAUnit, [simple]),
    "reused in checkpoints": (ReusedInCheckpoints, [simple]),
    "checkpoint inside": (lambda: Stack(PartlyCheckpointed), [with_input_gradient]),
    "checkpoint frozen": (
        lambda: Stack(Lora, how="each saved"),
        [with_input_gradient, simple, two_forwards_together],
    ),
}


ALL, HARDEST = slice(None), slice(-1, None)
"""Which runs of a case: how its units are wrapped and replicated matters to all of them alike."""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "wrappings"),
    [
        (2, {each_child: ALL, one_unit: HARDEST}),
        (4, {each_child: HARDEST}),
        pytest.param(2, {one_unit: ALL}, marks=pytest.mark.slow),
        pytest.param(4, {each_child: ALL, one_unit: ALL}, marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_the_dense_ones_however_parameters_are_used(world, wrappings):
    def body(rank):
        mesh = meshes(world)[-1]
        for name, (make, runs) in CASES.items():
            for shard, chosen in wrappings.items():
                for run in runs[chosen]:
                    try:
                        check_backward(make, lambda m, s=shard: s(m, mesh), run, world, rank)
                    except BaseException as error:
                        error.add_note(f"case {name}, {run.__name__}, {shard.__name__}")
                        raise

    run_ranks(body, world, timeout=240)
