"""Small models, their data and meshes, which several files of tests train."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_fsdp import fully_shard


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


class Stack(nn.Module):
    """Layers in sequence, checkpointed in one of several ways."""

    def __init__(self, layer, depth=2, how="plain"):
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


def seeded(make):
    def made():
        torch.manual_seed(3)
        return make()

    return made


def square_loss(model, x):
    return model(x).square().mean()


def data(rank, width=8, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(3, width, generator=generator).requires_grad_(requires_grad)


def meshes(world):
    """One axis, and two where they fit."""
    found = [init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))]
    if world == 4:
        names = ("dp_replicate", "dp_shard")
        found.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    return found


def each_child(model, mesh):
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            fully_shard(child, mesh=mesh)
        else:
            for grandchild in child:
                fully_shard(grandchild, mesh=mesh)
    fully_shard(model, mesh=mesh)
