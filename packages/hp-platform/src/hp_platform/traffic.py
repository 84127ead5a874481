"""How many bytes a collective must move, by whatever algorithm.

The counts are lower bounds that follow from the meaning of the operation, not measurements of a
backend: a backend that does not know the topology moves more, none can move less. Each byte is
counted once, on the side named below, so the counts of all ranks add up to all that moves.

For groups of ranks (fast domains, or every rank by itself) and a message of S bytes on D groups:

- all-gather: a group must receive the shares of all other groups once.
- reduce-scatter: a group must send one partial sum of every row that another group keeps.
- all-reduce: both of these with equal shares, 2 S (D - 1) / D a group.
- broadcast: every group but the source's receives S. reduce: every group but the destination's
  sends S.
- all-to-all, send, exchange: a rank sends what it has for ranks of other groups. A receive
  counts nothing, for its sender counts it.

What belongs to a group is divided among its ranks, rounded up.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hp_platform.errors import HPError

Parts = Sequence[int] | int | None
"""How a message divides: relative sizes of the coordinates' shares (all-gather, reduce-scatter)
or of the blocks for each coordinate (all-to-all), bytes sent to each coordinate (send, exchange),
or the coordinate that is source or destination. None: equal shares, or coordinate 0."""


def bytes_between(
    operation: str, size: int, parts: Parts, groups: Sequence[Hashable], rank: int
) -> int:
    """Bytes that must move between groups, as far as they are counted on coordinate `rank`.

    Args:
        operation: name of the collective.
        size: its payload in bytes, as `Record.bytes` defines it.
        groups: the group of every coordinate.

    Raises:
        HPError: there is no rule for the operation.
    """
    own = [coordinate for coordinate, group in enumerate(groups) if group == groups[rank]]
    others = [coordinate for coordinate in range(len(groups)) if coordinate not in set(own)]
    if operation in ("receive", "barrier") or not others or not size:
        return 0
    if operation in ("all_gather", "reduce_scatter", "gather_objects"):
        return _divided(size - _share(size, parts, own, len(groups)), len(own))
    if operation == "all_reduce":
        count = len(set(groups))
        return _divided(2 * size * (count - 1), count * len(own))
    if operation == "all_to_all":
        return _share(size, parts, others, len(groups))
    if operation in ("send", "exchange"):
        sent = parts if isinstance(parts, Sequence) else (0,) * len(groups)
        return sum(sent[coordinate] for coordinate in others)
    root = parts if isinstance(parts, int) else 0
    if operation in ("broadcast", "reduce"):
        return 0 if root in own else _divided(size, len(own))
    raise HPError(f"how many bytes {operation!r} moves is not known; add a rule in traffic.py")


def _share(size: int, parts: Parts, coordinates: Sequence[int], count: int) -> int:
    """Bytes of a message that belong to `coordinates`."""
    if not isinstance(parts, Sequence):
        return size * len(coordinates) // count
    whole = sum(parts)
    return size * sum(parts[coordinate] for coordinate in coordinates) // whole if whole else 0


def _divided(size: int, ranks: int) -> int:
    return -(-size // ranks)
