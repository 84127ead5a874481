"""Gradients as autograd leaves them: in memory that others see, lazily negated, of another type.

With peer memory they are read there; without it they are copied. Both give the dense gradients.
"""

import copy
import os

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor.mesh import mesh_axis
from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_fsdp.testing import assert_same, dense_backward, full_gradients
from hp_platform.meeting import SWITCH, share_memory
from hp_platform.testing import run_ranks

both_ways = pytest.mark.parametrize("peer_memory", ["1", "0"])


class OneMemory(torch.autograd.Function):
    """The gradients of `a` and `b` are views of one tensor, which autograd takes over."""

    @staticmethod
    def forward(ctx, x, a, b):
        return x + a + b

    @staticmethod
    def backward(ctx, gradient):
        summed = gradient.sum(0)
        return gradient, summed.view(-1), summed.view(-1)


class Negated(OneMemory):
    """The memory of `a`'s gradient holds the negated values."""

    @staticmethod
    def backward(ctx, gradient):
        summed = gradient.sum(0)
        return gradient, torch._neg_view(-summed), summed.clone()


class Added(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.a, self.b = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.how.apply(x, self.a, self.b)


class Conjugated(nn.Module):
    """Autograd conjugates the gradients of `v` lazily."""

    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.complex(torch.ones(5), torch.arange(5.0)))
        self.w = nn.Parameter(torch.complex(torch.arange(5.0), torch.ones(5)))

    def forward(self, x):
        return torch.view_as_real((self.v.conj() + self.w) * x)


def pair(make, peer_memory, policy="per_parameter", **options):
    """A sharded model and the dense one."""
    os.environ[SWITCH] = peer_memory
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), make())
    dense = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    fully_shard(model, mesh=mesh, comm_policy=policy, **options)
    return model, dense


def loss_of(model, x):
    return model(x.to(model[0].weight.dtype)).square().mean()


def train(model, dense, rank, steps, between=lambda model, number: None):
    """Accumulates over `steps` micro-steps, of which the last one reduces, and compares."""
    for number in range(steps):
        batches = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(number))
        model.set_requires_gradient_sync(number == steps - 1)
        loss_of(model, batches[rank]).backward()
        # Plain autograd adds up wrongly in memory that two gradients share.
        earlier = [p.grad for p in dense.parameters()]
        dense.zero_grad()
        dense_backward(dense, batches, loss_of)
        for p, gradient in zip(dense.parameters(), earlier):
            p.grad = p.grad.clone() if gradient is None else p.grad + gradient
        for each in (model, dense):
            between(each, number)
    assert_same(full_gradients(model), {name: p.grad for name, p in dense.named_parameters()})


@pytest.mark.ranks
@both_ways
@pytest.mark.parametrize("policy", ["per_parameter", "shared_buffer"])
def test_gradients_in_memory_that_others_see_or_that_holds_negated_values(peer_memory, policy):
    def body(rank):
        for how in (OneMemory, Negated):
            for steps in (1, 2, 3):
                train(*pair(lambda: Added(how), peer_memory, policy), rank, steps)  # noqa: B023

    run_ranks(body, 2)


@pytest.mark.ranks
def test_gradients_that_are_conjugated_lazily():
    def body(rank):
        os.environ[SWITCH] = "1"
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        if not share_memory(mesh_axis(mesh, 0)):
            return False  # gloo sums no complex numbers
        for steps in (1, 2):
            train(*pair(Conjugated, "1"), rank, steps)
        return True

    if not all(run_ranks(body, 2)):
        pytest.skip("this system lets no process read another's memory")


@pytest.mark.ranks
@both_ways
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_a_change_of_type_between_micro_steps_keeps_their_gradients(peer_memory, reduce_dtype):
    def to_double(model, number):
        if number == 0:
            model.double()

    def body(rank):
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        for comm in ("per_parameter", "shared_buffer"):
            model, dense = pair(nn.Tanh, peer_memory, comm, mp_policy=policy)
            train(model, dense, rank, 3, to_double)

    run_ranks(body, 2)


class Aside(nn.Module):
    """Its loss does not depend on its outputs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        self.loss = (x * self.scale).square().mean()
        return x.detach()


@pytest.mark.ranks
@both_ways
@pytest.mark.parametrize("policy", ["per_parameter", "shared_buffer"])
def test_micro_steps_add_up_where_backward_does_not_pass_the_outputs(
    monkeypatch, peer_memory, policy
):
    def loss_aside(model, x):
        model(x)
        return model[1].loss

    def body(rank):
        monkeypatch.setitem(globals(), "loss_of", loss_aside)
        for steps in (1, 2, 3):
            kept = {"reshard_after_forward": False}
            train(*pair(Aside, peer_memory, policy, **kept), rank, steps)

    run_ranks(body, 2)


@pytest.mark.ranks
def test_gradients_of_a_type_that_the_program_has_chosen():
    def body(rank):
        os.environ[SWITCH] = "1"
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        if not share_memory(mesh_axis(mesh, 0)):
            return False  # PyTorch refuses the place that gradients are given
        for steps in (1, 2, 3):
            model, dense = pair(nn.Tanh, "1")
            model.unshard()
            model[0].weight.grad_dtype = torch.float64
            model.reshard()
            train(model, dense, rank, steps)
        return True

    if not all(run_ranks(body, 2)):
        pytest.skip("this system lets no process read another's memory")
