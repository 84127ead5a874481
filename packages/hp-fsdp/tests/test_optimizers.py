import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hp_fsdp
from hp_fsdp import fully_shard
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
