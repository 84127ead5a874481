"""Modules with a sharding fault of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from dtensor_block import (
    HEADS,
    HIDDEN,
    INNER,
    Attention,
    Gated,
    Layer,
    Norm,
    Tiny,
    cut,
)
from torch import Tensor, nn

from hp_dtensor.dtensor import DTensor


class LosesLayout(Norm):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result.to_local() if isinstance(result, DTensor) else result


class Gathers(Norm):
    """Takes the whole tensor where a part is declared."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result.full_tensor() if isinstance(result, DTensor) else result


class Redistributes(Norm):
    """Changes the layout on its own authority; production would not."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if isinstance(result, DTensor):
            return result.redistribute(placements=[cut(2).placement("tp")])
        return result


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


class LocalSquare(Square):
    """Hands memory to a kernel, as it were."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Square.forward(ctx, x.to_local() if isinstance(x, DTensor) else x)


class OwnFunction(Norm):
    """An autograd.Function of a kernel's kind outside any region."""

    function: Any = LocalSquare

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.function.apply(x))


class LocalSum(Norm):
    """Normalises over the sequence, of which a rank holds a part."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6))


class OwnMean(Norm):
    """The same on its own part, in an opaque region."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(1, keepdim=True))


class TwoSums(Norm):
    """The same operator twice, over other dims."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x + x.sum(0, keepdim=True) + x.sum(2, keepdim=True)) / 10


class HardCoded(Attention):
    """Knows the number of heads without the attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.split = HEADS

    def forward(
        self, x: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        held, self.heads = self.heads, self.split
        try:
            return super().forward(x, positions, mask)
        finally:
            self.heads = held


class AddsToPending(Attention):
    """Adds a constant to its output, which is a summand on every rank."""

    def forward(
        self, x: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        mixed, rest = super().forward(x, positions, mask)
        return mixed + 1.0, rest


class NonLinear(Attention):
    """Applies a nonlinear function to a summand."""

    def forward(
        self, x: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        mixed, rest = super().forward(x, positions, mask)
        return torch.relu(mixed), rest


class OwnScale(Gated):
    """Scales its input by the largest element of its own features."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        gate = gate / gate.abs().amax(-1, keepdim=True)
        return F.linear(F.silu(gate) * up, self.down)


class Detached(Gated):
    """Cuts its output off from the graph where it finds itself sharded."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result if self.down.shape[1] == INNER else result.detach()


class Twice(Gated):
    """Sums over the ranks by counting its output twice."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result if self.down.shape[1] == INNER else 2 * result


class Detour(Layer):
    """Takes the local part of what the attention gave, as code outside torch functions may."""

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.first(x), positions=positions)[0]
        second = self.second(x)
        plain = second.to_local() if isinstance(second, DTensor) else second
        return x + self.mlp(plain)


class Mixes(Layer):
    """Adds the positions of the whole sequence to a part of it; in production, its own from 0."""

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(x + torch.arange(x.shape[1], dtype=x.dtype)[:, None], positions)


class KeepsOld(Layer):
    """Adds what came before the attention's reduction."""

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        whole = self.attention(self.first(x), positions=positions)[0]
        return x + whole.full_tensor() if isinstance(whole, DTensor) else x + whole


def with_layer(kind: Callable[..., nn.Module], attribute: str) -> nn.Module:
    """The tiny model with one module of layer 0, or the layer itself, replaced."""
    model = Tiny()
    target: Any = model.layers[0]
    new: Any = kind(HIDDEN) if attribute in ("first", "second") else kind()
    if attribute:
        new.load_state_dict(getattr(target, attribute).state_dict())
        setattr(target, attribute, new)
    else:
        new.load_state_dict(target.state_dict())
        model.layers[0] = new
    return model


def layer(kind: Callable[..., nn.Module], attribute: str = "") -> Callable[[], nn.Module]:
    return partial(with_layer, kind, attribute)


class Unlabelled(Tiny):
    """Is called without labels although the plan says that they come."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if labels is None:
            return super().forward(ids)
        raise AssertionError("called with labels")


class OwnLabels(Tiny):
    """Learns from the local part of its labels, as code outside torch functions may."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        assert labels is not None
        taken = self.embed(ids).argmax(-1)
        own = taken.to_local() if isinstance(taken, DTensor) else taken
        return super().forward(ids, own)
