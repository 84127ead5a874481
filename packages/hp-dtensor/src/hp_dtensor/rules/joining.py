"""Rules of operators that stack, repeat, pad or reorder along a dim; `cat` has its own module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_dtensor.placements import (
    Placement,
    RaggedShard,
    Shard,
    describe,
)
from hp_dtensor.rules.concatenation import cat, with_placed, without_axes
from hp_dtensor.rules.dims import bracketed, dims_of, letters, one_dim
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.own_part import of_nothing, own_coordinate, own_indices, own_shape
from hp_dtensor.rules.parts import cutting_axes, placed_in_order, shares_in_order
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule
from hp_dtensor.rules.regrouped import on_whole

# -- joining ---------------------------------------------------------------------------------------


def _stack(call: Call) -> Recipe:
    tensors = list(call.get("tensors"))
    if not all(isinstance(tensor, Operand) for tensor in tensors):
        raise call.error("every tensor stacked must be a DTensor", "wrap the others")
    names = letters(len(tensors[0].shape))
    dim = call.get("dim", 0)
    at = dim if dim >= 0 else dim + len(names) + 1
    out = " ".join([*names[:at], "[c]", *names[at:]])
    parts = " + ".join([" ".join(names)] * len(tensors))
    sizes = {"c": len(tensors)}
    derivation = derive(call.operator, parse(f"{parts} -> {out}"), call.layouts, sizes=sizes)
    return Recipe(derivation.operands, derivation.outputs[0])


_JOINED: Mapping[str, Callable[..., Any]] = {
    "vstack": lambda tensors: torch.cat([torch.atleast_2d(t) for t in tensors], 0),
    "hstack": lambda tensors: torch.cat(
        [torch.atleast_1d(t) for t in tensors], min(1, max(tensors[0].ndim - 1, 0))
    ),
    "dstack": lambda tensors: torch.cat([torch.atleast_3d(t) for t in tensors], 2),
    "column_stack": lambda tensors: torch.cat(
        [t.reshape(t.numel(), 1) if t.ndim < 2 else t for t in tensors], 1
    ),
}


def _joined(call: Call) -> Recipe:
    name = "vstack" if call.operator == "row_stack" else call.operator
    return Recipe(None, None, composite=_JOINED[name])


# -- repeating -------------------------------------------------------------------------------------


def _repeat(call: Call) -> Recipe:
    """Copies one after the other: the count is a new factor in front of each dim."""
    sizes = tuple(int(size) for size in call.get("sizes", call.get("dims", call.get("reps"))))
    shape = call.input.shape
    extra = len(sizes) - len(shape)
    if call.operator == "tile" and extra < 0:
        sizes, extra = (1,) * -extra + sizes, 0
    if extra < 0:
        raise call.error(
            f"repeat needs a count per dim, found {sizes} for {len(shape)} dims",
            "use 1 for the dims that stay as they are",
        )
    right = [f"n{i}" for i in range(extra)]
    new = {f"n{i}": count for i, count in enumerate(sizes)}
    left = [f"d{i}" for i in range(len(shape))]
    for i in range(len(shape)):
        count = sizes[extra + i]
        right.append(f"d{i}" if count == 1 else f"(n{extra + i} d{i})")
    return _linear(call, f"{' '.join(left)} -> {' '.join(right)}", new)


def _linear(call: Call, text: str, sizes: Mapping[str, int]) -> Recipe:
    derivation = derive(call.operator, parse(text), [call.input.layout], sizes=sizes)
    rest = (None,) * (len(call.operands) - 1)
    return Recipe((*derivation.operands, *rest), derivation.outputs[0])


def _repeat_interleave(call: Call) -> Recipe:
    """Each element several times in a row: the count is a new factor behind the dim."""
    count, given = call.get("repeats"), call.get("dim")
    if not isinstance(count, int) or given is None:
        raise call.error(
            "only an integer count along a given dim has a rule",
            "pass an integer and dim=, or redistribute to Replicate() and compute on to_local()",
        )
    dim = one_dim(call)
    names = letters(len(call.input.shape))
    right = " ".join(f"({name} n)" if i == dim else name for i, name in enumerate(names))
    return _linear(call, f"{' '.join(names)} -> {right}", {"n": count})


# -- padding ---------------------------------------------------------------------------------------


def _pad(call: Call) -> Recipe:
    amounts = [int(amount) for amount in call.get("pad")]
    ndim = len(call.input.shape)
    changed = {
        ndim - 1 - i: (before, after)
        for i, (before, after) in enumerate(zip(amounts[::2], amounts[1::2]))
        if before or after
    }
    mode, value = call.get("mode", "constant"), call.get("value", None)
    cut = {dim for dim in changed if cutting_axes(call.input.layout, dim)}
    if cut and (mode != "constant" or min(amounts) < 0):
        return on_whole(call, sorted(changed), _pad)  # what other ranks hold is needed
    names = letters(ndim)
    sizes = {f"p{d}": call.input.shape[d] + sum(amount) for d, amount in changed.items()}
    ends = {
        axis: (dim, _padded_shares(call, dim, axis, changed[dim]))
        for dim in sorted(cut)
        for axis in cutting_axes(call.input.layout, dim)
    }
    left = bracketed(names, set(changed))
    right = " ".join(f"[p{i}]" if i in changed else name for i, name in enumerate(names))
    linear = mode != "constant" or not value
    source = without_axes(call.input.layout, set(ends))
    derivation = derive(
        call.operator, parse(f"{left} -> {right}", linear=linear), [source], sizes=sizes
    )
    if not ends:
        made = derivation.outputs[0]

        def run_whole(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
            if args[0].numel() == 0 and 0 in own_shape(made):
                return of_nothing(own_shape(made), args[0])
            found: Tensor = func(*args, **kwargs)
            return found

        return Recipe(derivation.operands, made, None if mode == "constant" else run_whole)
    needed = with_placed(
        derivation.operands[0], {axis: call.input.layout.placements[axis] for axis in ends}
    )
    output = with_placed(
        derivation.outputs[0], {axis: placed for axis, (_, placed) in ends.items()}
    )
    coordinate = own_coordinate(needed)
    sizes_of_axes = needed.abstract_mesh.sizes
    own = list(amounts) + [0] * (2 * ndim - len(amounts))
    for axis, (dim, _) in ends.items():
        first, last = 2 * (ndim - 1 - dim), 2 * (ndim - 1 - dim) + 1
        own[first] *= coordinate[axis] == 0
        own[last] *= coordinate[axis] == sizes_of_axes[axis] - 1

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        return F.pad(args[0], own, value=value)

    return Recipe((needed,), output, run)


def _padded_shares(call: Call, dim: int, axis: int, amount: tuple[int, int]) -> Placement:
    layout = call.input.layout
    placement, ways = layout.placements[axis], layout.abstract_mesh.sizes[axis]
    alone = len(cutting_axes(layout, dim)) == 1
    size = layout.shape[dim]
    if not alone or not isinstance(placement, Shard | RaggedShard) or size == 0:
        raise call.error(
            f"dim {dim} is placed {describe(layout.placements)}, and no placement describes what "
            "padding it gives",
            "redistribute that dim to Replicate() first",
        )
    counts = list(shares_in_order(placement, size, ways))
    counts[0] += amount[0]
    counts[-1] += amount[1]
    return placed_in_order(dim, counts)


# -- reordering ------------------------------------------------------------------------------------


def reordered(call: Call, dims: Sequence[int], *, linear: bool = True, outputs: int = 1) -> Recipe:
    """The shape stays; the named dims must be whole on every rank."""
    names = letters(len(call.input.shape))
    text = f"{bracketed(names, set(dims))} -> {' , '.join([' '.join(names)] * outputs)}"
    derivation = derive(call.operator, parse(text, linear=linear), [call.input.layout])
    made = derivation.outputs[0] if outputs == 1 else derivation.outputs
    rest = (None,) * (len(call.operands) - 1)
    return Recipe((*derivation.operands, *rest), made)


def _moved(call: Call, dims: Sequence[int]) -> Recipe:
    return on_whole(call, dims, partial(reordered, dims=dims))


def _flip(call: Call) -> Recipe:
    if call.operator in ("fliplr", "flipud"):
        return _moved(call, (1 if call.operator == "fliplr" else 0,))
    return _moved(call, dims_of(call, len(call.input.shape), "dims"))


def _rot90(call: Call) -> Recipe:
    first, second = (
        dims_of(call, len(call.input.shape), "dims") if "dims" in call.arguments else (0, 1)
    )
    names = letters(len(call.input.shape))
    out = list(names)
    if call.get("k", 1) % 2:
        out[first], out[second] = out[second], out[first]
    text = f"{bracketed(names, {first, second})} -> {' '.join(out)}"
    return on_whole(call, (first, second), partial(_linear, text=text, sizes={}), returns=False)


def _roll(call: Call) -> Recipe:
    ndim = len(call.input.shape)
    if call.get("dims") in (None, ()):
        return _moved(call, tuple(range(ndim)))
    return _moved(call, dims_of(call, ndim, "dims"))


def _triangle(call: Call) -> Recipe:
    """Each rank clears by its own global row and column numbers."""
    layout = call.input.layout
    ndim = len(layout.shape)
    if ndim < 2:
        raise call.error("the input must have at least 2 dims", "unsqueeze it")
    rows, columns = ndim - 2, ndim - 1
    recipe = reordered(call, ())
    if not (cutting_axes(layout, rows) or cutting_axes(layout, columns)):
        return recipe
    diagonal = call.get("diagonal", 0)
    offset = own_indices(layout, columns)[None, :] - own_indices(layout, rows)[:, None]
    cleared = offset > diagonal if call.operator.startswith("tril") else offset < diagonal

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        mask = cleared.to(args[0].device)
        return args[0].masked_fill_(mask, 0) if call.inplace else args[0].masked_fill(mask, 0)

    return Recipe(recipe.operands, recipe.outputs, run)


def rules() -> Mapping[str, Rule]:
    found: dict[str, Rule] = {}
    for name in ("cat", "concat", "concatenate"):
        found[name] = Rule(name, cat, ("tensors", "dim"))
    found["stack"] = Rule("stack", _stack, ("tensors", "dim"))
    for name in (*_JOINED, "row_stack"):
        found[name] = Rule(name, _joined, ("tensors",))
    found["repeat"] = Rule("repeat", _repeat, ("input", "*sizes"))
    found["tile"] = Rule("tile", _repeat, ("input", "*dims"))
    found["repeat_interleave"] = Rule(
        "repeat_interleave", _repeat_interleave, ("input", "repeats", "dim")
    )
    found["pad"] = Rule("pad", _pad, ("input", "pad", "mode", "value"))
    found["constant_pad_nd"] = Rule("constant_pad_nd", _pad, ("input", "pad", "value"))
    for name in ("flip", "fliplr", "flipud"):
        found[name] = Rule(name, _flip, ("input", "*dims"))
    found["rot90"] = Rule("rot90", _rot90, ("input", "k", "dims"))
    found["roll"] = Rule("roll", _roll, ("input", "shifts", "dims"))
    for name in ("tril", "triu"):
        found[name] = Rule(name, _triangle, ("input", "diagonal"))
    return found
