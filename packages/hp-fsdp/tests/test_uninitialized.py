"""Buffers that a start on the meta device leaves without values."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_fsdp import UsageError, fully_shard, load_full_state_dict
from hp_platform.testing import run_ranks


class Rotary(nn.Module):
    def __init__(self, fill):
        super().__init__()
        self.e = nn.Linear(4, 4, bias=False)
        self.o = nn.Linear(4, 4, bias=False)
        self.o.weight = self.e.weight
        self.resets = 0
        self.fill = fill
        self.register_buffer("inv", torch.arange(4.0), persistent=False)
        self.register_buffer("kept", torch.ones(2))

    def reset_parameters(self):
        self.resets += 1
        if self.fill == "in place":
            self.inv.copy_(torch.arange(4.0))
        elif self.fill == "through data":
            self.inv.data.copy_(torch.arange(4.0))
        elif self.fill == "replaced":
            self.inv = torch.arange(4.0)

    def forward(self, x):
        return self.o(self.e(x)) * self.inv + self.kept.sum()


@pytest.mark.ranks
def test_a_start_on_the_meta_device_is_right_or_names_the_buffers_that_nobody_filled():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        torch.manual_seed(0)
        dense = nn.Sequential(Rotary("nobody"))
        for fill in ("in place", "through data", "replaced", "nobody"):
            with torch.device("meta"):
                model = nn.Sequential(Rotary(fill))
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
            model.to_empty(device="cpu")
            assert model[0].e.weight is model[0].o.weight
            model[0].reset_parameters()
            load_full_state_dict(model, dense.state_dict())
            x = torch.ones(2, 4)
            if fill == "nobody":
                with pytest.raises(UsageError, match=r"buffers \['0.inv'\] hold no values"):
                    model(x)
                model[0].inv.copy_(torch.arange(4.0))
            assert torch.equal(model(x), dense(x))
            assert model[0].inv.tolist() == [0, 1, 2, 3]
            assert model[0].resets == 1
            model.to(torch.float64)  # moves values, and leaves nothing to be filled
            assert torch.allclose(model(x.double()), dense(x).double())

    run_ranks(body, 2)
