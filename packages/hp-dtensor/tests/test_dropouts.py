"""Dropout drops the same elements in both modes and in the dense model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from dtensor_block import Layer, Tiny, batch, cut, loss_of, tiny_plan, with_boundary
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from hp_dtensor.dropouts import replace_dropouts
from hp_dtensor.dtensor import DTensor
from hp_dtensor.equivalence import GradientReport, check_gradients
from hp_dtensor.errors import PlanError
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.parallelize import parallelize
from hp_dtensor.plan import BoundaryKind, BoundarySpec, BoundaryTensor, ShardingPlan
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.testing.lockstep import run_lockstep


class Dropping(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        return self.drop(super().forward(x, positions))


def model() -> nn.Module:
    made = Tiny()
    for index, layer in enumerate(made.layers):
        dropping = Dropping()
        dropping.load_state_dict(layer.state_dict())
        made.layers[index] = dropping
    return made


def plan_of(mesh: dict[str, int]) -> ShardingPlan:
    plan = tiny_plan(mesh)
    drops = [
        BoundarySpec(
            f"layers.{i}.drop",
            BoundaryKind.NORM,
            inputs=[BoundaryTensor("input", cut(1), cut(1))],
            outputs=[BoundaryTensor("", cut(1), cut(1))],
        )
        for i in range(2)
    ]
    return evolve(plan, boundaries=[*plan.boundaries, *drops])


def test_both_modes_and_the_dense_model_drop_the_same_elements() -> None:
    def body(mesh: Any) -> GradientReport:
        return check_gradients(model, plan_of({"tp": 2}), mesh, batch(), loss_of)

    for report in run_lockstep(body, {"tp": 2}):
        report.raise_if_failed()
    dry = run_lockstep(
        lambda mesh: check_gradients(Tiny, tiny_plan({"tp": 2}), mesh, batch(), loss_of),
        {"tp": 2},
    )[0]
    assert abs(dry.losses["dense"] - report.losses["dense"]) > 1e-3, "nothing was dropped"


def test_data_ranks_drop_different_elements_and_steps_too() -> None:
    def body(mesh: Any) -> list[float]:
        made = parallelize(model(), plan_of({"dp": 2, "tp": 2}), mesh)
        return [float(loss_of(made, batch()).detach()) for _ in range(2)]

    first, second, third, fourth = run_lockstep(body, {"dp": 2, "tp": 2})
    assert first == second
    assert third == fourth
    assert first != third
    assert first[0] != first[1]


def test_the_state_is_in_the_state_dict() -> None:
    made = parallelize(model(), plan_of({"tp": 1}), AbstractMesh.of({"tp": 1}))
    loss_of(made, batch())
    state = copy.deepcopy(made.state_dict())
    assert state["layers.1.drop._extra_state"]["draws"] == 1
    again = parallelize(model(), plan_of({"tp": 1}), AbstractMesh.of({"tp": 1}), dropout_seed=5)
    again.load_state_dict(state)
    assert loss_of(made, batch()).item() == loss_of(again, batch()).item()
    assert loss_of(copy.deepcopy(made), batch()).item() == loss_of(again, batch()).item()


def test_dropout_whose_layout_is_unknown_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"module layers.0.drop drops activations \(p=0.4\)"):
        parallelize(model(), tiny_plan({"tp": 2}), AbstractMesh.of({"tp": 2}), mode="validate")


def test_dropout_that_a_module_calls_by_itself_is_refused_by_name() -> None:
    made = Tiny()
    made.layers[1].attention.attention_dropout = 0.1
    with pytest.raises(PlanError, match=r"layers.1.attention \(Attention\) has attention_dropout"):
        parallelize(made, tiny_plan({"tp": 2}), AbstractMesh.of({"tp": 2}), mode="validate")
    made = Tiny()
    made.layers[1].extra = nn.AlphaDropout(0.1)
    with pytest.raises(PlanError, match=r"layers.1.extra is a AlphaDropout"):
        parallelize(made, tiny_plan({"tp": 2}), AbstractMesh.of({"tp": 2}), mode="validate")


def test_dropout_of_torch_on_parts_is_refused() -> None:
    def body(mesh: Any) -> None:
        parts = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], shape=(4, 2))
        with pytest.raises(OperatorError, match="dropout"):
            F.dropout(parts, 0.5)
        heads = parts.view(1, 4, 1, 2)
        with pytest.raises(OperatorError, match="dropout"):
            F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)

    run_lockstep(body, {"tp": 2})


def test_recomputed_dropout_is_refused() -> None:
    made = nn.Sequential(nn.Dropout(0.5))
    replace_dropouts(made)
    result = checkpoint(made, torch.ones(4, requires_grad=True), use_reentrant=False)
    assert isinstance(result, Tensor)
    with pytest.raises(RuntimeError, match="dropout 0 runs again inside a backward pass"):
        result.pow(2).sum().backward()


def test_evaluation_drops_nothing() -> None:
    made = parallelize(model().eval(), plan_of({"tp": 1}), AbstractMesh.of({"tp": 1}))
    assert loss_of(made, batch()).item() == loss_of(model().eval(), batch()).item()
    assert with_boundary(plan_of({"tp": 1}), "norm") == plan_of({"tp": 1})
