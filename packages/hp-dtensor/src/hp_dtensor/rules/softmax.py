"""Softmax and its kin, and cross-entropy, over cut dims without gathering them.

Over a cut dim these are written in terms of maxima and sums of DTensors: a maximum without
gradient, one sum of exponentials, and for cross-entropy one sum of the targets' logits. What is
sent has the size of the logits without their classes. Derivatives of any order follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hp_dtensor.rules.along import axes_cutting
from hp_dtensor.rules.dims import checked_dim, dims_of, letters
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.joining import reordered
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule
from hp_dtensor.rules.reduction import reduced_over

# -- over cut dims ---------------------------------------------------------------------------------


def _shifted(input: Any, dim: Any) -> tuple[Any, Any]:
    """The input less its maximum along the dims, and that maximum (0 where it is infinite)."""
    top = input.detach().amax(dim, keepdim=True)
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    return input - top, top


def softmax(input: Any, dim: int, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    input = input if dtype is None else input.to(dtype)
    exponentials = _shifted(input, dim)[0].exp()
    return exponentials / exponentials.sum(dim, keepdim=True)


def log_softmax(input: Any, dim: int, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    input = input if dtype is None else input.to(dtype)
    shifted = _shifted(input, dim)[0]
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def softmin(input: Any, dim: int, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return softmax(-input, dim, dtype=dtype)


def logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    shifted, top = _shifted(input, dim)
    found = shifted.exp().sum(dim, keepdim=True).log() + top
    return found if keepdim else found.squeeze(dim)


def _along_dim(call: Call, *, cut: Callable[..., Any]) -> Recipe:
    given = call.get("dim")
    if given is None:
        raise call.error("the dim must be given", "pass dim=")
    ndim = len(call.input.shape)
    dim = checked_dim(call, given, ndim)
    if not axes_cutting(call.input.layout, (dim,)):
        return reordered(call, (dim,), linear=False)
    # Positional arguments behind the dim differ between torch, its methods and functional.
    dtype = next((v for v in call.arguments.values() if isinstance(v, torch.dtype)), None)

    def composite(input: Any, *args: Any, **kwargs: Any) -> Any:
        return cut(input, dim, dtype=dtype)

    return Recipe(None, None, composite=composite)


def _logsumexp(call: Call) -> Recipe:
    dims = dims_of(call, len(call.input.shape))
    over = reduced_over(call, dims, bool(call.get("keepdim", False)))
    if over.axes:
        return Recipe(None, None, composite=logsumexp)
    return Recipe((over.needed,), over.output)


# -- cross-entropy ---------------------------------------------------------------------------------


def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`torch.nn.functional.cross_entropy` in terms of operators that know cut classes and rows."""
    kind = input.dtype
    if kind in (torch.float16, torch.bfloat16):
        input = input.float()  # as torch's kernels, which add up in float32
    log_p = torch.log_softmax(input, _classes(input))
    if target.ndim == input.ndim and target.dtype.is_floating_point:
        found = _of_probabilities(log_p, target, weight, reduction, label_smoothing)
    else:
        found = nll_loss(log_p, target, weight, None, ignore_index, None, reduction)
        if label_smoothing:
            smooth = _smoothing(log_p, target, weight, ignore_index, reduction)
            found = found * (1 - label_smoothing) + smooth * (label_smoothing / _count(log_p))
    return found.to(kind)


def nll_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """`torch.nn.functional.nll_loss` over cut classes or rows."""
    classes = _classes(input)
    counted, safe = _counted(target, ignore_index)
    picked = input.gather(classes, safe.unsqueeze(classes)).squeeze(classes)
    factors = counted.to(input.dtype)
    if weight is not None:
        factors = factors * weight.to(input.dtype)[safe]
    # The picked log-probability of an ignored row may be infinite, and must not meet a zero.
    losses = torch.where(counted, -picked, torch.zeros_like(factors)) * factors
    return _reduced(losses, factors, reduction)


def _classes(input: Any) -> int:
    return 1 if input.ndim > 1 else 0


def _count(input: Any) -> int:
    return int(input.shape[_classes(input)])


def _counted(target: Any, ignore_index: int) -> tuple[Any, Any]:
    """Which rows count, and targets that can be looked up in every row."""
    counted = target != ignore_index
    return counted, torch.where(counted, target, torch.zeros_like(target))


def _reduced(losses: Any, factors: Any, reduction: str) -> Any:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / factors.sum()


def _shaped(weight: Any, ndim: int) -> Any:
    return weight if ndim == 1 else weight.view(-1, *[1] * (ndim - 2))


def _smoothing(log_p: Any, target: Any, weight: Any, ignore_index: int, reduction: str) -> Any:
    """The sum of all classes' losses, each class by its weight."""
    counted, safe = _counted(target, ignore_index)
    factors = counted.to(log_p.dtype)
    weighted = log_p
    if weight is not None:
        weight = weight.to(log_p.dtype)
        factors = factors * weight[safe]
        weighted = log_p * _shaped(weight, log_p.ndim)
    each = -weighted.sum(_classes(log_p))
    losses = torch.where(counted, each, torch.zeros_like(each))
    return _reduced(losses, factors, reduction)


def _of_probabilities(
    log_p: Any, target: Any, weight: Any, reduction: str, label_smoothing: float
) -> Any:
    classes = _classes(log_p)
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / _count(log_p)
    products = log_p * target
    if weight is not None:
        products = products * _shaped(weight.to(log_p.dtype), log_p.ndim)
    losses = -products.sum(classes)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / max(losses.numel(), 1)


def _loss(call: Call, *, composite: Callable[..., Any]) -> Recipe:
    """torch's own kernel where every operand is whole, else the sums above."""
    for name in ("size_average", "reduce"):
        if call.get(name) is not None:
            raise call.error(f"{name} is deprecated and has no rule", "use reduction=")
    if call.get("reduction", "mean") not in ("none", "mean", "sum"):
        raise call.error(f"reduction {call.get('reduction')!r} is unknown", "mean, sum or none")
    settled = all(
        not operand.layout.sharding_axes() and not operand.layout.partial_axes()
        for operand in call.operands
    )
    if not settled:
        return Recipe(None, None, composite=composite)
    return _whole_loss(call)


def _linear_loss(call: Call) -> Recipe | None:
    """`linear_cross_entropy` in two steps, unless every operand is whole, with whole gradients."""
    layouts = call.layouts
    if all(each.is_replicated and each.grad_placements == each.placements for each in layouts):
        return None
    if call.get("options") is not None:
        raise call.error("options has no rule on sharded or partial tensors", "leave it out")
    return Recipe(None, None, composite=_linear_cross_entropy)


def _linear_cross_entropy(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    weight: Any = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: None = None,
) -> Any:
    logits = F.linear(input, linear_weight, linear_bias)
    ignored = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(
        logits,
        target,
        weight,
        ignore_index=ignored,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _whole_loss(call: Call) -> Recipe:
    """Nothing is cut: one pattern for the layouts of gradients."""
    names = letters(len(call.input.shape))
    classes = 1 if len(names) > 1 else 0
    rows = [name for i, name in enumerate(names) if i != classes]
    soft = len(call.get("target").shape) == len(names)
    parts = [" ".join(names), " ".join(names if soft else rows)]
    if isinstance(call.get("weight"), Operand):
        parts.append(names[classes])
    output = " ".join(rows) if call.get("reduction", "mean") == "none" else ""
    made = derive(
        call.operator, parse(f"{', '.join(parts)} -> {output}", linear=False), call.layouts
    )
    return Recipe(made.operands, made.outputs[0])


def rules() -> Mapping[str, Rule]:
    loss = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    found: dict[str, Rule] = {}
    for name, function in (
        ("softmax", softmax),
        ("log_softmax", log_softmax),
        ("softmin", softmin),
    ):
        found[name] = Rule(
            name, partial(_along_dim, cut=function), ("input", "dim", "third", "fourth")
        )
    found["logsumexp"] = Rule("logsumexp", _logsumexp, ("input", "dim", "keepdim"))
    found["cross_entropy"] = Rule(
        "cross_entropy", partial(_loss, composite=cross_entropy), (*loss, "label_smoothing")
    )
    found["linear_cross_entropy"] = Rule(
        "linear_cross_entropy", _linear_loss, ("input", "linear_weight", "target")
    )
    found["nll_loss"] = Rule("nll_loss", partial(_loss, composite=nll_loss), loss)
    return found
