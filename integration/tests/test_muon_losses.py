"""Muon over a run: beside PyTorch FSDP2, HSDP, DDP and our FSDP, the losses of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from hp_fsdp import fully_shard
from hp_muon import Muon, split_parameters
from hp_platform.testing import run_ranks

RANKS = 4
Wrap = Callable[[nn.Sequential], nn.Module]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Embedding(13, 12),
        nn.Linear(12, 20),
        nn.Tanh(),
        nn.Linear(20, 10),
        nn.Linear(10, 13),
    ]
    return nn.Sequential(*layers)


def losses(model: nn.Module, optimizer: Muon, steps: int, rank: int, ranks: int) -> list[float]:
    """Of this rank's share of each batch."""
    found = []
    for step in range(steps):
        tokens = torch.randint(13, (8, 6), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(ranks)[rank]
        optimizer.zero_grad()
        logits = model(mine)
        # A task that can be learnt: each token's successor.
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ((mine + 1) % 13).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def optimizer_of(model: nn.Module) -> Muon:
    groups = split_parameters(model, lr=1e-2, adamw_lr=1e-2, adamw=["*4.weight"])
    return Muon(groups, ns_dtype=torch.float32)


def torch_fsdp2(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    for layer in (model[1], model[3]):
        torch_fully_shard(layer, mesh=mesh)
    return torch_fully_shard(model, mesh=mesh)


def torch_hsdp(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return torch_fully_shard(model, mesh=mesh)


def our_fsdp(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp(model: nn.Sequential) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def compare(wrap: Wrap, steps: int) -> None:
    model = make_model()
    expected = losses(model, optimizer_of(model), steps, 0, 1)

    def body(rank: int) -> list[float]:
        model = wrap(make_model())
        return losses(model, optimizer_of(model), steps, rank, RANKS)

    shares = run_ranks(body, RANKS, timeout=500)
    found = [sum(values) / RANKS for values in zip(*shares)]
    assert expected[-1] < 0.8 * expected[0]
    assert found == pytest.approx(expected, abs=1e-3)


SIDES = [torch_fsdp2, torch_hsdp, ddp, our_fsdp]


@pytest.mark.ranks
@pytest.mark.parametrize("wrap", SIDES)
def test_a_short_run_has_the_losses_of_one_process(wrap: Wrap) -> None:
    compare(wrap, 40)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("wrap", SIDES)
def test_200_steps_have_the_losses_of_one_process(wrap: Wrap) -> None:
    compare(wrap, 200)
