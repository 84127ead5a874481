"""Dense, single-process Muon and AdamW: what every layout must reproduce.

Written to be read beside the formulas (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982;
Loshchilov and Hutter 2019), not to be fast. Nothing of the sharded step is used here except the
Newton-Schulz iteration itself, which has its own tests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from hp_muon.newton_schulz import newton_schulz
from hp_muon.views import MatrixView


class DenseMuon:
    """Steps full tensors one matrix at a time; `grad` None skips a parameter.

    Args are those of `hp_muon.Muon`; `matrices` get Muon, `others` get AdamW.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        others: Sequence[Tensor] = (),
        *,
        lr: float = 2e-2,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        coefficients: str = "asym5",
        scale: str = "match_rms_adamw",
        ns_dtype: torch.dtype = torch.bfloat16,
        views: Sequence[MatrixView | None] | None = None,
        adamw_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.matrices, self.others = list(matrices), list(others)
        self.lr, self.mu, self.nesterov, self.wd = lr, momentum, nesterov, weight_decay
        self.iterate = functools.partial(
            newton_schulz, steps=ns_steps, coefficients=coefficients, dtype=ns_dtype
        )
        self.dtype = ns_dtype
        self.scale, self.views = scale, list(views or [None] * len(self.matrices))
        self.momenta = [torch.zeros_like(p, dtype=torch.float32) for p in self.matrices]
        self.adamw = None
        if self.others:
            self.adamw = torch.optim.AdamW(self.others, adamw_lr, betas, eps, weight_decay)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, momentum, view in zip(self.matrices, self.momenta, self.views):
            if parameter.grad is None:
                continue
            momentum.mul_(self.mu).add_(parameter.grad)
            update = parameter.grad + self.mu * momentum if self.nesterov else momentum
            update = self._orthogonalize(update.to(self.dtype), view)
            parameter.mul_(1 - self.lr * self.wd).sub_(self.lr * update)
        if self.adamw is not None:
            self.adamw.step()

    def _orthogonalize(self, update: Tensor, view: MatrixView | None) -> Tensor:
        """Scaled polar factor of every logical matrix, in the parameter's own shape."""
        if view is None:
            return torch.stack(
                [self._matrix(m) for m in update.reshape(-1, *update.shape[-2:])]
            ).reshape(update.shape)
        left, right = view.pattern.split("->")
        stack = rearrange(update, view.pattern, **view.sizes)
        done = torch.stack([self._matrix(m) for m in stack.reshape(-1, *stack.shape[-2:])])
        return rearrange(done.reshape(stack.shape), f"{right}->{left}", **view.sizes)

    def _matrix(self, matrix: Tensor) -> Tensor:
        rows, cols = matrix.shape
        rms = self.scale == "match_rms_adamw"
        factor = 0.2 * math.sqrt(max(rows, cols)) if rms else math.sqrt(max(1, rows / cols))
        return factor * self.iterate(matrix).float()
