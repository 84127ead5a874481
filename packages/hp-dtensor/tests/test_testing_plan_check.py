"""`check_plan` passes a right plan and stops wrong ones, alone and in a process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from dtensor_block import Tiny, batch, cut, loss_of, tiny_plan, with_parameter
from torch import nn

from hp_dtensor.equivalence import EquivalenceError
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.plan import ShardingPlan
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.testing import check_plan
from hp_platform.testing import run_ranks

pytestmark = pytest.mark.ranks


def wrong_sections() -> ShardingPlan:
    """Gate and up, fused in one weight, cut as if they were one."""
    return with_parameter(tiny_plan({"tp": 2}), "layers.0.mlp.gate_up", contract=cut(0))


def test_a_right_plan_passes_and_the_module_is_not_changed() -> None:
    model = Tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = check_plan(model, tiny_plan({"tp": 2}), batch())
    assert report.ok
    assert set(report.losses) == {"dense", "validate", "production"}
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_wrong_plan_fails_with_the_report() -> None:
    with pytest.raises(EquivalenceError, match="DIFFERENT") as error:
        check_plan(Tiny, wrong_sections(), batch())
    assert isinstance(error.value, AssertionError)
    assert "first difference: output of boundary layers.0.mlp" in str(error.value)


def test_a_plan_that_validate_mode_refuses_names_the_place() -> None:
    plan = with_parameter(tiny_plan({"tp": 2}), "layers.0.attention.o.weight", contract=cut(0))
    with pytest.raises(OperatorError, match=r"in module layers\.0\.attention\.o"):
        check_plan(Tiny, plan, batch())


def test_without_labels_the_logits_make_the_loss() -> None:
    ids = {"ids": batch()["ids"]}
    assert check_plan(Tiny, tiny_plan({"tp": 2}), ids).ok
    with pytest.raises(EquivalenceError):
        check_plan(Tiny, wrong_sections(), ids)


def test_a_loss_of_ones_own_is_used() -> None:
    def twice(model: nn.Module, data: Any) -> torch.Tensor:
        return 2 * loss_of(model, data)

    plan = tiny_plan({"tp": 1})
    own = check_plan(Tiny, plan, batch(), loss_fn=twice).losses["dense"]
    assert own == pytest.approx(2 * check_plan(Tiny, plan, batch()).losses["dense"])


def test_data_axes_need_no_ranks() -> None:
    plan = evolve(tiny_plan({"tp": 2}), mesh=AbstractMesh(("dp", "tp"), (64, 2)))
    assert check_plan(Tiny, plan, batch()).ok


def test_in_a_process_group_its_ranks_are_used_and_all_raise() -> None:
    def body() -> tuple[bool, str]:
        report = check_plan(Tiny, tiny_plan({"tp": 2}), batch())
        with pytest.raises(AssertionError) as error:
            check_plan(Tiny, wrong_sections(), batch())
        with pytest.raises(ValueError, match=r"needs 4 ranks.*the process group has 2"):
            check_plan(Tiny, tiny_plan({"tp": 4}), batch())
        return report.ok, str(error.value)

    first, second = run_ranks(body, 2)
    assert first == second
    assert first[0]


def test_arguments_that_cannot_be_checked_are_errors() -> None:
    plan = tiny_plan({"tp": 1})
    ids: Any = batch()["ids"]
    with pytest.raises(TypeError, match="batch is the mapping of the forward arguments"):
        check_plan(Tiny, plan, ids)
    nothing: Any = "Tiny"
    with pytest.raises(TypeError, match="a module or a function that makes it, found str"):
        check_plan(nothing, plan, batch())

    class Pair(Tiny):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return (1, 2)

    with pytest.raises(TypeError, match="gives a tuple without loss or logits; pass loss_fn"):
        check_plan(Pair, plan, batch())
