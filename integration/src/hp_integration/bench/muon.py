"""One optimizer step of hp_muon against its peers, on PyTorch FSDP2's parameters over four ranks.

The workloads are eight blocks of a dense transformer, eight of fused experts, and a single dense
block for torch.optim.Muon, which runs the iteration through DTensor operators and would take
minutes for eight.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hp_integration.bench.pairs import Step, interleaved, medians
from hp_integration.bench.result import BenchResult, Row, Target
from hp_muon import Muon, newton_schulz
from hp_platform.axis import MeshAxis
from hp_platform.collectives import Origin, gather_objects
from hp_platform.testing import run_ranks

_RANKS = 4
_DENSE_BLOCK = (*[(256, 256)] * 4, (1024, 256), (256, 1024))
_MOE_BLOCK = ((8, 128, 256),)
Maker = Callable[[list[nn.Parameter]], Step]


def _ours(parameters: list[nn.Parameter]) -> Step:
    return Muon(parameters, coefficients="quintic").step


def _adamw(parameters: list[nn.Parameter]) -> Step:
    return torch.optim.AdamW(parameters).step


def _torch_muon(parameters: list[nn.Parameter]) -> Step:
    return torch.optim.Muon(parameters).step


def _gather_and_run_everywhere(parameters: list[nn.Parameter]) -> Step:
    """What sharded Muon is without a plan: every rank gathers and iterates every matrix."""
    momenta = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step() -> None:
        for parameter, momentum in zip(parameters, momenta):
            assert isinstance(parameter.data, DTensor)
            assert isinstance(momentum, DTensor)
            assert parameter.grad is not None
            momentum.mul_(0.95).add_(parameter.grad)
            update = newton_schulz(momentum.full_tensor(), coefficients="quintic")
            rank, ranks = parameter.data.device_mesh.get_local_rank(), _RANKS
            mine = update.float().chunk(ranks, dim=0)[rank]
            parameter.data.to_local().mul_(1 - 0.002).sub_(mine, alpha=0.02)

    return step


@frozen
class Case:
    """A set of matrices, and the sides that are measured on it."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    peers: dict[str, Maker]
    limit: float | None = None


_GENERAL: dict[str, Maker] = {
    "AdamW": _adamw,
    "gather and run everywhere": _gather_and_run_everywhere,
}
_CASES = (
    Case("dense", _DENSE_BLOCK * 8, _GENERAL, limit=1.25),
    Case("moe", _MOE_BLOCK * 8, _GENERAL, limit=1.15),
    Case("one dense block", _DENSE_BLOCK, {"torch.optim.Muon": _torch_muon}),
)


@frozen
class Measured:
    """Milliseconds by side: wall time, and CPU time summed over the ranks; and the floor's CPU."""

    wall: dict[str, float]
    cpu: dict[str, float]
    floor: float


def run(quick: bool) -> BenchResult:
    """Wall time of a step (median) and CPU time summed over the ranks."""
    rows, targets = [], []
    for case in _CASES:
        found = run_ranks(lambda c=case: _measure(c, 2 if quick else 9), _RANKS, timeout=600)[0]
        for peer in case.peers:
            for kind, times in (("wall", found.wall), ("CPU", found.cpu)):
                label = f"{case.name}, FSDP {_RANKS}, {kind}"
                rows.append(Row(label, times["ours"], peer, times[peer], "ms"))
        label = f"{case.name}, FSDP {_RANKS}, CPU"
        rows.append(Row(label, found.cpu["ours"], "Newton-Schulz alone", found.floor, "ms"))
        if case.limit is not None:
            ratio = found.cpu["ours"] / found.floor
            targets.append(Target(f"{case.name}: CPU over Newton-Schulz alone", ratio, case.limit))
    return BenchResult("muon", rows, targets)


def _measure(case: Case, repeats: int) -> Measured:
    axis = MeshAxis.of_group()
    mesh = init_device_mesh("cpu", (axis.size,), mesh_dim_names=("dp_shard",))
    cpu: dict[str, list[float]] = {}
    sides = {}
    for name, make in {"ours": _ours, **case.peers}.items():
        cpu[name] = []
        sides[name] = _counted(make(_parameters(case.shapes, mesh)), cpu[name])
    wall = medians(interleaved(sides, repeats=repeats, axis=axis))
    spent = {name: statistics.median(values[1:]) for name, values in cpu.items()}
    every = gather_objects(spent, axis, origin=Origin("hp_integration", "bench"))
    return Measured(
        {name: 1e3 * value for name, value in wall.items()},
        {name: 1e3 * sum(rank[name] for rank in every) for name in spent},
        _floor(case.shapes),
    )


def _parameters(shapes: Sequence[tuple[int, ...]], mesh: DeviceMesh) -> list[nn.Parameter]:
    """As FSDP2 leaves them: dim 0 sharded, with gradients."""
    torch.manual_seed(0)
    return [_parameter(torch.randn(shape), torch.randn(shape), mesh) for shape in shapes]


def _parameter(value: Tensor, gradient: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    parameter = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
    return parameter


def _counted(step: Step, spent: list[float]) -> Step:
    """`step`, with the CPU seconds of every call appended to `spent`."""

    def counted() -> None:
        start = time.process_time()
        step()
        spent.append(time.process_time() - start)

    return counted


def _floor(shapes: Sequence[tuple[int, ...]]) -> float:
    """Milliseconds of CPU to iterate every matrix once, in one process."""
    matrices = [torch.randn(shape) for shape in shapes]
    times = []
    for _ in range(3):
        start = time.process_time()
        for matrix in matrices:
            newton_schulz(matrix, coefficients="quintic")
        times.append(time.process_time() - start)
    return 1e3 * min(times)
