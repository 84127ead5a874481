"""Rows sent to the ranks of an axis and gradients sent back, as one autograd node.

One node for all tensors of an exchange: two nodes could run backward in another order on another
rank, whose graph has another shape, and their collectives would then meet the wrong ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from hp_platform import Origin
from hp_platform.axis import MeshAxis
from hp_platform.collectives import all_to_all

__all__ = ["Exchange"]


@frozen(eq=False)
class Exchange:
    """Which rows go where.

    Attributes:
        axis: the ranks that exchange.
        sent: rows for every coordinate, in the order in which they lie in the tensors.
        received: rows from every coordinate.
        origin: who asks, for the ledger.
    """

    axis: MeshAxis
    sent: tuple[int, ...]
    received: tuple[int, ...]
    origin: Origin

    @property
    def back(self) -> Exchange:
        """The same rows on their way home."""
        return evolve(self, sent=self.received, received=self.sent)

    def apply(self, *tensors: Tensor, gradient_factor: float = 1.0) -> tuple[Tensor, ...]:
        """Exchanges the rows (dim 0) of every tensor; differentiable.

        Args:
            gradient_factor: what backward multiplies the gradients by.
        """
        moved: tuple[Tensor, ...] = _Exchanged.apply(self, gradient_factor, *tensors)
        return moved

    def run(self, tensors: Sequence[Tensor], phase: str) -> tuple[Tensor, ...]:
        """As `apply`, without autograd. All are under way before the first is waited for."""
        origin = Origin(self.origin.package, self.origin.name, phase)
        handles = [
            all_to_all(
                tensor.contiguous(),
                self.axis,
                input_sizes=self.sent,
                output_sizes=self.received,
                origin=origin,
            )
            for tensor in tensors
        ]
        return tuple(handle.wait() for handle in handles)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, gradient_factor: float, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.factor = exchange, gradient_factor
        return exchange.run(tensors, "forward")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        moved = ctx.exchange.back.run(gradients, "backward")
        if ctx.factor != 1.0:
            moved = tuple(gradient * ctx.factor for gradient in moved)
        return (None, None, *moved)
