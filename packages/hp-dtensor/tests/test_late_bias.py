"""A bias of a layer cut by input features is added once, in both modes."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.parallelize import parallelize
from hp_dtensor.plan import (
    REPLICATED,
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    ParameterSpec,
    ShardingPlan,
    partial_sum,
    replicated_with_partial_gradient,
    sharded,
)
from hp_dtensor.production import local_part
from hp_platform.testing import run_ranks

pytestmark = pytest.mark.ranks

MESH = AbstractMesh(("tp",), (2,))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(8, 6)

    def forward(self, x):
        return self.down(x).tanh()


def row_parallel(after, bias):
    down = BoundarySpec(
        "down",
        BoundaryKind.MLP,
        inputs=(BoundaryTensor("input", REPLICATED, sharded("tp", -1)),),
        outputs=(BoundaryTensor("", after, partial_sum("tp")),),
    )
    block = BoundarySpec(
        "",
        BoundaryKind.MODEL,
        inputs=(BoundaryTensor("x", REPLICATED, REPLICATED, plain=True),),
        outputs=(BoundaryTensor("", REPLICATED, after),),
    )
    parameters = (
        ParameterSpec("down.weight", "down", (6, 8), sharded("tp", 1), "down"),
        ParameterSpec("down.bias", "down_bias", (6,), bias, "down"),
    )
    return ShardingPlan("Block", MESH, ("tp",), parameters, (block, down))


@pytest.mark.parametrize("mode", ["production", "validate"])
@pytest.mark.parametrize(
    ("after", "bias"),
    [
        (REPLICATED, REPLICATED),
        (sharded("tp", 1), replicated_with_partial_gradient("tp")),
    ],
)
def test_the_bias_is_added_once_to_the_sum(mode, after, bias: Contract):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 4, 8)
    dense = copy.deepcopy(model)
    wanted = dense(x)
    wanted.square().sum().backward()
    plan = row_parallel(after, bias)

    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mine = parallelize(copy.deepcopy(model), plan, mesh, mode=mode)
        out = mine(x)
        out.square().sum().backward()
        whole = out.to_local() if mode == "validate" else out
        torch.testing.assert_close(whole.detach(), wanted.detach())
        for spec in plan.parameters:
            found = mine.get_parameter(spec.name).grad
            found = found.to_local() if mode == "validate" else found
            layout = Layout(MESH, spec.contract.on(MESH)[0], spec.shape)
            torch.testing.assert_close(
                found, local_part(dense.get_parameter(spec.name).grad, layout, (rank,))
            )
        return True

    assert all(run_ranks(body, 2))
