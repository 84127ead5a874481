"""Ranks whose models differ are told so, all of them, before a parameter is communicated."""

import os

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform import AgreementError, ledger
from hp_platform.testing import TwoTierUnavailable, run_ranks, two_tier


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


IN_SECOND = "At unit 'second', "
FAULTS = {
    "shape": (
        lambda mesh: sharded(mesh, Model(lambda: Layer(inner=16))),
        [IN_SECOND + "parameter 'second.up.weight': ", "Layout([8, 8]", "Layout([16, 8]"],
    ),
    "type": (
        lambda mesh: sharded(mesh, half()),
        [IN_SECOND + "parameter 'second.up.weight': ", "torch.float32, ", "torch.float16, "],
    ),
    "type changed after sharding": (
        cast_later,
        [IN_SECOND + "parameter 'second.up.weight': ", "torch.float32, ", "torch.bfloat16, "],
    ),
    "frozen": (
        lambda mesh: sharded(mesh, frozen()),
        [IN_SECOND + "parameter 'second.up.weight': ", ", trainable, ", ", frozen, "],
    ),
    "one parameter less": (
        lambda mesh: sharded(mesh, Model(lambda: Layer(bias=False))),
        [IN_SECOND + "parameter 'second.down.bias': ", "torch.float32, ", " has none"],
    ),
    "order": (
        lambda mesh: sharded(mesh, Model(OtherOrder)),
        [
            "in another order: ",
            "unit 'second', parameter 'second.up.weight'",
            "parameter 'second.down.weight'",
        ],
    ),
    "comm_policy": (
        lambda mesh: sharded(mesh, comm_policy="shared_buffer"),
        ["comm_policy: ", "per_parameter", "shared_buffer"],
    ),
    "mp_policy": (
        lambda mesh: sharded(mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64)),
        ["mp_policy: ", "reduce_dtype=None", "reduce_dtype=torch.float64"],
    ),
    "reshard_after_forward": (
        lambda mesh: sharded(mesh, reshard_after_forward=False),
        ["reshard_after_forward: ", " None", " False"],
    ),
    "dim": (
        lambda mesh: sharded(mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1)),
        ["parameter 'head.weight': "],
    ),
    "divisor": (
        with_setting(lambda model: model.second.set_gradient_divide_factor(3.0)),
        [IN_SECOND + "set_gradient_divide_factor: ", " 3.0"],
    ),
    "prefetch": (
        with_setting(lambda model: model.first.set_modules_to_forward_prefetch([model.second])),
        ["At unit 'first', set_modules_to_forward_prefetch: ", " None", "['second']"],
    ),
    "units": (
        lambda mesh: sharded(mesh, wraps=("first",)),
        ["At unit 'second': ", " such a unit", " has no such unit"],
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


@pytest.mark.ranks
def test_all_ranks_hear_of_experts_that_differ_on_two_of_them():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "ep"))
        model = Model(lambda: Layer(inner=16 if rank == 3 else 8))
        fully_shard(model.second, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("all",)))
        return told(model)

    found = run_ranks(body, 4)
    assert len(set(found)) == 1
    assert "mesh axis 'dp_shard' have different models" in found[0]
    for part in ("parameter 'second.up.weight': ", "rank 1 has torch.float32", "rank 3 has "):
        assert part in found[0]


@pytest.mark.ranks
def test_models_are_compared_once_and_again_when_types_have_changed():
    def body(rank):
        mesh = mesh_of(2, 2)
        model = sharded(mesh)

        def compared(after=lambda: None):
            after()
            with ledger() as log:
                model(torch.ones(2, 8)).sum().backward()
            return [r.axis for r in log.records if r.origin.phase == "agreement"]

        assert compared() == ["dp_shard", "dp_replicate"]
        for trains in (False, True, False, True):
            assert compared(lambda t=trains: model.second.requires_grad_(t)) == []
        # A rank may take its parameters elsewhere, as long as they come back.
        assert compared(lambda: model.double().float() if rank == 1 else None) == []
        assert compared(model.zero_grad) == []
        model.zero_grad()
        model.double()
        model.second.register_forward_pre_hook(lambda module, args: (args[0].double(),))
        model.first.register_forward_pre_hook(lambda module, args: (args[0].double(),))
        assert compared() == ["dp_shard", "dp_replicate"]
        assert compared() == []
        # A part that becomes part of a larger model is compared with that.
        outer = fully_shard(nn.Sequential(model), mesh=mesh)
        with ledger() as log:
            outer(torch.ones(2, 8)).sum().backward()
        assert sum(r.origin.phase == "agreement" for r in log.records) == 2

    run_ranks(body, 4)


@pytest.mark.ranks
@pytest.mark.parametrize("peer_memory", ["0", "1"])
def test_a_type_that_changes_on_one_rank_in_the_middle_of_training_ends_it(peer_memory):
    def body(rank):
        os.environ["HP_PLATFORM_PEER_MEMORY"] = peer_memory
        model = sharded(mesh_of(2))
        model(torch.ones(2, 8)).sum().backward()
        if rank == 1:
            model.second.to(torch.float64)
        with pytest.raises(AgreementError) as raised:
            model(torch.ones(2, 8)).sum().backward()
        return str(raised.value)

    for message in run_ranks(body, 2):
        assert "rank 0: all_gather asked by hp_fsdp root forward" in message
        assert "rank 1: all_gather asked by hp_fsdp models agreement" in message
        assert "again after the types of parameters have changed" in message


@pytest.mark.ranks
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_a_replica_may_run_forward_without_the_others_before_all_train(sizes):
    world = torch.Size(sizes).numel()

    def body(rank):
        torch.manual_seed(0)
        model = sharded(mesh_of(*sizes))
        if rank < world // 2:
            with torch.no_grad():
                for _ in range(2):
                    model(torch.ones(2, 8))
                # A part, as a method of the model might.
                model.first(torch.ones(2, 8))
        model(torch.ones(2, 8)).sum().backward()
        return model.head.weight.grad.full_tensor().flatten().tolist()

    found = run_ranks(body, world)
    assert all(each == found[0] for each in found)


@pytest.mark.ranks
def test_ranks_that_gather_without_gradients_compare_what_they_gather():
    def body(rank):
        mesh = mesh_of(2, 2)
        model = sharded(mesh, Model(lambda: Layer(inner=16 if rank == 1 else 8)))
        if rank < 2:
            return told(model, grad=False)
        with torch.no_grad():
            return model(torch.ones(2, 8)).shape

    first, second, *others = run_ranks(body, 4)
    assert first == second
    assert "rank 0 has torch.float32, trainable, Layout([8, 8]" in first
    assert others == [(2, 8)] * 2


@pytest.mark.ranks
def test_between_hosts_a_rank_with_another_model_is_named():
    def body(rank):
        mesh = mesh_of(2)
        return [
            told(fault(mesh) if rank == 1 else sharded(mesh))
            for name, (fault, _) in FAULTS.items()
            if name in ("shape", "type", "one parameter less", "comm_policy", "units")
        ]

    try:
        with two_tier(hosts=2, ranks_per_host=1, slow="1gbit") as net:
            here, there = net.run(body)
    except TwoTierUnavailable as reason:
        pytest.skip(str(reason))
    assert here == there
    assert all("rank 1 has " in message for message in here)
