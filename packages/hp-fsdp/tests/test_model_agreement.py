"""Ranks whose models differ are told so, all of them, before a parameter is communicated."""

import os

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform import AgreementError, ledger
from hp_platform.testing import run_ranks


class Layer(nn.Module):
    def __init__(self, inner=8, bias=True):
        super().__init__()
        self.up = nn.Linear(8, inner)
        self.down = nn.Linear(inner, 8, bias=bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, layer=Layer):
        super().__init__()
        self.first, self.second, self.head = Layer(), layer(), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.second(self.first(x)))


class OtherOrder(Layer):
    """The same parameters; those of `down` come first."""

    def __init__(self):
        super().__init__()
        up = self._modules.pop("up")
        self.up = up


def mesh_of(*sizes):
    names = ("dp_replicate", "dp_shard")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def sharded(mesh, model=None, wraps=("first", "second"), **arguments):
    model = Model() if model is None else model
    for name in wraps:
        fully_shard(getattr(model, name), mesh=mesh, **arguments)
    return fully_shard(model, mesh=mesh, **arguments)


def half():
    model = Model()
    model.second.to(torch.float16)
    return model


def frozen():
    model = Model()
    model.second.up.weight.requires_grad_(False)
    return model


def cast_later(mesh):
    model = sharded(mesh)
    model.second.bfloat16()
    return model


def with_setting(setting):
    def make(mesh):
        model = sharded(mesh)
        setting(model)
        return model

    return make


IN_SECOND = "Of unit 'second', "
FAULTS = {
    "shape": (
        lambda mesh: sharded(mesh, Model(lambda: Layer(inner=16))),
        [IN_SECOND + "parameter 'second.up.weight', ", "Layout([8, 8]", "Layout([16, 8]"],
    ),
    "type": (
        lambda mesh: sharded(mesh, half()),
        [IN_SECOND + "parameter 'second.up.weight', ", "torch.float32, ", "torch.float16, "],
    ),
    "type changed after sharding": (
        cast_later,
        [IN_SECOND + "parameter 'second.up.weight', ", "torch.float32, ", "torch.bfloat16, "],
    ),
    "frozen": (
        lambda mesh: sharded(mesh, frozen()),
        [IN_SECOND + "parameter 'second.up.weight', ", ", trainable, ", ", frozen, "],
    ),
    "one parameter less": (
        lambda mesh: sharded(mesh, Model(lambda: Layer(bias=False))),
        [IN_SECOND + "parameter 'second.down.bias', ", "torch.float32, ", " has none"],
    ),
    "order": (
        lambda mesh: sharded(mesh, Model(OtherOrder)),
        ["the order of units and their parameters", "second.up.weight", "second.down.weight"],
    ),
    "comm_policy": (
        lambda mesh: sharded(mesh, comm_policy="shared_buffer"),
        ["comm_policy, ", "per_parameter", "shared_buffer"],
    ),
    "mp_policy": (
        lambda mesh: sharded(mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64)),
        ["mp_policy, ", "reduce_dtype=None", "reduce_dtype=torch.float64"],
    ),
    "reshard_after_forward": (
        lambda mesh: sharded(mesh, reshard_after_forward=False),
        ["reshard_after_forward, ", " None", " False"],
    ),
    "dim": (
        lambda mesh: sharded(mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1)),
        ["parameter 'head.weight', "],
    ),
    "divisor": (
        with_setting(lambda model: model.second.set_gradient_divide_factor(3.0)),
        [IN_SECOND + "set_gradient_divide_factor, ", " 3.0"],
    ),
    "prefetch": (
        with_setting(lambda model: model.first.set_modules_to_forward_prefetch([model.second])),
        ["Of unit 'first', set_modules_to_forward_prefetch, ", " None", "['second']"],
    ),
    "units": (
        lambda mesh: sharded(mesh, wraps=("first",)),
        ["Of unit 'second', ", " such a unit", " has no such unit"],
    ),
}


def told(model, grad=True):
    """What the first forward raises, before any parameter has been sent."""
    with ledger() as log, torch.set_grad_enabled(grad), pytest.raises(AgreementError) as raised:
        model(torch.ones(2, 8))
    assert {record.origin.phase for record in log.records} == {"agreement"}
    return str(raised.value)


@pytest.mark.ranks
@pytest.mark.parametrize("peer_memory", ["0", "1"])
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_a_rank_with_another_model_is_named_on_all_ranks(sizes, peer_memory):
    world = torch.Size(sizes).numel()

    def body(rank):
        os.environ["HP_PLATFORM_PEER_MEMORY"] = peer_memory
        mesh, messages = mesh_of(*sizes), []
        for fault, _ in FAULTS.values():
            model = fault(mesh) if rank == world - 1 else sharded(mesh)
            messages.append([told(model) for _ in range(2)])
            if len(messages) == 1:  # The groups are whole: with the same model training goes on.
                sharded(mesh)(torch.ones(2, 8)).sum().backward()
        return messages

    found = run_ranks(body, world)
    for (name, (_, parts)), *messages in zip(FAULTS.items(), *found):
        assert len({each for pair in messages for each in pair}) == 1, name
        message = messages[0][0]
        axis = "mesh axis 'dp_shard' have different models under fully_shard"
        for part in (axis, f"rank {world - 1} has ", *parts):
            assert part in message, (name, message)
