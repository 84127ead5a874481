"""A tensor-parallel Llama block written by hand on local tensors: the floor of host overhead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hp_integration.models import build_model
from hp_platform.axis import MeshAxis
from hp_platform.collectives import Origin, all_gather, all_reduce, reduce_scatter

_ORIGIN = Origin("hp_integration", "handwritten")


class HandwrittenBlock(nn.Module):
    """Sequence shards outside, whole sequences and a share of heads and channels inside."""

    def __init__(self, config: Any, axis: MeshAxis) -> None:
        super().__init__()
        config.num_attention_heads //= axis.size
        config.num_key_value_heads //= axis.size
        config.intermediate_size //= axis.size
        self.layer = build_model(config, seed=0).get_submodule("model.layers.1")
        self.axis = axis
        self._norms = (
            self.layer.get_parameter("input_layernorm.weight"),
            self.layer.get_parameter("post_attention_layernorm.weight"),
        )

    def forward(
        self, hidden: Tensor, attention_mask: None, position_embeddings: tuple[Tensor, Tensor]
    ) -> Tensor:
        """[batch, sequence / ranks, hidden] to the same."""
        layer: Any = self.layer
        x = _SettleNorms.apply(hidden, self)
        whole = _Gather.apply(layer.input_layernorm(x), self.axis)
        whole, _ = layer.self_attn(
            hidden_states=whole,
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
        )
        x = x + _Scatter.apply(whole, self.axis)
        whole = _Gather.apply(layer.post_attention_layernorm(x), self.axis)
        return x + _Scatter.apply(layer.mlp(whole), self.axis)

    def settle(self) -> None:
        """Sums the norms' gradients, of which every rank holds a summand, in one message."""
        found = [norm.grad for norm in self._norms if norm.grad is not None]
        if found:
            flat = torch.cat(found)
            all_reduce(flat, self.axis, origin=_ORIGIN).wait()
            torch._foreach_copy_(found, list(flat.split([g.numel() for g in found])))


def _gathered(x: Tensor, axis: MeshAxis) -> Tensor:
    parts = all_gather(x.transpose(0, 1).contiguous(), axis, origin=_ORIGIN).wait()
    return parts.transpose(0, 1)


def _scattered(x: Tensor, axis: MeshAxis) -> Tensor:
    part = reduce_scatter(x.transpose(0, 1).contiguous(), axis, origin=_ORIGIN).wait()
    return part.transpose(0, 1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return _gathered(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradient, ctx.axis), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return _scattered(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.axis), None


class _SettleNorms(torch.autograd.Function):
    """Identity whose backward runs when the whole block's has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: HandwrittenBlock) -> Tensor:
        ctx.block = block
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.block.settle()
        return gradient, None
