"""AdamW for what is no matrix, on local tensors; equal in value to torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


def step_adamw(
    group: Mapping[str, Any],
    locals: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
) -> None:
    """Steps the local tensors of one group, in place, with their states."""
    if not locals:
        return
    adamw(
        list(locals),
        list(gradients),
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        eps=group["eps"],
        maximize=False,
    )


def new_adamw_state(local: Tensor) -> dict[str, Tensor]:
    """The state of a parameter that was never stepped."""
    return {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(local),
        "exp_avg_sq": torch.zeros_like(local),
    }
