"""The cheapest sequence of single-axis steps from one layout to another.

A *step* changes what the ranks along one mesh axis hold. It is possible exactly when each rank's
new part lies within what the ranks along that axis hold together, which can be read off the order
in which axes cut the dims (`Layout.cuts`):

- the axis must be the innermost cut of its dims: the ranks along it then hold together what the
  layout without that cut would give each of them;
- the remaining cuts must be the beginning of the new layout's, which may cut further.

The search is Dijkstra's over layouts in which every axis has its source placement, its target
placement or Replicate, by elements moved and then by number of steps.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Iterable, Iterator
from itertools import combinations, count

from attrs import frozen

from hp_dtensor.layout import Layout
from hp_dtensor.placements import (
    Placement,
    RaggedShard,
    Replicate,
    describe,
    is_partial,
    is_replicate,
    is_sharding,
    sharded_dims,
)


class Kind(enum.Enum):
    """What a step does along its axis."""

    SLICE = "slice"  # keep a part of the local tensor; no communication
    KEEP = "keep on coordinate 0"  # Replicate to Partial(sum): zeros elsewhere
    PAD = "pad with zeros"  # sharded to Partial(sum): zeros around the own part
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"

    @property
    def communicates(self) -> bool:
        return self not in (Kind.SLICE, Kind.KEEP, Kind.PAD)


@frozen(slots=False)
class Move:
    """One step, before its data movement is worked out.

    `elements` is a bound on what a rank sends and on what it receives, its own part left out.
    """

    kind: Kind
    axis: int
    before: Layout
    after: Layout
    elements: int

    def __str__(self) -> str:
        name = self.before.abstract_mesh.axis_names[self.axis]
        text = f"{self.kind.value} on {name}: {describe(self.before.placements)} -> "
        return f"{text}{describe(self.after.placements)}, {self.elements} elements"


def shortest_path(source: Layout, target: Layout) -> tuple[Move, ...]:
    """The moves from `source` to `target`, both on an abstract mesh. Empty if none is needed."""
    start = _without_idle_axes(source, target)
    found = _Search(start, target, detours=False).run()
    if found is None:
        found = _Search(start, target, detours=True).run()
    # Gathering innermost cuts first always reaches full replication, and slicing outermost cuts
    # first always leaves it, so the second search cannot fail.
    assert found is not None, f"no path from {source} to {target}"
    return _joined_slices(found)


def _without_idle_axes(source: Layout, target: Layout) -> Layout:
    """On an axis of one rank all placements mean the same: take the target's."""
    placements = tuple(
        new if size == 1 and type(old) is not RaggedShard and type(new) is not RaggedShard else old
        for old, new, size in zip(source.placements, target.placements, source.abstract_mesh.sizes)
    )
    if placements == source.placements:
        return source
    return Layout(source.abstract_mesh, placements, source.shape)


State = tuple[int, ...]
"""Per axis, which of its choices holds."""


_ALONE: tuple[tuple[int, ...], ...] = ((),)


class _Search:
    """States are numbers: comparing and hashing placements at every move would take longer than
    all the rest."""

    def __init__(self, source: Layout, target: Layout, detours: bool) -> None:
        self.source, self.target = source, target
        self.sizes = source.abstract_mesh.sizes
        # With detours, an axis that ends as it began may be replicated on the way.
        self.choices = [
            _distinct((old, new, Replicate()) if old != new or detours else (old,))
            for old, new in zip(source.placements, target.placements)
        ]
        self.start: State = (0,) * len(self.choices)
        self.end: State = tuple(
            [each.index(new) for each, new in zip(self.choices, target.placements)]
        )
        self.layouts: dict[State, Layout | None] = {self.end: target, self.start: source}
        self.sliced = [is_sharding(placement) for placement in target.placements]

    def run(self) -> list[Move] | None:
        order = count()
        queue: list[tuple[int, int, int, State]] = [(0, 0, next(order), self.start)]
        best: dict[State, tuple[int, int]] = {self.start: (0, 0)}
        arrived_by: dict[State, tuple[State, Move]] = {}
        while queue:
            elements, steps, _, state = heapq.heappop(queue)
            if state == self.end:
                return self._trace(arrived_by)
            if best[state] < (elements, steps):
                continue
            limit = best.get(self.end)
            if limit is not None and (elements, steps + 1) >= limit:
                continue
            for after, move in self._moves(state):
                cost = (elements + move.elements, steps + 1)
                if limit is not None and cost >= limit:
                    continue
                if after not in best or cost < best[after]:
                    best[after] = cost
                    arrived_by[after] = state, move
                    heapq.heappush(queue, (*cost, next(order), after))
        return None

    def _trace(self, arrived_by: dict[State, tuple[State, Move]]) -> list[Move]:
        path: list[Move] = []
        state = self.end
        while state != self.start:
            state, move = arrived_by[state]
            path.append(move)
        return path[::-1]

    def _layout(self, state: State) -> Layout | None:
        """None where a mixture of source and target placements makes no layout."""
        if state not in self.layouts:
            placements = tuple([each[number] for each, number in zip(self.choices, state)])
            try:
                made = self.source._of_same_tensor(placements)
            except ValueError:
                made = None
            self.layouts[state] = made
        return self.layouts[state]

    def _moves(self, state: State) -> Iterator[tuple[State, Move]]:
        before = self._layout(state)
        assert before is not None
        ready = [
            axis
            for axis, placement in enumerate(before.placements)
            if self.sliced[axis] and is_replicate(placement)
        ]
        for axis, number in enumerate(state):
            if not _is_innermost(before, axis):
                continue
            old = before.placements[axis]
            for other, new in enumerate(self.choices[axis]):
                changed = (*state[:axis], other, *state[axis + 1 :])
                for others in _slices_along(ready, axis, old, new) if ready else _ALONE:
                    if others:
                        end = self.end
                        reached = tuple(
                            [end[i] if i in others else each for i, each in enumerate(changed)]
                        )
                    elif other == number:
                        continue
                    else:
                        reached = changed
                    kind = _kind(old, new, bool(others))
                    after = self._layout(reached) if kind is not None else None
                    if kind is not None and after is not None:
                        move = self._move(kind, before, after, axis, bool(others))
                        if move is not None:
                            yield reached, move

    def _move(
        self, kind: Kind, before: Layout, after: Layout, axis: int, fused: bool
    ) -> Move | None:
        exact = not is_sharding(after.placements[axis]) and not fused
        if not _continues(before, after, axis, exact=exact):
            return None
        if self.sizes[axis] == 1 and kind is not Kind.SLICE:
            kind = Kind.SLICE
        return Move(
            kind, axis, before, after, _elements(kind, before, after, axis, self.sizes[axis])
        )


def _distinct(placements: Iterable[Placement]) -> list[Placement]:
    found: list[Placement] = []
    for placement in placements:
        if placement not in found:
            found.append(placement)
    return found


def _slices_along(
    ready: list[int], axis: int, old: Placement, new: Placement
) -> Iterator[tuple[int, ...]]:
    """Sets of other axes, of those that are `ready` for it, that may be sliced in the same step."""
    yield ()
    if not (is_sharding(old) or (is_partial(old) and is_sharding(new))) or is_partial(new):
        return
    others = [i for i in ready if i != axis]
    for number in range(1, len(others) + 1):
        yield from combinations(others, number)


def _kind(old: Placement, new: Placement, fused: bool) -> Kind | None:
    """The step between two placements of one axis; None where two steps are needed."""
    if is_replicate(old):
        if is_partial(new) and new.reduce_op == "sum":
            return Kind.KEEP
        return Kind.SLICE  # the average, maximum or minimum of equal values is the value
    if is_partial(old):
        if is_replicate(new):
            return Kind.ALL_REDUCE
        if is_sharding(new) and old.reduce_op in ("sum", "avg"):
            return Kind.REDUCE_SCATTER
        return None
    if is_partial(new):
        return Kind.PAD if new.reduce_op == "sum" else None
    if is_replicate(new) and not fused:
        return Kind.ALL_GATHER
    return Kind.ALL_TO_ALL


def _elements(kind: Kind, before: Layout, after: Layout, axis: int, size: int) -> int:
    """What no rank exceeds, from the largest and smallest parts alone; exact for even cuts.

    An all-reduce counts as the reduce-scatter and all-gather of even shares that it is made of.
    """
    if not kind.communicates:
        return 0
    old, new = before.holdings.bounds()[1], after.holdings.bounds()[1]
    if kind is Kind.ALL_REDUCE:
        return 2 * (old - old // size)
    if kind is Kind.ALL_GATHER:
        return new - _smallest(before, axis)
    # Only the parts that the ranks along the axis keep are sent.
    if kind is Kind.REDUCE_SCATTER:
        return min(old - _smallest(after, axis), new * (size - 1))
    if is_replicate(after.placements[axis]):  # every part goes to all others
        return (size - 1) * min(old, new)
    sent, received = min(old, new * (size - 1)), min(new, old * (size - 1))
    return max(sent, received) - _kept(before, after, axis, size)


def _smallest(layout: Layout, axis: int) -> int:
    """Elements of the smallest local tensor along an axis, or of all where cuts are not chunks."""
    if not layout.is_chunked:
        return layout.numel_bounds[0]
    last = len(layout.abstract_mesh.sizes) * [0]
    last[axis] = layout.abstract_mesh.sizes[axis] - 1
    return math.prod(layout.holdings.local_shape(tuple(last)))


def _kept(before: Layout, after: Layout, axis: int, size: int) -> int:
    """What every rank keeps of its part in an all-to-all, if that can be told without looking."""
    old, new = before.placements[axis], after.placements[axis]
    if set(sharded_dims(old)) & set(sharded_dims(new)):
        return 0
    whole = before.largest_numel
    even = _smallest(before, axis) == whole == after.largest_numel == _smallest(after, axis)
    return whole // size if even else 0


def _is_innermost(layout: Layout, axis: int) -> bool:
    """No other axis cuts the dims of `axis` after it does."""
    for cuts in layout.cuts:
        if cuts and cuts[-1].axis != axis:
            for cut in cuts:
                if cut.axis == axis:
                    return False
    return True


def _continues(before: Layout, after: Layout, axis: int, *, exact: bool) -> bool:
    """Whether `after` is `before` without `axis`, cut further (`exact`: not cut further)."""
    for old, new in zip(before.cuts, after.cuts):
        remaining = old[:-1] if old and old[-1].axis == axis else old
        if new[: len(remaining)] != remaining or (exact and len(new) != len(remaining)):
            return False
    return True


def _joined_slices(moves: list[Move]) -> tuple[Move, ...]:
    """Consecutive slices as one; those that change nothing left out."""
    joined: list[Move] = []
    for move in moves:
        if move.kind is Kind.SLICE and joined and joined[-1].kind is Kind.SLICE:
            move = Move(Kind.SLICE, move.axis, joined.pop().before, move.after, 0)
        joined.append(move)
    return tuple(move for move in joined if move.kind is not Kind.SLICE or not _idle(move))


def _idle(move: Move) -> bool:
    return move.before.cuts == move.after.cuts and move.before.flat_dims == move.after.flat_dims
