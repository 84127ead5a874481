"""Replaced parameters keep their layouts, and their gradients are settled as before."""

from __future__ import annotations

import copy

import pytest
import torch
from dtensor_block import Tiny, batch, loss_of, tiny_plan
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor.errors import PlanError
from hp_dtensor.layout import layout_of
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.parallelize import parallelize
from hp_platform import ledger
from hp_platform.testing import run_ranks


def stepped(model: nn.Module) -> tuple[float, dict[str, Tensor], int]:
    """Loss, gradients and number of settlements of one step."""
    with ledger() as log:
        loss = loss_of(model, batch())
        loss.backward()
    sums = sum("settlement" in record.origin.name for record in log.records)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss), gradients, sums


def made(tied: bool = False) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize(Tiny(tied=tied), tiny_plan({"tp": 2}, tied=tied), mesh)


def check_same(model: nn.Module, other: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert layout_of(other.get_parameter(name)) == layout_of(parameter), name
    loss, gradients, sums = stepped(model)
    again, found, settled = stepped(other)
    assert again == loss
    assert settled == sums == 1
    assert found.keys() == gradients.keys()
    assert all(torch.equal(found[name], value) for name, value in gradients.items())


def copied() -> None:
    model = made(tied=True)
    other = copy.deepcopy(model)
    assert other.get_parameter("norm.weight") is not model.get_parameter("norm.weight")
    assert other.head.weight is other.embed.weight
    check_same(model, other)
    # A copy of a copy, inside a container, after a step.
    model.zero_grad()
    inner = copy.deepcopy(nn.ModuleList([other]))[0]
    inner.zero_grad()
    check_same(model, inner)


def emptied_and_loaded() -> None:
    model = made(tied=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.device("meta"):
        other = Tiny(tied=True)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize(other, tiny_plan({"tp": 2}, tied=True), mesh)
    other.to_empty(device="cpu")
    assert other.head.weight is other.embed.weight
    other.load_state_dict(state)
    check_same(model, other)


def assigned() -> None:
    model, other = made(), made()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = other.get_parameter("norm.weight")
    nn.Sequential(other).load_state_dict({f"0.{k}": v for k, v in state.items()}, assign=True)
    assert other.get_parameter("norm.weight") is not before
    check_same(model, other)


def cast() -> None:
    model = made()
    model.double()
    assert layout_of(model.get_parameter("norm.weight")) is not None
    assert stepped(model)[2] == 1


@pytest.mark.ranks
def test_replaced_parameters_keep_layouts_and_settlement() -> None:
    def body() -> list[str]:
        done = []
        for case in (copied, emptied_and_loaded, assigned, cast):
            case()
            done.append(case.__name__)
        return done

    assert run_ranks(body, 2)[0] == ["copied", "emptied_and_loaded", "assigned", "cast"]


@pytest.mark.ranks
def test_a_parameter_of_another_shape_is_refused() -> None:
    def body() -> None:
        model = made()
        whole = Tiny().state_dict()
        with pytest.raises((PlanError, RuntimeError), match=r"embed.weight"):
            model.load_state_dict(whole, assign=True)
        model.norm.weight = nn.Parameter(torch.ones(3))
        with pytest.raises(PlanError, match=r"parameter norm.weight was replaced by one of shape"):
            model.to(torch.float64)

    run_ranks(body, 2)


@pytest.mark.ranks
def test_settlement_can_be_in_another_dtype() -> None:
    def body() -> set[str]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = Tiny().double()
        parallelize(model, tiny_plan({"tp": 2}), mesh, settlement_dtype=torch.float32)
        with ledger() as log:
            loss_of(model, batch()).backward()
        assert model.norm.weight.grad.dtype == torch.float64
        return {str(r.dtype) for r in log.records if "settlement" in r.origin.name}

    assert run_ranks(body, 2) == [{"torch.float32"}] * 2


def test_a_module_in_validate_mode_is_not_copied() -> None:
    model = parallelize(Tiny(), tiny_plan({"tp": 1}), AbstractMesh.of({"tp": 1}), mode="validate")
    with pytest.raises(TypeError, match="validate mode cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match="validate mode cannot be copied"):
        copy.deepcopy(model.layers[0])
