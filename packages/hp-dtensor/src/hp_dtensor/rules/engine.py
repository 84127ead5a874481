"""Axis patterns: from one line in einops notation to placements (decisions D3, D4).

A pattern lists the dims of every operand and of every output by name:

- `,` separates operands that are multiplied, `+` separates terms that are added:
  `"... i, o i + o -> ... o"` is a linear layer with a bias.
- `...` stands for leading dims that broadcast; `1` for a dim of size one; `(b s)` for a dim that
  is the product of its factors; `[d]` for a dim the operator needs whole on every rank.
- A letter without an output is summed over.

`derive` works one mesh axis at a time. A letter cut alike in every operand of its term and kept
in the output stays cut; a contracted letter cut alike gives `Partial`; a factor of a merged dim
gives `Shard` or `StridedShard`. An operand that lacks the cut letter sees only a summand of its
gradient on each rank, so its gradient must be declared `Partial`. Everything else is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from attrs import frozen
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hp_dtensor.layout import Layout
from hp_dtensor.placements import (
    SectionedShard,
    StridedShard,
    describe,
    is_sharding,
    sharded_dims,
)
from hp_platform.errors import HPError

REPLICATE = Replicate()
PARTIAL = Partial()

Dim = tuple[str, ...]  # the letters of one tensor dim, slowest first; () is a dim of size one


class OperatorError(HPError):
    """An operator cannot be applied to operands laid out like these.

    Not a TypeError: Python's `a + b` would turn that into "unsupported operand types".
    """


@frozen
class Pattern:
    """A parsed axis pattern.

    Attributes:
        text: what the rule's author wrote.
        terms: for each term of the sum, its factors; for each factor, its dims.
        outputs: dims of every output.
        whole: letters that no rank may hold in part.
        linear: the operator is a sum of products of its operands, so `Partial` may pass.
    """

    text: str
    terms: tuple[tuple[tuple[Dim, ...], ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    whole: frozenset[str]
    linear: bool = True

    @property
    def operands(self) -> tuple[tuple[Dim, ...], ...]:
        return tuple(dims for term in self.terms for dims in term)

    @property
    def term_of(self) -> tuple[int, ...]:
        return tuple(i for i, term in enumerate(self.terms) for _ in term)


_TOKEN = re.compile(r"\.\.\.|\(|\)|\[|\]|[A-Za-z_]\w*|1")


def _parse_dims(text: str, whole: set[str]) -> tuple[Dim, ...]:
    if _TOKEN.sub("", text).strip():
        raise ValueError(f"pattern {text!r}: unexpected {_TOKEN.sub('', text).strip()!r}")
    dims: list[Dim] = []
    group: list[str] | None = None
    bracket = False
    for token in _TOKEN.findall(text):
        if token in "([":
            group, bracket = ([], bracket) if token == "(" else (group, True)
        elif token == ")":
            dims.append(tuple(group or ()))
            group = None
        elif token == "]":
            bracket = False
        elif token == "1":
            dims.append(())
        else:
            if bracket:
                whole.add(token)
            if group is None:
                dims.append((token,))
            else:
                group.append(token)
    return tuple(dims)


@lru_cache(maxsize=4096)
def parse(text: str, *, linear: bool = True) -> Pattern:
    """Parses a pattern once; see the module's docstring for the notation.

    Raises:
        ValueError: the pattern has no arrow, or holds a sign that is not part of the notation.
    """
    if text.count("->") != 1:
        raise ValueError(f"pattern {text!r}: write operands and outputs with one '->' between")
    left, right = text.split("->")
    whole: set[str] = set()
    terms = tuple(
        tuple(_parse_dims(operand, whole) for operand in term.split(","))
        for term in left.split("+")
    )
    outputs = tuple(_parse_dims(output, whole) for output in right.split(","))
    return Pattern(text, terms, outputs, frozenset(whole), linear)


@frozen
class Derivation:
    """What an operator needs and gives: layouts of every operand and of every output."""

    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@frozen
class _Cut:
    """How one axis cuts a letter: the letter, and the placement with its dim left out."""

    letter: str
    kind: type = Shard
    detail: Any = None

    def at(self, dim: int) -> Placement:
        if self.kind is Shard:
            return Shard(dim)
        return self.kind(dim, self.detail)


def derive(
    operator: str,
    pattern: Pattern,
    layouts: Sequence[Layout],
    *,
    sizes: Mapping[str, int] | None = None,
    names: Sequence[str] | None = None,
) -> Derivation:
    """Layouts that `operator` needs of its operands and gives to its outputs.

    Args:
        operator: name for errors.
        pattern: how dims correspond.
        layouts: one per operand, in the pattern's order, all on one mesh.
        sizes: sizes of letters that appear only inside `(...)` or only in outputs.
        names: what errors call the operands.

    Raises:
        OperatorError: the layouts do not fit together; the message names the operator, operand,
            mesh axis and layouts, and what to redistribute.
    """
    return _Solver(operator, pattern, layouts, sizes or {}, names).solve()


class _Solver:
    def __init__(
        self,
        operator: str,
        pattern: Pattern,
        layouts: Sequence[Layout],
        sizes: Mapping[str, int],
        names: Sequence[str] | None,
    ) -> None:
        self.operator = operator
        self.pattern = pattern
        self.layouts = tuple(layouts)
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
        values = self.settle_partial(axis, values, cut)
        if cut is not None:
            return self.cut_axis(axis, values, cuts, cut)
        if any(isinstance(value, Partial) for value in values):
            return self.partial_axis(values)
        return self.replicated_axis(axis)

    def settle_partial(
        self, axis: int, values: list[Placement], cut: _Cut | None
    ) -> list[Placement]:
        """Partial operands that the operator is not linear in are reduced before it."""
        partial = [i for i, value in enumerate(values) if isinstance(value, Partial)]
        if not partial:
            return values
        if cut is not None:
            raise self.conflict(axis, "are pending sums beside shards")
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
        self, axis: int, values: list[Placement], cuts: list[_Cut | None], cut: _Cut
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
        self, axis: int, values: list[Placement], cuts: list[_Cut | None]
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

    def cut(self, operand: int, axis: int) -> _Cut | None:
        """The letter that `axis` cuts in an operand."""
        placement = self.layouts[operand].placements[axis]
        if not is_sharding(placement):
            return None
        dims = sharded_dims(placement)
        letters = self.operands[operand][dims[0]]
        if len(dims) > 1 or not isinstance(placement, Shard | StridedShard | SectionedShard):
            raise self.conflict(axis, f"are placed {describe(placement)}, which no pattern follows")
        if len(letters) == 1:
            if isinstance(placement, Shard):
                return _Cut(letters[0])
            if isinstance(placement, StridedShard):
                return _Cut(letters[0], StridedShard, placement.split_factor)
            return _Cut(letters[0], SectionedShard, placement.sections)
        if not letters:
            # A dim of size one that broadcasts: whoever is not its holder has nothing to spread.
            raise self.conflict(axis, f"cut dim {dims[0]} of {self.names[operand]}, of size 1")
        return self.factor_cut(operand, axis, placement, letters)

    def factor_cut(self, operand: int, axis: int, placement: Placement, letters: Dim) -> _Cut:
        """The factor of a merged dim that is cut; every rank must get whole, equal pieces."""
        outer = placement.split_factor if isinstance(placement, StridedShard) else 1
        if isinstance(placement, SectionedShard):
            if len(set(placement.sections)) != 1:
                raise self.conflict(axis, f"are placed {describe(placement)}; sections differ")
            outer = len(placement.sections)
        rest = self.ways_before(operand, axis, letters)
        before = 1
        for i, letter in enumerate(letters):
            if before == outer and (self.sizes[letter] > 1 or i == len(letters) - 1):
                ways = self.axis_sizes[axis] * rest.get(letter, 1)
                if self.sizes[letter] % ways == 0:
                    return _Cut(letter)
                raise self.uneven(operand, axis, letter, ways)
            before *= self.sizes[letter] // rest.get(letter, 1)
            if before > outer:
                break
        raise self.conflict(axis, f"cut dim {sharded_dims(placement)[0]} inside a block of it")

    def ways_before(self, operand: int, axis: int, letters: Dim) -> dict[str, int]:
        """Into how many pieces earlier axes have cut each factor already."""
        ways: dict[str, int] = {}
        for earlier in range(axis):
            cut = self.cut(operand, earlier)
            if cut is not None and cut.letter in letters:
                ways[cut.letter] = ways.get(cut.letter, 1) * self.axis_sizes[earlier]
        return ways

    def output_cut(self, axis: int, dims: tuple[Dim, ...], cut: _Cut) -> Placement | None:
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
            ways = self.letter_ways(cut.letter)
            if cut.kind is not Shard:
                raise self.conflict(axis, "cut a factor of a merged dim in strides")
            if self.sizes[cut.letter] % ways:
                raise self.uneven(None, axis, cut.letter, ways)
            for letter in letters[:at]:
                outer //= self.letter_ways(letter, before=axis)
            return Shard(dim) if outer == 1 else StridedShard(dim, outer)
        return None

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
        return operator_error(self.operator, what, self.layouts, self.names, remedy)

    def conflict(self, axis: int, what: str) -> OperatorError:
        placed = ", ".join(
            f"{name} {describe(layout.placements[axis])}"
            for name, layout in zip(self.names, self.layouts)
        )
        return self.error(
            f"on mesh axis {self.axis_names[axis]!r} the operands {what} ({placed})",
            "redistribute the operand that is wrong before the operator "
            f"(pattern {self.pattern.text!r})",
        )

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


def operator_error(
    operator: str,
    what: str,
    layouts: Sequence[Layout],
    names: Sequence[str] | None = None,
    remedy: str = "",
) -> OperatorError:
    """The one form of a refusal: operator, what is wrong, operands' layouts, remedy."""
    names = names or [f"operand {i}" for i in range(len(layouts))]
    operands = "; ".join(f"{name}: {show(layout)}" for name, layout in zip(names, layouts))
    text = f"{operator}: {what}. Operands: {operands or 'none'}."
    return OperatorError(f"{text} Remedy: {remedy}." if remedy else text)


def show(layout: Layout) -> str:
    """Shape and placements by axis name, e.g. `(4, 8) dp=S(0) tp=R/grad P(sum)`."""
    parts = []
    for name, value, grad in zip(
        layout.abstract_mesh.axis_names, layout.placements, layout.grad_placements
    ):
        special = isinstance(value, Replicate) and isinstance(grad, Partial)
        parts.append(f"{name}={describe(value)}{'/grad ' + describe(grad) if special else ''}")
    return f"{tuple(layout.shape)} {' '.join(parts)}"
