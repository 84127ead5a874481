"""State in canonical form: saved, loaded elsewhere, kept in float32, one copy per owner."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hp_muon import MatrixView, Muon, MuonError
from hp_muon.reference import DenseMuon
from hp_muon.state import local_tensor
from hp_platform.testing import run_ranks

ARGUMENTS = {"lr": 0.05, "ns_dtype": torch.float32}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def groups(model):
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1]},
        {"params": [(n, p) for n, p in named if p.ndim < 2], "use_muon": False, "lr": 0.01},
    ]


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()


def sharded(mesh):
    model = make_model()
    fully_shard(model, mesh=mesh)
    return model


def mesh_of(world_size, replicas):
    if replicas == 1:
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    sizes = (replicas, world_size // replicas)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def uninterrupted(steps, **arguments):
    model = make_model()
    matrices, others = groups(model)
    optimizer = DenseMuon(
        [p for _, p in matrices["params"]],
        [p for _, p in others["params"]],
        adamw_lr=0.01,
        **ARGUMENTS,
        **arguments,
    )
    for step in range(steps):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("target_world", "target_replicas", "deduplicate"),
    [(1, 1, True), (2, 1, True), (4, 2, True), (4, 2, False), (4, 4, True)],
)
def test_a_checkpoint_continues_on_another_mesh(
    tmp_path, target_world, target_replicas, deduplicate
):
    expected = uninterrupted(4)

    def save():
        model = sharded(mesh_of(3, 1))
        optimizer = Muon(groups(model), **ARGUMENTS)
        train(model, optimizer, range(2))
        dcp.save(
            {"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path
        )

    def load():
        model = sharded(mesh_of(target_world, target_replicas))
        optimizer = Muon(groups(model), deduplicate_replicas=deduplicate, **ARGUMENTS)
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        train(model, optimizer, range(2, 4))
        for parameter, wanted in zip(model.parameters(), expected):
            torch.testing.assert_close(parameter.full_tensor(), wanted, atol=2e-5, rtol=1e-4)
        return sum("momentum_buffer" in s for s in optimizer.state.values())

    run_ranks(save, 3)
    held = run_ranks(load, target_world)
    if target_replicas > 1 and deduplicate:
        assert sum(held) == 2 * target_world // target_replicas


@pytest.mark.ranks
def test_a_replicated_checkpoint_loads_into_one_process(tmp_path):
    expected = uninterrupted(4)

    def save():
        model = sharded(mesh_of(4, 2))
        optimizer = Muon(groups(model), **ARGUMENTS)
        train(model, optimizer, range(2))
        dcp.save(
            {"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path
        )

    def load():
        model = make_model()
        optimizer = Muon(groups(model), **ARGUMENTS)
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        train(model, optimizer, range(2, 4))
        for parameter, wanted in zip(model.parameters(), expected):
            torch.testing.assert_close(parameter.detach(), wanted, atol=2e-5, rtol=1e-4)

    run_ranks(save, 4)
    run_ranks(load, 1)


@pytest.mark.ranks
def test_every_rank_sees_every_momentum_with_its_parameters_layout():
    def body():
        model = sharded(mesh_of(4, 2))
        optimizer = Muon(groups(model), **ARGUMENTS)
        train(model, optimizer, range(2))
        state = optimizer.state_dict()
        first = state["state"][0]["momentum_buffer"]
        weight = next(model.parameters())
        assert isinstance(first, DTensor)
        assert first.placements == weight.placements
        assert first.dtype is torch.float32
        assert state["param_groups"][0]["param_names"] == ["0.weight", "2.weight"]
        named = get_optimizer_state_dict(model, optimizer)
        assert sorted(named["state"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        other = Muon(groups(model), **ARGUMENTS)
        set_optimizer_state_dict(model, other, named)
        for index, saved in other.state_dict()["state"].items():
            for key, value in saved.items():
                wanted = state["state"][index][key]
                assert torch.equal(local_tensor(value), local_tensor(wanted)), (index, key)
        return [state["state"][i]["momentum_buffer"].full_tensor() for i in (0, 1)]

    results = run_ranks(body, 4)
    for momenta in results[1:]:
        for mine, first in zip(momenta, results[0]):
            assert torch.equal(mine, first)
            assert first.abs().sum() > 0


def test_momentum_of_bfloat16_parameters_stays_float32_after_loading():
    model = make_model().bfloat16()
    optimizer = Muon(groups(model), **ARGUMENTS)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    other = Muon(groups(model), **ARGUMENTS)
    other.load_state_dict(optimizer.state_dict())
    weight = model[0].weight
    assert other.state[weight]["momentum_buffer"].dtype is torch.float32
    assert torch.equal(
        other.state[weight]["momentum_buffer"], optimizer.state[weight]["momentum_buffer"]
    )
    assert other.state[model[0].bias]["exp_avg"].dtype is torch.bfloat16


def test_a_fresh_state_dict_is_inert():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = Muon([{"params": [parameter], "use_muon": False}], lr=0.1, weight_decay=0.0)
    optimizer.load_state_dict(optimizer.state_dict())
    parameter.grad = torch.full((1,), 2.0)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.9]))


def test_state_is_matched_by_name_where_names_are_known():
    model = make_model()
    optimizer = Muon(groups(model), **ARGUMENTS)
    train(model, optimizer, range(2))
    reordered = [{**g, "params": list(reversed(g["params"]))} for g in groups(model)]
    other = Muon(reordered, **ARGUMENTS)
    other.load_state_dict(optimizer.state_dict())
    for parameter in model.parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(other.state[parameter][key], value)


def test_the_state_of_torch_optim_muon_is_taken():
    weights = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3, 4))]
    theirs = torch.optim.Muon(weights, lr=0.1)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    theirs.step()
    mine = Muon(weights, lr=0.2)
    mine.load_state_dict(theirs.state_dict())
    for weight in weights:
        expected = theirs.state[weight]["momentum_buffer"]
        assert torch.equal(mine.state[weight]["momentum_buffer"], expected)
    assert mine.param_groups[0]["lr"] == 0.1
    mine.step()


def test_a_pickled_optimizer_keeps_state_and_settings():
    model = make_model()
    optimizer = Muon(groups(model), **ARGUMENTS)
    train(model, optimizer, range(1))
    twin = pickle.loads(pickle.dumps(optimizer))
    mine, theirs = optimizer.state_dict(), twin.state_dict()
    for index, state in mine["state"].items():
        for key, value in state.items():
            assert torch.equal(theirs["state"][index][key], value)
    assert twin.plan.digest == optimizer.plan.digest


def test_state_of_another_shape_is_refused_by_name():
    model = make_model()
    optimizer = Muon(groups(model), **ARGUMENTS)
    state = optimizer.state_dict()
    state["state"][1]["momentum_buffer"] = torch.zeros(7, 7)
    with pytest.raises(MuonError, match=r"'2.weight'.*\(7, 7\)"):
        optimizer.load_state_dict(state)


@pytest.mark.ranks
def test_momentum_reaches_every_rank_over_several_replica_axes():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        generator = torch.Generator().manual_seed(0)
        full = [torch.randn(4, 3, generator=generator) for _ in range(6)]
        places = [Replicate(), Replicate()]
        weights = [nn.Parameter(distribute_tensor(p.clone(), mesh, places)) for p in full]
        optimizer = Muon(weights, **ARGUMENTS)
        for weight, gradient in zip(weights, full):
            weight.grad = distribute_tensor(gradient, mesh, places)
        optimizer.step()
        state = optimizer.state_dict()["state"]
        for index, gradient in enumerate(full):
            assert torch.equal(state[index]["momentum_buffer"].to_local(), gradient)
        return sum("momentum_buffer" in s for s in optimizer.state.values())

    assert sum(run_ranks(body, 4)) == 6


@pytest.mark.ranks
def test_a_group_added_later_keeps_the_momentum_of_the_others():
    """The added matrices are larger, so the plan is other, and with it who owns the momentum."""

    def body():
        mesh = mesh_of(4, 2)
        places = [Replicate(), Shard(0)]
        models = [sharded(mesh) for _ in range(2)]
        extra = [nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, places)) for _ in range(2)]
        early = Muon([*groups(models[0]), {"params": [("extra", extra[0])]}], **ARGUMENTS)
        late = Muon(groups(models[1]), **ARGUMENTS)
        train(models[0], early, range(2))
        train(models[1], late, range(2))
        before = late.plan.owned
        late.add_param_group({"params": [("extra", extra[1])]})
        train(models[0], early, range(2, 4))
        train(models[1], late, range(2, 4))
        for mine, other in zip(models[0].parameters(), models[1].parameters()):
            torch.testing.assert_close(mine.full_tensor(), other.full_tensor())
        return before - late.plan.owned

    assert any(run_ranks(body, 4))  # on some rank, momentum moved away


def test_two_optimizers_with_the_same_loaded_state_do_not_share_it():
    first = nn.Parameter(torch.ones(3, 3))
    one = Muon([first])
    first.grad = torch.eye(3)
    one.step()
    second = nn.Parameter(torch.ones(3, 3))
    other = Muon([second])
    other.load_state_dict(one.state_dict())
    before = other.state[second]["momentum_buffer"].clone()
    one.step()
    assert torch.equal(other.state[second]["momentum_buffer"], before)


def test_the_state_of_another_algorithm_is_refused_by_name():
    weight = nn.Parameter(torch.ones(3, 3))
    weight.grad = torch.eye(3)
    adamw = torch.optim.AdamW([weight])
    adamw.step()
    with pytest.raises(MuonError, match="without 'momentum_buffer'"):
        Muon([weight]).load_state_dict(adamw.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize(("target_world", "target_replicas"), [(1, 1), (4, 2), (3, 1)])
def test_normuon_continues_on_another_mesh(tmp_path, target_world, target_replicas):
    """The second moments lie with the compute owners, and those are others on another mesh."""
    arguments = {**ARGUMENTS, "normuon_beta2": 0.9}
    expected = uninterrupted(4, normuon_beta2=0.9)

    def save():
        model = sharded(mesh_of(4, 2))
        optimizer = Muon(groups(model), **arguments)
        train(model, optimizer, range(2))
        dcp.save(
            {"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path
        )

    def load():
        model = sharded(mesh_of(target_world, target_replicas))
        optimizer = Muon(groups(model), **arguments)
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        train(model, optimizer, range(2, 4))
        for parameter, wanted in zip(model.parameters(), expected):
            torch.testing.assert_close(parameter.full_tensor(), wanted, atol=2e-5, rtol=1e-4)

    run_ranks(save, 4)
    run_ranks(load, target_world)


@pytest.mark.ranks
def test_second_moments_of_separated_experts_and_of_split_kinds_find_their_matrices():
    """Saved with experts on two ranks, loaded into one process, by the numbers of the matrices."""
    views = {"experts": MatrixView("e (x r) c -> e (x r) c", x=(1, 2))}
    arguments = {**ARGUMENTS, "normuon_beta2": 0.5, "views": views}
    stack = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        places = [Shard(0), Shard(1)]
        weight = nn.Parameter(distribute_tensor(stack.clone(), mesh, places))
        optimizer = Muon([("experts", weight)], **arguments)
        for step in range(2):
            weight.grad = distribute_tensor(stack * (step + 1), mesh, places)
            optimizer.step()
        state = optimizer.state_dict()["state"][0]
        return state["second_moment_buffer"].full_tensor(), state["momentum_buffer"].full_tensor()

    rows, _ = run_ranks(body, 4)[0]
    weight = nn.Parameter(stack.clone())
    single = Muon([("experts", weight)], **arguments)
    for step in range(2):
        weight.grad = stack * (step + 1)
        single.step()
    expected = single.state_dict()["state"][0]["second_moment_buffer"]
    assert rows.shape == (5 * 6,)
    torch.testing.assert_close(rows, expected, atol=1e-6, rtol=1e-4)


def test_second_moments_of_another_view_are_refused_by_name():
    def made():
        weight = nn.Parameter(torch.eye(4))
        weight.grad = torch.eye(4)
        optimizer = Muon([("w", weight)], normuon_beta2=0.9)
        optimizer.step()
        return optimizer

    state = made().state_dict()
    state["state"][0]["second_moment_buffer"] = torch.zeros(7)
    with pytest.raises(MuonError, match=r"'w'.*second_moment_buffer of shape \(7,\)"):
        made().load_state_dict(state)


@pytest.mark.ranks
def test_a_rank_holds_as_much_after_loading_as_before_saving():
    def held(optimizer):
        found = 0
        for state in optimizer.state.values():
            for value in state.values():
                parts = value.values() if isinstance(value, dict) else [value]
                found += sum(part.untyped_storage().nbytes() for part in parts)
        return found

    def body():
        model = sharded(mesh_of(4, 4))
        optimizer = Muon(groups(model), normuon_beta2=0.9, **ARGUMENTS)
        train(model, optimizer, range(2))
        before = held(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        return before, held(optimizer)

    for before, after in run_ranks(body, 4):
        assert before == after


@pytest.mark.ranks
def test_the_state_of_torch_optim_muon_over_fsdp2_is_taken():
    def body():
        models = [sharded(mesh_of(2, 1)) for _ in range(2)]
        matrices = [[p for p in model.parameters() if p.ndim > 1] for model in models]
        theirs, mine = torch.optim.Muon(matrices[0], lr=0.1), Muon(matrices[1], lr=0.2)
        for weight in matrices[0]:
            weight.grad = torch.ones_like(weight)
        theirs.step()
        mine.load_state_dict(theirs.state_dict())
        for weight, other in zip(matrices[1], matrices[0]):
            expected = theirs.state[other]["momentum_buffer"].to_local()
            assert torch.equal(mine.state[weight]["momentum_buffer"], expected)

    run_ranks(body, 2)
