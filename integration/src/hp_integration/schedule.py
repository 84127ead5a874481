"""Learning rate over the steps: linear warm-up, then a cosine down to a tenth."""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

_FLOOR = 0.1


def rate_factor(step: int, *, warmup: int, steps: int) -> float:
    """Share of the peak learning rate at 0-based `step` of `steps`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def learning_rate_schedule(optimizer: Optimizer, *, warmup: int, steps: int) -> LambdaLR:
    """The schedule over every parameter group, each from its own learning rate."""
    return LambdaLR(optimizer, partial(rate_factor, warmup=warmup, steps=steps))
