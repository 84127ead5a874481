"""How one mesh axis cuts a letter of an axis pattern."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from attrs import frozen
from torch.distributed.tensor import Placement, Shard

from hp_dtensor.placements import RaggedShard, SectionedShard, StridedShard


def chunk_sizes(size: int, ways: int) -> tuple[int, ...]:
    """Lengths of the chunks of `torch.chunk`, empty ones included."""
    step = -(-size // ways)
    return tuple(max(min(step, size - i * step), 0) for i in range(ways))


@frozen
class Cut:
    """How one axis cuts a letter: the letter, and the placement with its dim left out."""

    letter: str
    kind: type = Shard
    detail: Any = None

    @classmethod
    def of(cls, letter: str, placement: Placement) -> Cut:
        if isinstance(placement, StridedShard):
            return cls(letter, StridedShard, placement.split_factor)
        if isinstance(placement, SectionedShard):
            return cls(letter, SectionedShard, placement.sections)
        if isinstance(placement, RaggedShard):
            return cls(letter, RaggedShard, placement.local_units)
        return cls(letter)

    def at(self, dim: int) -> Placement:
        if self.kind is Shard:
            return Shard(dim)
        return self.kind((dim,) if self.kind is RaggedShard else dim, self.detail)


def followed(
    cuts: Sequence[Cut | None],
    leader: int | None,
    yielding: Collection[int],
    whole: Collection[str],
) -> set[Cut | None]:
    """What the operands are to be cut by on an axis: as the leader is, or as those that do not
    yield. Several are a conflict; without any, nothing has to follow."""
    found = {cut for cut in cuts if cut is not None}
    if leader is not None and found:
        return {cuts[leader]}
    if len(found) > 1 or any(cut.letter in whole for cut in found):
        kept = {cut for i, cut in enumerate(cuts) if cut is not None and i not in yielding}
        return set(kept) or ({None} if len(found) == 1 and yielding else set())
    return set(found)
