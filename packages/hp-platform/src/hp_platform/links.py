"""How fast the ranks of an axis reach one another: what decides whether to send alone or fused."""

from __future__ import annotations

import time
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hp_platform.axis import MeshAxis
from hp_platform.collectives import all_gather, all_reduce, barrier
from hp_platform.errors import HPError
from hp_platform.ledger import Origin

_ORIGIN = Origin("hp_platform", "links", "calibration")


@dataclass(frozen=True)
class Link:
    """The cost of an all-gather as a straight line in its size.

    Attributes:
        latency: seconds that even the smallest call takes.
        bandwidth: bytes of the whole message a second, beyond that.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0:
            raise HPError(
                f"a link needs latency >= 0 and bandwidth > 0, got {self.latency} s and "
                f"{self.bandwidth} bytes/s"
            )

    def seconds(self, size: int) -> float:
        """The predicted time of one message of `size` bytes."""
        return self.latency + size / self.bandwidth


# Groups belong to the process, and so does this record, which keeps none of them alive.
_measured: WeakKeyDictionary[dist.ProcessGroup, Link] = WeakKeyDictionary()


def link_of(axis: MeshAxis) -> Link:
    """As `measure_link`, once for every process group; all its ranks must ask equally often."""
    group = axis.process_group
    if not isinstance(group, dist.ProcessGroup):  # the simulator's, or none
        return measure_link(axis)
    known = _measured.get(group)
    if known is None:
        known = _measured[group] = measure_link(axis)
    return known


def measure_link(axis: MeshAxis, *, size: int = 1 << 22, repeats: int = 5) -> Link:
    """Times all-gathers of almost nothing and of `size` bytes; all ranks must call it.

    The minimum over the repeats counts, and of the ranks' times the longest, so every rank
    gets the same answer and plans the same way. An axis of one rank has no latency and an
    infinite bandwidth.

    Raises:
        HPError: `size` is below 4 bytes a rank, or `repeats` below 1.
    """
    if size < 4 * axis.size or repeats < 1:
        raise HPError(
            f"measuring axis {axis.name!r} needs at least {4 * axis.size} bytes and 1 repeat, got "
            f"size={size} and repeats={repeats}"
        )
    if axis.process_group is None:
        return Link(0.0, float("inf"))
    small, large = (_seconds(axis, length, repeats) for length in (axis.size, size // 4))
    times = torch.tensor([small, large], dtype=torch.float32, device=axis.device)
    small, large = all_reduce(times, axis, op="max", origin=_ORIGIN).wait().tolist()
    # Noise may make the large message look faster than the small one.
    return Link(small, size / max(large - small, 1e-9))


def _seconds(axis: MeshAxis, length: int, repeats: int) -> float:
    shard = torch.zeros(max(1, length // axis.size), device=axis.device)
    best = float("inf")
    for _ in range(repeats):
        barrier(axis, origin=_ORIGIN)
        start = time.perf_counter()
        # Reading an element holds the host until the device is done.
        all_gather(shard, axis, origin=_ORIGIN).wait()[-1].item()
        best = min(best, time.perf_counter() - start)
    return best
