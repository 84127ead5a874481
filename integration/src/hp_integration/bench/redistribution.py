"""How many redistributions a second `check_redistribute` checks on eight simulated ranks.

Every pair is two layouts drawn anew, of every kind of placement, on meshes of one to three axes and
uneven shapes, so nothing is answered from a memo. A check compiles the transition and its adjoint,
runs them on all ranks, compares the values with the dense tensor and the gradients by the adjoint
identity. What is counted is redistributions of a whole value on all eight ranks, each from one
layout to another: one into the target for the values, and, where both ends have gradients, one back
for those. A pair is therefore two redistributions and the check of both, and half as many pairs a
second are checked; drawing the layouts is not in the time. It is CPU time of one process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import Placement, Replicate, is_partial
from hp_dtensor.testing import check_redistribute, every_placement
from hp_integration.bench.result import BenchResult, Row, Target

_MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
_NAMES = ("dp", "cp", "tp")
_LAYOUTS_A_SECOND = 300
Pair = tuple[Layout, Layout]


def run(quick: bool) -> BenchResult:
    """Pairs, and redistributions, in a second of this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _check(drawn_pairs(20, seed=1))
        pairs = drawn_pairs(600 if quick else 3000, seed=0)
        start = time.process_time()
        count = _check(pairs)
        seconds = time.process_time() - start
    finally:
        torch.set_num_threads(threads)
    limit = 1e3 / _LAYOUTS_A_SECOND
    return BenchResult(
        "redistribution",
        [
            Row("milliseconds a pair", 1e3 * seconds / len(pairs), "target", limit, "ms"),
            Row("milliseconds a redistribution", 1e3 * seconds / count, "target", limit, "ms"),
        ],
        [Target("milliseconds a redistribution, 300 a second", 1e3 * seconds / count, limit)],
    )


def _check(pairs: Sequence[Pair]) -> int:
    """Checks every pair; how many redistributions were made and compared."""
    count = 0
    for source, target in pairs:
        transition = check_redistribute(source, target)
        # The check has run the adjoint exactly where it has been compiled.
        count += 2 if "adjoint" in vars(transition) else 1
    return count


def drawn_pairs(number: int, seed: int) -> list[Pair]:
    """Layouts of eight ranks, two by two on one mesh and of one shape; no two share an object."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(number):
        sizes = draw.choice(_MESHES)
        mesh = AbstractMesh(_NAMES[-len(sizes) :], sizes)
        shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3)))
        pairs.append((_layout(draw, mesh, shape), _layout(draw, mesh, shape)))
    return pairs


def _layout(draw: random.Random, mesh: AbstractMesh, shape: tuple[int, ...]) -> Layout:
    chosen = [draw.choice(every_placement(shape, size)) for size in mesh.sizes]
    try:
        return Layout(mesh, chosen, shape)
    except ValueError:  # ragged units that the other axes' cuts would break
        whole: list[Placement] = [p if is_partial(p) else Replicate() for p in chosen]
        return Layout(mesh, whole, shape)
