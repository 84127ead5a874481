"""Muon beside PyTorch's own parallelism: FSDP2, HSDP, tensor parallelism, DDP."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hp_muon import Muon
from hp_muon.reference import DenseMuon
from hp_platform import ledger
from hp_platform.testing import run_ranks

ARGUMENTS = {"ns_dtype": torch.float32, "weight_decay": 0.1}
STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def batch(step: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's rows of the global batch of 8."""
    full = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(step))
    return full.chunk(ranks)[rank]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) * torch.arange(6.0)).pow(2).mean()


def groups(model: nn.Module) -> list[dict]:
    named = list(model.named_parameters())
    matrices = [(n, p) for n, p in named if p.ndim >= 2]
    others = [(n, p) for n, p in named if p.ndim < 2]
    return [
        {"params": matrices, "lr": 0.02},
        {"params": others, "lr": 3e-3, "use_muon": False},
    ]


def dense_losses() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_model()
    matrices, others = groups(model)
    optimizer = DenseMuon(
        [p for _, p in matrices["params"]],
        [p for _, p in others["params"]],
        lr=0.02,
        adamw_lr=3e-3,
        **ARGUMENTS,
    )
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        loss = loss_of(model, batch(step, 0, 1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def train(model: nn.Module, rank: int, ranks: int, **arguments: object) -> Muon:
    optimizer = Muon(groups(model), **ARGUMENTS, **arguments)  # type: ignore[arg-type]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step, rank, ranks)).backward()
        optimizer.step()
    return optimizer


def assert_equals_dense(model: nn.Module, dense: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        torch.testing.assert_close(full.detach(), dense[name].detach(), atol=2e-5, rtol=1e-4)


def tensor_parallel(model: nn.Module, mesh: object) -> nn.Module:
    for block in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


@pytest.mark.ranks
def test_fsdp2_trains_as_one_process_with_uneven_and_empty_shards():
    _, dense = dense_losses()

    def body(rank):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = make_model()
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, rank, 4)
        assert_equals_dense(model, dense)

    run_ranks(body, 4)


@pytest.mark.ranks
@pytest.mark.parametrize("deduplicate", [True, False])
def test_hsdp_trains_as_one_process(deduplicate):
    _, dense = dense_losses()

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = make_model()
        fully_shard(model, mesh=mesh)
        optimizer = train(model, rank, 4, deduplicate_replicas=deduplicate)
        assert_equals_dense(model, dense)
        return [s["momentum_buffer"].numel() for s in optimizer.state.values() if "step" not in s]

    held = run_ranks(body, 4)
    full = sum(p.numel() for n, p in make_model().named_parameters() if p.ndim >= 2)
    copies = 1 if deduplicate else 2
    assert sum(map(sum, held)) == copies * full


@pytest.mark.ranks
def test_fsdp2_over_tensor_parallelism_trains_as_one_process():
    _, dense = dense_losses()

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = tensor_parallel(make_model(), mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
        train(model, mesh["dp"].get_local_rank(), 2)
        assert_equals_dense(model, dense)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_tensor_parallelism_alone_trains_as_one_process():
    _, dense = dense_losses()

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = tensor_parallel(make_model(), mesh)
        train(model, 0, 1)
        assert_equals_dense(model, dense)

    run_ranks(body, 2)


@pytest.mark.ranks
def test_ddp_trains_as_one_process_without_communication_of_muon():
    _, dense = dense_losses()

    def body(rank):
        model = nn.parallel.DistributedDataParallel(make_model())
        with ledger() as log:
            train(model, rank, 2)
        assert log.records == []
        assert_equals_dense(model.module, dense)

    run_ranks(body, 2)


def test_plain_parameters_train_as_the_reference():
    _, dense = dense_losses()
    model = make_model()
    train(model, 0, 1)
    assert_equals_dense(model, dense)


def test_the_adamw_group_equals_torch_adamw():
    model, other = make_model(), make_model()
    optimizer = Muon([{"params": model.parameters(), "use_muon": False}], lr=1e-2, weight_decay=0.2)
    reference = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.2)
    for step in range(3):
        for m, o in ((model, optimizer), (other, reference)):
            o.zero_grad()
            loss_of(m, batch(step, 0, 1)).backward()
            o.step()
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine, theirs)


def test_a_deep_copy_continues_as_the_original():
    model = make_model()
    optimizer = train(model, 0, 1)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (twin, twin_optimizer)):
        o.zero_grad()
        loss_of(m, batch(9, 0, 1)).backward()
        o.step()
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        assert torch.equal(mine, theirs)
