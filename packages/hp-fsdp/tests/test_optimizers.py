import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hp_fsdp
from hp_fsdp import fully_shard
from hp_platform import ledger
from hp_platform.testing import run_ranks


@pytest.mark.ranks
def test_an_optimizer_that_holds_something_other_than_shards_is_refused_at_its_step():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        refusal = "parameter 0 of group 0, a plain tensor of shape \\(4, 4\\)"

        early = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(early.parameters(), lr=0.1)
        fully_shard(early, mesh=mesh)
        early(torch.ones(1, 4)).sum().backward()
        with pytest.raises(hp_fsdp.UsageError, match=refusal):
            optimizer.step()

        # The root keeps its parameters gathered between forward and backward.
        between = fully_shard(nn.Linear(4, 4), mesh=mesh)
        loss = between(torch.ones(1, 4)).sum()
        optimizer = torch.optim.AdamW(between.parameters())
        loss.backward()
        with pytest.raises(hp_fsdp.UsageError, match=refusal):
            optimizer.step()
        torch.optim.AdamW(between.parameters()).step()

        plain = nn.Linear(4, 4)
        plain(torch.ones(1, 4)).sum().backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()

    run_ranks(body, 2)


@pytest.mark.ranks
def test_shards_and_their_gradients_are_found_whatever_is_gathered():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        fully_shard(model[0], mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
        model.set_reshard_after_backward(False)
        shards = list(model.parameters())
        for _ in range(2):
            with ledger() as log:
                model(torch.ones(1, 4)).sum().backward()
        gathers = [r.origin.phase for r in log.records if r.operation == "all_gather"]
        assert gathers == ["backward", "backward"]  # the first layer's; forward found all in place
        assert [id(p) for p in model.parameters()] == [id(p) for p in shards]
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor() > 1

        before = model[1].weight.full_tensor().detach()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not torch.equal(model[1].weight.full_tensor(), before)
        with torch.no_grad():
            bias, weight = model[0].bias.full_tensor(), model[1].weight.full_tensor()
            expected = (model[0].weight.full_tensor().sum(1) + bias) @ weight.T
            torch.testing.assert_close(model(torch.ones(1, 4))[0], expected)

        loss = model(torch.ones(1, 4)).sum()
        model.zero_grad()  # the root's parameters are gathered now
        loss.backward()
        grown = [p.grad.full_tensor() for p in model.parameters()]
        model.zero_grad()
        assert all(p.grad is None for p in shards)
        model(torch.ones(1, 4)).sum().backward()
        for parameter, gradient in zip(shards, grown):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient)

    run_ranks(body, 2)
