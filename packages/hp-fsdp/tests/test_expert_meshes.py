"""Experts over a smaller data axis than the rest: divisors, accumulation, clipping and scaling."""

import math

import pytest
import torch
from drawn_model import Experts, Plain
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import DTensor, Layout, Replicate, Shard, attach_layout
from hp_fsdp import fully_shard
from hp_fsdp.testing import assert_same, full_gradients, full_parameters
from hp_platform import ledger
from hp_platform.testing import run_ranks


def mesh_of(**axes):
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def experts_of_ones(mesh, *data):
    """Two experts `y = w x` with w = 1, sharded over the axes `data` under the expert axis."""
    experts = Experts(1, 1, 2)
    nn.init.ones_(experts.weight)
    experts.distribute(mesh)
    fully_shard(experts, mesh=mesh[data])
    experts.set_gradient_divide_factor(mesh.size())
    return experts


@pytest.mark.ranks
@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (1, 2), (2, 1)])
def test_experts_gradients_are_of_the_mean_loss_over_all_ranks(replicas, shards):
    """Tokens 1, 2 on the first rank, 3, 4 on the second, and so on: one for each expert."""
    world = 2 * replicas * shards

    def body(rank):
        mesh = mesh_of(dp_replicate=replicas, dp_shard=shards, ep=2)
        experts = experts_of_ones(mesh, "dp_replicate", "dp_shard")
        experts(torch.tensor([[1.0], [2.0]]) + 2 * rank).mean().backward()
        return experts.weight.grad.full_tensor().flatten().tolist()

    # The first token of every rank goes to the first expert; a loss is the mean of two.
    first = sum(range(1, 2 * world, 2)) / (2 * world)
    assert run_ranks(body, world) == [[first, first + 0.5]] * world
    if world == 2:
        assert first == 1.0


@pytest.mark.ranks
def test_accumulated_gradients_of_experts_are_those_of_all_micro_steps_in_every_mode():
    def body(rank):
        mesh = mesh_of(dp_replicate=2, dp_shard=1, ep=2)
        found = []
        for mode in ("every time", "fast tier until the last", "nothing until the last"):
            experts = experts_of_ones(mesh, "dp_replicate", "dp_shard")
            with ledger() as log:
                for step in range(3):
                    if mode == "nothing until the last":
                        experts.set_requires_gradient_sync(step == 2)
                    elif mode == "fast tier until the last":
                        experts.set_requires_all_reduce(step == 2)
                    experts(torch.full((2, 1), (rank + 1) * 10.0**step)).sum().backward()
            crossed = [r for r in log.records if r.operation == "all_reduce"]
            found.append((experts.weight.grad.full_tensor().flatten().tolist(), len(crossed)))
        return found

    assert run_ranks(body, 4) == [[([277.5, 277.5], count) for count in (3, 1, 1)]] * 4


class Routed(nn.Module):
    """A layer on all ranks, then experts on half of them, then a plain parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.experts = Plain(3, 4), Experts(4, 5, 3)
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return torch.tanh(self.experts(torch.tanh(self.dense(x)))) * self.scale


def routed():
    """Experts on (dp_shard, ep), the rest on an axis of all four ranks."""
    model, mesh = Routed(), mesh_of(dp_shard=2, ep=2)
    model.experts.distribute(mesh)
    fully_shard(model.experts, mesh=mesh["dp_shard"])
    model.experts.set_gradient_divide_factor(4)
    everyone = mesh_of(dp=4)
    fully_shard(model.dense, mesh=everyone)
    fully_shard(model, mesh=everyone)
    return model


def batch(rank, step=0):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model, dense, rank, step, scale=lambda loss: loss):
    scale(model(batch(rank, step)).square().mean()).backward()
    torch.stack([dense(batch(other, step)).square().mean() for other in range(4)]).mean().backward()


def dense_gradients(dense):
    return {name: p.grad for name, p in dense.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize("foreach", [False, True])
def test_a_model_on_two_meshes_is_clipped_by_the_norm_of_all_its_gradients(foreach):
    def body(rank):
        model, dense = routed(), Routed()
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, dense)]
        for step in range(3):
            backward(model, dense, rank, step)
            assert_same(full_gradients(model), dense_gradients(dense))
            found, expected = (
                nn.utils.clip_grad_norm_(m.parameters(), 0.01, foreach=foreach)
                for m in (model, dense)
            )
            assert found.item() == pytest.approx(expected.item(), rel=1e-5)
            assert found.item() > 0.01
            assert_same(full_gradients(model), dense_gradients(dense))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same(full_parameters(model), full_parameters(dense), rtol=1e-4, atol=1e-5)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_norms_of_known_gradients_on_two_meshes_and_plain_ones():
    def body(rank):
        mesh, everyone = mesh_of(edp=2, ep=2), mesh_of(dp=4)
        a, b = nn.Module(), nn.Module()
        a.weight = nn.Parameter(torch.zeros(8))
        layout = Layout(mesh, (Replicate(), Shard(0)), (8,))
        b.weight = attach_layout(nn.Parameter(torch.zeros(4)), layout)
        fully_shard(a, mesh=everyone)
        fully_shard(b, mesh=mesh["edp"])
        c = nn.Parameter(torch.zeros(2))

        def set_gradients():
            a.weight.grad = DTensor.of_layout(torch.full((2,), 3.0), a.weight.layout)
            value = 2.0 if rank % 2 == 0 else 4.0
            b.weight.grad = DTensor.of_layout(torch.full((2,), value), b.weight.layout)
            c.grad = torch.ones(2)

        norms = []
        for foreach in (False, True):
            for chosen in ((a.weight, b.weight), (a.weight, c)):
                set_gradients()
                norm = nn.utils.clip_grad_norm_(chosen, 1.0, foreach=foreach).item()
                norms.append(norm)
                factor = 1 / (norm + 1e-6)
                assert a.weight.grad.full_tensor().tolist() == pytest.approx([3 * factor] * 8)
                if chosen[1] is c:
                    assert c.grad.tolist() == pytest.approx([factor] * 2)
                else:
                    wanted = [2 * factor] * 4 + [4 * factor] * 4
                    assert b.weight.grad.full_tensor().tolist() == pytest.approx(wanted)
        return norms

    for norms in run_ranks(body, 4):
        assert norms == pytest.approx([12.328828, math.sqrt(74)] * 2)


@pytest.mark.ranks
def test_a_scaler_skips_the_step_of_all_ranks_where_one_shard_overflows():
    def body(rank):
        model, dense = routed(), Routed()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, dense)]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        before = full_parameters(dense)
        scales = []
        # Shards of each kind, each on another rank; then nothing overflows.
        overflows = [("experts.weight", 1), ("dense.weight", 3), ("scale", 2), None, None]
        for step, overflow in enumerate(overflows):
            backward(model, dense, rank, step, scaler.scale)
            if overflow is not None and overflow[1] == rank:
                model.get_parameter(overflow[0]).grad.to_local().view(-1)[0] = torch.inf
            scaler.unscale_(optimizers[0])
            if overflow is None:
                norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (model, dense)]
                assert norms[0].item() == pytest.approx(norms[1].item(), rel=1e-4)
                optimizers[1].step()
            scaler.step(optimizers[0])
            scaler.update()
            scales.append(scaler.get_scale())
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected = before if overflow else full_parameters(dense)
            assert_same(full_parameters(model), expected, rtol=1e-4, atol=1e-5)
        return scales

    assert run_ranks(body, 4) == [[512, 256, 128, 128, 256]] * 4
