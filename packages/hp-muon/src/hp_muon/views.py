"""Logical matrices: which matrices a parameter holds, as a reversible einops pattern.

How a parameter is stored and which matrices Muon orthogonalizes are two things (paper section
6.6). A `MatrixView` maps storage to a stack of matrices `[..., rows, cols]`; everything before
the last two axes of its right side is a batch. Without a view the last two dims are the matrix.

An axis whose size is a tuple is split: each piece is a kind of matrices of its own, whose shapes
may differ. Every kind has a storage of its own, see `sections`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch
from attrs import field, frozen
from einops import rearrange
from torch import Tensor

from hp_muon.errors import MuonError
from hp_muon.sections import Section

Groups = tuple[tuple[str, ...], ...]
_TOKEN = re.compile(r"\(([^()]*)\)|([A-Za-z_]\w*)|(\S)")


@frozen(init=False, repr=False)
class MatrixView:
    """The matrices in a parameter: `MatrixView("(h d) m -> h d m", h=8)`.

    The right side reorders, splits and joins the axes of the left side, as in
    `einops.rearrange`; its last two entries are rows and cols. Sizes that do not follow from the
    parameter's shape are given by keyword.

    A tuple as the size of one axis splits it into consecutive pieces, each of which holds its own
    matrices: `MatrixView("(x d) m -> (x d) m", x=(32, 8, 8), d=128)` are the query, key and value
    matrices of a fused projection with 32 query and 8 key-value heads.

    Raises:
        MuonError: the pattern is not a reversible einops pattern with at least two entries on
            the right, a size is given for an axis it does not have, or two axes are split.
    """

    pattern: str
    sizes: Mapping[str, int | tuple[int, ...]] = field(hash=False)
    left: Groups = field(eq=False)
    right: Groups = field(eq=False)

    def __init__(self, pattern: str, **sizes: int | Sequence[int]) -> None:
        if pattern.count("->") != 1:
            raise MuonError(f"view {pattern!r}: expected one '->' between storage and matrices")
        left, right = (_groups(pattern, side) for side in pattern.split("->"))
        names = [name for group in left for name in group]
        if len(set(names)) != len(names) or sorted(names) != sorted(
            name for group in right for name in group
        ):
            raise MuonError(
                f"view {pattern!r}: both sides must name the same axes once each, or the update "
                "could not be mapped back"
            )
        if len(right) < 2:
            raise MuonError(
                f"view {pattern!r}: the right side must end in rows and cols, found {len(right)} "
                "entries"
            )
        unknown = sorted(set(sizes) - set(names))
        if unknown:
            raise MuonError(f"view {pattern!r}: sizes given for axes it does not have: {unknown}")
        read = {name: _length_or_pieces(size) for name, size in sizes.items()}
        kept = {name: size for name, size in read.items() if size is not None}
        wrong = {name: size for name, size in sizes.items() if name not in kept}
        if wrong:
            raise MuonError(
                f"view {pattern!r}: sizes must be positive integers, or a tuple of them for an "
                f"axis that is split, found {wrong}"
            )
        split = [name for name, size in kept.items() if isinstance(size, tuple)]
        if len(split) > 1:
            raise MuonError(f"view {pattern!r}: one axis can be split, found {split}")
        self.__attrs_init__(" ".join(pattern.split()), kept, left, right)

    @classmethod
    def default(cls, ndim: int) -> MatrixView:
        """Last two dims are rows and cols, all others are a batch."""
        axes = " ".join([*(f"b{i}" for i in range(ndim - 2)), "r", "c"])
        return cls(f"{axes} -> {axes}")

    @property
    def split(self) -> str | None:
        """The axis that is split, if any."""
        return next((name for name, s in self.sizes.items() if isinstance(s, tuple)), None)

    def resolve(self, shape: Sequence[int], name: str = "the parameter") -> ResolvedView:
        """The view of a parameter of this global shape, of a view that splits no axis.

        Raises:
            MuonError: the shape does not fit the pattern and its sizes, or an axis is split.
        """
        if self.split is not None:
            raise MuonError(f"{name}: view {self.pattern!r} splits {self.split!r}; use kinds()")
        return self.kinds(shape, name)[0]

    def kinds(self, shape: Sequence[int], name: str = "the parameter") -> tuple[ResolvedView, ...]:
        """The view of a parameter of this global shape, one for every kind of matrices.

        Raises:
            MuonError: the shape does not fit the pattern and its sizes.
        """
        if len(shape) != len(self.left):
            raise MuonError(
                f"{name}: view {self.pattern!r} is for {len(self.left)} dims, found shape "
                f"{tuple(shape)}"
            )
        pieces = self.sizes[self.split] if self.split else ()
        assert isinstance(pieces, tuple)
        sizes = {n: sum(s) if isinstance(s, tuple) else s for n, s in self.sizes.items()}
        for dim, (group, length) in enumerate(zip(self.left, shape)):
            _infer(sizes, group, length, f"{name}: view {self.pattern!r}, dim {dim}")
        if self.split is None:
            return (ResolvedView(self, tuple(shape), sizes),)
        dim = next(d for d, group in enumerate(self.left) if self.split in group)
        group = self.left[dim]
        inner = math.prod(sizes[n] for n in group[group.index(self.split) + 1 :])
        found = []
        start = 0
        for size in pieces:
            section = Section(dim, sum(pieces) * inner, start * inner, size * inner)
            storage = list(shape)
            storage[dim] = shape[dim] // sum(pieces) * size
            piece = {**sizes, self.split: size}
            found.append(ResolvedView(self, tuple(storage), piece, section))
            start += size
        return tuple(found)

    def __repr__(self) -> str:
        sizes = "".join(f", {name}={size}" for name, size in self.sizes.items())
        return f"MatrixView({self.pattern!r}{sizes})"


def _length_or_pieces(size: object) -> int | tuple[int, ...] | None:
    if isinstance(size, int):
        return size if size > 0 else None
    if not isinstance(size, tuple | list) or not size:
        return None
    return tuple(size) if all(isinstance(piece, int) and piece > 0 for piece in size) else None


@frozen
class ResolvedView:
    """A view with the size of every axis known.

    Attributes:
        shape: storage shape it maps from; where a length is 0 it holds no matrix.
        sizes: size of every axis of the pattern.
        section: where this storage lies in the parameter's; None for all of it.
    """

    view: MatrixView
    shape: tuple[int, ...]
    sizes: Mapping[str, int] = field(eq=False)
    section: Section | None = None

    @property
    def rows(self) -> int:
        return self._product(self.view.right[-2])

    @property
    def cols(self) -> int:
        return self._product(self.view.right[-1])

    @property
    def count(self) -> int:
        """Number of matrices."""
        if 0 in self.shape:
            return 0
        return math.prod(self._product(group) for group in self.view.right[:-2])

    @property
    def keeps_storage_order(self) -> bool:
        """Whether the pattern moves nothing: the last two dims are the matrix."""
        return self.view.left == self.view.right

    def block(self, dim: int) -> int | None:
        """Length of the pieces of storage `dim` that lie in one matrix each.

        A cut of the dim at multiples of the block separates matrices and cuts none. None: any
        cut of the dim cuts a matrix.
        """
        batch, group = self._batch_names(), self.view.left[dim]
        inner = tuple(name for name in group if name not in batch)
        if len(inner) == len(group) or (inner and group[-len(inner) :] != inner):
            return None
        return self._product(inner)

    def localise(self, group_shape: Sequence[int]) -> ResolvedView:
        """The same view of whole matrices only: dims may be shorter by multiples of `block`."""
        sizes = dict(self.sizes)
        if 0 in group_shape:
            return ResolvedView(self.view, tuple(group_shape), sizes, self.section)
        for dim, length in enumerate(group_shape):
            block = self.block(dim)
            if length == self.shape[dim]:
                continue
            if block is None or length % block:
                raise MuonError(f"{self.view}: length {length} of dim {dim} cuts a matrix")
            outer = [name for name in self.view.left[dim] if name in self._batch_names()]
            sizes.update(dict.fromkeys(outer, 1))
            sizes[outer[0]] = length // block
        return ResolvedView(self.view, tuple(group_shape), sizes, self.section)

    def matrices(self, storage: Tensor) -> Tensor:
        """[count, rows, cols] from a tensor of `shape`; no copy where strides allow."""
        if storage.numel() == 0:
            return storage.new_empty(0, self.rows, self.cols)
        if self.keeps_storage_order:
            return storage.reshape(self.count, self.rows, self.cols)
        stack = rearrange(storage, self.view.pattern, **self.sizes)
        return stack.reshape(self.count, self.rows, self.cols)

    def restore(self, matrices: Tensor) -> Tensor:
        """The inverse of `matrices`: a tensor of `shape`."""
        if self.keeps_storage_order or matrices.numel() == 0:
            return matrices.reshape(self.shape)
        left, right = self.view.pattern.split("->")
        stack = matrices.reshape([self._product(group) for group in self.view.right])
        return rearrange(stack, f"{right}->{left}", **self.sizes)

    def matrix_numbers(self, storage: Sequence[Sequence[int]]) -> Tensor:
        """Which of the view's matrices, by number, are those of a part of the storage.

        Args:
            storage: the positions along every dim that the part holds; whole matrices.

        Returns:
            [count] int64, in the order of the part's own `matrices`.
        """
        batch = [name for group in self.view.right[:-2] for name in group]
        numbers = torch.arange(math.prod(self.sizes[name] for name in batch))
        numbers = numbers.reshape([self.sizes[name] for name in batch])
        outer = [[name for name in group if name in batch] for group in self.view.left]
        axes = [name for names in outer for name in names]
        numbers = numbers.permute([batch.index(name) for name in axes])
        numbers = numbers.reshape([self._product(names) for names in outer])
        lengths = dict(self.sizes)
        for dim, (names, positions) in enumerate(zip(outer, storage)):
            if not names or len(positions) == self.shape[dim]:
                continue
            block = self.block(dim)
            assert block is not None
            held = torch.as_tensor(positions)[::block] // block
            numbers = numbers.index_select(dim, held)
            lengths.update(dict.fromkeys(names, 1))
            lengths[names[0]] = len(held)
        numbers = numbers.reshape([lengths[name] for name in axes])
        return numbers.permute([axes.index(name) for name in batch]).reshape(-1)

    def _batch_names(self) -> set[str]:
        return {name for group in self.view.right[:-2] for name in group}

    def _product(self, names: Sequence[str]) -> int:
        return math.prod(self.sizes[name] for name in names)


def _groups(pattern: str, side: str) -> Groups:
    groups: list[tuple[str, ...]] = []
    for match in _TOKEN.finditer(side):
        inside, name, other = match.groups()
        if other is not None:
            raise MuonError(
                f"view {pattern!r}: cannot read {other!r}; axes are names, joined by parentheses"
            )
        groups.append(tuple(inside.split()) if inside is not None else (name,))
    names = [name for group in groups for name in group]
    if not all(name.isidentifier() for name in names):
        raise MuonError(f"view {pattern!r}: axes are names, found {names}")
    return tuple(groups)


def _infer(sizes: dict[str, int], group: tuple[str, ...], length: int, where: str) -> None:
    """Fills in the one size that follows from the dim's length, and checks the product."""
    known = math.prod(sizes[name] for name in group if name in sizes)
    missing = [name for name in group if name not in sizes]
    if len(missing) > 1:
        raise MuonError(f"{where}: give the sizes of all but one of {missing}")
    if missing and known > 0 and length % known == 0:
        sizes[missing[0]] = length // known
        return
    if missing or known != length:
        given = {name: sizes[name] for name in group if name in sizes}
        raise MuonError(f"{where}: length {length} does not fit the sizes {given}")
