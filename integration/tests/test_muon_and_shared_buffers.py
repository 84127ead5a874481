"""Muon on parameters that share a buffer: some whole on one rank, some cut anywhere."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import RaggedShard
from hp_fsdp import fully_shard
from hp_muon import Muon
from hp_platform.testing import run_ranks


def made():
    torch.manual_seed(0)
    sizes = ((24, 40), (40, 24), (24, 16))
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in sizes))


def batch(rank):
    return torch.ones(3, 24) * (rank + 1)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_steps_are_those_of_one_process(world):
    def body(rank):
        model, dense = made(), made()
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
        fully_shard(model, mesh=mesh, comm_policy="shared_buffer")
        placements = [p.placements[0] for p in model.parameters()]
        assert all(isinstance(placement, RaggedShard) for placement in placements)
        optimizers = [Muon(m.parameters(), lr=0.1) for m in (model, dense)]
        for _ in range(2):
            model(batch(rank)).square().mean().backward()
            sum(dense(batch(r)).square().mean() / world for r in range(world)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for parameter, expected in zip(model.parameters(), dense.parameters()):
            torch.testing.assert_close(
                parameter.full_tensor(), expected.detach(), rtol=1e-4, atol=1e-5
            )
        return placements

    # At 3 ranks one matrix is cut inside a row.
    assert any(p.dims == (0, 1) for p in run_ranks(body, world)[0]) == (world == 3)
