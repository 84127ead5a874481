"""One optimizer step of hp_muon against torch.optim.Muon and AdamW, on FSDP2's parameters."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from hp_integration.bench.pairs import Step, interleaved, medians
from hp_integration.bench.result import BenchResult, Row, Target
from hp_muon import Muon, newton_schulz
from hp_platform.axis import MeshAxis
from hp_platform.collectives import Origin, gather_objects
from hp_platform.testing import run_ranks

_RANKS = 4
_BLOCKS = 8
# Shapes of one block; `moe` holds fused experts.
_SETS = {
    "dense": (*[(256, 256)] * 4, (1024, 256), (256, 1024)),
    "moe": ((8, 128, 256),),
}
_QUINTIC = {"coefficients": "quintic", "ns_steps": 5}


def run(quick: bool) -> BenchResult:
    """Wall time of a step (median, slowest rank) and CPU time summed over the ranks."""
    rows, targets = [], []
    for name, shapes in _SETS.items():
        wall, cpu, floor = run_ranks(
            lambda s=shapes, n=name: _measure(s, with_torch_muon=n == "dense", quick=quick),
            _RANKS,
            timeout=300,
        )[0]
        for peer in wall:
            if peer != "ours":
                rows.append(Row(f"{name}, FSDP 4, wall", wall["ours"], peer, wall[peer], "ms"))
                rows.append(Row(f"{name}, FSDP 4, CPU", cpu["ours"], peer, cpu[peer], "ms"))
        rows.append(Row(f"{name}, FSDP 4, CPU", cpu["ours"], "Newton-Schulz alone", floor, "ms"))
        limit = 1.25 if name == "dense" else 1.15
        targets.append(Target(f"{name}: CPU over Newton-Schulz alone", cpu["ours"] / floor, limit))
    return BenchResult("muon", rows, targets)


def _measure(
    shapes: tuple[tuple[int, ...], ...], *, with_torch_muon: bool, quick: bool
) -> tuple[dict[str, float], dict[str, float], float]:
    """Milliseconds: wall by side, summed CPU by side, summed CPU of Newton-Schulz alone."""
    axis = MeshAxis.of_group()
    mesh = init_device_mesh("cpu", (axis.size,), mesh_dim_names=("dp_shard",))
    makers: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
        "ours": lambda p: Muon(p, ns_dtype=torch.bfloat16, **_QUINTIC),
        "AdamW": lambda p: torch.optim.AdamW(p),
    }
    if with_torch_muon:
        makers["torch.optim.Muon"] = lambda p: torch.optim.Muon(p)
    cpu: dict[str, list[float]] = {name: [] for name in makers}
    sides = {}
    for name, make in makers.items():
        optimizer = make(_parameters(shapes, mesh))
        sides[name] = _timed(optimizer.step, cpu[name])
    wall = medians(interleaved(sides, repeats=3 if quick else 9, axis=axis))
    spent = {name: sorted(values[1:])[len(values[1:]) // 2] for name, values in cpu.items()}
    every = gather_objects(spent, axis, origin=Origin("hp_integration", "bench"))
    summed = {name: 1e3 * sum(rank[name] for rank in every) for name in spent}
    return {name: 1e3 * value for name, value in wall.items()}, summed, _floor(shapes)


def _parameters(shapes: tuple[tuple[int, ...], ...], mesh: object) -> list[nn.Parameter]:
    """FSDP2's parameters with gradients: dim 0 sharded."""
    torch.manual_seed(0)
    parameters = []
    for shape in shapes * _BLOCKS:
        value, gradient = (
            distribute_tensor(torch.randn(shape), mesh, [Shard(0)])  # type: ignore[arg-type]
            for _ in range(2)
        )
        parameter = nn.Parameter(value)
        assert isinstance(gradient, DTensor)
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def _timed(step: Step, spent: list[float]) -> Step:
    def timed() -> None:
        start = time.process_time()
        step()
        spent.append(time.process_time() - start)

    return timed


def _floor(shapes: tuple[tuple[int, ...], ...]) -> float:
    """Milliseconds of CPU to iterate every matrix once, in one process."""
    matrices = [torch.randn(shape) for shape in shapes * _BLOCKS]
    times = []
    for _ in range(3):
        start = time.process_time()
        for matrix in matrices:
            newton_schulz(matrix, steps=5, coefficients="quintic")
        times.append(time.process_time() - start)
    return 1e3 * min(times)
