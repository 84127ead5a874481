import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel

from hp_dtensor import DTensor
from hp_fsdp import ShardingError, full_state_dict, fully_shard, load_full_state_dict
from hp_platform.testing import run_ranks


def made():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model[1].running_mean.fill_(2.0)
    return model


def sharded(mesh, seed=None):
    model = made()
    if seed is not None:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float(seed))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def flat(size):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",))


def hsdp():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


@pytest.mark.ranks
def test_state_dict_holds_shards_even_while_parameters_are_gathered():
    def body(rank):
        model = sharded(flat(2))
        model(torch.randn(4, 5))  # the root stays gathered for backward
        assert type(model[2].weight) is nn.Parameter
        state = model.state_dict()
        assert isinstance(state["0.weight"], DTensor)
        assert isinstance(state["2.weight"], DTensor)
        assert state["2.weight"].shape == (3, 7)
        assert not isinstance(state["1.running_mean"], DTensor)

    run_ranks(body, 2)


@pytest.mark.ranks
def test_full_state_dict_is_the_dense_one_and_loads_into_any_sharding():
    def body(rank):
        dense = made()
        for mesh in (flat(4), hsdp()):
            model = sharded(mesh, seed=9)
            load_full_state_dict(model, dense.state_dict())
            full = full_state_dict(model)
            assert full.keys() == dense.state_dict().keys()
            for name, value in dense.state_dict().items():
                assert type(full[name]) is torch.Tensor
                assert torch.equal(full[name], value), name
            # The first forward after loading uses the loaded values.
            dense.train(), model.train()
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
            torch.testing.assert_close(model(x), made()(x))
            with pytest.raises(ShardingError, match=r"missing \['0.bias'\]"):
                load_full_state_dict(
                    model, {k: v for k, v in dense.state_dict().items() if k != "0.bias"}
                )
            with pytest.raises(ShardingError, match=r"'0.bias' has shape \(2,\)"):
                load_full_state_dict(model, {"0.bias": torch.ones(2)}, strict=False)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_a_state_that_does_not_fit_is_refused_before_anything_is_loaded():
    def body(rank):
        model = sharded(flat(2))
        before = full_state_dict(model)
        for changed in ("0.bias", "1.weight", "2.weight"):
            state = {name: torch.full_like(value, 8) for name, value in before.items()}
            state[changed] = torch.ones(2)
            with pytest.raises(ShardingError, match=rf"'{changed}' has shape \(2,\), expected"):
                load_full_state_dict(model, state)
            after = full_state_dict(model)
            assert all(torch.equal(before[name], after[name]) for name in before)

    run_ranks(body, 2)


def train(model, optimizer, steps, rank):
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()


def state_of(model, optimizer):
    """Model and optimizer entries by parameter name, as a checkpoint holds them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    entries = {f"model.{name}": value for name, value in model.state_dict().items()}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            entries[f"optimizer.{names[parameter]}.{key}"] = value
    return entries


@pytest.mark.ranks
def test_a_checkpoint_saved_on_one_mesh_loads_on_another_and_training_continues(tmp_path):
    def body(rank):
        def fresh(mesh, seed):
            model = sharded(mesh, seed)
            return model, torch.optim.AdamW(model.parameters(), lr=0.01)

        dense = made()
        reference = torch.optim.AdamW(dense.parameters(), lr=0.01)
        train(dense, reference, 3, rank)
        model, optimizer = fresh(flat(4), None)
        train(model, optimizer, 2, rank)
        dcp.save(state_of(model, optimizer), checkpoint_id=str(tmp_path / "saved"))
        for mesh in (hsdp(), flat(4)):
            other, resumed = fresh(mesh, 9)
            # Steps with zero learning rate make the optimizer's state, then it is loaded over.
            train(other, resumed, 1, rank)
            entries = state_of(other, resumed)
            dcp.load(entries, checkpoint_id=str(tmp_path / "saved"))
            other.load_state_dict(
                {k.removeprefix("model."): v for k, v in entries.items() if k[:6] == "model."}
            )
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
            resumed.zero_grad()
            other(x).square().mean().backward()
            resumed.step()
            for name, value in dense.state_dict().items():
                found = full_state_dict(other)[name]
                torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_an_average_of_weights_kept_on_shards_is_that_of_the_full_weights():
    def body(rank):
        for mesh in (flat(4), hsdp()):
            model, dense = sharded(mesh), made()
            averaged = copy.deepcopy(model.state_dict())
            expected = copy.deepcopy(dense.state_dict())
            for _ in range(3):
                with torch.no_grad():
                    for ours, theirs in zip(model.parameters(), dense.parameters()):
                        ours.mul_(1.5), theirs.mul_(1.5)
                    for state, average in (
                        (model.state_dict(), averaged),
                        (dense.state_dict(), expected),
                    ):
                        for name, value in state.items():
                            if value.is_floating_point():
                                average[name].lerp_(value, 0.1)
            other = sharded(mesh, seed=9)
            other.load_state_dict(averaged)
            for name, value in full_state_dict(other).items():
                assert torch.equal(value, expected[name]), name
            # PyTorch's average copies the module, which has to be before it is sharded.
            theirs, dense = AveragedModel(made()), made()
            ours, model = AveragedModel(made()), sharded(mesh)
            fully_shard(ours.module, mesh=mesh)
            for factor in (1, 1.5, 1.5):
                for trained, average in ((model, ours), (dense, theirs)):
                    with torch.no_grad():
                        for parameter in trained.parameters():
                            parameter.mul_(factor)
                    average.update_parameters(trained)
            whole = full_state_dict(ours.module)
            assert whole.keys() == theirs.module.state_dict().keys()
            for name, value in theirs.module.state_dict().items():
                torch.testing.assert_close(whole[name], value)

    run_ranks(body, 4)
