"""Decorated regions: held to what they declare, and out of the way in production."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from hp_dtensor.dtensor import DTensor
from hp_dtensor.errors import ContractError
from hp_dtensor.layout import Layout
from hp_dtensor.plan import Contract
from hp_dtensor.region_contracts import opaque_region, transparent_region
from hp_dtensor.testing.lockstep import run_lockstep

ROWS, WHOLE, PENDING = Contract({"tp": Shard(0)}), Contract(), Contract({"tp": Partial()})


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


@opaque_region({"x": ROWS}, ROWS, like="x")
def squared(x: Tensor, scale: float = 1.0) -> Tensor:
    return scale * Square.apply(x)


@opaque_region({"x": ROWS}, {"0": ROWS, "1": PENDING})
def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x.sum(0)


@transparent_region(PENDING, inputs={"x": ROWS})
def summed(x: Tensor) -> Tensor:
    return x.sum(0)


@transparent_region(WHOLE)
def claims_to_be_whole(x: Tensor) -> Tensor:
    return x.sum(0)


def rows(mesh: Any, value: Tensor) -> DTensor:
    whole = DTensor.of_layout(value, Layout(mesh, [Replicate()], value.shape))
    return whole.redistribute(placements=[Shard(0)]).detach().requires_grad_()


def on_ranks(body: Any) -> Any:
    return run_lockstep(body, {"tp": 2})[0]


def test_an_opaque_region_computes_on_local_tensors_with_gradients() -> None:
    dense = torch.arange(8.0).view(4, 2)

    def body(mesh: Any) -> tuple[Tensor, Tensor]:
        x = rows(mesh, dense)
        result = squared(x, scale=3.0)
        result.sum().backward()
        return result.detach().full_tensor(), x.grad.full_tensor()

    value, gradient = on_ranks(body)
    assert torch.equal(value, 3 * dense**2)
    assert torch.equal(gradient, 6 * dense)


def test_several_outputs_have_a_contract_each() -> None:
    dense = torch.arange(8.0).view(4, 2)

    def body(mesh: Any) -> tuple[Tensor, Tensor]:
        first, second = parts(rows(mesh, dense))
        return first.detach().full_tensor(), second.detach().full_tensor()

    first, second = on_ranks(body)
    assert torch.equal(first, dense + 1)
    assert torch.equal(second, dense.sum(0))


def test_plain_tensors_pass_straight_through() -> None:
    x = torch.arange(4.0)
    assert torch.equal(squared(x), x * x)
    assert torch.equal(summed(x), x.sum())


def test_what_is_not_as_declared_is_named() -> None:
    dense = torch.ones(4, 2)

    def body(mesh: Any) -> None:
        x = rows(mesh, dense)
        whole = x.detach().redistribute(placements=[Replicate()])
        with pytest.raises(ContractError, match=r"input .x.: expected tp: S\(0\), found R"):
            squared(whole)
        with pytest.raises(ContractError, match=r"argument 'scale' is a DTensor that no contract"):
            squared(x, scale=whole)  # type: ignore[arg-type]
        with pytest.raises(ContractError, match=r"claims_to_be_whole, output .*: expected R"):
            claims_to_be_whole(x)
        assert summed(x).placements == (Partial(),)

    on_ranks(body)


def test_an_output_that_is_not_like_its_input_is_named() -> None:
    @opaque_region({"x": ROWS}, ROWS, like="x")
    def halves(x: Tensor) -> Tensor:
        return x[:, :1]

    @opaque_region({"x": ROWS}, {"0": ROWS})
    def too_many(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def body(mesh: Any) -> None:
        x = rows(mesh, torch.ones(4, 2))
        with pytest.raises(ContractError, match=r"halves, output .*: declared to be like"):
            halves(x)
        with pytest.raises(ContractError, match=r"too_many, output '1' is declared by no contract"):
            too_many(x)

    on_ranks(body)


def test_without_values_a_region_like_its_input_is_not_run() -> None:
    @opaque_region({"x": ROWS}, ROWS, like="x")
    def chooses(x: Tensor) -> Tensor:
        raise AssertionError("ran without values")

    layout = Layout({"tp": 2}, (Shard(0),), (4, 2))
    x = DTensor.of_layout(torch.ones(2, 2, device="meta"), layout).requires_grad_()
    result = chooses(x)
    assert result.layout == layout
    result.sum().backward()
    assert x.grad is not None
    assert tuple(x.grad.shape) == (4, 2)


def test_a_contract_for_no_argument_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"no argument 'y'; it takes \['x'\]"):

        @opaque_region({"y": ROWS}, ROWS)
        def function(x: Tensor) -> Tensor:
            return x
