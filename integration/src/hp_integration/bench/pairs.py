"""Times several sides in turn, so that a busy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from hp_platform.axis import MeshAxis
from hp_platform.collectives import Origin, barrier

Step = Callable[[], object]
_ORIGIN = Origin("hp_integration", "bench")


def interleaved(
    sides: Mapping[str, Step], *, repeats: int, warmup: int = 1, axis: MeshAxis | None = None
) -> dict[str, list[float]]:
    """Seconds of every call of every side, after `warmup` calls that are not counted.

    Args:
        axis: ranks that start each call together and wait for one another at its end.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(warmup + repeats):
        for name, step in sides.items():
            _together(axis)
            start = time.perf_counter()
            step()
            _together(axis)
            if repeat >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def median_of_pairs(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Of every repeat's times the pair whose ratio, first to last side, is the median.

    A pair is timed in one moment, so its ratio means more than that of two separate medians.
    """
    first, *_, last = times
    order = sorted(range(len(times[first])), key=lambda i: times[first][i] / times[last][i])
    middle = order[len(order) // 2]
    return {name: values[middle] for name, values in times.items()}


def _together(axis: MeshAxis | None) -> None:
    if axis is not None:
        barrier(axis, origin=_ORIGIN)
