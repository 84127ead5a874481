"""`check_simulated`: a function over drawn layouts on a mesh of any shape, in this process.

Ranks run in lockstep as threads (`hp_dtensor.testing.lockstep`), so a mesh of three axes costs no
processes. What is compared is the same as in `check_rule`: values, gradients, local shapes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import (
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    SectionedShard,
    Shard,
    StridedShard,
    is_partial,
    sharded_dims,
)
from hp_dtensor.rules.parts import moved
from hp_dtensor.testing.dense_comparison import DenseCall, Refused
from hp_dtensor.testing.lockstep import LockstepMesh, run_lockstep
from hp_dtensor.testing.strategies import spread

__all__ = ["check_simulated", "compare_simulated", "drawn_choices", "drawn_column", "placed_on"]

Choice = tuple[Placement, Placement]


def compare_simulated(
    call: DenseCall,
    mesh: Mapping[str, int],
    combinations: Sequence[Sequence[Layout]],
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> list[Refused | None]:
    """One entry per combination of layouts: None where everything is as in the dense call.

    Raises:
        AssertionError: something differs, or ranks disagree; names layouts and rank.
    """
    values = [call.leaves[i] for i in call.tensors]
    parts = [
        [spread(value.detach(), layout) for value, layout in zip(values, layouts)]
        for layouts in combinations
    ]

    def body(own: LockstepMesh) -> list[Refused | None]:
        found = []
        for layouts, locals_ in zip(combinations, parts):
            operands = [
                placed_on(own, layout, every[own.own_rank], call.has_gradient(value))
                for layout, every, value in zip(layouts, locals_, values)
            ]
            try:
                found.append(call.compare(operands, own, rtol=rtol, atol=atol))
            except Exception as error:
                shown = "; ".join(str(layout) for layout in layouts)
                raise AssertionError(f"input layouts {shown}: {error}") from error
        return found

    everyone = run_lockstep(body, dict(mesh))
    for rank, found in enumerate(everyone):
        for layouts, one, first in zip(combinations, found, everyone[0]):
            assert (one is None) == (first is None), (
                f"ranks 0 and {rank} disagree about {[str(each) for each in layouts]}: "
                f"{first}, {one}"
            )
    return everyone[0]


def placed_on(mesh: LockstepMesh, layout: Layout, local: Tensor, has_gradient: bool) -> DTensor:
    own = Layout(mesh, layout.placements, layout.shape, layout.grad_placements)
    return DTensor.of_layout(local.clone(), own).requires_grad_(has_gradient)


def drawn_choices(
    shape: Sequence[int], size: int, floating: bool, draw: random.Random
) -> list[Choice]:
    """What an axis may do to a tensor: every kind of placement, each with its gradient."""
    choices: list[Choice] = [(Replicate(), Replicate())]
    if floating:
        choices += [(Replicate(), Partial()), (Partial(), Replicate())]
    for dim, length in enumerate(shape):
        first = draw.randint(0, length)
        cuts = _cuts(draw, length, size)
        made: list[Placement] = [Shard(dim), Shard(dim), StridedShard(dim, draw.randint(2, 3))]
        made.append(SectionedShard(dim, (first, length - first)))
        if length:
            made.append(RaggedShard((dim,), cuts))
        choices += [(placement, placement) for placement in made]
    return choices


def _cuts(draw: random.Random, length: int, size: int) -> list[int]:
    ends = sorted(draw.randint(0, length) for _ in range(size - 1))
    bounds = [0, *ends, length]
    return [b - a for a, b in pairwise(bounds)]


def drawn_column(tensors: Sequence[Tensor], size: int, draw: random.Random) -> list[Choice]:
    """One axis's choices for all tensors: alike along dims of one size, or at random."""
    each = [drawn_choices(t.shape, size, t.dtype.is_floating_point, draw) for t in tensors]
    column = [draw.choice(choices) for choices in each]
    leader = draw.randrange(len(tensors))
    dims = sharded_dims(column[leader][0])
    if draw.random() < 0.2:
        return column
    for i, tensor in enumerate(tensors):
        if i == leader:
            continue
        fitting: list[Choice] = [(Replicate(), Replicate())]
        if tensor.dtype.is_floating_point:
            fitting.append((Replicate(), Partial()))
        if is_partial(column[leader][0]) and tensor.dtype.is_floating_point:
            fitting.append(column[leader])
        for dim, length in enumerate(tensor.shape):
            if dims and length == tensors[leader].shape[dims[0]]:
                placed = moved(column[leader][0], dim)
                fitting += [(placed, placed)] * 3
        column[i] = draw.choice(fitting)
    return column


def check_simulated(
    fn: Callable[..., Any],
    example: Sequence[Any],
    *,
    mesh: Mapping[str, int],
    draws: int = 20,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
) -> tuple[int, int]:
    """Runs a function on drawn layouts of its tensor arguments; how many were accepted, refused.

    Half of the draws give the tensors one placement each per axis at random; the others prefer
    axes that a first pass found acceptable by themselves, so that combinations are accepted too.

    Raises:
        AssertionError: a result is wrong. Names function, layouts and rank; of the layouts the
            simplest that still fails, with as much as can be whole or in plain chunks.
    """
    abstract = AbstractMesh.of(mesh)
    call = DenseCall.of(fn, example)
    tensors = [call.leaves[i] for i in call.tensors]
    draw = random.Random(seed)

    def compared(combinations: Sequence[Sequence[Layout]]) -> list[Refused | None]:
        try:
            return compare_simulated(call, mesh, combinations, rtol=rtol, atol=atol)
        except AssertionError as error:
            told = _simplest(call, mesh, combinations, rtol, atol) or str(error)
            raise AssertionError(f"{getattr(fn, '__name__', fn)}, {told}") from error

    def column(size: int) -> list[Choice]:
        return drawn_column(tensors, size, draw)

    def layouts_of(columns: Sequence[Sequence[Choice]]) -> list[Layout] | None:
        try:
            return [
                Layout(abstract, [c[i][0] for c in columns], t.shape, [c[i][1] for c in columns])
                for i, t in enumerate(tensors)
            ]
        except ValueError:
            return None

    whole: list[Choice] = [(Replicate(), Replicate())] * len(tensors)
    singles: list[tuple[int, list[Choice]]] = []
    tried = []
    for number in range(draws):
        axis = number % abstract.ndim
        columns = [whole] * abstract.ndim
        columns[axis] = column(abstract.sizes[axis])
        made = layouts_of(columns)
        if made is not None:
            singles.append((axis, columns[axis]))
            tried.append(made)
    found = compared(tried)
    fitting: dict[int, list[list[Choice]]] = {}
    for (axis, chosen), refusal in zip(singles, found):
        if refusal is None:
            fitting.setdefault(axis, []).append(chosen)
    accepted = sum(refusal is None for refusal in found)
    refused = len(found) - accepted
    if abstract.ndim > 1:
        tried = []
        for _ in range(draws):
            columns = [draw.choice(fitting.get(axis, [whole])) for axis in range(abstract.ndim)]
            made = layouts_of(columns)
            if made is not None:
                tried.append(made)
        found = compared(tried)
        accepted += sum(refusal is None for refusal in found)
        refused += sum(refusal is not None for refusal in found)
    return accepted, refused


def _simplest(
    call: DenseCall,
    mesh: Mapping[str, int],
    combinations: Sequence[Sequence[Layout]],
    rtol: float | None,
    atol: float | None,
) -> str | None:
    """What is wrong with the first combination that fails, made as simple as still fails."""

    def failure(layouts: Sequence[Layout]) -> str | None:
        try:
            compare_simulated(call, mesh, [layouts], rtol=rtol, atol=atol)
        except AssertionError as error:
            return str(error)
        return None

    found = next(((each, text) for each in combinations if (text := failure(each))), None)
    if found is None:
        return None
    layouts, told = found
    simpler = True
    while simpler:
        simpler = False
        for candidate in _simplified(layouts):
            text = failure(candidate)
            if text is not None:
                layouts, told, simpler = candidate, text, True
                break
    return told


def _simplified(layouts: Sequence[Layout]) -> Iterator[list[Layout]]:
    """The layouts with one axis of one tensor whole, or, where it is cut in another way, in
    chunks."""
    for i, layout in enumerate(layouts):
        for axis, placement in enumerate(layout.placements):
            whole = Replicate()
            choices: list[Placement] = [whole]
            dims = sharded_dims(placement)
            if len(dims) == 1 and type(placement) is not Shard:
                choices.append(Shard(dims[0]))
            for choice in choices:
                values, grads = list(layout.placements), list(layout.grad_placements)
                values[axis] = grads[axis] = choice
                try:
                    made = layout.with_placements(values, grads)
                except ValueError:
                    continue
                if made != layout:
                    yield [*layouts[:i], made, *layouts[i + 1 :]]
