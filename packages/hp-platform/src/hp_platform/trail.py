"""What this rank has asked of a process group, in order: by it ranks are told apart that do not
issue the same collectives.

Collectives match by their order alone. A rank that leaves one out, or makes two in another order,
gives its peers what they did not ask for, or leaves them waiting. `lookout` compares the trails.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from hp_platform.errors import AgreementError
from hp_platform.process import Process
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
        name: that of an axis with this group.
        size, rank, ranks, device: as of that axis.
        key: name of the group among all groups of the run.
        count: how many there have been.
        verdict: why no further collective may be issued; None while nothing is known against it.
        made: how many groups of these ranks have had this one's name, this one included.
        published: `count` when `lookout` last published it.
        process: which one it belongs to; one that is forked inherits it, and the group with it.
    """

    def __init__(self, axis: MeshAxis, made: int = 1) -> None:
        assert axis.process_group is not None
        # Not the axis itself: it holds the group, which is to end when the program drops it.
        self.name, self.size, self.rank, self.ranks = axis.name, axis.size, axis.rank, axis.ranks
        self.device = axis.device
        self.key = key_of(axis)
        self._group = ref(axis.process_group)
        self.verdict: str | None = None
        self.made = made
        self.published = -1
        self.process = Process.identity
        # The garbage collector may come upon a failed call while this thread publishes.
        self.lock = threading.RLock()
        self.count = 0
        self._numbers = 0
        # Rings, which are written to at every collective: nothing is allocated.
        self._operations = [""] * _KEPT
        self._origins = [_NOBODY] * _KEPT

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group; None once it has been destroyed."""
        group = self._group()
        if group is not None:
            try:
                dist.get_process_group_ranks(group)
            except (KeyError, RuntimeError, ValueError):
                return None
        return group

    def next_number(self) -> int:
        """1, 2, ...: for what all ranks of the group make in one order."""
        self._numbers += 1
        return self._numbers

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
# All ranks of a group use it, so that they count alike; they need not look at the same time. The
# coordinate is for ranks that are threads.
_made: Counter[tuple[str, int]] = Counter()


def trail_of(axis: MeshAxis) -> Trail | None:
    """The trail of the axis's group; None where nothing is sent: on fake and simulated groups."""
    group = axis.process_group
    if not isinstance(group, dist.ProcessGroup) or axis.backend in ("", "fake"):
        return None
    if not _is_registered(group):
        return None
    trail = _trails.get(group)
    if trail is None:
        place = (key_of(axis), axis.rank)
        _made[place] += 1
        trail = _trails.setdefault(group, Trail(axis, _made[place]))
    return trail


def key_of(axis: MeshAxis) -> str:
    """What PyTorch calls the axis's group, and which ranks it has.

    PyTorch uses names again once the default group has been destroyed, and of the groups of one
    mesh axis some have the same name.
    """
    assert axis.process_group is not None
    ranks = zlib.crc32(repr(axis.ranks).encode())
    return f"{axis.process_group.group_name}/{axis.ranks[0]}/{ranks:08x}"


def _is_registered(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed made it: others, as the simulator's, have no name to count by."""
    try:
        return bool(group.group_name)
    except RuntimeError:
        return False


def trails() -> list[Trail]:
    """Those of all groups that have been used and not destroyed.

    A destroyed one, which an axis may still hold, belongs to another store perhaps.
    """
    # References are listed in one piece: another thread may make a group meanwhile.
    groups = [group for reference in _trails.keyrefs() if (group := reference()) is not None]
    known = [trail for group in groups if (trail := _trails.get(group)) is not None]
    return [trail for trail in known if trail.group is not None]
