"""Operators that need a dim whole, on tensors that cut it: cut another dim meanwhile.

Sorting, turning round or shifting along a cut dim needs all of it in one place, though not all of
the tensor. Where another dim can be cut instead, an all-to-all moves each rank's part once, the
operator runs on whole dims, and a second all-to-all brings the result back; the memory of a rank
stays that of its part. Where there is none, the dim is gathered and each rank keeps its part of
the result. Both are refused where a boundary allows no communication, as any other implicit one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from attrs import evolve
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hp_dtensor.layout import Layout
from hp_dtensor.rules.along import axes_cutting
from hp_dtensor.rules.recipe import Call, Recipe
from hp_dtensor.transition import Transition
from hp_platform.collectives import Origin


def on_whole(
    call: Call,
    dims: Sequence[int],
    rule: Callable[[Call], Recipe],
    *,
    returns: bool = True,
    view: bool = False,
) -> Recipe:
    """`rule`'s recipe where `dims` are whole; else the same between two redistributions.

    Args:
        rule: of a call whose input has `dims` whole.
        returns: the results are cut as the input is; else they stay as the operator leaves them,
            which is right where `dims` are reduced or change places.
        view: torch's result is a view of the input, which this one is not.
    """
    layout = call.input.layout
    axes = axes_cutting(layout, dims)
    if not axes or call.inplace:
        return rule(call)  # what is written in place cannot move: the rule's own refusal
    inner = with_others_cut(layout, dims, axes, returns)
    made = rule(_on_layout(call, inner))
    assert made.operands is not None
    single = isinstance(made.outputs, Layout)
    outputs: list[Layout] = [made.outputs] if single else list(made.outputs)
    origin = Origin("hp_dtensor", call.operator, "operator")
    back = [_returned(each, layout, axes) if returns else None for each in outputs]
    moves = [None if t is None else Transition.compile(each, t) for each, t in zip(outputs, back)]

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        found = func(*args, **kwargs) if made.run is None else made.run(func, args, kwargs)
        if isinstance(found, Tensor):
            return moves[0].apply(found, origin=origin) if moves[0] else found
        # One layout may be stated for several results.
        each_move = moves * len(found) if single else moves
        moved = [m.apply(each, origin=origin) if m else each for each, m in zip(found, each_move)]
        return type(found)(moved)

    laid_out = [target or each for each, target in zip(outputs, back)]
    return evolve(
        made,
        outputs=laid_out[0] if single else laid_out,
        run=run,
        communicates=f"dims {sorted(dims)} made whole on every rank",
        copies=view,
    )


def with_others_cut(
    layout: Layout, dims: Sequence[int], axes: Sequence[int], returns: bool
) -> Layout:
    """The layout with `dims` whole: other dims cut in their place, as evenly as there are any."""
    values: list[Placement] = list(layout.placements)
    grads: list[Placement] = list(layout.grad_placements)
    cut = {dim for each in layout.sharding_axes().values() for dim in each}
    free = set(range(len(layout.shape))) - set(dims) - cut
    # A rank that keeps its part of a gathered result has a summand of the gradient.
    gathered: Placement = Partial() if returns else Replicate()
    for axis in axes:
        ways = layout.abstract_mesh.sizes[axis]
        fitting = [dim for dim in free if layout.shape[dim] >= ways]
        if fitting:
            chosen = max(fitting, key=partial(_fitness, layout.shape, ways))
            free.discard(chosen)
            values[axis] = grads[axis] = Shard(chosen)
        else:
            values[axis], grads[axis] = Replicate(), gathered
    return layout.with_placements(values, grads)


def _fitness(shape: Sequence[int], ways: int, dim: int) -> tuple[bool, int, int]:
    """Even parts first, then larger dims, then the first of them."""
    return shape[dim] % ways == 0, shape[dim], -dim


def _on_layout(call: Call, layout: Layout) -> Call:
    given = call.input
    moved = evolve(given, layout=layout)
    operands = tuple(moved if each is given else each for each in call.operands)
    arguments = {name: moved if value is given else value for name, value in call.arguments.items()}
    return evolve(call, operands=operands, arguments=arguments)


def _returned(output: Layout, source: Layout, axes: Sequence[int]) -> Layout:
    """The output cut along `axes` as the source is; in chunks where its size is another."""
    values, grads = list(output.placements), list(output.grad_placements)
    for axis in axes:
        placement = source.placements[axis]
        (dim, *more) = source.sharding_axes()[axis]
        same = output.shape[: len(source.shape)] == source.shape
        values[axis] = grads[axis] = placement if same or more else Shard(dim)
    return output.with_placements(values, grads)
