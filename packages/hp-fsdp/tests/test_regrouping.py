"""`reshard_after_forward=n` keeps parameters between neighbours until backward."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_fsdp.testing import assert_same, full_gradients
from hp_platform import ledger
from hp_platform.testing import run_ranks


class Net(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(
                checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            )
        return x


def batch(rank, step):
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.ranks
def test_backward_gathers_within_the_group_and_gradients_equal_the_dense_ones():
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = [
        {},
        {"comm_policy": "shared_buffer"},
        {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
        {"mp_policy": bf16},
    ]

    def body(rank):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
        for recompute in (False, True):
            for chosen in options:
                model, dense = Net(recompute), Net(False)
                for module in (*model.layers, model):
                    fully_shard(module, mesh=mesh, reshard_after_forward=2, **chosen)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                reference = torch.optim.SGD(dense.parameters(), lr=0.1)
                for step in range(3):
                    optimizer.zero_grad(), reference.zero_grad()
                    with ledger() as log:
                        loss = model(batch(rank, step)).float().square().mean()
                        loss.backward(retain_graph=step == 0)
                        if step == 0:  # without the part that was kept for the first one
                            loss.backward()
                    for other in range(4):
                        loss = dense(batch(other, step)).square().mean() / 4
                        (loss * (2 if step == 0 else 1)).backward()
                    expected = {name: p.grad for name, p in dense.named_parameters()}
                    close = {"rtol": 0.1, "atol": 0.02} if "mp_policy" in chosen else {}
                    assert_same(full_gradients(model), expected, **close)
                    optimizer.step(), reference.step()
                sizes = {
                    (r.origin.phase == "forward", r.axis_size)
                    for r in log.records
                    if r.operation == "all_gather"
                }
                packed = "shard_placement_fn" in chosen
                assert (True, 4) in sizes
                assert (False, 2) in sizes
                assert ((False, 4) in sizes) == packed, sizes

    run_ranks(body, 4, timeout=240)


@pytest.mark.ranks
def test_a_group_of_one_keeps_the_parameters_and_one_of_all_releases_them():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = nn.Sequential(nn.Linear(4, 4))
        layer = fully_shard(model[0], mesh=mesh, reshard_after_forward=1)
        fully_shard(model, mesh=mesh)
        model(torch.ones(1, 4))
        assert type(layer.weight) is nn.Parameter
        layer.set_reshard_after_forward(2)
        layer.reshard()
        model(torch.ones(1, 4))
        assert type(layer.weight) is not nn.Parameter

    run_ranks(body, 2)
