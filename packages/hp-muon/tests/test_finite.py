"""Gradients that are not finite stop all ranks that step together, before anything is written."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hp_muon import Muon, MuonError
from hp_platform import Tier, Topology, ledger
from hp_platform.testing import run_ranks

NAMES = ["a", "b", "experts", "bias"]


def made(mesh, places, expert_places):
    shapes = [((6, 4), places), ((5, 3), places), ((4, 3, 5), expert_places), ((4,), places)]
    parameters = [nn.Parameter(distribute_tensor(torch.ones(s), mesh, p)) for s, p in shapes]
    for parameter in parameters:
        parameter.grad = distribute_tensor(torch.ones(parameter.shape), mesh, parameter.placements)
    return parameters


def groups(parameters):
    named = list(zip(NAMES, parameters))
    return [{"params": named[:3]}, {"params": named[3:], "use_muon": False}]


def untouched(optimizer, parameters):
    momenta = [s["momentum_buffer"] for s in optimizer.state.values() if "momentum_buffer" in s]
    whole = all(bool((p.to_local() == 1).all()) for p in parameters)
    return whole and not any(bool(m.any()) for m in momenta)


@pytest.mark.ranks
def test_every_rank_names_the_parameter_nothing_is_written_and_the_next_step_works():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        parameters = made(mesh, [Replicate(), Shard(0)], [Shard(0), Shard(0)])
        optimizer = Muon(groups(parameters))
        for name, bad in (("a", torch.nan), ("experts", torch.inf), ("b", -torch.inf)):
            gradient = parameters[NAMES.index(name)].grad.to_local()
            if rank == 1:
                gradient.view(-1)[-1] = bad
            with pytest.raises(MuonError, match=rf"gradients of 1 .*\['{name}'\]"):
                optimizer.step()
            assert untouched(optimizer, parameters)
            gradient.fill_(1)
        optimizer.step()
        assert not untouched(optimizer, parameters)

    run_ranks(body, 4, timeout=200)


@pytest.mark.ranks
def test_ranks_agree_over_several_meshes_if_one_has_all_ranks_else_after_the_exchanges():
    def body(rank):
        flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for meshes, early in (((flat, both["tp"]), True), ((both["dp"], both["tp"]), False)):
            parameters = [
                nn.Parameter(distribute_tensor(torch.ones(4, 4), m, [Shard(0)])) for m in meshes
            ]
            optimizer = Muon(list(zip("wv", parameters)))
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            if rank == 3:
                parameters[1].grad.to_local().fill_(torch.nan)
            if early or rank in (2, 3):  # those that share it
                with pytest.raises(MuonError, match=r"finite.*\['v'\]"):
                    optimizer.step()
            else:
                optimizer.step()
            assert bool((parameters[0].to_local() == 1).all()) == early

    run_ranks(body, 4, timeout=200)


@pytest.mark.ranks
def test_the_agreement_stays_off_the_slow_tier_and_can_be_left_out():
    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        found = []
        for check in (True, False):
            parameters = made(mesh, [Replicate(), Shard(0)], [Shard(0), Shard(0)])
            topology = Topology.from_hosts(["a", "a", "b", "b"])
            optimizer = Muon(groups(parameters), topology=topology, check_finite=check)
            with ledger() as log:
                optimizer.step()
            assert not [r for r in log.records if r.tier is Tier.SLOW]
            found.append([r.axis for r in log.records if r.origin.name == "finite gradients"])
        return found

    assert run_ranks(body, 4) == [[["shard"], []]] * 4


def test_without_any_mesh_a_rank_decides_for_itself():
    parameters = [nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    optimizer = Muon(list(zip("ab", parameters)))
    parameters[0].grad = torch.ones(3, 3)
    parameters[1].grad = torch.full((3, 3), torch.nan, dtype=torch.float32)
    with pytest.raises(MuonError, match=r"\['b'\]"):
        optimizer.step()
    assert all(bool((p == 1).all()) for p in parameters)


def test_large_finite_gradients_of_any_dtype_are_taken():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        parameter = nn.Parameter(torch.ones(3, 4, dtype=dtype))
        parameter.grad = torch.full((3, 4), torch.finfo(dtype).max / 4, dtype=dtype)
        Muon([parameter], nesterov=False).step()
        assert parameter.isfinite().all()


def test_momentum_that_is_not_finite_is_reported_at_the_end_of_the_step():
    parameter = nn.Parameter(torch.ones(3, 4))
    parameter.grad = torch.ones(3, 4)
    optimizer = Muon([("w", parameter)])
    optimizer.step()
    optimizer.state[parameter]["momentum_buffer"][0, 0] = torch.nan
    with pytest.raises(MuonError, match=r"momentum or update of 1 .*\['w'\]"):
        optimizer.step()
