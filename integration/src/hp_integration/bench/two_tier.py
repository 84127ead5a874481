"""One training step on two hosts of two ranks each, joined by a slow link, against FSDP2's HSDP.

The hosts are network namespaces of this machine (`hp_platform.testing.two_tier`): shards stay
within a host, replicas are joined by the link.
"""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from hp_integration.bench.pairs import median_of_pairs
from hp_integration.bench.result import BenchResult, Row, Target, geometric_mean
from hp_integration.bench.training_step import PEER, paired_seconds
from hp_platform.testing.two_tier import two_tier

_QUICK = (("500mbit", 256), ("2gbit", 256))
_FULL = tuple((rate, hidden) for hidden in (256, 512) for rate in ("500mbit", "2gbit"))


def run(quick: bool) -> BenchResult:
    """Medians of pairs of interleaved steps, HSDP 2 x 2; needs Linux and root.

    Raises:
        TwoTierUnavailable: the machine cannot make such a network.
    """
    rows = []
    for rate, hidden in _QUICK if quick else _FULL:
        repeats = 5 if quick else 9
        with two_tier(hosts=2, ranks_per_host=2, slow=rate) as network:
            found = network.run(lambda h=hidden, n=repeats: _time(h, n), timeout=600)[0]
        rows.append(Row(f"link={rate} hidden={hidden}", found["ours"], PEER, found[PEER], "s"))
    ratios = [row.ratio for row in rows]
    return BenchResult(
        "two-tier",
        rows,
        [
            Target("geometric mean of step ratios", geometric_mean(ratios), 0.70),
            Target("largest step ratio", max(ratios), 0.90),
        ],
    )


def _time(hidden: int, repeats: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return median_of_pairs(paired_seconds(hidden, mesh, repeats))
