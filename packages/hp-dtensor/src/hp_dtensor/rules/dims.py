"""Names and numbers of dims, as rules read them from a call."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hp_dtensor.rules.recipe import Call


def letters(count: int) -> list[str]:
    return [f"d{i}" for i in range(count)]


def bracketed(names: Sequence[str], whole: Collection[int]) -> str:
    """The names as pattern text; those at the positions in `whole` must be whole."""
    return " ".join(f"[{name}]" if i in whole else name for i, name in enumerate(names))


def dims_of(call: Call, ndim: int, name: str = "dim") -> tuple[int, ...]:
    """The dims an operator names, non-negative; all of them for None or ()."""
    given = call.get(name)
    if given is None or given == ():
        return tuple(range(ndim))
    each = given if isinstance(given, tuple | list) else (given,)
    return tuple(checked_dim(call, dim, ndim) for dim in each)


def one_dim(call: Call, default: int = 0) -> int:
    """The dim an operator names; `default` where it names none."""
    given = call.get("dim")
    return checked_dim(call, default if given is None else given, len(call.input.shape))


def checked_dim(call: Call, dim: int, ndim: int) -> int:
    limit = max(ndim, 1)
    if not -limit <= dim < limit:
        raise call.error(
            f"dim {dim} is out of range for a tensor of {ndim} dims",
            f"use {-limit} to {limit - 1}",
        )
    return dim % limit
