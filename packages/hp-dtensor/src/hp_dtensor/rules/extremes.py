"""Rules of the largest and smallest: values with global indices, over cut dims too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.rules.along import Along, carried, to_summands
from hp_dtensor.rules.dims import dims_of, letters, one_dim
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.lookups import OwnDim
from hp_dtensor.rules.own_part import own_coordinate
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule
from hp_dtensor.rules.reduction import reduced_over
from hp_dtensor.transition import Transition

_COMBINES = "the ranks' extremes gathered"


def lowest(dtype: torch.dtype, largest: bool) -> Any:
    """A value that loses against every other."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _filled(local: Tensor, dims: tuple[int, ...], largest: bool) -> Tensor:
    """A rank that holds nothing of a dim holds one element that loses."""
    for dim in dims:
        if local.shape[dim] == 0:
            shape = [1 if i == dim else n for i, n in enumerate(local.shape)]
            local = torch.cat([local, local.new_full(shape, lowest(local.dtype, largest))], dim)
    return local


def _needs_gradient(local: Tensor) -> bool:
    return local.requires_grad and torch.is_grad_enabled()


# -- values ----------------------------------------------------------------------------------------


def _extreme_value(call: Call, *, largest: bool) -> Recipe:
    """`amax`, `amin`, and `max`, `min` of everything: ties share the gradient, as in torch."""
    dims = dims_of(call, len(call.input.shape))
    keepdim = bool(call.get("keepdim", False))
    over = reduced_over(call, dims, keepdim)
    if not over.axes:
        return Recipe((over.needed,), over.output)
    along = Along(over.needed, over.axes, call.operator)
    summed = to_summands(over.output, over.axes)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        return _value(args[0], dims, keepdim, largest, along, summed)

    return Recipe((over.needed,), over.output, run, communicates=_COMBINES)


def _value(
    local: Tensor,
    dims: tuple[int, ...],
    keepdim: bool,
    largest: bool,
    along: Along,
    summed: Transition,
) -> Tensor:
    filled = _filled(local, dims, largest)
    own = filled.detach()
    own = own.amax(dims, True) if largest else own.amin(dims, True)
    parts = along.gather(own)  # not reduced: only torch's own amax passes on a NaN
    found = parts.amax(0) if largest else parts.amin(0)
    value = found if keepdim else found.squeeze(dims)
    if not _needs_gradient(local):
        return value
    ties = filled.detach() == found
    count = along.reduce(ties.sum(dims, keepdim=True).to(local.dtype), "sum")
    carrier = (filled * (ties / count)).sum(dims, keepdim=keepdim)
    return carried(value, carrier, along.operator, summed)


def _max_or_min(call: Call, *, largest: bool) -> Recipe:
    """Of everything, along a dim (values and indices), or of two tensors."""
    other = call.get("dim", call.get("other"))
    if isinstance(other, Operand):
        derivation = derive(call.operator, parse("..., ... -> ...", linear=False), call.layouts)
        return Recipe(derivation.operands, derivation.outputs[0])
    if other is None:
        return _extreme_value(call, largest=largest)
    return _with_index(call, largest=largest)


def _aminmax(input: Any, *, dim: int | None = None, keepdim: bool = False, out: Any = None) -> Any:
    dims = () if dim is None else dim
    low, high = torch.amin(input, dims, keepdim), torch.amax(input, dims, keepdim)
    return torch.return_types.aminmax((low, high))


def _composite(call: Call) -> Recipe:
    return Recipe(None, None, composite=_aminmax)


# -- values and global indices ---------------------------------------------------------------------


def _held(layout: Layout, dim: int) -> Tensor:
    """Global indices of this rank's part of a dim; one past the end where it holds nothing."""
    held = layout.dim_indices(dim, own_coordinate(layout))
    return held if len(held) else torch.tensor([layout.shape[dim]])


def _with_index(call: Call, *, largest: bool) -> Recipe:
    """The first of equal elements, as torch on the CPU."""
    dim = one_dim(call)
    keepdim = bool(call.get("keepdim", False))
    over = reduced_over(call, (dim,), keepdim)
    outputs = [over.output, over.output]
    if not over.axes:
        return Recipe((over.needed,), outputs)
    along, layout = Along(over.needed, over.axes, call.operator), over.needed
    held = _held(layout, dim)
    summed = to_summands(reduced_over(call, (dim,), True).output, over.axes)
    kind = torch.return_types.max if largest else torch.return_types.min

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        value, index, own, mine = _first(args[0], dim, largest, held, along)
        carrier = torch.where(mine, own, torch.zeros_like(own))
        value = carried(value, carrier, call.operator, summed)
        return kind((value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim)))

    return Recipe((over.needed,), outputs, run, communicates=_COMBINES)


def _first(
    local: Tensor, dim: int, largest: bool, held: Tensor, along: Along
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value, global index, this rank's own candidate, and whether that was chosen."""
    filled = _filled(local, (dim,), largest)
    own, place = filled.max(dim, keepdim=True) if largest else filled.min(dim, keepdim=True)
    candidate = held.to(local.device)[place]
    values, indices = along.gather(own), along.gather(candidate)
    value = values.amax(0) if largest else values.amin(0)
    best = values == value
    if value.dtype.is_floating_point:
        best |= values.isnan()
    beyond = torch.iinfo(torch.int64).max
    index = torch.where(best, indices, beyond).amin(0)
    return value, index, own, candidate == index


def _arg(call: Call, *, largest: bool) -> Recipe:
    """`argmax`, `argmin`: along a dim, or in the flattened tensor."""
    keepdim = bool(call.get("keepdim", False))
    if call.get("dim") is None:
        return _arg_of_everything(call, largest=largest, keepdim=keepdim)
    dim = one_dim(call)
    over = reduced_over(call, (dim,), keepdim)
    if not over.axes:
        return Recipe((over.needed,), over.output)
    along = Along(over.needed, over.axes, call.operator)
    held = _held(over.needed, dim)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        index = _first(args[0].detach(), dim, largest, held, along)[1]
        return index if keepdim else index.squeeze(dim)

    return Recipe((over.needed,), over.output, run, communicates=_COMBINES)


def _arg_of_everything(call: Call, *, largest: bool, keepdim: bool) -> Recipe:
    dims = tuple(range(len(call.input.shape)))
    over = reduced_over(call, dims, keepdim)
    if not over.axes:
        return Recipe((over.needed,), over.output)
    along, layout = Along(over.needed, over.axes, call.operator), over.needed
    held = layout.owned_indices(own_coordinate(layout))
    held = held if len(held) else torch.tensor([layout.numel])

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        flat = args[0].detach().reshape(-1)
        index = _first(flat, 0, largest, held, along)[1].squeeze(0)
        return index.view([1] * len(dims)) if keepdim else index

    return Recipe((over.needed,), over.output, run, communicates=_COMBINES)


# -- the k largest ---------------------------------------------------------------------------------


def _topk(call: Call) -> Recipe:
    """Along a cut dim every rank sends its own k largest, never the whole dim."""
    dim, k = one_dim(call, -1), call.get("k")
    layout = call.input.layout
    names = letters(len(layout.shape))
    over = reduced_over(call, (dim,), True)
    kept = " ".join("1" if i == dim else name for i, name in enumerate(names))
    out = " ".join("[k]" if i == dim else name for i, name in enumerate(names))
    made = derive(
        call.operator, parse(f"{kept} -> {out}", linear=False), [over.output], sizes={"k": k}
    )
    if k > layout.shape[dim]:
        raise call.error(f"k is {k}, but dim {dim} has size {layout.shape[dim]}", "use a smaller k")
    outputs = [made.outputs[0]] * 2
    if not over.axes:
        return Recipe((over.needed,), outputs)
    along, own = Along(over.needed, over.axes, call.operator), OwnDim(over.needed, dim)
    held, largest = _held(over.needed, dim), call.get("largest", True)
    summed = to_summands(made.outputs[0], over.axes)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        local = args[0]
        filled = _filled(local.detach(), (dim,), largest)
        few = min(k, filled.shape[dim])
        values, places = filled.topk(few, dim, largest)
        indices = held.to(local.device)[places]
        # Every rank sends k of them, so that all send alike; those of no element lose.
        missing = [k - few if i == dim else n for i, n in enumerate(values.shape)]
        fill = values.new_full(missing, lowest(values.dtype, largest))
        beyond = indices.new_full(missing, own.size)
        values, indices = torch.cat([values, fill], dim), torch.cat([indices, beyond], dim)
        every = torch.cat(along.gather(values).unbind(), dim)
        numbers = torch.cat(along.gather(indices).unbind(), dim)
        # Elements before the fillings, which may equal them.
        order = (numbers == own.size).to(torch.int8).argsort(dim=dim, stable=True)
        every, numbers = every.gather(dim, order), numbers.gather(dim, order)
        value, place = every.topk(k, dim, largest, call.get("sorted", True))
        index = numbers.gather(dim, place)
        if _needs_gradient(local):
            position, mine = own.local(index, call.operator)
            if own.count == 0:
                carrier = torch.zeros_like(value) + local.sum()
            else:
                assert mine is not None
                carrier = local.gather(dim, position).masked_fill(~mine, 0)
            value = carried(value, carrier, call.operator, summed)
        return torch.return_types.topk((value, index))

    return Recipe((over.needed,), outputs, run, communicates="the ranks' k largest gathered")


def rules() -> Mapping[str, Rule]:
    reduced = ("input", "dim", "keepdim")
    found: dict[str, Rule] = {}
    for name, largest in (("max", True), ("min", False)):
        found[name] = Rule(name, partial(_max_or_min, largest=largest), reduced)
        found[f"a{name}"] = Rule(f"a{name}", partial(_extreme_value, largest=largest), reduced)
        found[f"arg{name}"] = Rule(f"arg{name}", partial(_arg, largest=largest), reduced)
    found["aminmax"] = Rule("aminmax", _composite, ("input",))
    found["topk"] = Rule("topk", _topk, ("input", "k", "dim", "largest", "sorted"))
    return found
