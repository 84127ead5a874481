"""`torch.autograd.Function`s in validate mode: followed where they are made of torch functions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from dtensor_block import batch, loss_of, tiny_plan
from faulty_modules import OwnFunction, Square, with_layer
from torch import Tensor

from hp_dtensor.dtensor import DTensor
from hp_dtensor.equivalence import check_gradients
from hp_dtensor.parallelize import parallelize
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.testing.lockstep import run_lockstep


class Squares(OwnFunction):
    function = Square


class OverTheCut(Square):
    """Its gradient is averaged over a dim that is cut."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean(1, keepdim=True)


class Loses(Square):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        given = gradients[0]
        return given.to_local() if isinstance(given, DTensor) else given


class Moves(Square):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        given: Any = gradients[0]
        return given.redistribute(
            placements=[tiny_plan({"tp": 2}).parameters[0].contract.placement("tp")]
        )


def test_a_function_of_torch_functions_agrees_in_all_modes() -> None:
    make = partial(with_layer, Squares, "first")
    plan = tiny_plan({"tp": 2})
    for report in run_lockstep(
        lambda mesh: check_gradients(make, plan, mesh, batch(), loss_of), {"tp": 2}
    ):
        report.raise_if_failed()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (OverTheCut, "would have to be reduced"),
        (Loses, "Loses.backward: it returned a plain tensor"),
        (Moves, "Moves.backward: expected a gradient laid out"),
    ],
)
def test_a_backward_that_is_wrong_on_parts_is_an_error(function: Any, message: str) -> None:
    def body(mesh: Any) -> None:
        model = with_layer(Squares, "first")
        model.layers[0].first.function = function  # type: ignore[index, union-attr]
        model = parallelize(model, tiny_plan({"tp": 2}), mesh, mode="validate")
        with pytest.raises(OperatorError, match=message):
            loss_of(model, batch()).backward()

    run_lockstep(body, {"tp": 2})
