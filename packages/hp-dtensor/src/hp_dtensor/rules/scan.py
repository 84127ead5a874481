"""Rules of operators that run along a dim: running sums, sorts, order statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.placements import RaggedShard, Shard
from hp_dtensor.rules.along import axes_cutting
from hp_dtensor.rules.dims import bracketed, dims_of, letters, one_dim
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.joining import reordered
from hp_dtensor.rules.own_part import own_coordinate
from hp_dtensor.rules.recipe import Call, Recipe, Rule, words
from hp_dtensor.transition import Transition


def _cumsum(call: Call) -> Recipe:
    """Over a cut dim: this rank's running sum, after the totals of the ranks before it."""
    dim = one_dim(call)
    layout = call.input.layout
    axes = axes_cutting(layout, (dim,))
    if not axes:
        return reordered(call, (dim,))
    if len(axes) > 1 or type(layout.placements[axes[0]]) not in (Shard, RaggedShard):
        return reordered(call, (dim,))  # refused: the ranks' parts are not in order
    (axis,) = axes
    if layout.flat_dims > 1:
        return reordered(call, (dim,))
    recipe = reordered(call, ())
    assert recipe.operands is not None
    needed = recipe.operands[0]
    assert needed is not None
    totals = _totals(needed, dim, axis)
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


def _totals(layout: Layout, dim: int, axis: int) -> Transition:
    """From one total on each rank to all of them on every rank; each rank uses some of them."""
    shape = list(layout.shape)
    shape[dim] = layout.abstract_mesh.sizes[axis]
    values: list[Placement] = list(layout.placements)
    grads: list[Placement] = list(layout.grad_placements)
    values[axis] = grads[axis] = Shard(dim)
    source = Layout(layout.mesh, values, shape, grads)
    values[axis], grads[axis] = Replicate(), Partial()
    return Transition.compile(source, Layout(layout.mesh, values, shape, grads))


def _along(call: Call, *, linear: bool = False, outputs: int = 1) -> Recipe:
    """The dim must be whole; the shape stays."""
    given = call.get("dim", -1)
    if given is None:
        raise call.error("the dim must be given", "pass dim=")
    return reordered(call, dims_of(call, len(call.input.shape)) if "dim" in call.arguments else
                     (len(call.input.shape) - 1,), linear=linear, outputs=outputs)  # fmt: skip


def _sort(call: Call, *, outputs: int) -> Recipe:
    """`sort(stable=, dim=)` and `sort(dim)`: one dim, the last by default, whole."""
    dim = call.get("dim", -1)
    ndim = len(call.input.shape)
    at = dims_of(Call(call.operator, call.operands, {**call.arguments, "dim": dim}), ndim)
    return reordered(call, at, linear=False, outputs=outputs)


def _msort(call: Call) -> Recipe:
    return reordered(call, (0,), linear=False)


def _statistic(call: Call, *, indices: bool = True) -> Recipe:
    """`median`, `mode`, `kthvalue`: of everything, or values and indices along a whole dim."""
    names = letters(len(call.input.shape))
    if call.get("dim") is None and call.operator in ("median", "nanmedian"):
        made = derive(
            call.operator,
            parse(f"{bracketed(names, range(len(names)))} ->", linear=False),
            [call.input.layout],
        )
        return Recipe(made.operands, made.outputs[0])
    dim = one_dim(call, -1)
    if call.get("keepdim", False):
        kept = ["1" if i == dim else name for i, name in enumerate(names)]
    else:
        kept = [name for i, name in enumerate(names) if i != dim]
    count = 2 if indices else 1
    text = f"{bracketed(names, {dim})} -> {' , '.join([' '.join(kept)] * count)}"
    made = derive(call.operator, parse(text, linear=False), [call.input.layout])
    return Recipe(made.operands, made.outputs if indices else made.outputs[0])


def _diff(call: Call) -> Recipe | None:
    if call.get("prepend") is not None or call.get("append") is not None:
        return None
    dim = one_dim(call, -1)
    names = letters(len(call.input.shape))
    size = max(call.input.shape[dim] - call.get("n", 1), 0)
    out = " ".join("[r]" if i == dim else name for i, name in enumerate(names))
    made = derive(
        call.operator,
        parse(f"{bracketed(names, {dim})} -> {out}"),
        [call.input.layout],
        sizes={"r": size},
    )
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
    }
    for name in words("logcumsumexp cumprod"):
        found[name] = Rule(name, _along, dim)
    for name in words("cummax cummin"):
        found[name] = Rule(name, partial(_along, outputs=2), dim)
    for name in words("median nanmedian mode"):
        found[name] = Rule(name, _statistic, ("input", "dim", "keepdim"))
    return found
