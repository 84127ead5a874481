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
        normuon_beta2: float | None = None,
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
        self.dtype, self.beta2 = ns_dtype, normuon_beta2
        self.scale, self.views = scale, list(views or [None] * len(self.matrices))
        self.momenta = [torch.zeros_like(p, dtype=torch.float32) for p in self.matrices]
        self.rows: list[dict[int, Tensor]] = [{} for _ in self.matrices]
        self.adamw = None
        if self.others:
            self.adamw = torch.optim.AdamW(self.others, adamw_lr, betas, eps, weight_decay)

    @torch.no_grad()
    def step(self) -> None:
        for index, (parameter, momentum) in enumerate(zip(self.matrices, self.momenta)):
            if parameter.grad is None:
                continue
            momentum.mul_(self.mu).add_(parameter.grad)
            update = parameter.grad + self.mu * momentum if self.nesterov else momentum
            update = self._orthogonalize(update.to(self.dtype), index)
            parameter.mul_(1 - self.lr * self.wd).sub_(self.lr * update)
        if self.adamw is not None:
            self.adamw.step()

    def _orthogonalize(self, update: Tensor, index: int) -> Tensor:
        """Scaled polar factor of every logical matrix, in the parameter's own shape."""
        view = self.views[index] or MatrixView.default(update.ndim)
        left, right = view.pattern.split("->")
        names = left.replace("(", "").replace(")", "").split()
        split = view.split or names[0]
        pieces = view.sizes.get(split)
        sizes = {n: sum(s) if isinstance(s, tuple) else s for n, s in view.sizes.items()}
        axes = rearrange(update, f"{left} -> {' '.join(names)}", **sizes)
        at = names.index(split)
        sections = axes.split(list(pieces), at) if isinstance(pieces, tuple) else [axes]
        done, number = [], 0
        for section in sections:
            lengths = dict(zip(names, section.shape))
            stack = rearrange(section, f"{' '.join(names)} -> {right}")
            flat = stack.reshape(-1, *stack.shape[-2:])
            made = [self._matrix(m, index, number + i) for i, m in enumerate(flat)]
            number += len(made)
            result = torch.stack(made).reshape(stack.shape)
            done.append(rearrange(result, f"{right} -> {' '.join(names)}", **lengths))
        return rearrange(torch.cat(done, at), f"{' '.join(names)} -> {left}")

    def _matrix(self, matrix: Tensor, index: int, number: int) -> Tensor:
        rows, cols = matrix.shape
        rms = self.scale == "match_rms_adamw"
        factor = 0.2 * math.sqrt(max(rows, cols)) if rms else math.sqrt(max(1, rows / cols))
        update = self.iterate(matrix).float()
        if self.beta2 is not None:
            before = update.norm()
            rows_moment = self.rows[index].get(number, torch.zeros(rows))
            rows_moment = self.beta2 * rows_moment + (1 - self.beta2) * update.square().mean(1)
            self.rows[index][number] = rows_moment
            update = update / (rows_moment.sqrt() + 1e-8)[:, None]
            update = update * (before / update.norm()) if before > 0 else update
        return factor * update
