"""What `torch.utils.checkpoint` runs again in backward is held to what held in forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from dtensor_block import HIDDEN, Layer, Norm, Tiny, batch, loss_of, tiny_plan
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_dtensor.equivalence import check_gradients
from hp_dtensor.parallelize import parallelize
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.testing.lockstep import run_lockstep


def scaled(x: Tensor, norm: Any, times: float = 2.0) -> Tensor:
    """Makes a plain tensor and, where told, is right in forward and wrong when it is run again."""
    norm.calls += 1
    if norm.wrong and norm.calls == 2:
        x = x - x.mean(1, keepdim=True)
    return Norm.forward(norm, x) * torch.arange(1.0, HIDDEN + 1) * times


class Weighs(Norm):
    calls, wrong = 0, False
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x, self)

    def method(self, x: Tensor) -> Tensor:
        return scaled(x, self, 2.0)

    def again(self, function: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=self.reentrant)


class OfFunction(Weighs):
    def forward(self, x: Tensor) -> Tensor:
        return self.again(scaled, x, self, 2.0)


class OfMethod(Weighs):
    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.method, x)


class OfPartial(Weighs):
    def forward(self, x: Tensor) -> Tensor:
        return self.again(partial(scaled, norm=self, times=2.0), x)


class OfClosure(Weighs):
    def forward(self, x: Tensor) -> Tensor:
        return self.again(lambda y: self.method(y), x)


class Nested(Weighs):
    """A function that computes, and has another one recomputed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.again(lambda y: self.again(self.method, y * 1.0), x)


class Several(Weighs):
    def forward(self, x: Tensor) -> Tensor:
        return self.again(lambda y: (self.method(y), y), x)[0]


class Recomputed(Layer):
    """A module run again, as transformers does it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = partial(super().__call__, **kwargs)
        return checkpoint(run, *args, use_reentrant=self.first.reentrant)  # type: ignore[arg-type]


def made(kind: Any = Weighs, reentrant: bool = False, wrong: bool = False) -> Tiny:
    model = Tiny()
    layer: Any = model.layers[0]
    layer.first.__class__ = Weighs if kind is Recomputed else kind
    layer.first.reentrant, layer.first.wrong = reentrant, wrong
    if kind is Recomputed:
        layer.__class__ = Recomputed
    return model


@pytest.mark.parametrize(
    ("kinds", "reentrant"),
    [
        ((OfPartial, Recomputed), False),
        ((OfFunction,), True),
        pytest.param((OfFunction, OfMethod, OfClosure), False, marks=pytest.mark.slow),
        pytest.param((OfPartial, OfMethod, OfClosure, Recomputed), True, marks=pytest.mark.slow),
    ],
)
def test_what_is_run_again_in_backward_is_followed_and_checked(
    kinds: tuple[Any, ...], reentrant: bool
) -> None:
    def body(mesh: Any) -> None:
        plan = tiny_plan({"tp": 2})
        for kind in kinds:
            make = partial(made, kind, reentrant)
            check_gradients(make, plan, mesh, batch(), loss_of).raise_if_failed()
            model: Any = parallelize(made(kind, reentrant, True), plan, mesh, mode="validate")
            loss = loss_of(model, batch())
            assert model.layers[0].first.calls == 1
            with pytest.raises(OperatorError, match="would have to be reduced") as error:
                loss.backward()
            place = "in module layers.0.first" if kind is Recomputed else "runs in backward"
            assert place in str(error.value.__notes__)

    run_lockstep(body, {"tp": 2})


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the inner of two
def test_a_recomputed_function_that_cannot_be_followed_is_refused_with_what_to_do() -> None:
    data = batch()

    def body(mesh: Any) -> None:
        plan = tiny_plan({"tp": 2})
        check_gradients(partial(made, Nested, True), plan, mesh, data, loss_of).raise_if_failed()
        within = parallelize(made(Nested), plan, mesh, mode="validate")
        with pytest.raises(OperatorError, match="Remedy: checkpoint one of the two"):
            loss_of(within, data).backward()
        several = parallelize(made(Several, reentrant=True), plan, mesh, mode="validate")
        with pytest.raises(OperatorError, match="Remedy: pass use_reentrant=False"):
            loss_of(several, data)
        check_gradients(partial(made, Several), plan, mesh, data, loss_of).raise_if_failed()

    run_lockstep(body, {"tp": 2})
