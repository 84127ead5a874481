"""Which kind of bucket each journey of a unit's parameters takes."""

from __future__ import annotations

from collections.abc import Sequence

from hp_fsdp.bucket import Bucket
from hp_fsdp.cut import Cut, Uncut
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.offload import Offload
from hp_fsdp.packed_bucket import PackedBucket
from hp_fsdp.piecewise_bucket import PiecewiseBucket, can_lend
from hp_fsdp.policies import MixedPrecisionPolicy
from hp_fsdp.schedule import Journey
from hp_fsdp.unit_memory import UnitMemory
from hp_fsdp.whole_bucket import WholeBucket


def make_buckets(
    journeys: Sequence[Journey],
    data: DataMesh,
    policy: MixedPrecisionPolicy,
    offload: Offload | None = None,
) -> list[Bucket]:
    """One unit's buckets."""
    memory = UnitMemory.on(data.shard.device)
    buckets = []
    for journey in journeys:
        cut = journey.cuts[0]
        kind = Bucket
        if isinstance(cut, Uncut):
            kind = WholeBucket
        elif isinstance(cut, Cut) and not cut.is_leading:
            kind = PackedBucket
        elif can_lend(data) and journey.part:
            kind = PiecewiseBucket
        buckets.append(kind(journey, data, policy, memory, offload))
    return buckets
