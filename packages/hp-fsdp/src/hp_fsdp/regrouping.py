"""`reshard_after_forward=n`: what forward leaves for backward, on groups of `n` ranks.

After forward a rank keeps not its shard of the gathered parameters only, but one of `n` parts of
them, so that backward gathers within `n` neighbours, such as one machine's ranks.
"""

from __future__ import annotations

from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.errors import ShardingError
from hp_fsdp.unit import Unit
from hp_platform.meeting import share_memory


def checked_reshard(value: object, data: DataMesh) -> bool | int | None:
    """True, False, None, or the size of a group smaller than the shard axis.

    Raises:
        ShardingError: it is none of these, or does not divide the size of the shard axis.
    """
    if value is None or isinstance(value, bool):
        return value
    size = data.shard.size
    if not isinstance(value, int):
        raise ShardingError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {value!r}"
        )
    if value < 1 or value > size or size % value:
        raise ShardingError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{size}, not {value}: {size} is the size of mesh axis {data.shard.name!r}; or pass "
            "True, False or None"
        )
    if value == 1:
        return False
    return True if value == size else value


def regroup(unit: Unit, value: bool | int | None) -> None:
    """Makes `unit` gather for backward within groups of `value` ranks, if that is a number."""
    if value is None or isinstance(value, bool):
        near = None
    else:
        axis = unit.data.shard
        starts = range(0, axis.size, value)
        near = axis.subset([range(start, start + value) for start in starts])
        share_memory(near)
    for bucket in unit.buckets:
        bucket.near = near
