"""A thousand steps on a two-tier mesh track a single process."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_fsdp import fully_shard
from hp_platform.testing import run_ranks

STEPS, WORLD, VOCABULARY = 1000, 4, 17


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Mixture(nn.Module):
    """Each token goes to the expert that its router likes best. All experts are in the unit, so a
    rank whose tokens leave one out contributes zero to it."""

    def __init__(self, width, experts=4):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(experts)
        )

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(tokens[rows]) * weight[rows, None])
        return x + out.view_as(x)


class Model(nn.Module):
    def __init__(self, block, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(step, rank):
    """Sequences of x, 3x + 1, ... with some noise, so that there is something to learn."""
    generator = torch.Generator().manual_seed(WORLD * step + rank)
    ids = [torch.randint(VOCABULARY, (4, 1), generator=generator)]
    for _ in range(7):
        noise = torch.rand(4, 1, generator=generator) < 0.2
        ids.append(torch.where(noise, (ids[-1] + 5) % VOCABULARY, (3 * ids[-1] + 1) % VOCABULARY))
    return torch.cat(ids, 1)


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(model, ranks, steps):
    """Mean losses over all ranks' batches; `ranks` are those that this process computes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = torch.empty(steps, dtype=torch.float64)
    for step in range(steps):
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, tokens(step, rank)) for rank in ranks]).mean()
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    return losses


def measured(block, steps):
    """Pearson's r of the losses and the relative difference of the mean of the last ones."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        model = Model(block)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        return train(model, [rank], steps).tolist()

    sharded = torch.tensor(run_ranks(body, WORLD, timeout=1800), dtype=torch.float64).mean(0)
    single = train(Model(block), range(WORLD), steps)
    r = torch.corrcoef(torch.stack([sharded, single]))[0, 1].item()
    assert single[-1] < single[0] / 2, "the model has not learnt anything to be compared"
    return r, (abs(sharded[-1] - single[-1]) / single[-1]).item()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("block", [Block, Mixture])
def test_a_thousand_steps_track_a_single_process(block):
    r, difference = measured(block, STEPS)
    print(f"{block.__name__}: r = {r:.9f}, final losses differ by {difference:.5%}")
    assert r > 0.999997
    assert difference < 0.00034
