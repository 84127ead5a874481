"""PyTorch's state functions see our shards as what they are."""

import copy

import pytest
import torch
import torch.distributed._state_dict_utils as values
import torch.distributed.checkpoint.planner_helpers as planning
import torch.distributed.checkpoint.state_dict as states
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_dtensor import DTensor, OperatorError
from hp_fsdp import fully_shard
from hp_fsdp.testing import full_parameters
from hp_platform.testing import run_ranks


def made(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model[1].running_mean.fill_(2.0)
    return model


def sharded(mesh, policy="per_parameter", seed=0, shard=fully_shard, **options):
    model = made(seed)
    if shard is fully_shard:
        options["comm_policy"] = policy
    shard(model[0], mesh=mesh, **options)
    shard(model, mesh=mesh, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model, optimizer, seed):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def meshes():
    names = ("dp_replicate", "dp_shard")
    return [
        init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=names),
    ]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_equal(found[key], value)
        elif isinstance(value, torch.Tensor):
            assert type(found[key]) is torch.Tensor, key
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


def assert_shards_stay_shards(model, full, policy):
    """Whatever PyTorch's checkpointing makes of a shard is a shard of ours with its values."""
    shards = states.get_model_state_dict(model)
    assert isinstance(shards["0.weight"], DTensor)
    # Code for FSDP2 asks this before it gathers. PyTorch has no ragged shards.
    claims = policy == "per_parameter"
    assert isinstance(shards["0.weight"], TorchDTensor) == claims
    assert isinstance(model[0].weight, TorchDTensor) == claims
    copied = values._create_cpu_state_dict(shards)  # staging of `async_save`, the older and
    values._copy_state_dict(shards, copied)
    staged = StateDictStager().stage(shards)  # the newer one
    on_meta = {key: value.to("meta") for key, value in shards.items()}
    planning._init_state_dict(on_meta)  # `load` gives memory to what is on the meta device
    for key, shard in shards.items():
        for copy_ in (copied[key], staged[key], on_meta[key]):
            assert type(copy_) is type(shard)
            assert copy_.device.type == "cpu"
            assert copy_.shape == shard.shape
    for state in (copied, staged):
        assert_equal({name: whole(value) for name, value in state.items()}, full)
    if claims:
        torch.testing.assert_close(copied["0.weight"], shards["0.weight"])
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(copied["0.weight"], shards["0.weight"] + 1)
        md = planning._create_default_metadata_only_plan({"w": shards["0.weight"]}).items
        assert [md[0].tensor_data.chunk] == shards["0.weight"].__create_chunk_list__()


def assert_methods_of_pytorchs_class_differentiate(model):
    """`TorchDTensor.full_tensor(weight)`, as `map` calls it, is `weight.full_tensor()`."""
    weight = model[0].weight
    for read in (
        TorchDTensor.full_tensor,
        TorchDTensor.to_local,
        lambda w: TorchDTensor.redistribute(w, w.device_mesh, w.placements).to_local(),
    ):
        weight.grad = None
        read(weight).square().sum().backward()
        torch.testing.assert_close(weight.grad.to_local(), 2 * weight.to_local().detach())
    weight.grad = None


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


FULL = states.StateDictOptions(full_state_dict=True)


@pytest.mark.ranks
@pytest.mark.parametrize("policy", ["per_parameter", "shared_buffer"])
def test_full_states_of_model_and_optimizer_are_the_dense_ones_and_load_anywhere(policy):
    def body(rank):
        dense = made()
        reference = torch.optim.AdamW(dense.parameters(), lr=0.01)
        step(dense, reference, 0)
        expected = states.get_state_dict(dense, reference)
        for mesh, other in (meshes(), meshes()[::-1]):
            model, optimizer = sharded(mesh, policy)
            step(model, optimizer, 0)
            model.eval()(torch.ones(2, 5))  # the root's parameters are gathered now
            model.train()
            found = states.get_state_dict(model, optimizer, options=FULL)
            assert_equal(found[0], states.get_model_state_dict(dense))
            assert_equal(found[1]["state"], expected[1]["state"])
            assert_shards_stay_shards(model, found[0], policy)
            for broadcast in (False, True):
                options = states.StateDictOptions(
                    full_state_dict=True, broadcast_from_rank0=broadcast
                )
                again, resumed = sharded(other, policy, seed=5)
                # Optimizers share the scalars of a state that they load.
                held = copy.deepcopy(found) if rank == 0 or not broadcast else ({}, {})
                full = dict(held[0])  # what is loaded becomes what was made of it
                states.set_model_state_dict(again, held[0], options=options)
                states.set_optimizer_state_dict(again, resumed, held[1], options=options)
                moments = [m for s in resumed.state.values() for m in s.values() if m.dim()]
                assert all(type(tensor) is DTensor for tensor in (*moments, *again.parameters()))
                with torch.device("meta"):
                    empty, _ = sharded(other, policy)
                states.set_model_state_dict(empty, dict(full), options=options)
                assert all(type(parameter) is DTensor for parameter in empty.parameters())
                assert_equal({n: whole(v) for n, v in empty.state_dict().items()}, found[0])
                twin = made()
                twin.load_state_dict(found[0])
                step(again, resumed, 1)
                continued = torch.optim.AdamW(twin.parameters(), lr=0.01)
                states.set_optimizer_state_dict(
                    twin, continued, copy.deepcopy(found[1]), options=FULL
                )
                step(twin, continued, 1)
                for name, value in full_parameters(again).items():
                    torch.testing.assert_close(
                        value, twin.get_parameter(name).detach(), rtol=1e-5, atol=1e-6
                    )

    run_ranks(body, 4, timeout=240)


@pytest.mark.ranks
def test_states_are_exchanged_with_pytorchs_fsdp2_in_memory_however_they_are_placed():
    def body(rank):
        alike = meshes()  # one mesh for both: `copy_` keeps to the mesh
        for ours in alike:
            for theirs in (*alike, *meshes()):
                source, _ = sharded(theirs, seed=3, shard=fsdp2.fully_shard)
                for policy, assign in (("shared_buffer", False), ("per_parameter", True)):
                    model, _ = sharded(ours, policy, seed=4)
                    model.load_state_dict(source.state_dict(), assign=assign)
                    if assign:
                        with pytest.raises(OperatorError, match="Call the module itself"):
                            model[0].forward(torch.ones(2, 5))
                    model(torch.ones(2, 5)).sum().backward()
                    found = full_parameters(model)
                    for name, value in made(3).named_parameters():
                        assert torch.equal(found[name], value.detach())
                    if theirs is ours and policy == "per_parameter":
                        assert_methods_of_pytorchs_class_differentiate(model)
                        weights = model[0].weight, source[0].weight
                        with torch.no_grad():
                            weights[0].copy_(2 * weights[1])
                        assert torch.equal(weights[0].full_tensor(), 2 * found["0.weight"])
                        source.load_state_dict(model.state_dict())
                        assert torch.equal(weights[1].full_tensor(), 2 * found["0.weight"])

    run_ranks(body, 4, timeout=240)


@pytest.mark.ranks
def test_asking_for_an_optimizers_state_does_not_change_its_first_step():
    """The first step of Adam is `lr`, whatever the gradient; a counted step before it is less."""

    def body(rank):
        model = fully_shard(nn.Linear(3, 1, bias=False), mesh=meshes()[0])
        nn.init.ones_(model.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
        found = states.get_optimizer_state_dict(model, optimizer)
        assert found["state"]["weight"]["step"] == 0
        model(torch.full((1, 3), 2.0)).sum().backward()
        optimizer.step()
        assert full_parameters(model)["weight"].tolist() == [[pytest.approx(0.9)] * 3]
        # Only the first rank holds what is exported, and no rank waits for another.
        options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        exported = states.get_state_dict(model, optimizer, options=options)
        if rank == 0:
            assert exported[0]["weight"].tolist() == [[pytest.approx(0.9)] * 3]
            assert exported[1]["state"]["weight"]["step"] == 1
        else:
            assert exported == ({}, {})

    run_ranks(body, 4)
