"""Rules of operators that run along a dim: running sums, sorts, order statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from hp_dtensor.placements import RaggedShard, Shard
from hp_dtensor.rules.along import axes_cutting, to_everyone
from hp_dtensor.rules.dims import bracketed, letters, one_dim
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.joining import reordered
from hp_dtensor.rules.own_part import of_nothing, own_coordinate, own_shape
from hp_dtensor.rules.recipe import Call, Recipe, Rule, words
from hp_dtensor.rules.regrouped import on_whole


def _cumsum(call: Call) -> Recipe:
    """Over a cut dim: this rank's running sum, after the totals of the ranks before it."""
    dim = one_dim(call)
    layout = call.input.layout
    axes = axes_cutting(layout, (dim,))
    in_order = len(axes) == 1 and type(layout.placements[axes[0]]) in (Shard, RaggedShard)
    if not in_order or layout.flat_dims > 1:
        return on_whole(call, (dim,), partial(reordered, dims=(dim,)))
    (axis,) = axes
    recipe = reordered(call, ())
    assert recipe.operands is not None
    needed = recipe.operands[0]
    assert needed is not None
    totals = to_everyone(needed, dim, axis)
    place = own_coordinate(needed)[axis]
    dtype = call.get("dtype")

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        local = args[0] if dtype is None else args[0].to(dtype)
        own = local.cumsum(dim)
        every = totals.apply(local.sum(dim, keepdim=True))
        found = own + every.narrow(dim, 0, place).sum(dim, keepdim=True)
        return args[0].copy_(found) if call.inplace else found

    return Recipe(
        recipe.operands, recipe.outputs, run, communicates="the totals of the ranks gathered"
    )


def _along(call: Call, *, linear: bool = False, outputs: int = 1) -> Recipe:
    """The dim must be whole; the shape stays."""
    if call.get("dim", -1) is None:
        raise call.error("the dim must be given", "pass dim=")
    dims = (one_dim(call, -1),)
    return on_whole(call, dims, partial(reordered, dims=dims, linear=linear, outputs=outputs))


def _sort(call: Call, *, outputs: int) -> Recipe:
    """`sort(stable=, dim=)` and `sort(dim)`: one dim, the last by default, whole."""
    dims = (one_dim(call, -1),)
    return on_whole(call, dims, partial(reordered, dims=dims, linear=False, outputs=outputs))


def _msort(call: Call) -> Recipe:
    return on_whole(call, (0,), partial(reordered, dims=(0,), linear=False))


def _statistic(call: Call) -> Recipe:
    """`median`, `mode`, `kthvalue`: of everything, or values and indices along a whole dim."""
    ndim = len(call.input.shape)
    if call.get("dim") is None and call.operator in ("median", "nanmedian"):
        return on_whole(call, range(ndim), _of_everything, returns=False)
    dim = one_dim(call, -1)
    return on_whole(call, (dim,), partial(_of_dim, dim=dim, outputs=2), returns=False)


def _of_everything(call: Call) -> Recipe:
    names = letters(len(call.input.shape))
    text = f"{bracketed(names, range(len(names)))} ->"
    made = derive(call.operator, parse(text, linear=False), [call.input.layout])
    return Recipe(made.operands, made.outputs[0])


def _of_dim(call: Call, *, dim: int, outputs: int) -> Recipe:
    """The whole dim is reduced."""
    names = letters(len(call.input.shape))
    if call.get("keepdim", False):
        kept = ["1" if i == dim else name for i, name in enumerate(names)]
    else:
        kept = [name for i, name in enumerate(names) if i != dim]
    text = f"{bracketed(names, {dim})} -> {' , '.join([' '.join(kept)] * outputs)}"
    made = derive(call.operator, parse(text, linear=False), [call.input.layout])
    return Recipe(made.operands, made.outputs if outputs > 1 else made.outputs[0])


def _quantile(call: Call) -> Recipe:
    """One quantile of everything, or along a whole dim."""
    if not isinstance(call.get("q"), float):
        raise call.error("only a Python number as q has a rule", "ask for one quantile at a time")
    if call.get("dim") is None:
        if call.get("keepdim", False):
            raise call.error("keepdim without dim has no rule", "give the dim")
        return on_whole(call, range(len(call.input.shape)), _of_everything, returns=False)
    dim = one_dim(call)
    return on_whole(call, (dim,), partial(_quantile_of_dim, dim=dim), returns=False)


def _quantile_of_dim(call: Call, *, dim: int) -> Recipe:
    """torch's kernel takes no empty tensor, which a rank may have beside the whole dim."""
    recipe = _of_dim(call, dim=dim, outputs=1)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        if args[0].numel() == 0 and args[0].shape[dim]:
            return of_nothing(own_shape(recipe.outputs), args[0])
        found: Tensor = func(*args, **kwargs)
        return found

    return Recipe(recipe.operands, recipe.outputs, run)


def _diff(call: Call) -> Recipe | None:
    if call.get("prepend") is not None or call.get("append") is not None:
        return None
    dim = one_dim(call, -1)
    size = max(call.input.shape[dim] - call.get("n", 1), 0)
    return on_whole(call, (dim,), partial(_resized, dim=dim, size=size))


def _resized(call: Call, *, dim: int, size: int) -> Recipe:
    names = letters(len(call.input.shape))
    out = " ".join("[r]" if i == dim else name for i, name in enumerate(names))
    pattern = parse(f"{bracketed(names, {dim})} -> {out}")
    made = derive(call.operator, pattern, [call.input.layout], sizes={"r": size})
    return Recipe(made.operands, made.outputs[0])


def rules() -> Mapping[str, Rule]:
    dim = ("input", "dim")
    found = {
        "cumsum": Rule("cumsum", _cumsum, dim),
        "msort": Rule("msort", _msort),
        "sort": Rule("sort", partial(_sort, outputs=2), ("input", "dim", "descending")),
        "argsort": Rule("argsort", partial(_sort, outputs=1), ("input", "dim", "descending")),
        "kthvalue": Rule("kthvalue", _statistic, ("input", "k", "dim", "keepdim")),
        "diff": Rule("diff", _diff, ("input", "n", "dim")),
        "quantile": Rule("quantile", _quantile, ("input", "q", "dim", "keepdim")),
        "nanquantile": Rule("nanquantile", _quantile, ("input", "q", "dim", "keepdim")),
    }
    for name in words("logcumsumexp cumprod"):
        found[name] = Rule(name, _along, dim)
    for name in words("cummax cummin"):
        found[name] = Rule(name, partial(_along, outputs=2), dim)
    for name in words("median nanmedian mode"):
        found[name] = Rule(name, _statistic, ("input", "dim", "keepdim"))
    return found
