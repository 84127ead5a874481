"""A small transformer and plans written by hand for it: what the runtime's tests run on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Shard

from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import SectionedShard
from hp_dtensor.plan import (
    REPLICATED,
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    LocalAttribute,
    ParameterSpec,
    Region,
    RegionKind,
    ShardingPlan,
)

VOCABULARY, HIDDEN, HEADS, INNER, SEQUENCE, BATCH = 12, 8, 4, 12, 8, 2

WHOLE = REPLICATED
SUMMED = Contract({}, {"tp": Partial()})
PENDING = Contract({"tp": Partial()})


def cut(dim: int) -> Contract:
    return Contract({"tp": Shard(dim)})


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """q, k, v with biases and a norm per head; the head count is an attribute."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.heads = HEADS
        self.q = nn.Linear(HIDDEN, HIDDEN)
        self.k = nn.Linear(HIDDEN, HIDDEN)
        self.v = nn.Linear(HIDDEN, HIDDEN)
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=bias)
        self.q_norm = Norm(HIDDEN // HEADS)

    def forward(
        self, x: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        cos, sin = positions
        split = (x.shape[0], x.shape[1], self.heads, HIDDEN // HEADS)
        q = self.q_norm(self.q(x).view(split)).transpose(1, 2)
        k = self.k(x).view(split).transpose(1, 2)
        v = self.v(x).view(split).transpose(1, 2)
        q = q * cos + q * sin
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        mixed = mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)
        return self.o(mixed), None


class Gated(nn.Module):
    """Gate and up fused in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * INNER, HIDDEN))
        self.down = nn.Parameter(torch.empty(HIDDEN, INNER))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


class Layer(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.first = Norm(HIDDEN)
        self.attention = Attention(bias)
        self.second = Norm(HIDDEN)
        self.mlp = Gated()

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.first(x), positions=positions)[0]
        return x + self.mlp(self.second(x))


class Tiny(nn.Module):
    """Two layers; returns a mapping like the model outputs of transformers."""

    def __init__(
        self,
        layers: int = 2,
        tied: bool = False,
        padding_idx: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=padding_idx)
        self.layers = nn.ModuleList(Layer(bias) for _ in range(layers))
        self.norm = Norm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(ids)
        angle = torch.arange(x.shape[1], dtype=torch.float32).view(1, 1, -1, 1) / 10
        positions = (angle.cos(), angle.sin())
        for layer in self.layers:
            x = layer(x, positions)
        logits = self.head(self.norm(x))
        output = {"logits": logits}
        if labels is not None:
            output["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return output


def batch(sequence: int = SEQUENCE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, sequence + 1), generator=generator)
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def loss_of(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    output: Any = model(**data)
    return output["loss"]


def tiny_plan(
    mesh: dict[str, int], *, sequence_parallel: bool = True, layers: int = 2, tied: bool = False
) -> ShardingPlan:
    stream = cut(1) if sequence_parallel else WHOLE
    norm = SUMMED if sequence_parallel else WHOLE
    parameters = [ParameterSpec("embed.weight", "embedding", (VOCABULARY, HIDDEN), cut(0), "embed")]
    boundaries = [
        BoundarySpec(
            "",
            BoundaryKind.MODEL,
            inputs=[_plain("ids"), evolve(_plain("labels"), optional=True)],
        ),
        BoundarySpec(
            "embed",
            BoundaryKind.EMBEDDING,
            inputs=[_plain("input")],
            outputs=[BoundaryTensor("", WHOLE, PENDING)],
        ),
    ]
    for index in range(layers):
        name = f"layers.{index}"
        parameters += _layer_parameters(name, norm)
        boundaries += _layer_boundaries(name, WHOLE if index == 0 else stream, stream)
    # Without sequence parallelism the head's input boundary is where the gradient is summed.
    to_head = SUMMED if sequence_parallel else WHOLE
    parameters.append(ParameterSpec("norm.weight", "norm", (HIDDEN,), norm, "norm"))
    boundaries += [
        BoundarySpec(
            "norm",
            BoundaryKind.NORM,
            inputs=[BoundaryTensor("x", stream, stream)],
            outputs=[BoundaryTensor("", to_head, stream)],
        ),
        BoundarySpec(
            "head",
            BoundaryKind.HEAD,
            inputs=[BoundaryTensor("input", to_head, SUMMED)],
            outputs=[BoundaryTensor("", WHOLE, cut(-1))],
        ),
    ]
    if not tied:
        parameters.append(
            ParameterSpec("head.weight", "head", (VOCABULARY, HIDDEN), cut(0), "head")
        )
    return ShardingPlan(
        model="Tiny",
        mesh=AbstractMesh.of(mesh),
        model_axes=("tp",),
        parameters=parameters,
        boundaries=boundaries,
        tied=[("embed.weight", "head.weight")] if tied else [],
    )


def _plain(where: str) -> BoundaryTensor:
    return BoundaryTensor(where, WHOLE, WHOLE, plain=True)


def _layer_parameters(layer: str, norm: Contract) -> list[ParameterSpec]:
    attention, mlp = f"{layer}.attention", f"{layer}.mlp"
    square, row, head = (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN // HEADS,)
    specs = [ParameterSpec(f"{layer}.first.weight", "norm", row, norm, f"{layer}.first")]
    for name in "qkv":
        specs += [
            ParameterSpec(f"{attention}.{name}.weight", "query", square, cut(0), attention),
            ParameterSpec(f"{attention}.{name}.bias", "query", row, cut(0), attention),
        ]
    return [
        *specs,
        ParameterSpec(f"{attention}.o.weight", "output", square, cut(1), attention),
        ParameterSpec(f"{attention}.q_norm.weight", "head_norm", head, SUMMED, attention),
        ParameterSpec(f"{layer}.second.weight", "norm", row, norm, f"{layer}.second"),
        ParameterSpec(
            f"{mlp}.gate_up",
            "fused",
            (2 * INNER, HIDDEN),
            Contract({"tp": SectionedShard(0, (INNER, INNER))}),
            mlp,
        ),
        ParameterSpec(f"{mlp}.down", "down", (HIDDEN, INNER), cut(1), mlp),
    ]


def _layer_boundaries(layer: str, before: Contract, stream: Contract) -> list[BoundarySpec]:
    positions = _plain("positions")
    return [
        BoundarySpec(
            layer,
            BoundaryKind.LAYER,
            inputs=[BoundaryTensor("x", before, stream), positions],
            outputs=[BoundaryTensor("", stream, stream)],
        ),
        *(
            BoundarySpec(
                f"{layer}.{name}",
                BoundaryKind.NORM,
                inputs=[BoundaryTensor("x", stream, stream)],
                outputs=[BoundaryTensor("", stream, stream)],
            )
            for name in ("first", "second")
        ),
        BoundarySpec(
            f"{layer}.attention",
            BoundaryKind.ATTENTION,
            inputs=[
                BoundaryTensor("x", stream, SUMMED),
                positions,
                BoundaryTensor("mask", WHOLE, WHOLE, plain=True, optional=True),
            ],
            outputs=[BoundaryTensor("0", stream, PENDING)],
            localize=[LocalAttribute("heads", "tp", HEADS)],
        ),
        BoundarySpec(
            f"{layer}.mlp",
            BoundaryKind.MLP,
            inputs=[BoundaryTensor("x", stream, SUMMED)],
            outputs=[BoundaryTensor("", stream, PENDING)],
            region=Region(RegionKind.OPAQUE, "gate and up are fused"),
        ),
    ]


def with_parameter(plan: ShardingPlan, name: str, /, **changes: Any) -> ShardingPlan:
    """The plan with one parameter's spec changed."""
    assert any(spec.name == name for spec in plan.parameters)
    changed = [evolve(s, **changes) if s.name == name else s for s in plan.parameters]
    return evolve(plan, parameters=changed)


def with_boundary(plan: ShardingPlan, module: str, /, **changes: Any) -> ShardingPlan:
    """The plan with one boundary's spec changed."""
    assert any(spec.module == module for spec in plan.boundaries)
    changed = [evolve(s, **changes) if s.module == module else s for s in plan.boundaries]
    return evolve(plan, boundaries=changed)
