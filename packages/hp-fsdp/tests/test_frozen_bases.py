"""A frozen base of one type with trainable adapters of another, in one unit."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_fsdp.root import unit_of
from hp_fsdp.testing import assert_same, full_gradients
from hp_platform.testing import run_ranks


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).bfloat16().requires_grad_(False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        base = self.base(x.to(self.base.weight.dtype)).float()
        return torch.tanh(base + self.b(self.a(x.float())).float())


def made():
    torch.manual_seed(0)
    return nn.Sequential(*(Lora() for _ in range(3)))


def batch(rank):
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(rank))


@pytest.mark.ranks
def test_adapters_have_the_dense_gradients_and_bases_are_released_in_backward():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        wide = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        for policy in (MixedPrecisionPolicy(), wide):
            model, dense = made(), made()
            if policy is wide:
                dense.float()
            for layer in model:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            held = []

            def look(_, model=model, held=held):
                """Backward has come to the first layer: what the others held is free."""
                held.append([[b.is_held for b in unit_of(layer).buckets] for layer in model])

            first = model[0](batch(rank))
            first.register_hook(look)
            model[2](model[1](first)).square().mean().backward()
            for other in range(2):
                (dense(batch(other)).square().mean() / 2).backward()
            expected = {
                n: None if p.grad is None else p.grad.float() for n, p in dense.named_parameters()
            }
            assert_same(full_gradients(model), expected)
            assert all(layer.base.weight.grad is None for layer in model)
            assert [any(unit) for unit in held[0]] == [True, False, False]
            assert not any(b.is_held for layer in model for b in unit_of(layer).buckets)

    run_ranks(body, 2)
