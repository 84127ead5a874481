"""Rules of losses that compare element by element: sums over cut operands stay pending."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hp_dtensor.placements import is_sharding
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.recipe import Call, Recipe, Rule
from hp_dtensor.rules.reduction import everything

_OLD = ("size_average", "reduce")


def _elementwise(call: Call) -> Recipe:
    """Each rank's losses, not reduced; their sum over the global number of elements."""
    for name in _OLD:
        if call.get(name) is not None:
            raise call.error(f"{name} is deprecated and has no rule", "use reduction=")
    reduction = call.get("reduction", "mean")
    layouts = call.layouts
    each = derive(
        call.operator, parse(", ".join(["..."] * len(layouts)) + " -> ...", linear=False), layouts
    )
    output = each.outputs[0]
    if reduction == "none":
        return Recipe(each.operands, output)
    if reduction not in ("mean", "sum", "batchmean"):
        raise call.error(f"reduction {reduction!r} is unknown", "use mean, sum or none")
    count = math.prod(output.shape) if reduction == "mean" else 1
    count = output.shape[0] if reduction == "batchmean" else count
    scalar = everything(output)
    if not any(is_sharding(p) for p in output.placements):
        return Recipe(each.operands, scalar)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        kwargs = {k: v for k, v in kwargs.items() if k not in _OLD} | {"reduction": "sum"}
        known = call.arguments
        if func.__name__ == "gaussian_nll_loss" or "reduction" not in known:
            return func(*args, **kwargs) / count
        # The reduction may have been given by position.
        positions = _POSITIONS[call.operator]
        named = dict(zip(positions, args)) | kwargs
        return func(**{k: v for k, v in named.items() if k not in _OLD}) / count

    return Recipe(each.operands, scalar, run)


_TWO = ("input", "target", "size_average", "reduce", "reduction")
_POSITIONS: Mapping[str, tuple[str, ...]] = {
    "mse_loss": _TWO,
    "l1_loss": _TWO,
    "smooth_l1_loss": (*_TWO, "beta"),
    "huber_loss": ("input", "target", "reduction", "delta"),
    "soft_margin_loss": _TWO,
    "kl_div": (*_TWO, "log_target"),
    "poisson_nll_loss": (
        "input",
        "target",
        "log_input",
        "full",
        "size_average",
        "eps",
        "reduce",
        "reduction",
    ),
    "binary_cross_entropy": (
        "input",
        "target",
        "weight",
        "size_average",
        "reduce",
        "reduction",
    ),
    "binary_cross_entropy_with_logits": (
        "input",
        "target",
        "weight",
        "size_average",
        "reduce",
        "reduction",
        "pos_weight",
    ),
    "hinge_embedding_loss": ("input", "target", "margin", "size_average", "reduce", "reduction"),
}


def _cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """As torch: each norm is at least eps."""
    products = (x1 * x2).sum(dim)
    sizes = [torch.linalg.vector_norm(x, 2, dim).clamp_min(eps) for x in (x1, x2)]
    return products / (sizes[0] * sizes[1])


def _pairwise_distance(
    x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


_COMPOSITES: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "cosine_similarity": (_cosine_similarity, ("x1", "x2", "dim", "eps")),
    "pairwise_distance": (_pairwise_distance, ("x1", "x2", "p", "eps", "keepdim")),
}


def _composite(call: Call, *, function: Callable[..., Any]) -> Recipe:
    return Recipe(None, None, composite=function)


def rules() -> Mapping[str, Rule]:
    found = {name: Rule(name, _elementwise, names) for name, names in _POSITIONS.items()}
    for name, (function, parameters) in _COMPOSITES.items():
        found[name] = Rule(name, partial(_composite, function=function), parameters)
    return found
