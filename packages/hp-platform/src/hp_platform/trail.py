"""What this rank has asked of a process group, in order: by it ranks are told apart that do not
issue the same collectives.

Collectives match by their order alone. A rank that leaves one out, or makes two in another order,
gives its peers what they did not ask for, or leaves them waiting. `lookout` compares the trails.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hp_platform.errors import AgreementError
from hp_platform.records import Origin

if TYPE_CHECKING:
    from hp_platform.axis import MeshAxis

_NOBODY = Origin("nobody")

Step = tuple[int, str, Origin]
"""Number, operation and origin of one collective."""

_KEPT = 1 << 13
"""Steps that can be compared with what a peer published a few seconds ago."""


class Trail:
    """The last collectives that this rank has issued on one group.

    Attributes:
        axis: an axis with this group.
        count: how many there have been.
        verdict: why no further collective may be issued; None while nothing is known against it.
        made: how many groups have had this one's name, this one included; 0 until `lookout` asks.
        published: `count` when `lookout` last published it.
    """

    def __init__(self, axis: MeshAxis) -> None:
        self.axis = axis
        self.verdict: str | None = None
        self.made = 0
        self.published = -1
        self.lock = threading.Lock()
        self.count = 0
        # Rings, which are written to at every collective: nothing is allocated.
        self._operations = [""] * _KEPT
        self._origins = [_NOBODY] * _KEPT

    def add(self, operation: str, origin: Origin) -> None:
        """A collective is about to be issued that all ranks of the group must make.

        Raises:
            AgreementError: ranks are known to differ in what they issue.
        """
        if self.verdict is not None:
            raise AgreementError(self.verdict)
        place = self.count & (_KEPT - 1)
        self._operations[place] = operation
        self._origins[place] = origin
        self.count += 1

    def steps(self, last: int = _KEPT) -> list[Step]:
        """The last ones, oldest first. May be called from any thread."""
        count = self.count
        operations, origins = self._operations.copy(), self._origins.copy()
        # What was added meanwhile, one of them in part, has taken the place of the oldest.
        first = max(0, count - last, self.count + 1 - _KEPT)
        places = ((number, number & (_KEPT - 1)) for number in range(first, count))
        return [(number, operations[place], origins[place]) for number, place in places]


# Groups belong to the process, and so does this record, which keeps none of them alive.
_trails: WeakKeyDictionary[dist.ProcessGroup, Trail] = WeakKeyDictionary()


def trail_of(axis: MeshAxis) -> Trail | None:
    """The trail of the axis's group; None where nothing is sent, as on a fake group."""
    group = axis.process_group
    if not isinstance(group, dist.ProcessGroup) or axis.backend in ("", "fake"):
        return None
    trail = _trails.get(group)
    if trail is None:
        trail = _trails.setdefault(group, Trail(axis))
    return trail


def trails() -> list[Trail]:
    """Those of all groups that are in use."""
    return list(_trails.values())
