"""Equal shares between ranks that reach one another directly: read out of the peers' memory where
it is lent and can be, sent and received elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hp_platform.axis import MeshAxis
from hp_platform.direct import (
    prepare_direct_all_gather,
    prepare_direct_reduce_scatter,
    sends_first_on,
)
from hp_platform.peer_memory import (
    peer_memory,
    prepare_lent_all_gather,
    prepare_lent_reduce_scatter,
)
from hp_platform.records import Origin
from hp_platform.uneven import Prepared


def prepare_equal_all_gather(
    source: Tensor, target: Tensor, axis: MeshAxis, lends: bool
) -> Callable[[Origin], Sequence[Any]]:
    """Fills flat `target` with every coordinate's flat `source`, one after another.

    Returns:
        What starts it, as often as one likes.
    """
    memory = peer_memory(axis) if lends else None
    if memory is None:
        return prepare_direct_all_gather(
            source, target, axis.rank, axis.process_group, sends_first_on(axis)
        )
    lent = prepare_lent_all_gather(memory, source, target)
    return lambda origin: (lent(origin),)


def prepare_equal_reduce_scatter(
    source: Tensor, scratch: Tensor | None, axis: MeshAxis, lends: bool
) -> Callable[[Tensor, Origin], Prepared]:
    """Fills a flat target with this coordinate's share of the sum of all flat `source`s.

    Args:
        scratch: as long as the others' shares, or longer; made when None.

    Returns:
        What prepares a call into a given target, as often as one likes.
    """
    memory = peer_memory(axis) if lends else None
    if memory is None:
        return prepare_direct_reduce_scatter(
            source, scratch, axis.rank, axis.size, axis.process_group, sends_first_on(axis)
        )
    lent = prepare_lent_reduce_scatter(memory, source, scratch)
    return lambda target, origin: Prepared(lambda: [lent(target, origin)])
