"""Momentum and update scale: the elementwise parts of Muon, as functions of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hp_muon.errors import MuonError

SCALES = ("match_rms_adamw", "spectral", "jordan", "none")

Scale = str | Callable[[int, int], float]
"""The name of a rule, or a function of the logical matrix's rows and cols."""

MomentumRule = Callable[[list[Tensor], list[Tensor], float, bool], list[Tensor]]
"""(momenta, gradients, momentum, nesterov) -> inputs of the orthogonalization; see `accumulate`.

Updates the float32 momenta in place. Elementwise: it sees shards, in any number at a time.
"""


def update_scale(scale: Scale, rows: int, cols: int) -> float:
    """Factor on the orthogonalized update of a logical matrix.

    - "match_rms_adamw": 0.2 sqrt(max(rows, cols)), the root mean square of AdamW's updates
      (Liu et al. 2025, arXiv 2502.16982).
    - "spectral", "jordan": sqrt(max(1, rows / cols)) (Jordan et al. 2024).
    - "none": 1.
    - a function: what it returns.

    Raises:
        MuonError: no such rule.
    """
    if callable(scale):
        return float(scale(rows, cols))
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if scale in ("spectral", "jordan"):
        return math.sqrt(max(1.0, rows / cols))
    if scale == "none":
        return 1.0
    raise MuonError(f"unknown scale {scale!r}; use one of {SCALES}")


def accumulate(
    momenta: list[Tensor], gradients: list[Tensor], momentum: float, nesterov: bool
) -> list[Tensor]:
    """m <- mu m + g in place; returns the input of Newton-Schulz, g + mu m or m.

    Args:
        momenta: float32, one per gradient; gradients may be of another floating dtype.
    """
    if not momenta:
        return []
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, gradients)
    if not nesterov:
        return momenta
    return list(torch._foreach_add(gradients, momenta, alpha=momentum))


def apply_updates(
    parameters: list[Tensor], updates: list[Tensor], lr: float, decay: float, scale: float
) -> None:
    """p <- p (1 - lr decay) - lr scale update, in place, with decoupled weight decay."""
    if not parameters:
        return
    if decay:
        torch._foreach_mul_(parameters, 1 - lr * decay)
    torch._foreach_add_(parameters, updates, alpha=-lr * scale)
