"""A model under `fully_shard` and PyTorch's own wrappers: one clear error, before all messages."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hp_fsdp import fully_shard
from hp_fsdp.errors import ShardingError, UsageError
from hp_platform.testing import run_ranks

pytestmark = pytest.mark.ranks


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])


def sharded_first(mesh):
    model = blocks()
    fully_shard(model[0], mesh=mesh)
    return model


def other(wrap):
    """A model whose first block PyTorch has wrapped."""

    def made(mesh):
        model = blocks()
        model[0] = wrap(model[0], mesh)
        return model

    return made


def by_fsdp2(module, mesh):
    return torch_fully_shard(module, mesh=mesh)


def by_fsdp1(module, mesh):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


@pytest.mark.parametrize(
    ("model", "wrap", "match"),
    [
        (other(by_fsdp2), fully_shard, r"PyTorch's fully_shard has sharded '0'; a model is"),
        (other(by_fsdp1), fully_shard, r"FullyShardedDataParallel has sharded '0'"),
        # By themselves, at the first shard that they read.
        (sharded_first, torch_fully_shard, r"overlapping meshes"),
        (sharded_first, by_fsdp1, r"cat: a plain tensor .* is mixed with DTensors"),
        (sharded_first, lambda m, mesh: DistributedDataParallel(m), r"a mesh of two axes"),
    ],
)
def test_wrappers_do_not_mix(model, wrap, match):
    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        made = model(mesh)
        with pytest.raises(RuntimeError, match=match):
            wrap(made, mesh=mesh)

    run_ranks(body, 2)


def test_a_part_of_a_replica_that_is_sharded_afterwards_is_refused_where_it_runs():
    def body():
        model = blocks()
        replicas = DistributedDataParallel(model)
        fully_shard(model[0])
        with pytest.raises(UsageError, match=r"'.*' runs inside a DistributedDataParallel"):
            replicas(torch.ones(2, 4))

    run_ranks(body, 2)


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_replicas_of_the_parameters_beside_a_part_that_is_sharded(wrapped_first):
    def body():
        dense, model = blocks(), blocks()
        inside = ["1.0.weight", "1.0.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, inside)
        replicas = DistributedDataParallel(model) if wrapped_first else None
        fully_shard(model[1])
        replicas = replicas or DistributedDataParallel(model)
        for _ in range(2):
            for module in (dense, replicas):
                module.zero_grad()
            replicas(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
            for rank in range(2):
                (dense(torch.full((2, 4), 1.0 + rank)).square().sum() / 2).backward()
            for name, parameter in model.named_parameters():
                gradient = parameter.grad.full_tensor() if name in inside else parameter.grad
                torch.testing.assert_close(gradient, dense.get_parameter(name).grad)

    run_ranks(body, 2)


@pytest.mark.parametrize("axes", [("dp", "tp"), ("dp",)])
def test_a_dtensor_that_lies_on_the_data_axes_is_refused_by_their_names(axes):
    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        own = mesh if len(axes) == 2 else mesh["dp"]
        layer = nn.Linear(4, 4, bias=False)
        placed = distribute_tensor(layer.weight.detach(), own, [Replicate(), Shard(0)][: own.ndim])
        layer.weight = nn.Parameter(placed)
        with pytest.raises(ShardingError, match=r"'weight' .* has the data axes \['dp'\] of"):
            fully_shard(layer, mesh=mesh["dp"])

    run_ranks(body, 4)
