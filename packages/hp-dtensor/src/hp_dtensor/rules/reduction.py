"""Rules of reductions: sums stay pending over cut dims, others are combined over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.placements import is_sharding
from hp_dtensor.rules.along import Along, axes_cutting, carried
from hp_dtensor.rules.dims import dims_of, letters
from hp_dtensor.rules.engine import Derivation, derive, parse
from hp_dtensor.rules.recipe import Call, Recipe, Rule


def reduce_dims(
    call: Call, *, linear: bool, outputs: int = 1, layout: Layout | None = None
) -> Derivation:
    """Drops the named dims (or keeps them with size one)."""
    names = letters(len(call.input.shape))
    gone = dims_of(call, len(names))
    if call.get("keepdim", False):
        kept = ["1" if i in gone else name for i, name in enumerate(names)]
    else:
        kept = [name for i, name in enumerate(names) if i not in gone]
    text = f"{' '.join(names)} -> {' , '.join([' '.join(kept)] * outputs)}"
    source = call.input.layout if layout is None else layout
    return derive(call.operator, parse(text, linear=linear), [source])


def settled(layout: Layout) -> Layout:
    """Pending sums replaced by replicas: what an operator that is not linear needs."""
    if not layout.partial_axes():
        return layout
    values = [Replicate() if isinstance(p, Partial) else p for p in layout.placements]
    grads = [
        Replicate() if isinstance(p, Partial) else g
        for p, g in zip(layout.placements, layout.grad_placements)
    ]
    return Layout(layout.mesh, values, layout.shape, grads)


def without(layout: Layout, axes: Sequence[int]) -> Layout:
    """Replicated along `axes`."""
    values = [Replicate() if i in axes else p for i, p in enumerate(layout.placements)]
    grads = [Replicate() if i in axes else p for i, p in enumerate(layout.grad_placements)]
    return Layout(layout.mesh, values, layout.shape, grads)


@frozen
class Over:
    """A reduction over dims that may be cut.

    Attributes:
        needed: the input's layout.
        axes: mesh axes that cut the reduced dims; the ranks along them combine their results.
        output: the result's layout, replicated along `axes`.
    """

    needed: Layout
    axes: tuple[int, ...]
    output: Layout


def reduced_over(call: Call, dims: Sequence[int], keepdim: bool) -> Over:
    layout = settled(call.input.layout)
    axes = axes_cutting(layout, dims)
    if layout.flat_dims > 1 and any(len(set(d)) > 1 for d in layout.sharding_axes().values()):
        raise call.error(
            "leading dims are flattened by a RaggedShard, and only a reduction of everything has "
            "a rule",
            "redistribute to Shard or Replicate() first",
        )
    names = letters(len(layout.shape))
    if keepdim:
        kept = ["1" if i in dims else name for i, name in enumerate(names)]
    else:
        kept = [name for i, name in enumerate(names) if i not in dims]
    pattern = parse(f"{' '.join(names)} -> {' '.join(kept)}", linear=False)
    derivation = derive(call.operator, pattern, [without(layout, axes)])
    (found,) = derivation.operands
    needed = Layout(
        layout.mesh,
        [layout.placements[i] if i in axes else p for i, p in enumerate(found.placements)],
        layout.shape,
        [layout.placements[i] if i in axes else p for i, p in enumerate(found.grad_placements)],
    )
    return Over(needed, axes, derivation.outputs[0])


# -- sums ------------------------------------------------------------------------------------------


def everything(layout: Layout) -> Layout:
    """Layout of a sum over all elements, of any sharding: a summand on each rank."""
    values: list[Placement] = []
    grads: list[Placement] = []
    for value, grad in zip(layout.placements, layout.grad_placements):
        cut = is_sharding(value) or isinstance(value, Partial)
        values.append(Partial() if cut else Replicate())
        grads.append(Replicate() if cut else grad)
    return Layout(layout.mesh, values, (), grads)


def _reduces_everything(call: Call) -> bool:
    whole = len(dims_of(call, len(call.input.shape))) == len(call.input.shape)
    return whole and not call.get("keepdim", False)


def _sums(layout: Layout) -> bool:
    return all(p.reduce_op == "sum" for p in layout.placements if isinstance(p, Partial))


def _sum(call: Call, *, settle: bool = False) -> Recipe:
    """`settle`: what is added up is not linear in the elements, so they must be known first."""
    layout = settled(call.input.layout) if settle else call.input.layout
    if _reduces_everything(call) and _sums(layout):
        return Recipe((layout,), everything(layout))
    derivation = reduce_dims(call, linear=True, layout=layout)
    return Recipe(derivation.operands, derivation.outputs[0])


def _mean(call: Call) -> Recipe:
    """The divisor is the global count, whatever this rank holds."""
    layout = call.input.layout
    gone = dims_of(call, len(layout.shape))
    count = math.prod(layout.shape[dim] for dim in gone)
    keepdim, dtype = bool(call.get("keepdim", False)), call.get("dtype")
    if _reduces_everything(call) and _sums(layout):
        recipe = Recipe(None, everything(layout))
    else:
        derivation = reduce_dims(call, linear=True)
        recipe = Recipe(derivation.operands, derivation.outputs[0])

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        local = args[0]
        total = local.sum(dim=gone, keepdim=keepdim, dtype=dtype) if gone else local
        return total / count if count else total / math.nan

    if any(is_sharding(p) for p in layout.placements):
        return Recipe(recipe.operands, recipe.outputs, run)
    return recipe


# -- other combinations ----------------------------------------------------------------------------


def _truth(call: Call, *, op: str) -> Recipe:
    """`all` and `any`: the ranks' answers are combined."""
    dims = dims_of(call, len(call.input.shape))
    over = reduced_over(call, dims, bool(call.get("keepdim", False)))
    if not over.axes:
        return Recipe((over.needed,), over.output)
    along = Along(over.needed, over.axes, call.operator)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        return along.reduce(func(*args, **kwargs), op)

    return Recipe((over.needed,), over.output, run, communicates="the ranks' answers combined")


def _prod(call: Call) -> Recipe:
    dims = dims_of(call, len(call.input.shape))
    over = reduced_over(call, dims, bool(call.get("keepdim", False)))
    if not over.axes:
        return Recipe((over.needed,), over.output)
    along = Along(over.needed, over.axes, call.operator)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        own: Tensor = func(*args, **kwargs)
        parts = along.gather(own)
        mine = along.place
        others = torch.cat([parts[:mine], parts[mine + 1 :]]).prod(0)
        return carried(parts.prod(0), own * others, call.operator)

    return Recipe((over.needed,), over.output, run, communicates="the ranks' products gathered")


@frozen
class _Spread:
    """What `var`, `std`, `var_mean` and `std_mean` were asked for."""

    dims: tuple[int, ...]
    keepdim: bool
    correction: float
    root: bool
    mean: bool

    @classmethod
    def of(cls, call: Call) -> _Spread:
        given, unbiased = call.get("dim"), call.get("unbiased", True)
        arguments = dict(call.arguments)
        if isinstance(given, bool):
            arguments["dim"], unbiased = None, given
        dims = dims_of(Call(call.operator, call.operands, arguments), len(call.input.shape))
        correction = call.get("correction", 1 if unbiased else 0)
        return cls(
            dims,
            bool(call.get("keepdim", False)),
            1.0 if correction is None else float(correction),
            call.operator.startswith("std"),
            call.operator.endswith("_mean"),
        )


def _spread(call: Call) -> Recipe:
    """Variances over cut dims: a sum for the mean, then one of squared distances from it."""
    asked = _Spread.of(call)
    over = reduced_over(call, asked.dims, asked.keepdim)
    outputs = [over.output] * 2 if asked.mean else over.output
    if not over.axes:
        return Recipe((over.needed,), outputs)
    if call.input.dtype.is_complex:
        raise call.error("complex variances over cut dims have no rule", "use view_as_real()")
    along = Along(over.needed, over.axes, call.operator)
    count = math.prod(call.input.shape[dim] for dim in asked.dims)
    divisor = max(count - asked.correction, 0.0)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        local = args[0]
        share = local.sum(asked.dims, keepdim=True) / count
        mean = along.reduce(share, "sum")
        part = (local - mean).square().sum(asked.dims, keepdim=asked.keepdim)
        spread = along.reduce(part, "sum") / divisor
        carrier = part / divisor
        if asked.root:
            spread = spread.sqrt()
            slope = torch.where(spread == 0, torch.zeros_like(spread), 0.5 / spread)
            carrier = carrier * slope
        spread = carried(spread, carrier, call.operator)
        if not asked.mean:
            return spread
        average = carried(mean, share, call.operator)
        return spread, average if asked.keepdim else average.squeeze(asked.dims)

    return Recipe((over.needed,), outputs, run, communicates="sums over the cut dims")


def _histogram(call: Call) -> Recipe:
    """Counts in given bounds: each rank's own, to be summed."""
    low, high = call.get("min", 0), call.get("max", 0)
    layout = settled(call.input.layout)
    counts = everything(layout)
    if low == high and counts.partial_axes():
        raise call.error(
            "without bounds the bins would depend on each rank's values", "pass min= and max="
        )
    return Recipe((layout,), counts.with_shape((call.get("bins", 100),)))


def _nanmean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    count = (~torch.isnan(input)).sum(dim, keepdim=keepdim)
    return torch.nansum(input, dim, keepdim=keepdim, dtype=dtype) / count


def _composite(call: Call, *, function: Callable[..., Any]) -> Recipe:
    return Recipe(None, None, composite=function)


def rules() -> Mapping[str, Rule]:
    reduced = ("input", "dim", "keepdim")
    found: dict[str, Rule] = {
        "sum": Rule("sum", _sum, reduced),
        "nansum": Rule("nansum", partial(_sum, settle=True), reduced),
        "count_nonzero": Rule("count_nonzero", partial(_sum, settle=True), ("input", "dim")),
        "mean": Rule("mean", _mean, reduced),
        "nanmean": Rule("nanmean", partial(_composite, function=_nanmean), reduced),
        "all": Rule("all", partial(_truth, op="min"), reduced),
        "any": Rule("any", partial(_truth, op="max"), reduced),
        "prod": Rule("prod", _prod, reduced),
    }
    found["histc"] = Rule("histc", _histogram, ("input", "bins", "min", "max"))
    for name in ("var", "std", "var_mean", "std_mean"):
        found[name] = Rule(name, _spread, ("input", "dim", "unbiased", "keepdim"))
    return found
