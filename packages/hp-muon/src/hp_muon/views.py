"""Logical matrices: which matrices a parameter holds, as a reversible einops pattern.

How a parameter is stored and which matrices Muon orthogonalizes are two things (paper section
6.6). A `MatrixView` maps storage to a stack of matrices `[..., rows, cols]`; everything before
the last two axes of its right side is a batch. Without a view the last two dims are the matrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from attrs import field, frozen
from einops import rearrange
from torch import Tensor

from hp_muon.errors import MuonError

Groups = tuple[tuple[str, ...], ...]
_TOKEN = re.compile(r"\(([^()]*)\)|([A-Za-z_]\w*)|(\S)")


@frozen(init=False, repr=False)
class MatrixView:
    """The matrices in a parameter: `MatrixView("(h d) m -> h d m", h=8)`.

    The right side reorders, splits and joins the axes of the left side, as in
    `einops.rearrange`; its last two entries are rows and cols. Sizes that do not follow from the
    parameter's shape are given by keyword.

    Raises:
        MuonError: the pattern is not a reversible einops pattern with at least two entries on
            the right, or a size is given for an axis it does not have.
    """

    pattern: str
    sizes: Mapping[str, int] = field(hash=False)
    left: Groups = field(eq=False)
    right: Groups = field(eq=False)

    def __init__(self, pattern: str, **sizes: int) -> None:
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
        wrong = {name: size for name, size in sizes.items() if not _is_length(size)}
        if wrong:
            raise MuonError(f"view {pattern!r}: sizes must be positive integers, found {wrong}")
        self.__attrs_init__(" ".join(pattern.split()), dict(sizes), left, right)

    @classmethod
    def default(cls, ndim: int) -> MatrixView:
        """Last two dims are rows and cols, all others are a batch."""
        axes = " ".join([*(f"b{i}" for i in range(ndim - 2)), "r", "c"])
        return cls(f"{axes} -> {axes}")

    def resolve(self, shape: Sequence[int], name: str = "the parameter") -> ResolvedView:
        """The view of a parameter of this global shape.

        Raises:
            MuonError: the shape does not fit the pattern and its sizes.
        """
        if len(shape) != len(self.left):
            raise MuonError(
                f"{name}: view {self.pattern!r} is for {len(self.left)} dims, found shape "
                f"{tuple(shape)}"
            )
        sizes = dict(self.sizes)
        for dim, (group, length) in enumerate(zip(self.left, shape)):
            _infer(sizes, group, length, f"{name}: view {self.pattern!r}, dim {dim}")
        return ResolvedView(self, tuple(shape), sizes)

    def __repr__(self) -> str:
        sizes = "".join(f", {name}={size}" for name, size in self.sizes.items())
        return f"MatrixView({self.pattern!r}{sizes})"


def _is_length(size: object) -> bool:
    return isinstance(size, int) and size > 0


@frozen
class ResolvedView:
    """A view with the size of every axis known.

    Attributes:
        shape: storage shape it maps from; where a length is 0 it holds no matrix.
        sizes: size of every axis of the pattern.
    """

    view: MatrixView
    shape: tuple[int, ...]
    sizes: Mapping[str, int] = field(eq=False)

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
        return self.view.left == self.view.right and all(len(g) == 1 for g in self.view.left)

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
            return ResolvedView(self.view, tuple(group_shape), sizes)
        for dim, length in enumerate(group_shape):
            block = self.block(dim)
            if length == self.shape[dim]:
                continue
            if block is None or length % block:
                raise MuonError(f"{self.view}: length {length} of dim {dim} cuts a matrix")
            outer = [name for name in self.view.left[dim] if name in self._batch_names()]
            sizes.update(dict.fromkeys(outer, 1))
            sizes[outer[0]] = length // block
        return ResolvedView(self.view, tuple(group_shape), sizes)

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
