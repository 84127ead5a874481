"""A plan validated without values, on meshes that no machine has."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from attrs import evolve
from dtensor_block import (
    HEADS,
    HIDDEN,
    WHOLE,
    Attention,
    Tiny,
    batch,
    cut,
    tiny_plan,
    with_boundary,
    with_parameter,
)
from torch import Tensor, nn

from hp_dtensor.errors import ContractError, PlanError
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.meta import MetaReport, validate_on_meta
from hp_dtensor.parallelize import parallelize
from hp_dtensor.plan import BoundaryTensor, Region, RegionKind, ShardingPlan
from hp_dtensor.rules.engine import OperatorError

MLP, ATTENTION = "layers.0.mlp", "layers.0.attention"


def like_input(plan: ShardingPlan) -> ShardingPlan:
    """The opaque MLPs say that they give back what they are given."""
    for name in ("layers.0.mlp", "layers.1.mlp"):
        outputs = [evolve(each, like="x") for each in plan.boundary(name).outputs]
        plan = with_boundary(plan, name, outputs=outputs)
    return plan


def checked(plan: ShardingPlan, model: nn.Module | None = None, **options: Any) -> MetaReport:
    return validate_on_meta(model or Tiny(), plan, batch(), **options)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("mesh", [{"tp": 1}, {"tp": 2}, {"tp": 4}, {"dp": 192, "tp": 4}])
def test_a_good_plan_holds_on_a_mesh_of_any_size(
    mesh: dict[str, int], sequence_parallel: bool
) -> None:
    plan = like_input(tiny_plan(mesh, sequence_parallel=sequence_parallel))
    report = checked(plan)
    assert report.mesh == AbstractMesh.of(mesh)
    assert report.gradients == len(plan.parameters)
    assert report.unreached == ()
    assert "without values: 27 parameters" in str(report)


def test_the_model_is_left_as_it_is() -> None:
    model = Tiny(tied=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checked(tiny_plan({"tp": 2}, tied=True), model)
    assert model.layers[0].attention.heads == 4
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert model.head.weight is model.embed.weight


def test_a_model_on_meta_is_validated_too() -> None:
    assert checked(tiny_plan({"tp": 2}), Tiny().to("meta")).unreached == ()


FAULTS = {
    "reduction missing": (
        lambda plan: with_boundary(plan, "embed", outputs=[BoundaryTensor("", WHOLE, WHOLE)]),
        r"boundary embed, output '': expected R, found tp: P\(sum\)",
        ContractError,
    ),
    "weight cut along the wrong dim": (
        lambda plan: with_parameter(plan, f"{ATTENTION}.o.weight", contract=cut(0)),
        "in module layers.0.attention.o",
        OperatorError,
    ),
    "gradient not declared a summand": (
        lambda plan: with_parameter(plan, f"{ATTENTION}.q_norm.weight", contract=WHOLE),
        "in module layers.0.attention.q_norm",
        OperatorError,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_without_values(name: str) -> None:
    change, place, kind = FAULTS[name]
    plan = like_input(tiny_plan({"tp": 2}))
    with pytest.raises(kind) as error:  # type: ignore[arg-type]
        checked(change(plan))  # type: ignore[operator]
    text = "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])
    assert re.search(place, text), text


class Chooses(nn.Module):
    """Chooses by value, as experts do: what cannot run without values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        assert not x.is_meta, "an opaque region ran without values"
        return x * self.weight


def choosing() -> tuple[nn.Module, ShardingPlan]:
    model = Tiny()
    model.layers[0].second = Chooses()
    plan = with_boundary(like_input(tiny_plan({"tp": 2})), "layers.0.second")
    outputs = [evolve(each, like="x") for each in plan.boundary("layers.0.second").outputs]
    region = Region(RegionKind.OPAQUE, "chooses by value")
    return model, with_boundary(plan, "layers.0.second", outputs=outputs, region=region)


def test_an_opaque_region_is_not_run_but_keeps_its_place_in_the_graph() -> None:
    model, plan = choosing()
    assert checked(plan, model).unreached == ()


def test_an_opaque_region_without_like_is_run() -> None:
    model, plan = choosing()
    outputs = [evolve(each, like="") for each in plan.boundary("layers.0.second").outputs]
    with pytest.raises(AssertionError, match="ran without values"):
        checked(with_boundary(plan, "layers.0.second", outputs=outputs), model)


class KnowsItsHeads(Attention):
    """Counts all heads, whatever the plan makes of its attributes."""

    def forward(
        self, x: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        return self.o(self.part(self.q(x)).flatten(2)), None

    def part(self, q: Tensor) -> Tensor:
        return q.view(q.shape[0], q.shape[1], HEADS, -1)


class KnowsItsWidth(KnowsItsHeads):
    def part(self, q: Tensor) -> Tensor:
        return torch.cat([q[..., HIDDEN // 2 :], q[..., : HIDDEN // 2]], dim=-1)


class MakesAMask(KnowsItsHeads):
    def part(self, q: Tensor) -> Tensor:
        return q * torch.ones(HIDDEN)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (KnowsItsHeads, rf"view: size {HEADS} of dim 2 .* localize"),
        (KnowsItsWidth, rf"__getitem__: {HIDDEN // 2} along dim 2 .* localize"),
        (MakesAMask, r"mul: an operand would have to be .*redistributed"),
    ],
)
def test_a_module_that_hard_codes_a_global_size_is_named(kind: Any, told: str) -> None:
    model = Tiny()
    model.layers[1].attention = kind(bias=False)
    with pytest.raises(OperatorError, match=told) as error:
        checked(like_input(tiny_plan({"tp": 2})), model)
    assert "in module layers.1.attention" in error.value.__notes__


class Branches(Tiny):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        where = torch.arange(ids.shape[1], device=self.embed.weight.device)
        if not bool((where >= 0).all()):
            raise ValueError("negative positions")
        return super().forward(ids, labels)


def test_plain_tensors_keep_their_values_because_models_branch_on_them() -> None:
    assert checked(like_input(tiny_plan({"tp": 2})), Branches()).unreached == ()


def test_an_abstract_mesh_is_refused_for_values_and_for_production() -> None:
    mesh = AbstractMesh.of({"tp": 2})
    with pytest.raises(PlanError, match=r"embed.weight and 26 others have; use .*validate_on_meta"):
        parallelize(Tiny(), tiny_plan({"tp": 2}), mesh, mode="validate")
    with pytest.raises(PlanError, match="cannot communicate"):
        parallelize(Tiny(), tiny_plan({"tp": 2}), mesh)


def test_inputs_are_a_mapping() -> None:
    with pytest.raises(TypeError, match="mapping of the forward arguments"):
        validate_on_meta(Tiny(), tiny_plan({"tp": 2}), torch.ones(2))  # type: ignore[arg-type]


def test_a_loss_function_is_taken() -> None:
    def loss(model: nn.Module, data: Any) -> Tensor:
        logits: Tensor = model(**{"ids": data["ids"]})["logits"]
        return logits.logsumexp(-1).sum()

    assert checked(like_input(tiny_plan({"tp": 4})), loss_fn=loss).unreached == ()


def test_a_mesh_that_is_not_the_plans_is_refused() -> None:
    with pytest.raises(PlanError, match="mesh axis 'tp' has size 8, the plan is for size 2"):
        checked(tiny_plan({"tp": 2}), mesh={"tp": 8})


def test_on_one_rank_a_plan_without_boundaries_validates_real_values() -> None:
    plan = evolve(
        tiny_plan({"tp": 1}),
        boundaries=[],
        parameters=[evolve(p, contract=WHOLE) for p in tiny_plan({"tp": 1}).parameters],
    )
    model = parallelize(Tiny(), plan, AbstractMesh.of({"tp": 1}), mode="validate")
    loss = model(**batch())["loss"]
    loss.backward()
    dense = Tiny()
    expected = dense(**batch())["loss"]
    expected.backward()
    assert loss.item() == expected.item()
    assert torch.equal(model.norm.weight.grad.full_tensor(), dense.norm.weight.grad)


def test_what_is_taken_on_one_rank_is_not_taken_outside_the_model() -> None:
    """The plan of an operator is kept with the policy that allowed it."""
    from torch.distributed.tensor import Replicate

    from hp_dtensor.dtensor import DTensor
    from hp_dtensor.implicit import implicit
    from hp_dtensor.layout import Layout

    value = DTensor.of_layout(torch.ones(3), Layout({"tp": 1}, (Replicate(),), (3,)))
    with implicit(reductions=False, adjoints=False, plain=True):
        assert torch.equal((value + torch.ones(3)).to_local(), torch.full((3,), 2.0))
    with pytest.raises(OperatorError, match="plain tensor of shape"):
        value + torch.ones(3)
