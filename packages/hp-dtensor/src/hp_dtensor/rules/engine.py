"""Axis patterns: from one line in einops notation to placements (decisions D3, D4).

`hp_dtensor.rules.pattern` has the notation. `derive` works one mesh axis at a time. A letter cut
alike in every operand of its term and kept in the output stays cut; a contracted letter cut alike
gives `Partial`; a factor of a merged dim gives `Shard` or `StridedShard`, or where ranks hold
unequal parts `RaggedShard` or `SectionedShard`. An operand that lacks the cut letter sees only a
summand of its gradient on each rank, so its gradient must be declared `Partial`. An operand that
is whole, or a pending sum, where another is cut is brought to that cut (`fitted`): each rank takes
its part of what it holds, or of the sum. Everything else is an error.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from attrs import frozen
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hp_dtensor.layout import Layout
from hp_dtensor.placements import (
    RaggedShard,
    SectionedShard,
    StridedShard,
    describe,
    is_sharding,
    sharded_dims,
)
from hp_dtensor.rules.cut import Cut, chunk_sizes, followed
from hp_dtensor.rules.pattern import Dim, Pattern, parse
from hp_dtensor.rules.refusal import (
    OperatorError,
    operator_error,
    remedy_of_conflict,
    show,
)

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "Derivation",
    "OperatorError",
    "Pattern",
    "chunk_sizes",
    "derive",
    "operator_error",
    "parse",
    "show",
]

REPLICATE = Replicate()
PARTIAL = Partial()


@frozen
class Derivation:
    """What an operator needs and gives: layouts of every operand and of every output."""

    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


def derive(
    operator: str,
    pattern: Pattern,
    layouts: Sequence[Layout],
    *,
    sizes: Mapping[str, int] | None = None,
    names: Sequence[str] | None = None,
    leader: int | None = None,
    yielding: Collection[int] = (),
) -> Derivation:
    """Layouts that `operator` needs of its operands and gives to its outputs.

    Args:
        operator: name for errors.
        pattern: how dims correspond.
        layouts: one per operand, in the pattern's order, all on one mesh.
        sizes: sizes of letters that appear only inside `(...)` or only in outputs.
        names: what errors call the operands.
        leader: the operand that stays as it is, which is written in place; the others follow it.
        yielding: operands that follow the others where they are cut differently: masks.

    Raises:
        OperatorError: the layouts do not fit together; the message names the operator, operand,
            mesh axis and layouts, and what to redistribute.
    """
    return _Solver(operator, pattern, layouts, sizes or {}, names, leader, yielding).solve()


class _Solver:
    def __init__(
        self,
        operator: str,
        pattern: Pattern,
        layouts: Sequence[Layout],
        sizes: Mapping[str, int],
        names: Sequence[str] | None,
        leader: int | None,
        yielding: Collection[int],
    ) -> None:
        self.operator = operator
        self.leader, self.yielding = leader, yielding
        self.pattern = pattern
        self.layouts = self.given = tuple(layouts)
        self.names = tuple(names or (f"operand {i}" for i in range(len(layouts))))
        if len(layouts) != len(pattern.operands):
            raise ValueError(
                f"{operator}: pattern {pattern.text!r} is for {len(pattern.operands)} operands, "
                f"found {len(layouts)}"
            )
        self.mesh = layouts[0].mesh
        self.axis_names = layouts[0].abstract_mesh.axis_names
        self.axis_sizes = layouts[0].abstract_mesh.sizes
        for layout in layouts[1:]:
            if layout.mesh is not self.mesh and layout.mesh != self.mesh:
                raise self.error(
                    "operands are on different meshes",
                    "bring them to one mesh with to_local() and DTensor.from_local()",
                )
        self.sizes = dict(sizes)
        self.bind()
        self.layouts = self.fitted()

    # -- dims to letters -------------------------------------------------------------------

    def bind(self) -> None:
        """Resolves `...`, sizes of letters and broadcasting for the operands at hand."""
        broadcast = 0
        expanded = []
        for dims, layout, name in zip(self.pattern.operands, self.layouts, self.names):
            free = len(layout.shape) - (len(dims) - (("...",) in dims))
            if free < 0 or (free and ("...",) not in dims):
                raise self.error(
                    f"{name} has {len(layout.shape)} dims, which {self.pattern.text!r} does not fit"
                )
            broadcast = max(broadcast, free)
            expanded.append(_expand(dims, free))
        self.outputs = tuple(_expand(dims, broadcast) for dims in self.pattern.outputs)
        for dims, layout in zip(expanded, self.layouts):
            for letters, size in zip(dims, layout.shape):
                if len(letters) == 1:
                    known = self.sizes.get(letters[0], 1)
                    self.sizes[letters[0]] = size if known == 1 else known
        self.operands = tuple(
            tuple(
                self.dim_letters(letters, size, name, layout)
                for letters, size in zip(dims, layout.shape)
            )
            for dims, layout, name in zip(expanded, self.layouts, self.names)
        )

    def dim_letters(self, letters: Dim, size: int, name: str, layout: Layout) -> Dim:
        expected = math.prod(self.sizes[letter] for letter in letters)
        if size == expected:
            return letters
        if size == 1 and len(letters) == 1:
            return ()  # broadcasts along this letter, so it does not hold it
        raise self.error(
            f"{name} has size {size} where the other operands have {expected} "
            f"(shapes {[tuple(each.shape) for each in self.layouts]})"
        )

    # -- operands that are whole beside shards ---------------------------------------------

    def fitted(self) -> tuple[Layout, ...]:
        """The operands as the others' cuts need them.

        Where one cut is found on an axis, an operand that holds its letter by itself is cut alike,
        and other pending sums are reduced. A factor of a merged dim is left to the checks below.
        """
        columns = [self.fitted_axis(axis) for axis in range(len(self.axis_names))]
        if not any(columns):
            return self.layouts
        made = []
        for i, layout in enumerate(self.layouts):
            values, grads = list(layout.placements), list(layout.grad_placements)
            for axis, column in enumerate(columns):
                if i in column:
                    values[axis] = grads[axis] = column[i]
            try:
                made.append(Layout(layout.mesh, values, layout.shape, grads))
            except ValueError as error:
                raise self.error(
                    f"{self.names[i]} cannot be cut as the others are: {error}",
                    "redistribute the operands to placements that they can share",
                ) from None
        return tuple(made)

    def fitted_axis(self, axis: int) -> dict[int, Placement]:
        """The placements that change on one axis, by operand."""
        cuts = [self.cut(i, axis) for i in range(len(self.layouts))]
        found = followed(cuts, self.leader, self.yielding, self.pattern.whole)
        led = None if self.leader is None else self.layouts[self.leader].placements[axis]
        if len(found) != 1 or isinstance(led, Partial):
            return {}
        (cut,) = found
        changed: dict[int, Placement] = {}
        for i, dims in enumerate(self.operands):
            if i == self.leader or cuts[i] == cut:
                continue
            if cut is not None and (cut.letter,) in dims:
                changed[i] = cut.at(dims.index((cut.letter,)))
            elif cuts[i] is not None or isinstance(self.layouts[i].placements[axis], Partial):
                changed[i] = REPLICATE
        return changed

    # -- one mesh axis at a time -----------------------------------------------------------

    def solve(self) -> Derivation:
        columns = [self.solve_axis(axis) for axis in range(len(self.axis_names))]
        operands = [
            Layout(
                self.mesh,
                [column[0][i][0] for column in columns],
                layout.shape,
                [column[0][i][1] for column in columns],
            )
            for i, layout in enumerate(self.layouts)
        ]
        outputs = [
            Layout(
                self.mesh,
                [column[1][i][0] for column in columns],
                [math.prod(self.sizes[letter] for letter in letters) for letters in dims],
                [column[1][i][1] for column in columns],
            )
            for i, dims in enumerate(self.outputs)
        ]
        return Derivation(tuple(operands), tuple(outputs))

    def solve_axis(
        self, axis: int
    ) -> tuple[list[tuple[Placement, Placement]], list[tuple[Placement, Placement]]]:
        values = [layout.placements[axis] for layout in self.layouts]
        cuts = [self.cut(i, axis) for i in range(len(values))]
        found = {cut for cut in cuts if cut is not None}
        if len(found) > 1:
            raise self.conflict(axis, "cut different dims, or the same dim in different ways")
        cut = found.pop() if found else None
        if cut is not None:
            return self.cut_axis(axis, values, cuts, cut)
        values = self.settle_partial(values)
        if any(isinstance(value, Partial) for value in values):
            return self.partial_axis(values)
        return self.replicated_axis(axis)

    def settle_partial(self, values: list[Placement]) -> list[Placement]:
        """Partial operands that the operator is not linear in are reduced before it."""
        partial = [i for i, value in enumerate(values) if isinstance(value, Partial)]
        if not partial:
            return values
        terms = [self.pattern.term_of[i] for i in partial]
        sums = all(values[i].reduce_op == "sum" for i in partial)  # type: ignore[attr-defined]
        if self.pattern.linear and sums and len(set(terms)) == len(terms):
            return values
        return [REPLICATE if isinstance(value, Partial) else value for value in values]

    def replicated_axis(
        self, axis: int
    ) -> tuple[list[tuple[Placement, Placement]], list[tuple[Placement, Placement]]]:
        """Every rank computes the same; one gradient that is a summand makes them all so."""
        summand = any(
            isinstance(layout.placements[axis], Replicate)
            and isinstance(layout.grad_placements[axis], Partial)
            for layout in self.layouts
        )
        grad: Placement = PARTIAL if summand else REPLICATE
        return [(REPLICATE, grad)] * len(self.layouts), [(REPLICATE, grad)] * len(self.outputs)

    def partial_axis(
        self, values: list[Placement]
    ) -> tuple[list[tuple[Placement, Placement]], list[tuple[Placement, Placement]]]:
        """Terms without a pending sum become one; factors beside one see summands."""
        term_of = self.pattern.term_of
        pending = {term_of[i] for i, value in enumerate(values) if isinstance(value, Partial)}
        needed: list[tuple[Placement, Placement]] = []
        made: set[int] = set()
        for i, value in enumerate(values):
            term = term_of[i]
            if isinstance(value, Partial):
                needed.append((value, REPLICATE))
            elif term in pending or term in made:
                needed.append((REPLICATE, PARTIAL))
            else:
                made.add(term)
                needed.append((PARTIAL, REPLICATE))
        return needed, [(PARTIAL, REPLICATE)] * len(self.outputs)

    def cut_axis(
        self, axis: int, values: list[Placement], cuts: list[Cut | None], cut: Cut
    ) -> tuple[list[tuple[Placement, Placement]], list[tuple[Placement, Placement]]]:
        if cut.letter in self.pattern.whole:
            raise self.conflict(axis, "cut a dim the operator needs whole on every rank")
        for i, dims in enumerate(self.operands):
            holds = any(cut.letter in letters for letters in dims)
            if holds and cuts[i] is None:
                raise self.conflict(
                    axis,
                    f"disagree: {self.names[i]} holds all of a dim that another holds in part",
                )
        outputs = [self.output_cut(axis, dims, cut) for dims in self.outputs]
        contracted = [placement is None for placement in outputs]
        if any(contracted):
            if not (all(contracted) and self.pattern.linear):
                raise self.conflict(axis, "cut a dim the operator reduces over")
            return self.contracted_axis(axis, values, cuts)
        needed = [
            (value, layout.grad_placements[axis]) if is_sharding(value) else (REPLICATE, PARTIAL)
            for value, layout in zip(values, self.layouts)
        ]
        return needed, [(placement, placement) for placement in outputs]  # type: ignore[misc]

    def contracted_axis(
        self, axis: int, values: list[Placement], cuts: list[Cut | None]
    ) -> tuple[list[tuple[Placement, Placement]], list[tuple[Placement, Placement]]]:
        """The sum runs over ranks too. A term without the letter is given to one rank only."""
        term_of = self.pattern.term_of
        cut_terms = {term_of[i] for i, cut in enumerate(cuts) if cut is not None}
        needed: list[tuple[Placement, Placement]] = []
        made: set[int] = set()
        for i, value in enumerate(values):
            term = term_of[i]
            if cuts[i] is not None:
                needed.append((value, value))
            elif term in cut_terms or term in made:
                needed.append((REPLICATE, PARTIAL))
            else:
                made.add(term)
                needed.append((PARTIAL, REPLICATE))
        return needed, [(PARTIAL, REPLICATE)] * len(self.outputs)

    # -- cuts ------------------------------------------------------------------------------

    def cut(self, operand: int, axis: int) -> Cut | None:
        """The letter that `axis` cuts in an operand."""
        placement = self.layouts[operand].placements[axis]
        if not is_sharding(placement):
            return None
        dims = sharded_dims(placement)
        letters = self.operands[operand][dims[0]]
        if len(dims) > 1:
            raise self.conflict(axis, f"are placed {describe(placement)}, which no pattern follows")
        if len(letters) == 1:
            return Cut.of(letters[0], placement)
        if not letters:
            # A dim of size one that broadcasts: whoever is not its holder has nothing to spread.
            raise self.conflict(axis, f"cut dim {dims[0]} of {self.names[operand]}, of size 1")
        return self.factor_cut(operand, axis, placement, letters)

    def factor_cut(self, operand: int, axis: int, placement: Placement, letters: Dim) -> Cut:
        """The factor of a merged dim that is cut; every rank must get whole pieces of it."""
        if isinstance(placement, RaggedShard):
            return self.ragged_factor(axis, placement, letters)
        outer = placement.split_factor if isinstance(placement, StridedShard) else 1
        if isinstance(placement, SectionedShard):
            if len(set(placement.sections)) != 1:
                raise self.conflict(axis, f"are placed {describe(placement)}; sections differ")
            outer = len(placement.sections)
        rest = self.ways_before(operand, axis, letters)
        # Sections are global; pieces of a StridedShard are of what earlier axes have left.
        left = {} if isinstance(placement, SectionedShard) else rest
        before = 1
        for i, letter in enumerate(letters):
            if before == outer and (self.sizes[letter] > 1 or i == len(letters) - 1):
                ways = self.axis_sizes[axis] * rest.get(letter, 1)
                if self.sizes[letter] % ways == 0:
                    return Cut(letter)
                inner = math.prod(self.sizes[each] for each in letters[i + 1 :])
                if self.has_whole_chunks(placement, letter, inner, ways, letters, operand):
                    return Cut(letter)
                raise self.uneven(operand, axis, letter, ways)
            before *= self.sizes[letter] // left.get(letter, 1)
            if before > outer:
                break
        raise self.conflict(axis, f"cut dim {sharded_dims(placement)[0]} inside a block of it")

    def has_whole_chunks(
        self, placement: Placement, letter: str, inner: int, ways: int, letters: Dim, operand: int
    ) -> bool:
        """Whether unequal chunks of the merged dim are whole chunks of one factor."""
        if self.axes_cutting(operand, letters) > 1:
            return False
        if isinstance(placement, SectionedShard):
            return inner == 1
        return isinstance(placement, Shard) and -(-self.sizes[letter] * inner // ways) % inner == 0

    def axes_cutting(self, operand: int, letters: Dim) -> int:
        dim = self.operands[operand].index(letters)
        placements = self.layouts[operand].placements
        return sum(dim in sharded_dims(placement) for placement in placements)

    def ragged_factor(self, axis: int, placement: RaggedShard, letters: Dim) -> Cut:
        """Shares that are whole rows of the slowest factor."""
        letter = next((each for each in letters if self.sizes[each] > 1), letters[-1])
        size, units = self.sizes[letter], sum(placement.local_units)
        if size % units and not all(size * u % units == 0 for u in placement.local_units):
            raise self.conflict(axis, f"cut a dim inside a block of it ({describe(placement)})")
        counts = tuple(size * u // units for u in placement.local_units)
        if counts == chunk_sizes(size, self.axis_sizes[axis]):
            return Cut(letter)
        return Cut(letter, RaggedShard, counts)

    def ways_before(self, operand: int, axis: int, letters: Dim) -> dict[str, int]:
        """Into how many pieces earlier axes have cut each factor already."""
        ways: dict[str, int] = {}
        for earlier in range(axis):
            cut = self.cut(operand, earlier)
            if cut is not None and cut.letter in letters:
                ways[cut.letter] = ways.get(cut.letter, 1) * self.axis_sizes[earlier]
        return ways

    def output_cut(self, axis: int, dims: tuple[Dim, ...], cut: Cut) -> Placement | None:
        for dim, letters in enumerate(dims):
            if cut.letter not in letters:
                continue
            if len(letters) == 1:
                return cut.at(dim)
            at = letters.index(cut.letter)
            inner = math.prod(self.sizes[letter] for letter in letters[at + 1 :])
            outer = math.prod(self.sizes[letter] for letter in letters[:at])
            if inner == outer == 1:
                return cut.at(dim)
            if self.is_cut_evenly(cut) and all(
                self.is_cut_evenly(Cut(each)) for each in letters[:at]
            ):
                if outer > 1 and self.letter_ways(cut.letter) != self.axis_sizes[axis]:
                    # Two axes cut it. Strides would read as one axis after the other's pieces.
                    return SectionedShard(dim, (self.sizes[cut.letter] * inner,) * outer)
                for letter in letters[:at]:
                    outer //= self.letter_ways(letter, before=axis)
                return Shard(dim) if outer == 1 else StridedShard(dim, outer)
            return self.uneven_cut(axis, dim, cut, outer, inner)
        return None

    def uneven_cut(self, axis: int, dim: int, cut: Cut, outer: int, inner: int) -> Placement:
        """A factor in unequal shares, as a cut of the merged dim."""
        if cut.kind in (StridedShard, SectionedShard):
            raise self.conflict(axis, "cut a factor of a merged dim in strides")
        alone = self.letter_ways(cut.letter) == self.axis_sizes[axis]
        if alone and outer == 1:
            size, ways = self.sizes[cut.letter], self.axis_sizes[axis]
            return RaggedShard((dim,), cut.detail or chunk_sizes(size, ways))
        if alone and inner == 1 and cut.kind is Shard:
            return SectionedShard(dim, (self.sizes[cut.letter],) * outer)
        raise self.uneven(None, axis, cut.letter, self.letter_ways(cut.letter))

    def is_cut_evenly(self, cut: Cut) -> bool:
        """Whether all ranks hold equally much of a letter, in chunks; true if it is whole."""
        kinds = {found.kind for found in self.cuts_of(cut.letter)}
        ways = self.letter_ways(cut.letter)
        return kinds <= {Shard} and self.sizes[cut.letter] % ways == 0

    def cuts_of(self, letter: str) -> list[Cut]:
        every = (
            self.cut(i, axis)
            for axis in range(len(self.axis_names))
            for i in range(len(self.layouts))
        )
        return [cut for cut in every if cut is not None and cut.letter == letter]

    def letter_ways(self, letter: str, before: int | None = None) -> int:
        """Into how many pieces all axes together (or those before one) cut a letter."""
        ways = 1
        for axis in range(len(self.axis_names) if before is None else before):
            cuts = (self.cut(i, axis) for i in range(len(self.layouts)))
            if any(cut is not None and cut.letter == letter for cut in cuts):
                ways *= self.axis_sizes[axis]
        return ways

    # -- errors ----------------------------------------------------------------------------

    def error(self, what: str, remedy: str = "") -> OperatorError:
        return operator_error(self.operator, what, self.given, self.names, remedy)

    def conflict(self, axis: int, what: str) -> OperatorError:
        given = [layout.placements[axis] for layout in self.given]
        placed = ", ".join(f"{name} {describe(p)}" for name, p in zip(self.names, given))
        text = f"on mesh axis {self.axis_names[axis]!r} the operands {what} ({placed})"
        return self.error(text, remedy_of_conflict(given, self.pattern.text))

    def uneven(self, operand: int | None, axis: int, letter: str, ways: int) -> OperatorError:
        where = "" if operand is None else f" of {self.names[operand]}"
        return self.error(
            f"mesh axis {self.axis_names[axis]!r} cuts a dim{where} whose factor has size "
            f"{self.sizes[letter]}, which {ways} ranks cannot share equally",
            "redistribute that dim to Replicate first",
        )


def _expand(dims: tuple[Dim, ...], free: int) -> tuple[Dim, ...]:
    expanded: list[Dim] = []
    for letters in dims:
        if letters == ("...",):
            expanded.extend((f"·{free - i}",) for i in range(free))
        else:
            expanded.append(letters)
    return tuple(expanded)
