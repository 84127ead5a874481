"""Rules of one-hot vectors, gated halves and other choices among elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hp_dtensor.rules.along import axes_cutting
from hp_dtensor.rules.dims import bracketed, letters, one_dim
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.recipe import Call, Recipe, Rule


def _one_hot(call: Call) -> Recipe:
    classes = call.get("num_classes", -1)
    if classes < 0:
        raise call.error(
            "the number of classes would depend on each rank's values", "pass num_classes"
        )
    derivation = derive(
        call.operator,
        parse("... -> ... [c]", linear=False),
        [call.input.layout],
        sizes={"c": classes},
    )
    return Recipe(derivation.operands, derivation.outputs[0])


def _glu(call: Call) -> Recipe:
    """Over a cut dim in two steps, for which the halves must be cut alike (in two sections)."""
    dim = one_dim(call, -1)
    if axes_cutting(call.input.layout, (dim,)):
        return Recipe(None, None, composite=_gated)
    names = letters(len(call.input.shape))
    out = " ".join("[h]" if i == dim else name for i, name in enumerate(names))
    derivation = derive(
        call.operator,
        parse(f"{bracketed(names, {dim})} -> {out}", linear=False),
        [call.input.layout],
        sizes={"h": call.input.shape[dim] // 2},
    )
    return Recipe(derivation.operands, derivation.outputs[0])


def _gated(input: Any, dim: int = -1) -> Any:
    value, gate = input.chunk(2, dim)
    return value * torch.sigmoid(gate)


def _shuffle(call: Call) -> Recipe:
    return Recipe(None, None, composite=_SHUFFLES[call.operator])


def _pixel_shuffle(input: Any, upscale_factor: int) -> Any:
    *batch, channels, height, width = input.shape
    r = upscale_factor
    split = input.reshape(*batch, channels // r**2, r, r, height, width)
    n = len(batch)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return split.permute(*order).reshape(*batch, channels // r**2, height * r, width * r)


def _pixel_unshuffle(input: Any, downscale_factor: int) -> Any:
    *batch, channels, height, width = input.shape
    r = downscale_factor
    split = input.reshape(*batch, channels, height // r, r, width // r, r)
    n = len(batch)
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return split.permute(*order).reshape(*batch, channels * r**2, height // r, width // r)


def _channel_shuffle(input: Any, groups: int) -> Any:
    batch, channels, *rest = input.shape
    split = input.reshape(batch, groups, channels // groups, *rest)
    return split.transpose(1, 2).reshape(batch, channels, *rest)


_SHUFFLES: Mapping[str, Any] = {
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "channel_shuffle": _channel_shuffle,
}


def rules() -> Mapping[str, Rule]:
    found = {
        "one_hot": Rule("one_hot", _one_hot, ("input", "num_classes")),
        "glu": Rule("glu", _glu, ("input", "dim")),
    }
    for name in _SHUFFLES:
        found[name] = Rule(name, _shuffle, ("input", "factor"))
    return found
