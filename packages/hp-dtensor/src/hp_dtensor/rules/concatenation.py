"""The rule of `cat`.

Tensors joined along a dim that all of them cut need no communication: every rank joins its own
parts. The result is cut in sections, one per tensor (`SectionedShard`), or in chunks or shares
where the parts follow one another so; a tensor that is whole gives each rank its chunk. Where no
placement describes what the ranks would hold (the halves of a cut dim, turned round), the dim is
made whole meanwhile and the result is cut in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import (
    Placement,
    Replicate,
    SectionedShard,
    Shard,
    StridedShard,
    describe,
    is_sharding,
    sharded_dims,
)
from hp_dtensor.rules.dims import bracketed, letters
from hp_dtensor.rules.engine import derive, parse
from hp_dtensor.rules.parts import cutting_axes, moved, placed_in_order
from hp_dtensor.rules.pattern import Pattern
from hp_dtensor.rules.recipe import Call, Operand, Recipe
from hp_dtensor.rules.regrouped import with_others_cut
from hp_dtensor.transition import Transition
from hp_platform.collectives import Origin


def cat(call: Call) -> Recipe:
    """`torch.cat` and its other names."""
    tensors = list(call.get("tensors"))
    if not all(isinstance(tensor, Operand) for tensor in tensors):
        raise call.error("every tensor joined must be a DTensor", "wrap the others")
    ndim = max(len(tensor.shape) for tensor in tensors)
    given = call.get("dim", call.get("axis"))
    (dim,) = (0,) if given is None else _dims(call, given, ndim)
    # PyTorch joins a tensor of shape (0,) to any other: caches begin with one.
    void = [ndim > 1 and tuple(tensor.shape) == (0,) for tensor in tensors]
    if not any(void):
        return _cat_equal(call, tensors, dim)
    recipe = _cat_equal(call, [t for t, empty in zip(tensors, void) if not empty], dim)
    rest = iter(recipe.operands or ())
    return evolve(recipe, operands=tuple(None if empty else next(rest) for empty in void))


def _dims(call: Call, given: Any, ndim: int) -> tuple[int, ...]:
    if not -ndim <= given < ndim:
        raise call.error(f"dim {given} is out of range for tensors of {ndim} dims")
    return (given % ndim,)


def _cat_equal(call: Call, tensors: Sequence[Operand], dim: int) -> Recipe:
    ndim = max(len(tensor.shape) for tensor in tensors)
    if any(len(tensor.shape) != ndim for tensor in tensors):
        raise call.error("tensors joined must have equally many dims", "unsqueeze the others")
    cut = sorted({axis for tensor in tensors for axis in cutting_axes(tensor.layout, dim)})
    names = letters(ndim)
    parts = [
        " ".join(f"[c{i}]" if k == dim else name for k, name in enumerate(names))
        for i in range(len(tensors))
    ]
    sizes = {"c": sum(tensor.shape[dim] for tensor in tensors)}
    out = bracketed([*names[:dim], "c", *names[dim + 1 :]], {dim})
    pattern = parse(f"{' + '.join(parts)} -> {out}")
    given = [tensor.layout for tensor in tensors]
    layouts = [without_axes(layout, cut) for layout in given]
    derivation = derive(call.operator, pattern, layouts, sizes=sizes)
    if not cut:
        return Recipe(derivation.operands, derivation.outputs[0])
    columns = {axis: _column(call, given, dim, axis) for axis in cut}
    joined = {axis: _joined(column, given, dim, axis, cut) for axis, column in columns.items()}
    found = {axis: placement for axis, placement in joined.items() if placement is not None}
    if len(found) < len(cut) or (len(cut) > 1 and not _describes(found, columns, given, dim)):
        return _made_whole(call, derivation.operands, dim, cut, pattern, sizes)
    operands = [
        with_placed(layout, {axis: column[i] for axis, column in columns.items()})
        for i, layout in enumerate(derivation.operands)
    ]
    return Recipe(tuple(operands), with_placed(derivation.outputs[0], found))


def without_axes(layout: Layout, axes: Sequence[int] | set[int]) -> Layout:
    """The layout whole along `axes`, its gradient too."""
    return with_placed(layout, dict.fromkeys(axes, Replicate()))


def with_placed(layout: Layout, chosen: Mapping[int, Placement]) -> Layout:
    """The layout with other placements of value and gradient on some axes."""
    values = [chosen.get(axis, p) for axis, p in enumerate(layout.placements)]
    grads = [chosen.get(axis, p) for axis, p in enumerate(layout.grad_placements)]
    return Layout(layout.mesh, values, layout.shape, grads)


def _column(call: Call, layouts: Sequence[Layout], dim: int, axis: int) -> list[Placement]:
    """How one axis cuts the joined dim of each tensor; those that are whole, in chunks."""
    column: list[Placement] = []
    name = layouts[0].abstract_mesh.axis_names[axis]
    for layout in layouts:
        placement = layout.placements[axis]
        if not is_sharding(placement):
            placement = Shard(dim)
        elif sharded_dims(placement) != (dim,):
            raise call.error(
                f"on mesh axis {name!r} dim {dim} is cut in some of the tensors joined along it, "
                f"and another is placed {describe(placement)}",
                f"redistribute all of them to Shard({dim}), or all to Replicate()",
            )
        column.append(placement)
    return column


def _joined(
    column: Sequence[Placement], layouts: Sequence[Layout], dim: int, axis: int, cut: Sequence[int]
) -> Placement | None:
    """The cut of the joined dim along one axis; None where no placement describes it."""
    sections: list[int] = []
    for placement, layout in zip(column, layouts):
        size = layout.shape[dim]
        if isinstance(placement, Shard):
            sections.append(size)
        elif isinstance(placement, SectionedShard):
            sections += placement.sections
        elif isinstance(placement, StridedShard) and size % placement.split_factor == 0:
            sections += [size // placement.split_factor] * placement.split_factor
        else:
            return _in_order(column, layouts, dim, axis) if len(cut) == 1 else None
    return SectionedShard(dim, sections)


def _describes(
    joined: Mapping[int, Placement],
    columns: Mapping[int, Sequence[Placement]],
    layouts: Sequence[Layout],
    dim: int,
) -> bool:
    """Whether placements along several axes say together what every rank holds."""
    sizes = layouts[0].abstract_mesh.sizes
    line = AbstractMesh.of({f"axis{axis}": sizes[axis] for axis in joined})

    def along(placements: Sequence[Placement], size: int) -> Layout:
        return Layout(line, [moved(placement, 0) for placement in placements], [size])

    try:
        parts = [
            along([column[i] for column in columns.values()], layout.shape[dim])
            for i, layout in enumerate(layouts)
        ]
        made = along(list(joined.values()), sum(layout.shape[0] for layout in parts))
    except ValueError:
        return False
    starts = [0, *accumulate(layout.shape[0] for layout in parts)]
    return all(
        torch.equal(
            made.dim_indices(0, coord),
            torch.cat([part.dim_indices(0, coord) + start for part, start in zip(parts, starts)]),
        )
        for coord in line.coordinates()
    )


def _in_order(
    column: Sequence[Placement], layouts: Sequence[Layout], dim: int, axis: int
) -> Placement | None:
    """The placement by which the joined parts follow one another, rank by rank; None else."""
    ways = layouts[0].abstract_mesh.sizes[axis]
    line = AbstractMesh.of({"axis": ways})
    each = [
        Layout(line, [moved(placement, 0)], [layout.shape[dim]])
        for placement, layout in zip(column, layouts)
    ]
    expected, counts = 0, []
    for rank in range(ways):
        before, held = 0, []
        for layout in each:
            held.append(layout.dim_indices(0, (rank,)) + before)
            before += layout.shape[0]
        found = torch.cat(held)
        if not torch.equal(found, torch.arange(expected, expected + len(found))):
            return None
        expected += len(found)
        counts.append(len(found))
    return placed_in_order(dim, counts)


def _made_whole(
    call: Call,
    operands: Sequence[Layout],
    dim: int,
    axes: Sequence[int],
    pattern: Pattern,
    sizes: Mapping[str, int],
) -> Recipe:
    """Other dims are cut along `axes` meanwhile, as in `hp_dtensor.rules.regrouped`."""
    if call.inplace:
        raise call.error(
            f"no placement describes what joining along dim {dim} gives",
            f"redistribute the tensors to Shard({dim}) first, or leave out= away",
        )
    inner = [with_others_cut(layout, (dim,), axes, True) for layout in operands]
    made = derive(call.operator, pattern, inner, sizes=sizes)
    output = with_placed(made.outputs[0], dict.fromkeys(axes, Shard(dim)))
    back = Transition.compile(made.outputs[0], output)
    origin = Origin("hp_dtensor", call.operator, "operator")

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        return back.apply(func(*args, **kwargs), origin=origin)

    communicates = f"dim {dim} made whole on every rank, as no placement describes the parts joined"
    return Recipe(made.operands, output, run, communicates=communicates)
