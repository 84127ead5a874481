"""Placements: how one mesh axis divides a tensor (decisions D1, D2).

`Shard`, `Replicate` and `Partial` are PyTorch's own. Three more derive from PyTorch's public
`Placement`: `StridedShard`, `SectionedShard` and `RaggedShard`. What each rank holds is decided
in one place, `hp_dtensor.layout`; a placement only carries its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import placement_types as _torch_placements
from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "Partial",
    "Placement",
    "RaggedShard",
    "Replicate",
    "SectionedShard",
    "Shard",
    "StridedShard",
    "default_grad_placement",
    "describe",
    "is_partial",
    "is_replicate",
    "is_sharding",
    "normalize_placement",
    "sharded_dims",
    "to_torch_placement",
]

REDUCTIONS = ("sum", "avg", "max", "min")


class _Value(Placement):
    """A placement that is an immutable value: equal and hashable by type and fields."""

    __slots__ = ("_fields",)
    _fields: tuple[Any, ...]

    def _freeze(self, *fields: Any) -> None:
        object.__setattr__(self, "_fields", fields)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; make a new one to change {name}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._fields == self._fields

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._fields))

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), self._fields

    def __copy__(self) -> _Value:
        return self

    def __deepcopy__(self, memo: object) -> _Value:
        return self

    def __str__(self) -> str:
        return describe(self)


class StridedShard(_Value):
    """Cuts a dim that is also cut by other axes, or that is made of equal sections.

    On an axis that is followed by axes cutting the same dim, whose sizes multiply to
    `split_factor`, this cut comes after theirs: mesh `(dp, tp)` with `(StridedShard(0, tp),
    Shard(0))` is FSDP over tensor parallelism. Otherwise the dim is cut into `split_factor`
    chunks of ceil size, and every rank holds its own chunk of each, concatenated.

    Raises:
        ValueError: `split_factor` is below 1.
    """

    __slots__ = ()

    def __init__(self, dim: int, split_factor: int) -> None:
        super().__init__()
        if split_factor < 1:
            raise ValueError(f"StridedShard: split_factor must be at least 1, found {split_factor}")
        self._freeze(int(dim), int(split_factor))

    @property
    def dim(self) -> int:
        return self._fields[0]

    @property
    def split_factor(self) -> int:
        return self._fields[1]

    def __repr__(self) -> str:
        return f"StridedShard(dim={self.dim}, split_factor={self.split_factor})"


class SectionedShard(_Value):
    """Cuts each section of a dim by itself; a rank's pieces are concatenated.

    `sections` are global lengths in order, e.g. `(4, 2, 2)` for the rows of a fused q, k, v
    weight. Each section is cut into chunks of ceil size.

    Raises:
        ValueError: no section is given, or one is negative.
    """

    __slots__ = ()

    def __init__(self, dim: int, sections: Sequence[int]) -> None:
        super().__init__()
        lengths = tuple(int(length) for length in sections)
        if not lengths or min(lengths) < 0:
            raise ValueError(f"SectionedShard: sections must be lengths >= 0, found {lengths}")
        self._freeze(int(dim), lengths)

    @property
    def dim(self) -> int:
        return self._fields[0]

    @property
    def sections(self) -> tuple[int, ...]:
        return self._fields[1]

    def __repr__(self) -> str:
        return f"SectionedShard(dim={self.dim}, sections={self.sections})"


class RaggedShard(_Value):
    """Gives each rank its own share of a dim, or of the leading dims together; the whole tensor
    to one rank included.

    `dims` is one dim, or 0, 1, ... in order. Several are flattened, in the local tensor too: its
    shape is `(share, *remaining dims)`. `local_units[r]` units go to coordinate `r`; one unit is
    the size over `sum(local_units)` and must be whole. This cut always comes after those of the
    other axes. A slice of a sharded dim is laid out like this: every rank keeps what it has of it.

    Raises:
        ValueError: several dims that are not leading, a share is negative, or all shares are zero.
    """

    __slots__ = ()

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        super().__init__()
        leading = tuple(int(dim) for dim in dims)
        units = tuple(int(unit) for unit in local_units)
        if len(leading) != 1 and (not leading or leading != tuple(range(len(leading)))):
            raise ValueError(
                f"RaggedShard: dims must be one dim or leading ones (0, 1, ...), found {leading}"
            )
        if not units or min(units) < 0 or sum(units) == 0:
            raise ValueError(
                f"RaggedShard: local_units must be counts >= 0 that are not all zero, found {units}"
            )
        self._freeze(leading, units)

    @property
    def dims(self) -> tuple[int, ...]:
        return self._fields[0]

    @property
    def local_units(self) -> tuple[int, ...]:
        return self._fields[1]

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"


# Types are compared exactly: PyTorch's placement types answer isinstance through a slow metaclass,
# and a normalised placement is never of a subclass.
_SHARDING = frozenset({Shard, StridedShard, SectionedShard, RaggedShard})


def is_sharding(placement: Placement) -> bool:
    """Whether different coordinates hold different parts."""
    return type(placement) in _SHARDING


def is_replicate(placement: Placement) -> bool:
    return type(placement) is Replicate


def is_partial(placement: Placement) -> TypeGuard[Partial]:
    return type(placement) is Partial


def sharded_dims(placement: Placement) -> tuple[int, ...]:
    """The tensor dims a placement cuts; empty for Replicate and Partial."""
    if type(placement) is RaggedShard:
        return placement.dims
    return (placement.dim,) if is_sharding(placement) else ()  # type: ignore[attr-defined]


def default_grad_placement(placement: Placement) -> Placement:
    """The gradient's placement where nothing else is said (D3)."""
    return Replicate() if is_replicate(placement) or is_partial(placement) else placement


def _normalize_dim(dim: int, ndim: int, placement: object) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(
            f"{placement!r} names dim {dim}, but the tensor has {ndim} dims; "
            f"use a dim in [{-ndim}, {ndim - 1}]"
            if ndim
            else f"{placement!r} cuts a 0-dimensional tensor; use Replicate() or Partial()"
        )
    return dim % ndim


def normalize_placement(placement: Any, ndim: int) -> Placement:
    """The placement with non-negative dims; PyTorch's private strided shard becomes ours.

    Raises:
        ValueError: a dim is out of range, or the reduction is not one of sum, avg, max, min.
        TypeError: the object is not a placement this package knows.
    """
    kind = type(placement)
    if kind is Replicate:
        return placement
    if kind is Partial:
        if placement.reduce_op not in REDUCTIONS:
            raise ValueError(
                f"Partial({placement.reduce_op!r}): supported reductions are {REDUCTIONS}"
            )
        return placement
    if kind is Shard:
        dim = _normalize_dim(placement.dim, ndim, placement)
        return placement if dim == placement.dim else Shard(dim)
    if kind is SectionedShard:
        dim = _normalize_dim(placement.dim, ndim, placement)
        return placement if dim == placement.dim else SectionedShard(dim, placement.sections)
    if kind is StridedShard or kind is getattr(_torch_placements, "_StridedShard", None):
        return StridedShard(
            _normalize_dim(placement.dim, ndim, placement), int(placement.split_factor)
        )
    if kind is RaggedShard:
        dim = _normalize_dim(placement.dims[-1], ndim, placement)
        return (
            placement if dim == placement.dims[-1] else RaggedShard((dim,), placement.local_units)
        )
    raise TypeError(
        f"{placement!r} is not a supported placement; use Shard, StridedShard, SectionedShard, "
        "RaggedShard, Replicate or Partial"
    )


def to_torch_placement(placement: Placement) -> Placement:
    """The same placement in PyTorch's own types.

    Raises:
        ValueError: PyTorch has no such placement (SectionedShard, RaggedShard), or this version
            has no strided shard.
    """
    if isinstance(placement, StridedShard):
        strided = getattr(_torch_placements, "_StridedShard", None)
        if strided is None:
            raise ValueError(f"this version of PyTorch has no placement for {placement!r}")
        return strided(placement.dim, split_factor=placement.split_factor)
    if isinstance(placement, SectionedShard | RaggedShard):
        raise ValueError(
            f"PyTorch has no placement for {placement!r}; redistribute to Shard or Replicate first"
        )
    return placement


def describe(value: object) -> str:
    """Short text of a placement, or of a sequence of them: `S(0)`, `SS(0,2)`, `R`, `P(sum)`."""
    if isinstance(value, Shard):
        return f"S({value.dim})"
    if isinstance(value, StridedShard):
        return f"SS({value.dim},{value.split_factor})"
    if isinstance(value, SectionedShard):
        return f"Sec({value.dim},{_plain(value.sections)})"
    if isinstance(value, RaggedShard):
        return f"Rag({_plain(value.dims)},{_plain(value.local_units)})"
    if isinstance(value, Replicate):
        return "R"
    if isinstance(value, Partial):
        return f"P({value.reduce_op})"
    if isinstance(value, list | tuple):
        return f"({', '.join(describe(item) for item in value)})"
    return str(value)


def _plain(numbers: Sequence[int]) -> str:
    return f"[{','.join(str(number) for number in numbers)}]"
