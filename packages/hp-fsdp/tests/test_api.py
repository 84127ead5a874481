"""The sharded model computes what the dense one does, whatever it is made of."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_fsdp import fully_shard
from hp_fsdp.testing import (
    assert_same,
    assert_trains_like_dense,
    full_gradients,
)
from hp_platform.testing import run_ranks

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Token ids in, so that no input requires a gradient."""

    def __init__(self, width: int = 8, vocabulary: int = 11, depth: int = 3, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded(make):
    def made():
        torch.manual_seed(3)
        return make()

    return made


def token_loss(model, ids):
    logits = model(ids)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def square_loss(model, x):
    return model(x).square().mean()


def token_batches(steps, ranks, vocabulary=11):
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randint(vocabulary, (2, 6), generator=generator) for _ in range(ranks)]
        for _ in range(steps)
    ]


def vector_batches(steps, ranks, width):
    generator = torch.Generator().manual_seed(7)
    return [
        [torch.randn(3, width, generator=generator) for _ in range(ranks)] for _ in range(steps)
    ]


def shard_blocks(model, **kwargs):
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def meshes(world):
    """One axis, and two where they fit."""
    found = [init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))]
    if world == 4:
        names = ("dp_replicate", "dp_shard")
        found.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_and_three_optimizer_steps_equal_the_dense_model(world):
    def body(rank):
        for mesh in meshes(world):
            for name, optimizer in OPTIMIZERS.items():
                for tied in (False, True):
                    for reshard in (None, False):
                        assert_trains_like_dense(
                            seeded(lambda tied=tied: Net(tied=tied)),
                            lambda m, mesh=mesh, r=reshard: shard_blocks(
                                m, mesh=mesh, reshard_after_forward=r
                            ),
                            token_batches(3, world),
                            rank,
                            token_loss,
                            optimizer,
                            rtol=1e-4 if name == "adamw" else 1e-5,
                            atol=1e-5,
                        )

    run_ranks(body, world)


# -- models that use their parameters in unusual ways ---------------------------------------------


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


class Stack(nn.Module):
    """Layers in sequence, checkpointed in one of several ways."""

    def __init__(self, layer, depth=3, how="plain"):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.how = how

    def segment(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        if self.how == "plain":
            return self.segment(x)
        kind, reentrant = self.how.split()
        if kind == "whole":
            return checkpoint(self.segment, x, use_reentrant=reentrant == "reentrant")
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant == "reentrant")
        return x


class Switch(nn.Module):
    """Uses one of its branches, chosen by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 8)

    def forward(self, x, branch):
        return self.last(self.branches[branch](x))


def each_child(model, mesh):
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            fully_shard(child, mesh=mesh)
        else:
            for grandchild in child:
                fully_shard(grandchild, mesh=mesh)
    fully_shard(model, mesh=mesh)


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
            assert isinstance(parameter, hp_dtensor_type()), "a gathered parameter was left behind"
        model.zero_grad()
        dense.zero_grad()


def hp_dtensor_type():
    from hp_dtensor import DTensor

    return DTensor


def data(rank, width=8, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(3, width, generator=generator).requires_grad_(requires_grad)


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
    "checkpoint frozen": (
        lambda: Stack(Lora, how="each saved"),
        [with_input_gradient, simple, two_forwards_together],
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_equal_the_dense_ones_however_parameters_are_used(world):
    def body(rank):
        mesh = meshes(world)[-1]
        for name, (make, runs) in CASES.items():
            for run in runs:
                for shard in (one_unit, each_child):
                    try:
                        check_backward(make, lambda m, s=shard: s(m, mesh), run, world, rank)
                    except BaseException as error:
                        error.add_note(f"case {name}, {run.__name__}, {shard.__name__}")
                        raise

    run_ranks(body, world)
