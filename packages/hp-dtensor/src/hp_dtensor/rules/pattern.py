"""The notation of axis patterns, parsed: which dims of operands and outputs go together.

A pattern lists the dims of every operand and of every output by name:

- `,` separates operands that are multiplied, `+` separates terms that are added:
  `"... i, o i + o -> ... o"` is a linear layer with a bias.
- `...` stands for leading dims that broadcast; `1` for a dim of size one; `(b s)` for a dim that
  is the product of its factors; `[d]` for a dim the operator needs whole on every rank.
- A letter without an output is summed over.
"""

from __future__ import annotations

import re
from functools import lru_cache

from attrs import frozen

Dim = tuple[str, ...]  # the letters of one tensor dim, slowest first; () is a dim of size one


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
