"""Modules whose code is right on the whole tensor and wrong on a part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from dtensor_block import INNER, SEQUENCE, WHOLE, Attention, Gated, Norm, Tiny
from fault import Fault, both, changed, parameter, same
from faulty_modules import layer
from planted_faults import without_adjoints
from torch import Tensor, nn

from hp_dtensor.placements import SectionedShard
from hp_dtensor.plan import Contract

ATTENTION, MLP, FIRST = "layers.0.attention", "layers.0.mlp", "layers.0.first"


def after_norm(change: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """The first norm, with a part of a sequence as its result, changes it further."""

    class Changed(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return change(super().forward(x))

    return layer(Changed, "first")


def first_cleared(x: Tensor) -> Tensor:
    x = x * 1
    x[:, 0] = 0.0
    return x


def one_hot_of_largest(x: Tensor) -> Tensor:
    return x * F.one_hot(x.argmax(1), SEQUENCE).transpose(1, 2).to(x.dtype)


class ScalesByFeatures(Gated):
    """Scales by the number of inner features that it sees."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        hidden = F.silu(gate) * up
        return F.linear(hidden * hidden.shape[-1] / INNER, self.down)


class ScalesByHeads(Attention):
    """Scales by the number of heads, which is this rank's."""

    def forward(self, x: Tensor, positions: Any, mask: Tensor | None = None) -> Any:
        mixed, rest = super().forward(x, positions, mask)
        return self.heads * mixed, rest


class AveragesHeads(Attention):
    """The same by way of a float."""

    def forward(self, x: Tensor, positions: Any, mask: Tensor | None = None) -> Any:
        mixed, rest = super().forward(x, positions, mask)
        return mixed * (1 / self.heads), rest


class ScalesByWeight(Attention):
    """Scales by the largest element of a weight of which it has rows."""

    def forward(self, x: Tensor, positions: Any, mask: Tensor | None = None) -> Any:
        return super().forward(x / self.q.weight.abs().max(), positions, mask)


class PenalizesWeights(Tiny):
    """Adds squares of parts and of whole weights to its loss."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        output = super().forward(ids, labels)
        squares = sum(p.pow(2).sum() for p in self.layers[0].attention.parameters())
        return {**output, "loss": output["loss"] + squares}


def _norm_fault(message: str, change: Callable[[Tensor], Tensor], stops: str = "error") -> Fault:
    where = f"in module {FIRST}" if stops == "error" else f"output of boundary {FIRST}"
    return Fault(same, f"{message}.*{where}" if message else where, stops, after_norm(change))


MODULE_FAULTS: dict[str, Fault] = {
    "tokens shifted by a roll of a part": _norm_fault("roll", lambda x: x + x.roll(1, 1)),
    "running sum over a part": _norm_fault("cumsum", lambda x: x + x.cumsum(1)),
    "tokens sorted within a part": _norm_fault("sort", lambda x: x.sort(1).values),
    "softmax over a part": _norm_fault("amax", lambda x: x * x.softmax(1)),
    "largest token of a part": _norm_fault("argmax", one_hot_of_largest),
    "norm of a part": _norm_fault("norm", lambda x: x / x.norm()),
    "clipped at a quantile of a part": _norm_fault(
        "quantile", lambda x: x.clamp(max=x.quantile(0.9))
    ),
    "mean of what a mask selects of a part": _norm_fault(
        "depends on values", lambda x: x * x[x > 0].mean()
    ),
    "branches on the value of a part": _norm_fault(
        "item", lambda x: x * (2.0 if float(x.detach().abs().sum()) > 50 else 1.0)
    ),
    "reads an element of a part": _norm_fault("item", lambda x: x * x[0, 0, 0].detach().item()),
    "values of a part as a list": _norm_fault("tolist", lambda x: x * sum(x[0, :, 0].tolist())),
    "first token of every part cleared": _norm_fault("", first_cleared, "report"),
    "tokens shifted by padding a part": Fault(
        same,
        r"__getitem__: -1 along dim 1 .* over tp.*in module layers.0.first",
        model=after_norm(lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1]),
    ),
    "scales by a number of features that is this rank's": Fault(
        same, f"output of boundary {MLP}", "report", layer(ScalesByFeatures, "mlp")
    ),
    "scales by a number of heads that is this rank's": Fault(
        same,
        f"mul: 4 is a number of what is cut over tp.*own 2.*in module {ATTENTION}",
        model=layer(ScalesByHeads, "attention"),
    ),
    "averages over a number of heads that is this rank's": Fault(
        same, f"output of boundary {ATTENTION}", "report", layer(AveragesHeads, "attention")
    ),
    "scales by the largest element of a weight's rows": Fault(
        same, f"max: .*in module {ATTENTION}", model=layer(ScalesByWeight, "attention")
    ),
    "penalty on parts of weights": Fault(
        same, r"would have to be reduced.*in module \(root\)", model=PenalizesWeights
    ),
    "key in sections of its own": Fault(
        both(
            parameter(f"{ATTENTION}.k.weight", Contract({"tp": SectionedShard(0, (2, 6))})),
            parameter(f"{ATTENTION}.k.bias", Contract({"tp": SectionedShard(0, (2, 6))})),
        ),
        f"view: .*in module {ATTENTION}",
    ),
    "planted: an operator asks for no adjoint where the plan declares none": Fault(
        both(
            changed("head", "inputs", "input", inside=WHOLE, outside=WHOLE),
            changed("norm", "outputs", "", outside=WHOLE),
        ),
        "gradient of the output of boundary norm",
        "report",
        plant=without_adjoints,
    ),
}
