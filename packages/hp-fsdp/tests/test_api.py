"""The sharded model computes what the dense one does, whatever it is made of."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import hp_fsdp
from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_fsdp.testing import (
    assert_same,
    assert_trains_like_dense,
    dense_backward,
    full_gradients,
    full_parameters,
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
