"""What is found out about plan, module and mesh before anything is communicated."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from dtensor_block import HIDDEN, Tiny, cut, tiny_plan, with_boundary, with_parameter
from torch import nn

from hp_dtensor.contracts import PlanError
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.plan import BoundaryTensor, Contract, LocalAttribute, ShardingPlan
from hp_dtensor.plan_checks import check_plan

MESH = {"tp": 1}


def findings(
    plan: ShardingPlan,
    module: nn.Module | None = None,
    mesh: object = None,
    mode: str = "production",
) -> str:
    with pytest.raises(PlanError) as error:
        check_plan(module or Tiny(), plan, mesh or AbstractMesh.of(MESH), mode)  # type: ignore[arg-type]
    return str(error.value)


def test_a_fitting_plan_passes() -> None:
    check_plan(Tiny(), tiny_plan(MESH), AbstractMesh.of(MESH), "production")


def test_all_findings_come_in_one_error() -> None:
    plan = with_parameter(tiny_plan(MESH), "norm.weight", name="normal.weight")
    plan = with_boundary(plan, "head", module="heads")
    text = findings(plan, mode="validation")
    assert "mode is 'validation'" in text
    assert "parameter normal.weight is in the plan, but not in the module" in text
    assert "parameter norm.weight is trainable, but not in the plan" in text
    assert "boundary heads is in the plan, but the module has no such submodule" in text


def test_a_frozen_parameter_need_not_be_in_the_plan() -> None:
    plan = tiny_plan(MESH)
    plan = evolve(plan, parameters=[s for s in plan.parameters if s.name != "norm.weight"])
    module = Tiny()
    module.norm.weight.requires_grad_(False)
    check_plan(module, plan, AbstractMesh.of(MESH), "production")


def test_a_wrong_shape_is_named() -> None:
    text = findings(with_parameter(tiny_plan(MESH), "norm.weight", shape=(HIDDEN + 1,)))
    assert "norm.weight has shape (8,), the plan expects (9,)" in text


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tp": 2}, "mesh axis 'tp' has size 2, the plan is for size 1"),
        ({"dp": 1}, "mesh axis 'tp' is not in the mesh"),
    ],
)
def test_another_mesh_is_refused(mesh: dict[str, int], message: str) -> None:
    assert message in findings(tiny_plan(MESH), mesh=AbstractMesh.of(mesh))


def test_an_abstract_mesh_of_several_ranks_is_refused() -> None:
    plan = tiny_plan({"tp": 2})
    assert "pass a DeviceMesh" in findings(plan, mesh=AbstractMesh.of({"tp": 2}))


def test_a_placement_on_a_data_axis_is_refused() -> None:
    plan = with_parameter(
        tiny_plan(MESH), "norm.weight", contract=Contract({"dp": cut(0).placement("tp")})
    )
    assert "norm.weight is placed on ['dp'], no model axes" in findings(plan)


def test_an_argument_that_forward_does_not_take_is_named() -> None:
    plan = with_boundary(tiny_plan(MESH), "norm", inputs=[BoundaryTensor("y", cut(1), cut(1))])
    assert "boundary norm: Norm.forward takes no argument 'y'; it takes ['x']" in findings(plan)


def test_a_parameter_that_cannot_be_cut_evenly_is_named() -> None:
    plan = with_parameter(tiny_plan({"tp": 5}), "head.weight", contract=cut(0))
    text = findings(plan, mesh=AbstractMesh.of({"tp": 5}))
    assert "parameter head.weight of shape (12, 8): dim 0 cannot be cut into equal pieces" in text
    assert "parameter embed.weight" in text
    assert "a rank would have no rows" in text


def test_ties_of_plan_and_module_must_agree() -> None:
    assert "are one tensor in the module" in findings(tiny_plan(MESH), Tiny(tied=True))
    assert "tied in the plan, but not in the module" in findings(tiny_plan(MESH, tied=True))


def test_an_attribute_to_localize_must_exist_and_hold_the_global_value() -> None:
    where = "layers.0.attention"
    plan = with_boundary(tiny_plan(MESH), where, localize=[LocalAttribute("head", "tp", 4)])
    assert "attribute 'head' to localize does not exist" in findings(plan)
    plan = with_boundary(tiny_plan(MESH), where, localize=[LocalAttribute("heads", "tp", 8)])
    assert "attribute 'heads' is 4, the plan expects the global value 8" in findings(plan)


def test_an_embedding_that_needs_its_whole_table_is_refused() -> None:
    module = Tiny()
    module.embed.max_norm = 1.0
    assert "max_norm" in findings(tiny_plan({"tp": 2}), module, AbstractMesh.of({"tp": 2}))


def test_a_leftover_gradient_is_refused() -> None:
    module = Tiny()
    module.norm.weight.grad = torch.ones(HIDDEN)
    assert "norm.weight has a gradient" in findings(tiny_plan(MESH), module)
