"""One optimizer step of hp_muon against its peers, on PyTorch FSDP2's parameters over four ranks.

Workloads: eight blocks of a dense transformer, eight of fused experts, and a single dense block for
torch.optim.Muon, which runs the iteration through DTensor operators and would take minutes for
eight. All sides of a workload are interleaved in one process group: ours on three meshes, peers on
those they support, the iteration alone (every matrix once, divided over the ranks, in the plain
form of five direct steps), gather-and-run-everywhere, and AdamW.

Reported: wall time of a step, CPU time summed over the ranks, state of all ranks, work (the busiest
rank's operations over an even share), and bytes that all ranks receive, by tier, against the lower
bound: every shard once to the owner of its matrix, and every update once back, in bfloat16.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from hp_integration.bench.muon_peers import (
    GatherAndRunEverywhere,
    Maker,
    adamw,
    installed,
    ours,
    state_bytes,
    stepper,
    torch_muon,
)
from hp_integration.bench.pairs import Step, interleaved, medians
from hp_integration.bench.result import BenchResult, Row, Target
from hp_muon import Muon
from hp_platform import ledger
from hp_platform.axis import MeshAxis
from hp_platform.collectives import Origin, gather_objects
from hp_platform.testing import run_ranks

_RANKS = 4
_DENSE_BLOCK = (*[(256, 256)] * 4, (1024, 256), (256, 1024))
_MOE_BLOCK = ((8, 128, 256),)
_QUINTIC = (3.4445, -4.7750, 2.0315)
_FLOOR = "iteration alone"
OURS = "ours"

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[Placement, ...]]] = {
    "FSDP4": ((4,), ("dp_shard",), (Shard(0),)),
    "HSDP2x2": ((2, 2), ("dp_replicate", "dp_shard"), (Replicate(), Shard(0))),
    "TP2xFSDP2": ((2, 2), ("dp_shard", "tp"), (Shard(0), Shard(1))),
}


@frozen
class Case:
    """A set of matrices, and the sides that are measured on it, by mesh."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    sides: dict[str, dict[str, Maker]]
    limits: dict[str, float]


@frozen
class Measured:
    """By (mesh, side).

    Attributes:
        wall, cpu: milliseconds; CPU time is summed over the ranks.
        state: bytes of optimizer state of all ranks.
        operations: ours by mesh: the busiest rank's over an even share of them.
        wire: ours by mesh and tier: bytes that all ranks received.
    """

    wall: dict[tuple[str, str], float]
    cpu: dict[tuple[str, str], float]
    state: dict[tuple[str, str], float]
    operations: dict[str, float]
    wire: dict[tuple[str, str], float]


def _cases(quick: bool) -> tuple[Case, ...]:
    general: dict[str, Maker] = {"AdamW": adamw}
    slow: dict[str, Maker] = {"gather everywhere": GatherAndRunEverywhere}
    peers = installed("muon_fsdp2", "dtensor_muon", "muonium")
    # These run every matrix on each replica; the third refuses two axes.
    replicating = installed("dtensor_muon", "muonium")
    dense = _DENSE_BLOCK * (4 if quick else 8)
    few = {} if quick else slow | replicating
    return (
        Case(
            "dense",
            dense,
            {
                "FSDP4": {OURS: ours, **general, **({} if quick else slow), **peers},
                "HSDP2x2": {OURS: ours, **few},
                "TP2xFSDP2": {OURS: ours},
            },
            # 1.42 is 0.45 of what dion takes there, which iterates every matrix on each replica.
            {"FSDP4": 1.25, "HSDP2x2": 1.42},
        ),
        Case(
            "moe",
            _MOE_BLOCK * 8,
            {
                "FSDP4": {OURS: ours, **general, **slow, **peers},
                "HSDP2x2": {OURS: ours},
                "TP2xFSDP2": {OURS: ours},
            },
            {"FSDP4": 1.15},
        ),
        Case("block", _DENSE_BLOCK, {"FSDP4": {OURS: ours, "torch.optim.Muon": torch_muon}}, {}),
    )


def run(quick: bool) -> BenchResult:
    """Every case; see the module for what is reported."""
    rows: list[Row] = []
    targets: list[Target] = []
    for case in _cases(quick):
        found = run_ranks(lambda c=case: measure(c, 2 if quick else 9), _RANKS, timeout=900)[0]
        rows += rows_of(case, found)
        targets += targets_of(case, found)
    return BenchResult("muon", rows, targets)


def rows_of(case: Case, found: Measured) -> list[Row]:
    """Ours against every other side of the same mesh, the floor, and the lower bounds."""
    rows = []
    for mesh, sides in case.sides.items():
        where, own = f"{case.name} {mesh}", (mesh, OURS)
        for peer in sides:
            for kind, times in (("wall", found.wall), ("CPU", found.cpu)):
                if peer != OURS:
                    rows.append(Row(f"{where} {kind}", times[own], peer, times[mesh, peer], "ms"))
            if peer != OURS:
                state = (found.state[own] / 1e6, peer, found.state[mesh, peer] / 1e6)
                rows.append(Row(f"{where} state", *state, "MB"))
        floor = found.cpu["", _FLOOR]
        rows.append(Row(f"{where} CPU", found.cpu[own], _FLOOR, floor, "ms"))
        share = found.operations[mesh]
        rows.append(Row(f"{where} work", share, "even share", 1.0, "x"))
        bound = lower_bound(case.shapes, mesh) / 1e6
        for (of, tier), received in found.wire.items():
            if of == mesh and bound:
                label = f"{where} {tier} bytes"
                rows.append(Row(label, received / 1e6, "lower bound", bound, "MB"))
    return rows


def targets_of(case: Case, found: Measured) -> list[Target]:
    """Limits on CPU over the floor, on wall over the fastest peer, and between meshes."""
    floor = found.cpu["", _FLOOR]
    targets = [
        Target(f"{case.name}, {mesh}: CPU over {_FLOOR}", found.cpu[mesh, OURS] / floor, limit)
        for mesh, limit in case.limits.items()
    ]
    for mesh, sides in case.sides.items():
        peers = {side: found.wall[mesh, side] for side in sides if side not in (OURS, "AdamW")}
        if peers:
            fastest = min(peers, key=lambda side: peers[side])
            name = f"{case.name}, {mesh}: wall over the fastest peer, {fastest}"
            targets.append(Target(name, found.wall[mesh, OURS] / peers[fastest], 1.0))
    for (mesh, tier), received in found.wire.items():
        if not lower_bound(case.shapes, mesh):
            name = f"{case.name}, {mesh}: MB received on the {tier} tier"
            targets.append(Target(name, received / 1e6, 0.0))
    crossed = "TP2xFSDP2"
    if crossed in case.sides:
        for kind, times in (("wall", found.wall), ("CPU", found.cpu)):
            ratio = times[crossed, OURS] / times["FSDP4", OURS]
            targets.append(Target(f"{case.name}: {kind} of {crossed} over FSDP4", ratio, 1.3))
    return targets


def lower_bound(shapes: Sequence[tuple[int, ...]], mesh: str) -> float:
    """Bytes that all ranks must receive at least, in bfloat16.

    Of every matrix that S ranks share, (S - 1) / S go to its owner and as much comes back; a stack
    whose matrices lie whole on their ranks costs nothing. Every replica but one then receives its
    part of each parameter in float32.
    """
    sizes, _, placements = MESHES[mesh]
    total = 0.0
    for shape in shapes:
        numel = math.prod(shape)
        plane = [p for p in placements if isinstance(p, Shard) and p.dim >= len(shape) - 2]
        cut = math.prod(size for size, p in zip(sizes, placements) if p in plane)
        whole = math.prod(size for size, p in zip(sizes, placements) if isinstance(p, Replicate))
        total += 2 * 2 * numel * (cut - 1) / cut + 4 * numel * (whole - 1)
    return total


def measure(case: Case, repeats: int) -> Measured:
    """On every rank of a group; all get the same numbers."""
    axis = MeshAxis.of_group()
    spent: dict[tuple[str, str], list[float]] = {("", _FLOOR): []}
    sides = {("", _FLOOR): _counted(_floor(case.shapes, axis), spent["", _FLOOR])}
    optimizers: dict[tuple[str, str], torch.optim.Optimizer] = {}
    for name, made in case.sides.items():
        sizes, axes, placements = MESHES[name]
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
        for side, make in made.items():
            key = (name, side)
            optimizers[key] = make(_parameters(case.shapes, mesh, placements))
            spent[key] = []
            sides[key] = _counted(stepper(optimizers[key]), spent[key])
    named = {str(key): step for key, step in sides.items()}
    wall = medians(interleaved(named, repeats=repeats, axis=axis))
    operations = {
        mesh: optimizer.plan.operations
        for (mesh, side), optimizer in optimizers.items()
        if side == OURS and isinstance(optimizer, Muon)
    }
    own: dict[str, dict[Any, float]] = {
        "cpu": {key: statistics.median(values[1:]) for key, values in spent.items()},
        "state": {key: state_bytes(optimizer) for key, optimizer in optimizers.items()},
        "wire": _received(optimizers),
        "operations": operations,
    }
    every = gather_objects(own, axis, origin=Origin("hp_integration", "bench"))
    return Measured(
        {key: 1e3 * wall[str(key)] for key in sides},
        {key: 1e3 * sum(rank["cpu"][key] for rank in every) for key in spent},
        {key: sum(rank["state"][key] for rank in every) for key in optimizers},
        {
            mesh: _imbalance([rank["operations"][mesh] for rank in every])
            for mesh in own["operations"]
        },
        {key: sum(rank["wire"].get(key, 0) for rank in every) for key in own["wire"]},
    )


def _imbalance(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values)


def _received(
    optimizers: dict[tuple[str, str], torch.optim.Optimizer],
) -> dict[tuple[str, str], float]:
    """Bytes this rank receives in a step of ours, by mesh and tier."""
    found: dict[tuple[str, str], float] = {}
    for (mesh, side), optimizer in optimizers.items():
        if side != OURS:
            continue
        with ledger() as log:
            optimizer.step()
        found[mesh, "fast"] = 0.0
        for record in log.records:
            key = (mesh, record.tier.value)
            found[key] = found.get(key, 0.0) + record.wire
    return found


def _parameters(
    shapes: Sequence[tuple[int, ...]], mesh: DeviceMesh, placements: Sequence[Placement]
) -> list[nn.Parameter]:
    """As FSDP2 leaves them, dim 0 sharded; with gradients."""
    torch.manual_seed(0)
    return [_parameter(torch.randn(s), torch.randn(s), mesh, placements) for s in shapes]


def _parameter(
    value: Tensor, gradient: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> nn.Parameter:
    parameter = nn.Parameter(distribute_tensor(value, mesh, placements))
    parameter.grad = distribute_tensor(gradient, mesh, placements)
    return parameter


def _counted(step: Step, spent: list[float]) -> Step:
    """`step`, with the CPU seconds of every call appended to `spent`."""

    def counted() -> None:
        start = time.process_time()
        step()
        spent.append(time.process_time() - start)

    return counted


def _floor(shapes: Sequence[tuple[int, ...]], axis: MeshAxis) -> Step:
    """Every matrix iterated once, by one of the ranks: the plain direct form, one by one."""
    matrices = [m for shape in shapes for m in torch.randn(shape).reshape(-1, *shape[-2:])]
    # By size, so that all ranks have equal work.
    matrices.sort(key=lambda matrix: matrix.numel())
    mine = [m.mT if m.shape[0] > m.shape[1] else m for m in matrices[axis.rank :: axis.size]]

    def step() -> None:
        for matrix in mine:
            x = matrix / (matrix.norm() + 1e-7)
            for _ in range(5):
                a, b, c = _QUINTIC
                gram = x @ x.mT
                polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
                x = torch.addmm(x, polynomial, x, beta=a)

    return step
