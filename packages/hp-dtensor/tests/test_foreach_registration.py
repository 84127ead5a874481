"""PyTorch's private lists of types that its foreach optimizers take: guarded against change."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate
from torch.optim import optimizer
from torch.utils import _foreach_utils

from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout


def test_the_lists_exist_and_hold_ours_once() -> None:
    for held in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        assert isinstance(held, list)
        assert torch.Tensor in held
        assert held.count(DTensor) == 1


def test_they_decide_whether_an_optimizer_takes_its_foreach_way() -> None:
    layout = Layout({"tp": 1}, (Replicate(),), (3,))
    parameter = torch.nn.Parameter(DTensor.of_layout(torch.ones(3), layout))
    assert _foreach_utils._device_has_foreach_support(torch.device("cpu")) in (True, False)
    stepped = []
    real = torch._foreach_add_

    def counted(*args: object, **kwargs: object) -> object:
        stepped.append(args)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    parameter.grad = DTensor.of_layout(torch.ones(3), layout)
    sgd = torch.optim.SGD([parameter], lr=0.5, foreach=True)
    torch._foreach_add_ = counted  # type: ignore[assignment]
    try:
        sgd.step()
    finally:
        torch._foreach_add_ = real
    assert stepped
    assert parameter.to_local().tolist() == [0.5] * 3  # type: ignore[attr-defined]
