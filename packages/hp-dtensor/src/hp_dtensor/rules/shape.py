"""Rules of operators that only rearrange: views, joins, splits, expansions, indexing by slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule
from hp_dtensor.rules.reduction import dims_of, letters, whole_dims


def own_coordinate(layout: Layout) -> tuple[int, ...]:
    """This rank's coordinate; coordinate 0 stands for every rank of an abstract mesh."""
    if isinstance(layout.mesh, AbstractMesh):
        return (0,) * layout.mesh.ndim
    return layout.coordinate()


def own_shape(layout: Layout) -> tuple[int, ...]:
    return layout.local_shape(own_coordinate(layout))


def own_indices(layout: Layout, dim: int) -> Tensor:
    return layout.dim_indices(dim, own_coordinate(layout))


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
    sizes = tuple(int(size) for size in call.get("size"))
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
    local_shape = own_shape(recipe.outputs)

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        return args[0].expand(local_shape)

    return Recipe(recipe.operands, recipe.outputs, run)


def _expand_as(call: Call) -> Recipe:
    target = call.get("other").shape
    arguments = {**call.arguments, "size": target}
    return _expand(Call(call.operator, call.operands, arguments))


# -- joining and splitting -----------------------------------------------------------------------


def _cat(call: Call) -> Recipe:
    """The joined dim must be whole."""
    tensors = list(call.get("tensors"))
    ndim = len(tensors[0].shape)
    (dim,) = dims_of(call, ndim) if call.get("dim") is not None else (0,)
    parts = []
    for i, _ in enumerate(tensors):
        parts.append(" ".join(f"[c{i}]" if k == dim else f"d{k}" for k in range(ndim)))
    total = sum(tensor.shape[dim] for tensor in tensors)
    out = " ".join("[c]" if k == dim else f"d{k}" for k in range(ndim))
    return _joined(call, parts, out, {"c": total})


def _stack(call: Call) -> Recipe:
    tensors = list(call.get("tensors"))
    names = letters(len(tensors[0].shape))
    dim = call.get("dim", 0)
    at = dim if dim >= 0 else dim + len(names) + 1
    out = [*names[:at], "[c]", *names[at:]]
    return _joined(call, [" ".join(names)] * len(tensors), " ".join(out), {"c": len(tensors)})


def _joined(call: Call, parts: list[str], out: str, sizes: Mapping[str, int]) -> Recipe:
    """Linear as a whole: pending sums only where every part is one."""
    pattern = parse(f"{' + '.join(parts)} -> {out}")
    derivation = derive(call.operator, pattern, call.layouts, sizes=sizes)
    return Recipe(derivation.operands, derivation.outputs[0])


def _pieces(call: Call, lengths: Sequence[int], dim: int) -> Recipe:
    names = letters(len(call.input.shape))
    inside = " ".join(f"[{name}]" if i == dim else name for i, name in enumerate(names))
    outs = [
        " ".join(f"[p{k}]" if i == dim else name for i, name in enumerate(names))
        for k in range(len(lengths))
    ]
    sizes = {f"p{k}": length for k, length in enumerate(lengths)}
    derivation = derive(
        call.operator, parse(f"{inside} -> {' , '.join(outs)}"), [call.input.layout], sizes=sizes
    )
    return Recipe(derivation.operands, derivation.outputs)


def _one_dim(call: Call, default: int = 0) -> int:
    if "dim" not in call.arguments:
        return default
    return dims_of(call, len(call.input.shape))[0]


def _chunk(call: Call) -> Recipe:
    dim = _one_dim(call)
    size = call.input.shape[dim]
    step = -(-size // call.get("chunks"))
    return _pieces(call, _steps(size, step), dim)


def _split(call: Call) -> Recipe:
    dim = _one_dim(call)
    given = call.get("split_size", call.get("split_size_or_sections"))
    size = call.input.shape[dim]
    lengths = _steps(size, given) if isinstance(given, int) else list(given)
    return _pieces(call, lengths, dim)


def _steps(size: int, step: int) -> list[int]:
    if step <= 0:
        return [size]
    return [min(step, size - start) for start in range(0, size, step)] or [0]


def _unbind(call: Call) -> Recipe:
    dim = _one_dim(call)
    names = letters(len(call.input.shape))
    inside = " ".join(f"[{name}]" if i == dim else name for i, name in enumerate(names))
    out = " ".join(name for i, name in enumerate(names) if i != dim)
    count = call.input.shape[dim]
    derivation = derive(
        call.operator,
        parse(f"{inside} -> {' , '.join([out] * count)}"),
        [call.input.layout],
    )
    return Recipe(derivation.operands, derivation.outputs)


# -- parts and repetitions ------------------------------------------------------------------------


def resized(call: Call, changed: Mapping[int, int | None], *, linear: bool = True) -> Recipe:
    """Dims that get another size (None: vanish) must be whole; the others stay as they are cut."""
    ndim = len(call.input.shape)
    left, right, sizes = [], [], {}
    for i in range(ndim):
        if i not in changed:
            left.append(f"d{i}")
            right.append(f"d{i}")
            continue
        left.append(f"[d{i}]")
        size = changed[i]
        if size is not None:
            right.append(f"[r{i}]")
            sizes[f"r{i}"] = size
    pattern = parse(f"{' '.join(left)} -> {' '.join(right)}", linear=linear)
    derivation = derive(call.operator, pattern, [call.input.layout], sizes=sizes)
    rest = (None,) * (len(call.operands) - 1)
    return Recipe((*derivation.operands, *rest), derivation.outputs[0])


def _narrow(call: Call) -> Recipe:
    dim = _one_dim(call)
    if (call.get("start"), call.get("length")) == (0, call.input.shape[dim]):
        return resized(call, {})
    return resized(call, {dim: call.get("length")})


def _select(call: Call) -> Recipe:
    return resized(call, {_one_dim(call): None})


def _repeat(call: Call) -> Recipe:
    sizes = tuple(int(size) for size in call.get("sizes"))
    shape = call.input.shape
    extra = len(sizes) - len(shape)
    if extra < 0:
        raise call.error(
            f"repeat needs a count per dim, found {sizes} for {len(shape)} dims",
            "use 1 for the dims that stay as they are",
        )
    left, right, new = [], [f"n{i}" for i in range(extra)], {}
    for i in range(extra):
        new[f"n{i}"] = sizes[i]
    for i, size in enumerate(shape):
        count = sizes[extra + i]
        left.append(f"d{i}" if count == 1 else f"[d{i}]")
        right.append(f"d{i}" if count == 1 else f"[r{i}]")
        new[f"r{i}"] = size * count
    return _single(call, f"{' '.join(left)} -> {' '.join(right)}", new)


def _repeat_interleave(call: Call) -> Recipe:
    count, dim = call.get("repeats"), call.get("dim")
    if not isinstance(count, int) or dim is None:
        raise call.error(
            "only an integer count along a given dim has a rule",
            "pass an integer and dim=, or redistribute to Replicate() and compute on to_local()",
        )
    at = _one_dim(call)
    return resized(call, {at: call.input.shape[at] * count})


def _roll(call: Call) -> Recipe:
    if call.get("dims") is None:
        raise call.error("roll without dims has no rule", "pass dims=")
    return whole_dims(call, dims_of(call, len(call.input.shape), "dims"), linear=True)


def _pad(call: Call) -> Recipe:
    amounts = list(call.get("pad"))
    shape = call.input.shape
    changed: dict[int, int | None] = {}
    for i in range(len(amounts) // 2):
        dim = len(shape) - 1 - i
        before, after = amounts[2 * i], amounts[2 * i + 1]
        if before or after:
            changed[dim] = shape[dim] + before + after
    zero = call.get("mode", "constant") == "constant" and not call.get("value", None)
    return resized(call, changed, linear=zero or call.get("mode", "constant") != "constant")


def _triangle(call: Call) -> Recipe:
    ndim = len(call.input.shape)
    return whole_dims(call, (ndim - 2, ndim - 1), linear=True)


# -- indexing --------------------------------------------------------------------------------------


class Index:
    """An index expression over whole dims: what becomes of every dim."""

    def __init__(self, call: Call, index: Any) -> None:
        self.call = call
        shape = call.input.shape
        items = list(index) if isinstance(index, tuple) else [index]
        consumed = sum(1 for item in items if item is not None and item is not Ellipsis)
        if items.count(Ellipsis) == 0:
            items.append(Ellipsis)
        self.left: list[str] = []
        self.right: list[str] = []
        self.sizes: dict[str, int] = {}
        dim = 0
        for item in items:
            if item is Ellipsis:
                for _ in range(len(shape) - consumed):
                    self.keep(dim)
                    dim += 1
            elif item is None:
                self.right.append("1")
            else:
                if dim >= len(shape):
                    raise call.error(
                        f"too many indices for a tensor of {len(shape)} dims",
                        f"give at most {len(shape)}",
                    )
                self.take(item, dim, shape[dim])
                dim += 1

    def keep(self, dim: int) -> None:
        self.left.append(f"d{dim}")
        self.right.append(f"d{dim}")

    def take(self, item: Any, dim: int, size: int) -> None:
        if isinstance(item, slice):
            length = len(range(*item.indices(size)))
            if length == size and item.step in (None, 1):
                self.keep(dim)
                return
            self.left.append(f"[d{dim}]")
            self.right.append(f"[s{dim}]")
            self.sizes[f"s{dim}"] = length
        elif isinstance(item, int) and not isinstance(item, bool):
            if not -size <= item < size:
                raise self.call.error(
                    f"index {item} is out of range for dim {dim} of size {size}",
                    f"use {-size} to {size - 1}; indices are those of the global tensor",
                )
            self.left.append(f"[d{dim}]")
        else:
            raise self.call.error(
                f"an index of type {type(item).__name__} on sharded or partial tensors has no rule",
                "redistribute the tensor and the index to Replicate() first",
            )


def _has_tensor(index: Any) -> bool:
    items = index if isinstance(index, tuple | list) else [index]
    return any(isinstance(item, Operand | list | bool) for item in items)


def _getitem(call: Call) -> Recipe | None:
    index = call.get("index")
    if _has_tensor(index):
        return None
    parsed = Index(call, index)
    pattern = f"{' '.join(parsed.left)} -> {' '.join(parsed.right)}"
    return _single(call, pattern, parsed.sizes)


def _setitem(call: Call) -> Recipe | None:
    """Writes into whole dims; the value broadcasts to the part that is written."""
    index, value = call.get("index"), call.get("value")
    if _has_tensor(index):
        return None
    parsed = Index(call, index)
    target = call.input.layout
    part = derive(
        call.operator,
        parse(f"{' '.join(parsed.left)} -> {' '.join(parsed.right)}", linear=False),
        [target],
        sizes=parsed.sizes,
    )
    if not isinstance(value, Operand):
        return Recipe(part.operands, target)
    joined = derive(
        call.operator, parse("..., ... -> ...", linear=False), [part.outputs[0], value.layout]
    )
    if joined.outputs[0].placements != part.outputs[0].placements:
        raise call.error(
            "the value is cut where the tensor written is not",
            "redistribute the value to the placements of the part that is written",
        )
    return Recipe((*part.operands, joined.operands[1]), target)


def rules() -> Mapping[str, Rule]:
    size = ("input", "*size")
    dim = ("input", "dim")
    return {
        "view": Rule("view", partial(_view, run="view"), size),
        "reshape": Rule("reshape", partial(_view, run="reshape"), size),
        "view_as": Rule("view_as", _view_as, ("input", "other")),
        "reshape_as": Rule("reshape_as", _view_as, ("input", "other")),
        "flatten": Rule("flatten", _flatten, ("input", "start_dim", "end_dim")),
        "ravel": Rule("ravel", _flatten),
        "unflatten": Rule("unflatten", _unflatten, ("input", "dim", "sizes")),
        "squeeze": Rule("squeeze", _squeeze, dim),
        "unsqueeze": Rule("unsqueeze", _unsqueeze, dim),
        "permute": Rule("permute", _permute, ("input", "*dims")),
        "transpose": Rule("transpose", _transpose, ("input", "dim0", "dim1")),
        "swapaxes": Rule("swapaxes", _transpose, ("input", "dim0", "dim1")),
        "swapdims": Rule("swapdims", _transpose, ("input", "dim0", "dim1")),
        "t": Rule("t", _t),
        "movedim": Rule("movedim", _movedim, ("input", "source", "destination")),
        "moveaxis": Rule("moveaxis", _movedim, ("input", "source", "destination")),
        "expand": Rule("expand", _expand, size),
        "broadcast_to": Rule("broadcast_to", _expand, ("input", "size")),
        "expand_as": Rule("expand_as", _expand_as, ("input", "other")),
        "cat": Rule("cat", _cat, ("tensors", "dim")),
        "concat": Rule("concat", _cat, ("tensors", "dim")),
        "concatenate": Rule("concatenate", _cat, ("tensors", "dim")),
        "stack": Rule("stack", _stack, ("tensors", "dim")),
        "chunk": Rule("chunk", _chunk, ("input", "chunks", "dim")),
        "split": Rule("split", _split, ("input", "split_size", "dim")),
        "split_with_sizes": Rule("split_with_sizes", _split, ("input", "split_size", "dim")),
        "unbind": Rule("unbind", _unbind, dim),
        "narrow": Rule("narrow", _narrow, ("input", "dim", "start", "length")),
        "select": Rule("select", _select, ("input", "dim", "index")),
        "repeat": Rule("repeat", _repeat, ("input", "*sizes")),
        "repeat_interleave": Rule(
            "repeat_interleave", _repeat_interleave, ("input", "repeats", "dim")
        ),
        "roll": Rule("roll", _roll, ("input", "shifts", "dims")),
        "pad": Rule("pad", _pad, ("input", "pad", "mode", "value")),
        "tril": Rule("tril", _triangle, ("input", "diagonal")),
        "triu": Rule("triu", _triangle, ("input", "diagonal")),
        "__getitem__": Rule("__getitem__", _getitem, ("input", "index")),
        "__setitem__": Rule("__setitem__", _setitem, ("input", "index", "value")),
    }
