"""Sizes that a module states where the dim is cut: production would ask a part for a whole's size.

In validate mode shapes are global, so `x.view(b, s, 8, d)` with eight heads in all is right there.
In production this rank has some of the heads, and the same numbers fail or, with a `-1` beside
them, give other numbers another meaning. `x[..., :32]` takes 32 of all features here, and there 32
of each part. A size that comes from the tensor's own shape, or from an attribute that the plan
localises, is a `CutSize`; a plain int is a constant of the module.

The other way round, a tensor scaled by a `CutSize` is scaled by a smaller number in production.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hp_dtensor.cut_size import CutSize, sizes_of
from hp_dtensor.layout import Layout
from hp_dtensor.rules.recipe import Call, Operand, words

__all__ = ["stated_size"]

_SHAPING = {"view": "size", "reshape": "size", "expand": "size", "unflatten": "sizes"}
_SPLITTING = frozenset(
    {"split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "tensor_split"}
)
_SPLIT_SIZES = ("split_size", "split_size_or_sections", "split_sizes", "indices_or_sections")
_SCALING = frozenset(
    words(
        """
        mul mul_ multiply multiply_ __mul__ __rmul__ __imul__ div div_ divide divide_ true_divide
        true_divide_ __truediv__ __itruediv__ __rtruediv__ __rdiv__
        """
    )
)
_INDEXING = frozenset({"__getitem__", "__setitem__"})


_GIVEN = (
    "take the size from the tensor's shape, give -1, or read it from an attribute of the module "
    "that the boundary's localize names"
)
_ASKED = (
    "keep the number for all ranks in an attribute of its own, which localize does not name; "
    "int() of it where each rank's own number is meant"
)


def stated_size(call: Call, result: object) -> tuple[str, str] | None:
    """What is wrong with the sizes that the operator was given, and the remedy; None if nothing is.

    Of shapes, only what `sizes_of` knows to be cut is looked at, before and after: uneven parts
    have no size that would be a multiple of a part's.
    """
    what: str | None = None
    if call.operator in _SHAPING and isinstance(result, Layout):
        what = _shape(call, result)
    elif call.operator in _INDEXING or call.operator == "narrow" or call.operator in _SPLITTING:
        what = _place(call)
    elif call.operator in _SCALING:
        what = _scale(call)
        return None if what is None else (what, _ASKED)
    return None if what is None else (what, _GIVEN)


def _scale(call: Call) -> str | None:
    size = next((each for each in call.arguments.values() if isinstance(each, CutSize)), None)
    if size is None:
        return None
    return (
        f"{int(size)} is a number of what is cut over {_names(call.layouts[0], size.cut)}: in "
        f"production each rank scales by its own {size // size.ways}"
    )


def _shape(call: Call, result: Layout) -> str | None:
    wanted = sizes_of(result)
    if not any(isinstance(size, CutSize) for size in wanted):
        return None
    sizes = call.get(_SHAPING[call.operator], ())
    first = len(wanted) - len(sizes)
    if call.operator == "unflatten":
        first = call.get("dim") % len(call.input.shape)
    known = {axis for size in sizes_of(call.input.layout) for axis in getattr(size, "cut", ())}
    for dim, size in enumerate(sizes, first):
        cut = wanted[dim]
        if type(size) is int and size != -1 and isinstance(cut, CutSize) and known >= set(cut.cut):
            axes = _names(call.input.layout, cut.cut)
            return (
                f"size {size} of dim {dim} of the result is a number of the module's own, but the "
                f"dim is cut over {axes}: in production each rank has {cut // cut.ways} of it"
            )
    return None


def _place(call: Call) -> str | None:
    layout = call.input.layout
    ways = layout.abstract_mesh.sizes
    cuts = {
        d: axis for axis, dims in layout.sharding_axes().items() for d in dims if ways[axis] > 1
    }
    for dim, number in _numbers(call) if cuts else ():
        if dim in cuts and type(number) is int and abs(number) < max(layout.shape[dim], 1):
            return (
                f"{number} along dim {dim} is a number of the module's own, but the dim is cut "
                f"over {_names(layout, (cuts[dim],))}: in production each rank counts its own part "
                f"of the {layout.shape[dim]}"
            )
    return None


def _ways(layout: Layout, axis: int) -> int:
    return layout.abstract_mesh.sizes[axis]


def _names(layout: Layout, axes: tuple[int, ...]) -> str:
    return ", ".join(layout.abstract_mesh.axis_names[axis] for axis in axes)


def _numbers(call: Call) -> Iterator[tuple[int, Any]]:
    """Dims, and where along them the operator takes something; zero is where every part begins."""
    ndim = len(call.input.shape)
    if call.operator in _INDEXING:
        yield from _indices(call, ndim)
        return
    dim = call.get("dim", 0) % ndim
    if call.operator == "narrow":
        yield dim, call.get("start") or None
        yield dim, call.get("length")
        return
    sizes = next((call.get(name) for name in _SPLIT_SIZES if name in call.arguments), None)
    if isinstance(sizes, tuple | list):
        yield from ((dim, size) for size in sizes)
    elif call.operator != "tensor_split":  # a number of parts
        yield dim, sizes


def _indices(call: Call, ndim: int) -> Iterator[tuple[int, Any]]:
    index = call.get("index")
    items = index if isinstance(index, tuple) else (index,)
    dim = 0
    for place, item in enumerate(items):
        if item is Ellipsis:
            dim = ndim - sum(map(_taken, items[place + 1 :]))
            continue
        if isinstance(item, slice):
            # In every second, and the like, what begins before the second is the same in all parts.
            step = item.step if isinstance(item.step, int) else 1
            yield dim, item.start if (item.start or 0) not in range(step) else None
            yield dim, item.stop
        dim += _taken(item)


def _taken(item: Any) -> int:
    """How many dims an item of an index is for."""
    if item is None or isinstance(item, bool):
        return 0
    if isinstance(item, Operand) and str(item.dtype) in ("torch.bool", "torch.uint8"):
        return len(item.shape)
    return 1
