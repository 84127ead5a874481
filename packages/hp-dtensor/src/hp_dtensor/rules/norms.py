"""Rules of vector norms: of all elements, or of dims, cut ones included."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.placements import is_sharding
from hp_dtensor.rules.along import Along, carried, to_summands
from hp_dtensor.rules.dims import dims_of
from hp_dtensor.rules.recipe import Call, Recipe, Rule
from hp_dtensor.rules.reduction import reduced_over, settled
from hp_dtensor.transition import Transition


def summable_norm(local: Tensor, order: float) -> Tensor:
    """This rank's contribution to a norm: what is added up (or compared, for infinity)."""
    if math.isinf(order):
        if local.numel() == 0:
            return local.new_full((), 0.0 if order > 0 else math.inf)
        return torch.linalg.vector_norm(local, order)
    if order == 0:
        return _counted(local.abs(), tuple(range(local.ndim)), False)
    if order == 2:
        return local.abs().square().sum() if local.is_complex() else local.square().sum()
    return local.abs().pow(order).sum()


def finished_norm(total: Tensor, order: float) -> Tensor:
    if math.isinf(order) or order in (0, 1):
        return total
    return total.sqrt() if order == 2 else total.pow(1.0 / order)


def norm_reduction(order: float) -> Partial:
    if math.isinf(order):
        return Partial("max" if order > 0 else "min")
    return Partial("sum")


def norm_layouts(
    layout: Layout, order: float, shape: tuple[int, ...] = ()
) -> tuple[Layout, Layout]:
    """Layouts of the contributions to a norm over all elements, and of the finished norm."""
    pending = [norm_reduction(order) if is_sharding(p) else Replicate() for p in layout.placements]
    source = Layout(layout.mesh, pending, shape)
    return source, source.with_placements([Replicate()] * len(pending))


def _norm(call: Call) -> Recipe:
    """The norm of all elements is the global one, on every rank; so is that of cut dims."""
    order = _order(call)
    layout = settled(call.input.layout)
    gone = dims_of(call, len(layout.shape))
    keepdim = bool(call.get("keepdim", False))
    if len(gone) == len(layout.shape) and not keepdim:
        return _of_everything(call, layout, order)
    over = reduced_over(call, gone, keepdim)
    if not over.axes:
        return Recipe((over.needed,), over.output)
    along = Along(layout, over.axes, call.operator)
    linear = math.isinf(order) or order == 1
    summed = to_summands(over.output, over.axes) if linear else None
    dtype = call.get("dtype")

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        local = args[0] if dtype is None else args[0].to(dtype)
        part = _contribution(local, order, gone, keepdim)
        op = "sum" if not math.isinf(order) else ("max" if order > 0 else "min")
        total = along.reduce(part, op)
        norm = finished_norm(total, order)
        if not (local.requires_grad and torch.is_grad_enabled()):
            return norm
        carrier = _carrier(local, part, norm, order, gone, keepdim, along)
        return carried(norm, carrier, call.operator, summed)

    return Recipe((over.needed,), over.output, run, communicates="a sum over the cut dims")


def _order(call: Call) -> float:
    order = call.get("ord", call.get("p", 2))
    order = 2.0 if order in (None, "fro") else order
    if not isinstance(order, int | float):
        raise call.error(f"the norm {order!r} has no rule", "use full_tensor(), or a p-norm")
    return float(order)


def _contribution(local: Tensor, order: float, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    size = local.abs()
    if math.isinf(order):
        if local.numel() == 0:
            shape = [1 if i in dims else n for i, n in enumerate(local.shape)]
            empty = size.new_full(shape, 0.0 if order > 0 else math.inf)
            return (empty if keepdim else empty.squeeze(dims)) + size.sum(dims, keepdim=keepdim)
        return size.amax(dims, keepdim) if order > 0 else size.amin(dims, keepdim)
    if order == 0:
        return _counted(size, dims, keepdim)
    return (size.square() if order == 2 else size.pow(order)).sum(dims, keepdim=keepdim)


def _counted(size: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """How many are not zero; as in torch, with a gradient that is zero."""
    return torch.where(size == 0, size, torch.ones_like(size)).sum(dims, keepdim=keepdim)


def _carrier(
    local: Tensor,
    part: Tensor,
    norm: Tensor,
    order: float,
    dims: tuple[int, ...],
    keepdim: bool,
    along: Along,
) -> Tensor:
    """What has the norm's gradient; zero where the norm is zero, as in torch."""
    if math.isinf(order):
        kept = norm if keepdim else _unsqueezed(norm, dims)
        mask = local.abs() == kept
        ties = along.reduce(mask.sum(dims, keepdim=True).to(norm.dtype), "sum")
        weights = (mask / ties).detach()
        return (local.abs() * weights).sum(dims, keepdim=keepdim)
    if order in (0, 1):
        return part
    slope = norm.pow(1.0 - order) / order
    return part * torch.where(norm == 0, torch.zeros_like(slope), slope)


def _unsqueezed(value: Tensor, dims: tuple[int, ...]) -> Tensor:
    for dim in sorted(dims):
        value = value.unsqueeze(dim)
    return value


def _of_everything(call: Call, needed: Layout, order: float) -> Recipe:
    if not any(is_sharding(p) for p in needed.placements):
        return Recipe((needed,), _scalar(needed))
    # The norm's gradient is the same on all ranks, so a replicated input's must be, too.
    needed = needed.with_placements(needed.placements)
    source, target = norm_layouts(needed, order)
    transition = Transition.compile(source, target)
    dtype = call.get("dtype")
    axes = tuple(axis for axis, p in enumerate(needed.placements) if is_sharding(p))
    along = Along(needed, axes, call.operator)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        local = args[0] if dtype is None else args[0].to(dtype)
        part = summable_norm(local, order)
        if math.isinf(order) and local.requires_grad and torch.is_grad_enabled():
            norm = along.reduce(part, "max" if order > 0 else "min")
            dims = tuple(range(local.ndim))
            carrier = _carrier(local, part, norm, order, dims, False, along)
            return carried(norm, carrier, call.operator, to_summands(target, axes))
        return finished_norm(transition.apply(part), order)

    # Each rank's gradient reaches its own elements only, and the sum is made above: the norm is
    # an ordinary replicated value.
    return Recipe((needed,), target, run, communicates="a sum over all shards")


def _scalar(layout: Layout) -> Layout:
    return Layout(layout.mesh, layout.placements, (), layout.grad_placements)


_FUNCTIONAL = {
    "normalize": lambda input, p=2.0, dim=1, eps=1e-12, out=None: (
        input / torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps)
    ),
}


def _composite(call: Call) -> Recipe:
    return Recipe(None, None, composite=_FUNCTIONAL[call.operator])


def rules() -> Mapping[str, Rule]:
    return {
        "vector_norm": Rule("vector_norm", _norm, ("input", "ord", "dim", "keepdim")),
        "norm": Rule("norm", _norm, ("input", "p", "dim", "keepdim")),
        "normalize": Rule("normalize", _composite, ("input", "p", "dim", "eps")),
    }
