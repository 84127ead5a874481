"""Rules of `x[...]` and `x[...] = value`, and of what does the same by another name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hp_dtensor.rules.dims import letters, one_dim
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.lookups import OwnDim, landed, looked_up, with_slots
from hp_dtensor.rules.mask_writes import check_same_dtype, value_letters, write_rows
from hp_dtensor.rules.masks import selection_by, with_lists
from hp_dtensor.rules.own_part import own_indices
from hp_dtensor.rules.parts import Selection
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule
from hp_dtensor.rules.reduction import everything
from hp_dtensor.rules.regrouped import on_whole
from hp_dtensor.rules.slicing import along, parsed, take_parts, write_part

# -- what an index holds ---------------------------------------------------------------------------


def _items(index: Any) -> list[Any]:
    if isinstance(index, list) and any(isinstance(i, Operand | slice) for i in index):
        return list(index)
    return list(index) if isinstance(index, tuple) else [index]


def _is_by_tensor(item: Any) -> bool:
    return isinstance(item, Operand | list | bool)


def _mask(call: Call, index: Any) -> Operand | None:
    """The one mask that an index consists of, or None."""
    items = _items(index)
    if len(items) == 1 and isinstance(items[0], Operand) and items[0].dtype == torch.bool:
        return items[0]
    return None


def _refuse_masks(call: Call, items: Sequence[Any]) -> None:
    for item in items:
        if isinstance(item, Operand) and item.dtype in (torch.bool, torch.uint8):
            raise call.error(
                "a mask beside other indices, or of values that are written, has no rule on "
                "sharded or partial tensors",
                "index with the mask alone, use torch.where() or masked_fill(), or redistribute "
                "tensor and mask to Replicate() first",
            )
        if isinstance(item, list | bool):
            raise call.error(
                "writing at a list of positions has no rule on sharded or partial tensors",
                "make it a DTensor of integers",
            )


def _is_everywhere(call: Call) -> bool:
    """Whether torch's own indexing on the local tensors is right."""
    return all(
        operand.layout.is_replicated
        and all(g == p for g, p in zip(operand.layout.grad_placements, operand.layout.placements))
        for operand in call.operands
    )


# -- reading ---------------------------------------------------------------------------------------


def _getitem(call: Call) -> Recipe | None:
    index = call.get("index")
    items = _items(index)
    if not any(_is_by_tensor(item) for item in items):
        return take_parts(call, [parsed(call, index)], many=False)
    if _is_everywhere(call):
        return None
    mask = _mask(call, index)
    if mask is not None:
        return selection_by(call, mask)
    if any(isinstance(item, list) for item in items):
        return Recipe(None, None, composite=with_lists)
    _refuse_masks(call, items)
    at, front = _tensor_dims(call, items)
    if all(_is_by_tensor(item) or item == slice(None) or item is Ellipsis for item in items):
        return looked_up(call, at, call.input.layout, front=front)
    return Recipe(None, None, composite=_slices_first)


def _tensor_dims(call: Call, items: Sequence[Any]) -> tuple[dict[int, Operand], bool]:
    """Which dims are looked up by which tensors, and whether the new dims go in front."""
    consumed = sum(1 for item in items if item is not None and item is not Ellipsis)
    at: dict[int, Operand] = {}
    places = []
    dim = 0
    for place, item in enumerate(items):
        if item is Ellipsis:
            dim += len(call.input.shape) - consumed
        elif item is not None:
            if isinstance(item, Operand):
                at[dim] = item
                places.append(place)
            dim += 1
    if dim > len(call.input.shape):
        raise call.error(f"too many indices for a tensor of {len(call.input.shape)} dims")
    for dim_, item in at.items():
        if item.dtype.is_floating_point or item.layout.partial_axes():
            raise call.error(
                f"the index of dim {dim_} is {item.dtype} and laid out {item.layout}",
                "index with whole or sharded integers",
            )
    return at, places != list(range(places[0], places[0] + len(places)))


def _slices_first(tensor: Any, index: Any) -> Any:
    """Slices, integers and None by themselves, then the tensors, as torch does."""
    items = list(index)
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    basic = [slice(None) if isinstance(item, Tensor) else item for item in items]
    later: list[Any] = []
    for item in items:
        if isinstance(item, Tensor) or item is Ellipsis:
            later.append(item)
        elif not isinstance(item, int):
            later.append(slice(None))
    return tensor[tuple(basic)][tuple(later)]


def _narrow(call: Call) -> Recipe:
    dim, start, length = one_dim(call), call.get("start"), call.get("length")
    size = call.input.shape[dim]
    if isinstance(start, Operand):
        raise call.error("a tensor as start has no rule", "pass an integer")
    start = start + size if start < 0 else start
    if not 0 <= start <= start + length <= size:
        raise call.error(
            f"start {start} and length {length} do not fit dim {dim} of size {size}",
            "positions are those of the global tensor",
        )
    return take_parts(call, [along(call, dim, Selection(size, start, start + length))], many=False)


def _select(call: Call) -> Recipe:
    dim, index = one_dim(call), call.get("index")
    items: list[Any] = [slice(None)] * len(call.input.shape)
    items[dim] = index
    return take_parts(call, [parsed(call, tuple(items))], many=False)


def _pieces(call: Call, lengths: Sequence[int], dim: int) -> Recipe:
    size = call.input.shape[dim]
    if sum(lengths) != size:
        raise call.error(
            f"lengths {list(lengths)} do not add up to {size}, the size of dim {dim}",
            "lengths are those of the global tensor",
        )
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    pieces = [Selection(size, end - length, end) for end, length in zip(ends, lengths)]
    return take_parts(call, [along(call, dim, piece) for piece in pieces], many=True)


def _chunk(call: Call) -> Recipe:
    dim = one_dim(call)
    size = call.input.shape[dim]
    return _pieces(call, steps_of(size, -(-size // call.get("chunks"))), dim)


def _split(call: Call) -> Recipe:
    dim = one_dim(call)
    given = call.get("split_size", call.get("split_size_or_sections", call.get("split_sizes")))
    size = call.input.shape[dim]
    return _pieces(call, steps_of(size, given) if isinstance(given, int) else list(given), dim)


def steps_of(size: int, step: int) -> list[int]:
    if step <= 0:
        return [size]
    return [min(step, size - start) for start in range(0, size, step)] or [0]


def _tensor_split(call: Call) -> Recipe:
    dim = one_dim(call)
    given = call.get("indices_or_sections", call.get("sections", call.get("indices")))
    size = call.input.shape[dim]
    if isinstance(given, Operand):
        raise call.error("a tensor of split points has no rule", "pass integers")
    if isinstance(given, int):
        short, longer = divmod(size, given)
        return _pieces(call, [short + 1] * longer + [short] * (given - longer), dim)
    bounds = [0, *(min(max(i + size if i < 0 else i, 0), size) for i in given), size]
    return _pieces(call, [max(b - a, 0) for a, b in pairwise(bounds)], dim)


def _split_along(call: Call, *, dim: int) -> Recipe:
    ndim = len(call.input.shape)
    at = 0 if ndim == 1 and dim == 1 else dim
    arguments = {**call.arguments, "dim": at}
    return _tensor_split(Call(call.operator, call.operands, arguments))


def _unbind(call: Call) -> Recipe:
    dim = one_dim(call)
    size = call.input.shape[dim]
    return take_parts(call, [along(call, dim, i) for i in range(size)], many=True)


def _diagonal(call: Call) -> Recipe:
    """Both dims of the diagonal are whole."""
    ndim = len(call.input.shape)
    first = call.get("dim1", 0 if call.operator == "diagonal" else -2) % ndim
    second = call.get("dim2", 1 if call.operator == "diagonal" else -1) % ndim
    both = (first, second)
    return on_whole(call, both, partial(_diagonal_of, dims=both), returns=False, view=True)


def _diagonal_of(call: Call, *, dims: tuple[int, int]) -> Recipe:
    first, second = dims
    names = letters(len(call.input.shape))
    rows, columns = call.input.shape[first], call.input.shape[second]
    offset = call.get("offset", 0)
    length = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    left = " ".join(f"[{n}]" if i in (first, second) else n for i, n in enumerate(names))
    right = " ".join([*(n for i, n in enumerate(names) if i not in (first, second)), "[g]"])
    made = derive(
        call.operator, parse(f"{left} -> {right}"), [call.input.layout], sizes={"g": length}
    )
    return Recipe(made.operands, made.outputs[0])


def _trace(call: Call) -> Recipe:
    """Each rank adds up those diagonal elements that it holds."""
    layout = call.input.layout
    made = derive(call.operator, parse("i j -> i j"), [layout])
    source = made.operands[0]
    same = own_indices(source, 0)[:, None] == own_indices(source, 1)[None, :]

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        kept = args[0].masked_fill(~same.to(args[0].device), 0)
        found: Tensor = kept.sum()
        return found

    return Recipe((source,), everything(source), run)


def _unfold(call: Call) -> Recipe | None:
    """Windows over a whole dim. `F.unfold`, of images, is another function."""
    if "step" not in call.arguments:
        return None
    dim = one_dim(call)
    return on_whole(call, (dim,), partial(_windows, dim=dim), view=True)


def _windows(call: Call, *, dim: int) -> Recipe:
    names = letters(len(call.input.shape))
    size, step = call.get("size"), call.get("step")
    count = (call.input.shape[dim] - size) // step + 1
    left = " ".join(f"[{name}]" if i == dim else name for i, name in enumerate(names))
    right = " ".join("[n]" if i == dim else name for i, name in enumerate(names))
    made = derive(
        call.operator,
        parse(f"{left} -> {right} [s]"),
        [call.input.layout],
        sizes={"n": count, "s": size},
    )
    return Recipe(made.operands, made.outputs[0])


# -- writing ---------------------------------------------------------------------------------------


def _setitem(call: Call) -> Recipe | None:
    index, value = call.get("index"), call.get("value")
    items = _items(index)
    if not any(_is_by_tensor(item) for item in items):
        return write_part(call, parsed(call, index), value)
    mask = _mask(call, index)
    if mask is not None and (not isinstance(value, Operand) or not value.shape):
        return _write_masked(call, mask, value)
    if _is_everywhere(call):
        return None
    if mask is not None:
        check_same_dtype(call, value)
        same = value_letters(call, len(mask.shape), value.shape)
        if same is None:
            return Recipe(None, None, composite=write_rows)
        return _write_masked(call, mask, value, same)
    _refuse_masks(call, items)
    if not all(_is_by_tensor(item) or item == slice(None) or item is Ellipsis for item in items):
        raise call.error(
            "writing at positions beside slices, integers or None has no rule",
            "take the slice first, which is a view, and write into that",
        )
    at, front = _tensor_dims(call, items)
    return _write_at(call, at, value, front=front, accumulate=False)


def _write_masked(call: Call, mask: Operand, value: Any, same: str = "") -> Recipe:
    """One value where a mask of the leading dims is set, of the dims that `same` names."""
    names = letters(len(call.input.shape))
    if tuple(mask.shape) != call.input.shape[: len(mask.shape)]:
        raise call.error(f"the mask has shape {mask.shape}", "give it the leading dims' sizes")
    parts = [" ".join(names), " ".join(names[: len(mask.shape)])]
    parts += [same] if isinstance(value, Operand) else []
    derivation = derive(
        call.operator,
        parse(f"{', '.join(parts)} -> {' '.join(names)}", linear=False),
        call.layouts,
        leader=0,
    )

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        local, where = args[0], args[1]
        where = where[0] if isinstance(where, tuple) else where
        aligned = where.view(*where.shape, *[1] * (local.ndim - where.ndim))
        given = args[2]
        if not isinstance(given, Tensor) or not given.ndim:
            result: Tensor = local.masked_fill_(aligned, given)
            return result
        given = given[0] if same.startswith("1") else given
        return local.copy_(torch.where(aligned, given, local))

    first, *rest = derivation.operands
    return Recipe((first, *rest), derivation.outputs[0], run)


def _write_at(
    call: Call, at: Mapping[int, Operand], value: Any, *, front: bool, accumulate: bool
) -> Recipe:
    """Values at the positions that index tensors give; `accumulate` adds them up."""
    target = call.input.layout
    ndim = max(len(index.shape) for index in at.values())
    new = [f"i{k}" for k in range(ndim)]
    names = letters(len(target.shape))
    kept = [name for i, name in enumerate(names) if i not in at]
    before = 0 if front else sum(1 for i in range(min(at)) if i not in at)
    out = [*kept[:before], *new, *kept[before:]]
    factors = [" ".join(new[ndim - len(index.shape) :]) for index in at.values()]
    layouts = [index.layout for index in at.values()]
    if isinstance(value, Operand):
        # The first factor: where one term is a summand, it is the value that becomes one.
        factors.insert(0, " ".join(out[len(out) - len(value.shape) :] if value.shape else []))
        layouts.insert(0, value.layout)
    joined = " ".join(names)
    derivation = derive(
        call.operator,
        parse(
            f"{joined} + {', '.join(factors)} -> {joined}",
            linear=accumulate and isinstance(value, Operand),
        ),
        [target, *layouts],
        leader=0 if call.inplace else None,
    )
    first, *rest = derivation.operands
    operands = [first, *rest[1:], rest[0]] if isinstance(value, Operand) else [first, *rest]
    owns = {dim: OwnDim(derivation.operands[0], dim, wraps=True) for dim in at}

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        local, given = args[0], args[2] if len(args) > 2 else kwargs["values"]
        indices = [i for i in _flat(args[1]) if isinstance(i, Tensor)]
        steps: list[Any] = [slice(None)] * local.ndim
        for (dim, own), index in zip(owns.items(), indices):
            steps[dim] = own.slotted(index, call.operator)
        padded = with_slots(local, owns)
        full = _full_index(padded, steps)
        if not isinstance(given, Tensor):
            given = torch.tensor(given, dtype=local.dtype, device=local.device)
        shape = torch.broadcast_shapes(*(i.shape for i in full))
        wrote = padded.index_put(full, _in_order(given, steps, shape, before, ndim), accumulate)
        return landed(local, wrote, owns, call.inplace)

    return Recipe((first, *operands[1:]), derivation.outputs[0], run)


def _flat(index: Any) -> list[Any]:
    return list(index) if isinstance(index, tuple | list) else [index]


def _full_index(local: Tensor, steps: Sequence[Any]) -> tuple[Tensor, ...]:
    """Every dim by a tensor: the given indices first, then the dims that are kept."""
    tensors = [step for step in steps if isinstance(step, Tensor)]
    count = max(step.ndim for step in tensors)
    kept = [dim for dim, step in enumerate(steps) if not isinstance(step, Tensor)]
    full = []
    for dim, step in enumerate(steps):
        if isinstance(step, Tensor):
            full.append(step.view(*step.shape, *[1] * len(kept)))
        else:
            place = kept.index(dim)
            shape = [1] * (count + len(kept))
            shape[count + place] = local.shape[dim]
            positions = torch.arange(local.shape[dim], device=local.device)
            full.append(positions.view(shape))
    return tuple(full)


def _in_order(
    value: Tensor, steps: Sequence[Any], shape: Sequence[int], before: int, count: int
) -> Tensor:
    """The value with the dims of the indices in front, as `_full_index` has them."""
    value = value.view(*[1] * (len(shape) - value.ndim), *value.shape)
    order = [*range(before, before + count), *range(before), *range(before + count, len(shape))]
    return value.permute(order)


def _index_put(call: Call) -> Recipe | None:
    items = list(call.get("indices"))
    if _is_everywhere(call):
        return None
    mask = _mask(call, tuple(items))
    value = call.get("values")
    accumulate = bool(call.get("accumulate", False))
    if mask is not None and not accumulate and not value.shape and call.inplace:
        return _write_masked(call, mask, value)
    _refuse_masks(call, items)
    if not all(isinstance(item, Operand) for item in items):
        raise call.error("None among the indices has no rule", "give one index per leading dim")
    at, front = _tensor_dims(call, items)
    return _write_at(call, at, value, front=front, accumulate=accumulate)


def _scatter_part(call: Call) -> Recipe:
    """`select_scatter`, `slice_scatter`: a copy with one part replaced."""
    return Recipe(None, None, composite=_COPIES_WITH_PART[call.operator])


def _select_scatter(input: Any, src: Any, dim: int, index: int) -> Any:
    made = input.clone()
    made[(slice(None),) * (dim % input.ndim) + (index,)] = src
    return made


def _slice_scatter(
    input: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    made = input.clone()
    made[(slice(None),) * (dim % input.ndim) + (slice(start, end, step),)] = src
    return made


_COPIES_WITH_PART: Mapping[str, Callable[..., Any]] = {
    "select_scatter": _select_scatter,
    "slice_scatter": _slice_scatter,
}


def rules() -> Mapping[str, Rule]:
    dim = ("input", "dim")
    found = {
        "__getitem__": Rule("__getitem__", _getitem, ("input", "index"), views=True),
        "__setitem__": Rule("__setitem__", _setitem, ("input", "index", "value")),
        "index_put": Rule("index_put", _index_put, ("input", "indices", "values", "accumulate")),
        "narrow": Rule("narrow", _narrow, ("input", "dim", "start", "length"), views=True),
        "select": Rule("select", _select, ("input", "dim", "index"), views=True),
        "unbind": Rule("unbind", _unbind, dim, views=True),
        "chunk": Rule("chunk", _chunk, ("input", "chunks", "dim"), views=True),
        "diagonal": Rule("diagonal", _diagonal, ("input", "offset", "dim1", "dim2"), views=True),
    }
    for name in ("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"):
        found[name] = Rule(name, _split, ("input", "split_size", "dim"), views=True)
    found["unsafe_chunk"] = Rule("unsafe_chunk", _chunk, ("input", "chunks", "dim"))
    found["narrow_copy"] = Rule("narrow_copy", _narrow, ("input", "dim", "start", "length"))
    found["trace"] = Rule("trace", _trace, ("input",))
    found["unfold"] = Rule("unfold", _unfold, ("input", "dim", "size", "step"), views=True)
    found["tensor_split"] = Rule(
        "tensor_split", _tensor_split, ("input", "indices_or_sections", "dim"), views=True
    )
    for name, at in (("vsplit", 0), ("hsplit", 1), ("dsplit", 2)):
        found[name] = Rule(
            name, partial(_split_along, dim=at), ("input", "indices_or_sections"), views=True
        )
    found["select_scatter"] = Rule(
        "select_scatter", _scatter_part, ("input", "src", "dim", "index")
    )
    found["slice_scatter"] = Rule(
        "slice_scatter", _scatter_part, ("input", "src", "dim", "start", "end", "step")
    )
    return found
