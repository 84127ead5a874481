"""Regions with functions of their own, found by name."""

import sys
from types import ModuleType

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import (
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    ContractError,
    DTensor,
    ParameterSpec,
    PlanError,
    Region,
    RegionKind,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    parallelize,
)
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.plan import partial_sum, replicated_with_partial_gradient
from hp_platform.testing import run_ranks

MESH = AbstractMesh.of({"tp": 1})


def doubled(module, boundary, axes):
    """A region function of this test: doubles what the module returns."""
    module.register_forward_hook(lambda module, args, output: 2 * output)


def shortened(module, boundary, axes):
    """Hands the module more rows than arrived, and gives back fewer features."""
    module.register_forward_pre_hook(lambda module, args: (torch.cat([args[0], args[0]]),))
    module.register_forward_hook(lambda module, args, output: output[:1, :1])


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    module = ModuleType("regions_of_this_test")
    module.doubled, module.shortened = doubled, shortened
    monkeypatch.setitem(sys.modules, module.__name__, module)


def plan_with(region):
    whole = Contract()
    return ShardingPlan(
        "Sequential",
        MESH,
        ("tp",),
        [ParameterSpec("0.weight", "w", (2, 2), whole, "0")],
        [
            BoundarySpec(
                "0",
                BoundaryKind.MLP,
                [BoundaryTensor("input", whole, whole)],
                [BoundaryTensor("", whole, whole)],
                region=region,
            )
        ],
    )


def model():
    return nn.Sequential(nn.Linear(2, 2, bias=False))


def test_a_plan_with_a_region_function_survives_yaml_and_changes_the_digest():
    plain = plan_with(Region(RegionKind.OPAQUE))
    named = plan_with(Region(RegionKind.OPAQUE, function="some.module:name"))
    assert ShardingPlan.from_yaml(named.to_yaml()) == named
    assert named.digest != plain.digest
    assert "function" not in plain.to_yaml()


@pytest.mark.parametrize(
    ("region", "text"),
    [
        (Region(RegionKind.OPAQUE, function="nowhere.at.all:f"), "install the package 'nowhere'"),
        (Region(RegionKind.OPAQUE, function="hp_dtensor.plan:nothing"), "cannot be found"),
        (Region(RegionKind.OPAQUE, function="hp_dtensor.plan"), "is not 'package.module:function'"),
        (Region(RegionKind.TRANSPARENT, function="hp_dtensor.plan:Region"), "declare it so"),
    ],
)
def test_a_function_that_cannot_be_used_is_found_before_anything_is_cut(region, text):
    made = model()
    with pytest.raises(PlanError, match=text):
        parallelize(made, plan_with(region), MESH)
    assert made[0].weight.shape == (2, 2)


def test_without_process_groups_nothing_is_installed():
    made = model()
    inputs, expected = torch.ones(1, 2), made(torch.ones(1, 2))
    region = Region(RegionKind.OPAQUE, function="regions_of_this_test:doubled")
    parallelize(made, plan_with(region), MESH)
    torch.testing.assert_close(made(inputs), expected)


@pytest.mark.parametrize("mode", ["production", "validate"])
def test_the_function_works_between_entry_and_exit_of_the_boundary(mode):
    spec = plan_with(Region(RegionKind.OPAQUE, function="regions_of_this_test:doubled"))
    summed = BoundarySpec(
        "0",
        BoundaryKind.MLP,
        [BoundaryTensor("input", Contract(), replicated_with_partial_gradient("tp"))],
        [BoundaryTensor("", Contract(), partial_sum("tp"))],
        region=spec.boundaries[0].region,
    )
    two = AbstractMesh.of({"tp": 2})
    made = ShardingPlan(spec.model, two, ("tp",), spec.parameters, [summed])
    region = Region(RegionKind.OPAQUE, function="regions_of_this_test:shortened")
    outputs = [evolve(summed.outputs[0], like="input")]
    unlike = evolve(made, boundaries=[evolve(summed, outputs=outputs, region=region)])

    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mine = parallelize(whole, made, mesh, mode=mode)
        x = torch.ones(1, 2)
        if mode == "validate":
            given = distribute_tensor(x, mesh, [Replicate()])
            other = parallelize(model(), unlike, mesh, mode=mode)
            with pytest.raises(ContractError, match=r"like input .*global shape \(1, 2\)"):
                other(given)
            return mine(given).to_local().detach()
        return mine(x).detach()

    whole = model()
    expected = whole(torch.ones(1, 2)).detach()
    for found in run_ranks(body, 2):
        torch.testing.assert_close(found, 2 * 2 * expected)  # two ranks, each doubled


class Beside(nn.Linear):
    """Takes a second argument that a plan need not know."""

    def forward(self, input, **kwargs):
        assert not isinstance(kwargs["beside"], DTensor)
        return super().forward(input) + kwargs["beside"]


def test_an_opaque_region_is_given_whole_tensors_that_no_contract_declares_and_no_others():
    made = plan_with(Region(RegionKind.OPAQUE))
    two = AbstractMesh.of({"tp": 2})
    plan = ShardingPlan(made.model, two, ("tp",), made.parameters, made.boundaries)

    class Outer(nn.Sequential):
        def forward(self, input, beside):
            return self[0](input, beside=beside)

    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mine = parallelize(Outer(Beside(2, 2, bias=False)), plan, mesh, mode="validate")
        whole = distribute_tensor(torch.ones(2, 2), mesh, [Replicate()])
        mine(whole, whole)
        cut = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])
        with pytest.raises(ContractError, match="'beside' of the opaque region is a DTensor"):
            mine(whole, cut)

    run_ranks(body, 2)
