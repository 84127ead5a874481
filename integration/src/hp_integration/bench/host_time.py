"""Host time of a sharded step: PyTorch's `fake` group moves nothing, and tensors are tiny."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fully_shard_peer
from torch.testing._internal.distributed.fake_pg import FakeStore

import hp_fsdp
from hp_integration.bench.pairs import Step

_UNITS, _PARAMETERS, _SIZE = 48, 11, 16


class _Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(
            nn.Parameter(torch.ones(_SIZE, _SIZE)) for _ in range(_PARAMETERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = x * factor
        return x


def milliseconds_a_unit(repeats: int) -> dict[str, float]:
    """Medians of process time for one unit of one step, beyond the unsharded model's.

    Returns:
        "per_parameter" and "shared_buffer" for hp_fsdp's policies, and "FSDP2".
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        sides = {
            "per_parameter": _step(hp_fsdp.fully_shard, mesh),
            "shared_buffer": _step(hp_fsdp.fully_shard, mesh, comm_policy="shared_buffer"),
            "FSDP2": _step(fully_shard_peer, mesh),
            "plain": _step(None, mesh),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(3 + repeats):
            for name, step in sides.items():
                start = time.process_time()
                step()
                if repeat >= 3:
                    times[name].append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()
    medians = {name: 1e3 * statistics.median(found) / _UNITS for name, found in times.items()}
    plain = medians.pop("plain")
    return {name: value - plain for name, value in medians.items()}


def _step(shard: Callable[..., Any] | None, mesh: DeviceMesh, **options: Any) -> Step:
    model = nn.Sequential(*(_Unit() for _ in range(_UNITS)))
    if shard is not None:
        for unit in model:
            shard(unit, mesh=mesh, **options)
        shard(model, mesh=mesh, **options)
    x = torch.ones(_SIZE, _SIZE)

    def step() -> None:
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step
