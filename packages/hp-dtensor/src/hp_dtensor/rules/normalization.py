"""Rules of normalisations, over whole dims by torch's kernel and over cut dims by sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hp_dtensor.rules.along import axes_cutting
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.own_part import of_nothing, own_shape
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule

_NAMES = ("input", "weight", "bias")


def _shape(call: Call) -> tuple[int, ...]:
    shape = call.get("normalized_shape")
    return (int(shape),) if isinstance(shape, int) else tuple(int(n) for n in shape)


def _normalize(call: Call, *, composite: Callable[..., Any]) -> Recipe:
    """`layer_norm`, `rms_norm`: weight and bias have the normalised dims."""
    inner = len(_shape(call))
    ndim = len(call.input.shape)
    if axes_cutting(call.input.layout, range(ndim - inner, ndim)):
        return Recipe(None, None, composite=composite)
    names = " ".join(f"[n{i}]" for i in range(inner))
    plain = names.replace("[", "").replace("]", "")
    text = ", ".join([f"... {names}"] + [plain] * (len(call.operands) - 1)) + f" -> ... {plain}"
    derivation = derive(
        call.operator, parse(text, linear=False), call.layouts, names=_operand_names(call)
    )
    return Recipe(derivation.operands, derivation.outputs[0])


def _operand_names(call: Call) -> list[str]:
    names = [name for name in _NAMES if isinstance(call.get(name), Operand)]
    count = len(call.operands)
    return names if len(names) == count else [f"operand {i}" for i in range(count)]


def _precise(input: Any) -> Any:
    """As torch's kernels, which add up half precision in float32."""
    return input.float() if input.dtype in (torch.float16, torch.bfloat16) else input


def layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    dims = _dims(normalized_shape)
    precise = _precise(input)
    centred = precise - precise.mean(dims, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    return _affine(scaled, weight, bias).to(input.dtype)


def rms_norm(
    input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    dims = _dims(normalized_shape)
    precise = _precise(input)
    # torch takes the input type's epsilon where none is given.
    small = torch.finfo(precise.dtype).eps if eps is None else eps
    scaled = precise * torch.rsqrt(precise.square().mean(dims, keepdim=True) + small)
    return _affine(scaled, weight, None).to(input.dtype)


def _dims(normalized_shape: Any) -> tuple[int, ...]:
    count = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    return tuple(range(-count, 0))


def _affine(scaled: Any, weight: Any, bias: Any) -> Any:
    if weight is not None:
        scaled = scaled * weight
    return scaled if bias is None else scaled + bias


def _group_norm(call: Call) -> Recipe:
    """Whole groups may be on different ranks; each rank normalises those it has."""
    groups, shape = call.get("num_groups"), call.input.shape
    if shape[1] % groups:
        raise call.error(f"{shape[1]} channels do not divide into {groups} groups", "use another")
    sizes = {"g": groups, "c": shape[1] // groups}
    channels = "(g [c])" if sizes["c"] > 1 else "g"
    inside = " ".join(f"[l{i}]" for i in range(len(shape) - 2))
    plain = channels.replace("[", "").replace("]", "")
    text = f"n {channels} {inside}" + f", {plain}" * (len(call.operands) - 1)
    outside = f"n {plain} " + inside.replace("[", "").replace("]", "")
    derivation = derive(
        call.operator,
        parse(f"{text} -> {outside}", linear=False),
        call.layouts,
        sizes=sizes,
        names=_operand_names(call),
    )
    names = ("input", "num_groups", "weight", "bias", "eps")

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        given = dict(zip(names, args)) | kwargs
        given["num_groups"] = given["input"].shape[1] // sizes["c"]
        if given["num_groups"] == 0:
            parts: list[Tensor] = [given[n] for n in _NAMES if isinstance(given.get(n), Tensor)]
            return given["input"] + sum(part.sum() for part in parts)
        found: Tensor = func(**given)
        return found

    return Recipe(derivation.operands, derivation.outputs[0], run)


def _batch_norm(call: Call) -> Recipe:
    """With given statistics, each channel by itself; in training, batch and length are whole."""
    training = bool(call.get("training", call.get("use_input_stats", False)))
    shape = call.input.shape
    if training and call.get("running_mean") is not None:
        raise call.error(
            "batch_norm in training writes its running statistics, which has no rule",
            "use eval(), or a norm without running statistics",
        )
    text = []
    for operand in call.operands:
        if operand is call.input:
            batch = "[n]" if training and call.operator == "batch_norm" else "n"
            tail = [f"[l{i}]" if training else f"l{i}" for i in range(len(shape) - 2)]
            text.append(" ".join([batch, "c", *tail]))
        else:
            text.append("c")
    out = " ".join(["n", "c", *(f"l{i}" for i in range(len(shape) - 2))])
    derivation = derive(
        call.operator, parse(f"{', '.join(text)} -> {out}", linear=False), call.layouts
    )
    output = derivation.outputs[0]

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        if 0 in args[0].shape:
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            return of_nothing(own_shape(output), *given)
        found: Tensor = func(*args, **kwargs)
        return found

    return Recipe(derivation.operands, output, None if output.is_even else run)


def rules() -> Mapping[str, Rule]:
    running = ("input", "running_mean", "running_var", "weight", "bias")
    return {
        "layer_norm": Rule(
            "layer_norm",
            partial(_normalize, composite=layer_norm),
            ("input", "normalized_shape", "weight", "bias", "eps"),
        ),
        "rms_norm": Rule(
            "rms_norm",
            partial(_normalize, composite=rms_norm),
            ("input", "normalized_shape", "weight", "eps"),
        ),
        "group_norm": Rule(
            "group_norm", _group_norm, ("input", "num_groups", "weight", "bias", "eps")
        ),
        "batch_norm": Rule("batch_norm", _batch_norm, (*running, "training", "momentum", "eps")),
        "instance_norm": Rule(
            "instance_norm", _batch_norm, (*running, "use_input_stats", "momentum", "eps")
        ),
    }
