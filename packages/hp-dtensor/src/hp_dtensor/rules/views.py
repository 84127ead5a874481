"""Rules of views: the same elements under another shape, dims in another order, dims repeated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from hp_dtensor.cut_size import CutSize, sizes_of
from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial, Replicate, Shard
from hp_dtensor.rules.dims import dims_of, letters
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.own_part import own_shape
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule, words


def _single(call: Call, text: str, sizes: Mapping[str, int] | None = None) -> Recipe:
    derivation = derive(call.operator, parse(text), [call.input.layout], sizes=sizes)
    rest = (None,) * (len(call.operands) - 1)
    return Recipe((*derivation.operands, *rest), derivation.outputs[0])


# -- views -------------------------------------------------------------------------------------


def view_pattern(source: Sequence[int], target: Sequence[int]) -> tuple[str, dict[str, int]]:
    """The finest pattern that takes one shape to another, e.g. `a (b c) -> (a b) c`.

    Walks both shapes from the left; each letter is a common factor of what remains of both.
    """
    sizes: dict[str, int] = {}
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    i = j = 0
    rest_left = rest_right = 1
    while True:
        while rest_left == 1 and i < len(source):
            rest_left, i = source[i], i + 1
        while rest_right == 1 and j < len(target):
            rest_right, j = target[j], j + 1
        if rest_left == 1 and rest_right == 1:
            break
        factor = math.gcd(rest_left, rest_right)
        if factor == 1 or (factor != rest_left and factor != rest_right):
            # No common factor at this boundary: the blocks up to the next one mix freely, so they
            # become one letter that must be whole.
            return _blocked_pattern(source, target)
        name = f"f{len(sizes)}"
        sizes[name] = factor
        left[i - 1].append(name)
        right[j - 1].append(name)
        rest_left, rest_right = rest_left // factor, rest_right // factor
    return f"{_dims(left)} -> {_dims(right)}", sizes


def _blocked_pattern(source: Sequence[int], target: Sequence[int]) -> tuple[str, dict[str, int]]:
    """Dims that match from the left and from the right keep their letters; between, whole."""
    head = 0
    while head < min(len(source), len(target)) and source[head] == target[head]:
        head += 1
    tail = 0
    limit = min(len(source), len(target)) - head
    while tail < limit and source[-1 - tail] == target[-1 - tail]:
        tail += 1
    sizes: dict[str, int] = {}
    left = [f"h{i}" for i in range(head)]
    right = list(left)
    for side, shape, mark in ((left, source, "x"), (right, target, "y")):
        for i, size in enumerate(shape[head : len(shape) - tail]):
            sizes[f"{mark}{i}"] = size
            side.append(f"[{mark}{i}]")
        side.extend(f"t{i}" for i in range(tail))
    return f"{' '.join(left)} -> {' '.join(right)}", sizes


def _dims(groups: Sequence[Sequence[str]]) -> str:
    words = []
    for group in groups:
        if not group:
            words.append("1")
        else:
            words.append(group[0] if len(group) == 1 else f"({' '.join(group)})")
    return " ".join(words)


def _resolved(call: Call, sizes: Sequence[int], numel: int) -> tuple[int, ...]:
    """A shape with -1 replaced."""
    given = tuple(int(size) for size in sizes)
    if given.count(-1) > 1:
        raise call.error(f"only one size of {given} may be -1", "give the other sizes")
    if -1 in given:
        known = math.prod(size for size in given if size != -1)
        if not known or numel % known:
            raise call.error(
                f"shape {given} does not fit {numel} elements",
                "sizes are those of the global tensor",
            )
        given = tuple(numel // known if size == -1 else size for size in given)
    if math.prod(given) != numel:
        raise call.error(
            f"shape {given} has {math.prod(given)} elements, the tensor {numel}",
            "sizes are those of the global tensor",
        )
    return given


def reshaped(call: Call, target: Sequence[int], run: str = "reshape") -> Recipe:
    """A view as another global shape; the local one follows from the output's layout."""
    source = call.input.layout.shape
    if 0 in source:
        raise call.error(
            "a view of a tensor without elements has no rule",
            "make the empty tensor in its new shape",
        )
    text, sizes = view_pattern(source, target)
    recipe = _single(call, text, sizes)
    shape = own_shape(recipe.outputs)

    def local(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        return getattr(args[0], run)(shape)

    return Recipe(recipe.operands, recipe.outputs, local)


def _view(call: Call, run: str) -> Recipe:
    sizes = call.get("size", call.get("shape", ()))
    if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
        raise call.error("a view as another dtype has no rule", "use .to(dtype)")
    numel = math.prod(call.input.shape)
    return reshaped(call, _resolved(call, sizes, numel), run)


def _view_as(call: Call) -> Recipe:
    target = call.get("other").shape
    return reshaped(call, target)


def _flatten(call: Call) -> Recipe:
    shape = call.input.shape
    ndim = len(shape)
    start = call.get("start_dim", 0) % max(ndim, 1)
    end = call.get("end_dim", -1) % max(ndim, 1)
    if not shape:
        return reshaped(call, (1,))
    if start > end:
        raise call.error(f"start_dim {start} comes after end_dim {end}", "swap them")
    merged = math.prod(shape[start : end + 1])
    return reshaped(call, (*shape[:start], merged, *shape[end + 1 :]))


def _unflatten(call: Call) -> Recipe:
    shape = call.input.shape
    (dim,) = dims_of(call, len(shape))
    sizes = _resolved(call, call.get("sizes"), shape[dim])
    return reshaped(call, (*shape[:dim], *sizes, *shape[dim + 1 :]))


def _squeeze(call: Call) -> Recipe:
    shape = call.input.shape
    dims = dims_of(call, len(shape))
    names = letters(len(shape))
    gone = {dim for dim in dims if shape[dim] == 1}
    left = " ".join("1" if i in gone else name for i, name in enumerate(names))
    right = " ".join(name for i, name in enumerate(names) if i not in gone)
    return _local_dims(call, _single(call, f"{left} -> {right}"), tuple(sorted(gone)))


def _local_dims(call: Call, recipe: Recipe, gone: tuple[int, ...]) -> Recipe:
    """Squeezes exactly the dims that are of global size one, whatever the local sizes."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        return args[0].squeeze(gone)

    return Recipe(recipe.operands, recipe.outputs, run)


def _unsqueeze(call: Call) -> Recipe:
    names = letters(len(call.input.shape))
    dim = call.get("dim")
    at = dim if dim >= 0 else dim + len(names) + 1
    out = [*names[:at], "1", *names[at:]]
    return _single(call, f"{' '.join(names)} -> {' '.join(out)}")


def _permute(call: Call) -> Recipe:
    names = letters(len(call.input.shape))
    order = dims_of(call, len(names), "dims")
    if sorted(order) != list(range(len(names))):
        raise call.error(
            f"dims {call.get('dims')} are not a permutation",
            f"name each of the {len(names)} dims once",
        )
    return _single(call, f"{' '.join(names)} -> {' '.join(names[i] for i in order)}")


def _transpose(call: Call) -> Recipe:
    names = letters(len(call.input.shape))
    first, second = (dims_of(call, len(names), name)[0] for name in ("dim0", "dim1"))
    out = list(names)
    out[first], out[second] = out[second], out[first]
    return _single(call, f"{' '.join(names)} -> {' '.join(out)}")


def _t(call: Call) -> Recipe:
    names = letters(len(call.input.shape))
    if len(names) > 2:
        raise call.error("t() expects at most 2 dims", "use transpose(dim0, dim1)")
    return _single(call, f"{' '.join(names)} -> {' '.join(reversed(names))}")


def _adjoint(call: Call) -> Recipe:
    ndim = len(call.input.shape)
    if ndim < 2:
        return _t(call)
    return _transpose(
        Call(call.operator, call.operands, {**call.arguments, "dim0": -2, "dim1": -1})
    )


def _at_least(call: Call, *, ndim: int) -> Recipe | None:
    """New dims of size one in front; in front and behind for three dims, as torch does."""
    if not isinstance(call.get("input"), Operand):
        return None
    shape = call.input.shape
    missing = ndim - len(shape)
    if missing <= 0:
        return Recipe(None, call.input.layout)
    if ndim == 3:
        target = {0: (1, 1, 1), 1: (1, *shape, 1), 2: (*shape, 1)}[len(shape)]
    else:
        target = (1,) * missing + shape
    return reshaped(call, target)


def _movedim(call: Call) -> Recipe:
    names = letters(len(call.input.shape))
    source, target = (dims_of(call, len(names), name) for name in ("source", "destination"))
    out: list[str | None] = [None] * len(names)
    for a, b in zip(source, target):
        out[b] = names[a]
    rest = iter([name for i, name in enumerate(names) if i not in source])
    full = [name if name is not None else next(rest) for name in out]
    return _single(call, f"{' '.join(names)} -> {' '.join(full)}")


def _expand(call: Call) -> Recipe:
    """New leading dims, and dims of size one made larger; others stay as they are cut."""
    shape = call.input.shape
    sizes = tuple(call.get("size"))
    extra = len(sizes) - len(shape)
    if extra < 0:
        raise call.error(
            f"cannot expand {len(shape)} dims to {len(sizes)}", "give a size, or -1, for every dim"
        )
    left: list[str] = []
    right = [f"n{i}" for i in range(extra)]
    new = {f"n{i}": sizes[i] for i in range(extra)}
    for i, size in enumerate(shape):
        wanted = sizes[extra + i]
        if size == 1 and wanted not in (1, -1):
            left.append("1")
            right.append(f"n{extra + i}")
            new[f"n{extra + i}"] = wanted
        elif wanted not in (size, -1):
            raise call.error(
                f"dim {i} of size {size} cannot be expanded to {wanted}",
                f"give {size} or -1; sizes are those of the global tensor",
            )
        else:
            left.append(f"d{i}")
            right.append(f"d{i}")
    recipe = _single(call, f"{' '.join(left)} -> {' '.join(right)}", new)
    spread = [dim for dim, letter in enumerate(right) if letter in new]
    recipe = _spread_as_cut(recipe, {dim: sizes[dim] for dim in spread})
    local_shape = own_shape(recipe.outputs)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        return args[0].expand(local_shape)

    return Recipe(recipe.operands, recipe.outputs, run)


def _spread_as_cut(recipe: Recipe, sizes: Mapping[int, int]) -> Recipe:
    """A dim spread to the size of a dim that is cut: each rank makes its part only.

    What comes back to the operand is then the gradient of the rank's part, a summand.
    """
    output: Layout = recipe.outputs
    values, grads = list(output.placements), list(output.grad_placements)
    taken: list[int] = []
    for dim, size in sizes.items():
        if isinstance(size, CutSize) and all(values[axis] == Replicate() for axis in size.cut):
            for axis in size.cut:
                values[axis] = grads[axis] = Shard(dim)
                taken.append(axis)
    if not taken or recipe.operands is None:
        return recipe
    operand, *rest = recipe.operands
    assert operand is not None
    needed = [Partial() if a in taken else g for a, g in enumerate(operand.grad_placements)]
    return evolve(
        recipe,
        operands=(operand.with_placements(operand.placements, needed), *rest),
        outputs=Layout(output.mesh, values, output.shape, grads),
    )


def _expand_as(call: Call) -> Recipe:
    target: Operand = call.get("other")
    arguments = {**call.arguments, "size": sizes_of(target.layout)}
    return _expand(Call(call.operator, call.operands, arguments))


def _changes_shape(call: Call) -> Recipe:
    raise call.error(
        "it would change the shape of the DTensor itself, which its layout fixes",
        "use the function that returns a new tensor",
    )


def rules() -> Mapping[str, Rule]:
    size = ("input", "*size")
    dim = ("input", "dim")
    found: dict[str, Rule] = {}
    # Before the functions of which these are the forms in place.
    for name in words(
        "squeeze_ unsqueeze_ transpose_ swapaxes_ swapdims_ t_ resize_ resize_as_ set_ as_strided_"
    ):
        found[name] = Rule(name, _changes_shape, ("*all",), refuses=True)

    def view(
        name: str, derive: Callable[[Call], Recipe | None], parameters: tuple[str, ...]
    ) -> None:
        found[name] = Rule(name, derive, parameters, views=True)

    view("view", partial(_view, run="view"), size)
    view("reshape", partial(_view, run="reshape"), size)
    view("view_as", _view_as, ("input", "other"))
    view("reshape_as", _view_as, ("input", "other"))
    view("flatten", _flatten, ("input", "start_dim", "end_dim"))
    view("ravel", _flatten, ("input",))
    view("unflatten", _unflatten, ("input", "dim", "sizes"))
    view("squeeze", _squeeze, dim)
    view("unsqueeze", _unsqueeze, dim)
    view("permute", _permute, ("input", "*dims"))
    for name in ("transpose", "swapaxes", "swapdims"):
        view(name, _transpose, ("input", "dim0", "dim1"))
    view("t", _t, ("input",))
    view("adjoint", _adjoint, ("input",))
    for name in ("movedim", "moveaxis"):
        view(name, _movedim, ("input", "source", "destination"))
    view("expand", _expand, size)
    view("broadcast_to", _expand, ("input", "size"))
    view("expand_as", _expand_as, ("input", "other"))
    for name, ndim in (("atleast_1d", 1), ("atleast_2d", 2), ("atleast_3d", 3)):
        view(name, partial(_at_least, ndim=ndim), ("input",))
    return found
