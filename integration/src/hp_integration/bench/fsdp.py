"""One training step under hp_fsdp against PyTorch FSDP2, on a flat mesh."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_integration.bench.footprint import packed_bytes, peak_bytes
from hp_integration.bench.host_time import milliseconds_a_unit
from hp_integration.bench.pairs import median_of_pairs
from hp_integration.bench.result import BenchResult, Row, Target, geometric_mean
from hp_integration.bench.training_step import PEER, make_step, paired_seconds
from hp_platform.axis import MeshAxis
from hp_platform.testing import run_ranks

_QUICK = ((128, 2), (256, 2), (128, 4), (256, 4))
_FULL = tuple((hidden, ranks) for ranks in (2, 4) for hidden in (128, 256, 512, 1024))


def run(quick: bool) -> BenchResult:
    """Medians of pairs of interleaved steps: forward, backward, SGD, llama blocks."""
    times, copies, peaks = [], [], []
    for hidden, ranks in _QUICK if quick else _FULL:
        case = f"hidden={hidden} ranks={ranks}"
        repeats = 5 if quick else 9
        found = run_ranks(lambda h=hidden, n=repeats: _time(h, n), ranks, timeout=600)[0]
        times.append(Row(case, found["ours"], PEER, found[PEER], "s"))
    for hidden, ranks in ((256, 2),) if quick else ((256, 2), (512, 2), (512, 4)):
        case = f"hidden={hidden} ranks={ranks}"
        ours, theirs = run_ranks(lambda h=hidden: _copies(h), ranks, timeout=600)[0]
        copies.append(Row(f"{case} packed and unpacked", ours, PEER, theirs, "bytes"))
        sides = [
            run_ranks(lambda h=hidden, o=ours: _peak(h, o), ranks, timeout=600)[0]
            for ours in (True, False)
        ]
        if None not in sides:
            peaks.append(Row(f"{case} peak memory", sides[0], PEER, sides[1], "bytes"))
    found = milliseconds_a_unit(5 if quick else 15)
    host = [
        Row(f"host time a unit, {policy}", found[policy], PEER, found[PEER], "ms")
        for policy in ("per_parameter", "shared_buffer")
    ]
    ratios = [row.ratio for row in times]
    return BenchResult(
        "fsdp",
        [*times, *host, *copies, *peaks],
        [
            Target("geometric mean of step ratios", geometric_mean(ratios), 0.75),
            Target("largest step ratio", max(ratios), 0.95),
            *(Target(f"{row.case} over {PEER}'s", row.ratio, 1.0) for row in host),
            Target("bytes packed and unpacked", max(row.ours for row in copies), 0),
            *([Target("largest peak ratio", max(r.ratio for r in peaks), 1.0)] if peaks else []),
        ],
    )


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (MeshAxis.of_group().size,), mesh_dim_names=("dp_shard",))


def _time(hidden: int, repeats: int) -> dict[str, float]:
    return median_of_pairs(paired_seconds(hidden, _mesh(), repeats))


def _copies(hidden: int) -> tuple[int, int]:
    mesh, plain = _mesh(), make_step(hidden, None, ours=False)
    ours, theirs = (
        packed_bytes(make_step(hidden, mesh, ours=side), plain) for side in (True, False)
    )
    return ours, theirs


def _peak(hidden: int, ours: bool) -> int | None:
    mesh = _mesh()
    return peak_bytes(lambda: make_step(hidden, mesh, ours=ours))
