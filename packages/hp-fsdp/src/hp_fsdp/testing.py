"""Compares a sharded model with the dense one in a single process: the oracle of the tests.

Every rank calls the same functions; each computes the dense result for itself, from the data of
all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hp_dtensor.dtensor import DTensor

LossFn = Callable[[nn.Module, Any], Tensor]
"""(model, one rank's batch) -> scalar loss."""


def whole(tensor: Tensor) -> Tensor:
    """The full, plain value of a tensor that may be a DTensor."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's gradient, gathered; None stays None."""
    return {
        name: None if parameter.grad is None else whole(parameter.grad)
        for name, parameter in model.named_parameters()
    }


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, gathered."""
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def dense_backward(model: nn.Module, batches: Sequence[Any], loss_fn: LossFn) -> Tensor:
    """Backward of the mean over the ranks' losses, which data parallelism computes.

    Args:
        model: a plain model.
        batches: one batch per data-parallel rank.

    Returns:
        The mean loss.
    """
    total = torch.stack([loss_fn(model, batch) for batch in batches]).mean()
    total.backward()
    return total.detach()


def assert_same(
    found: dict[str, Tensor | None] | dict[str, Tensor],
    expected: dict[str, Tensor | None] | dict[str, Tensor],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    zero_is_none: bool = False,
) -> None:
    """Asserts that two sets of named tensors agree.

    Args:
        zero_is_none: accept zeros where the dense gradient is None, as for a parameter that
            backward did not use in a unit that it did.
    """
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        value = found[name]
        if wanted is None:
            assert value is None or (zero_is_none and not value.any()), f"{name}: {value}"
            continue
        assert value is not None, f"{name} has no gradient"
        assert value.shape == wanted.shape, f"{name}: {tuple(value.shape)}"
        try:
            torch.testing.assert_close(value.to(wanted.dtype), wanted, rtol=rtol, atol=atol)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def assert_trains_like_dense(
    make_model: Callable[[], nn.Module],
    shard: Callable[[nn.Module], Any],
    batches: Sequence[Sequence[Any]],
    rank: int,
    loss_fn: LossFn,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    zero_is_none: bool = False,
) -> None:
    """Trains a sharded and a dense model side by side and compares every gradient and parameter.

    Args:
        make_model: makes the same model every time.
        shard: applies `fully_shard` in place.
        batches: for every step, one batch per data-parallel rank.
        rank: this rank's position among the data-parallel ranks.

    Raises:
        AssertionError: a gradient or a parameter differs, with its name and the step.
    """
    model, dense = make_model(), make_model()
    shard(model)
    optimizer = make_optimizer(model.parameters())
    reference = make_optimizer(dense.parameters())
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        reference.zero_grad()
        loss_fn(model, batch[rank]).backward()
        dense_backward(dense, batch, loss_fn)
        close = functools.partial(assert_same, rtol=rtol, atol=atol)
        try:
            expected = {name: p.grad for name, p in dense.named_parameters()}
            close(full_gradients(model), expected, zero_is_none=zero_is_none)
            optimizer.step()
            reference.step()
            close(full_parameters(model), full_parameters(dense))
        except AssertionError as error:
            raise AssertionError(f"step {step}: {error}") from error
