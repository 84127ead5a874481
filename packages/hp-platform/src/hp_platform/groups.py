"""Process groups, made once for the same name and ranks.

Every group costs: on gloo threads and milliseconds, on HCCL two buffers of device memory. A
mesh or a subset that is built again therefore gets the groups it had.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from hp_platform.errors import TopologyError
from hp_platform.hccl import HcclGroupOptions, process_group_options

_Key = tuple[str, tuple[int, ...], HcclGroupOptions | None]

# Process groups belong to the process, and so does this record of them, by default group. It
# keeps none alive: `torch.distributed` does, until the program destroys them.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, ref[dist.ProcessGroup]]]
_made = WeakKeyDictionary()


def group_of(
    name: str, ranks: tuple[int, ...], options: HcclGroupOptions | None = None
) -> dist.ProcessGroup:
    """The group of `ranks`, in this order, for what `name` stands for.

    Groups of other names are kept apart even if the ranks are the same, for calls on one group
    must be issued in the same order on all its ranks. All `ranks` must make this call, in the
    same order among the calls that make groups.

    Args:
        options: for HCCL only.

    Raises:
        TopologyError: options are given for another backend than HCCL, or a group of the same
            ranks has been destroyed: PyTorch would give the new one its name, and it would hang
            on what the old one left in the store.
        HPError: HCCL options without torch_npu.
    """
    key = (name, ranks, options)
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, {})
    for other, known in made.items():
        found = known()
        if other[1] == ranks and (found is None or not _is_alive(found)):
            raise TopologyError(
                f"a group of ranks {ranks} for {other[0]!r} has been destroyed, and another of "
                f"these ranks, for {name!r}, would hang; keep it until all groups are destroyed"
            )
        if other == key and found is not None:
            return found
    backend = dist.get_backend()
    if options is not None and "hccl" not in backend:
        raise TopologyError(
            f"group {name!r} of ranks {ranks}: HCCL options cannot be given to backend "
            f"{backend!r}; leave them out"
        )
    group = dist.new_group(
        list(ranks),
        pg_options=None if options is None else process_group_options(options),
        use_local_synchronization=True,
        group_desc=name,
    )
    made[key] = ref(group)
    return group


def _is_alive(group: dist.ProcessGroup) -> bool:
    """Whether the group has not been destroyed, by itself or with all others."""
    try:
        dist.get_backend(group)
    except ValueError:
        return False
    return True
