"""Device meshes whose axes of size 1 have no groups, and which cost nothing to build again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hp_platform.errors import TopologyError
from hp_platform.groups import group_of
from hp_platform.hccl import HcclGroupOptions


class _NoGroup:
    """Stands where a mesh expects the group of an axis of size 1, and can be used for nothing."""

    def __init__(self, name: str) -> None:
        self.group_name = f"hp_platform: axis {name} of size 1 has no group"

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(f"{self.group_name}; nothing is to be sent along it ({attribute})")


def make_mesh(
    axes: Mapping[str, int],
    *,
    device_type: str = "cpu",
    options: Mapping[str, HcclGroupOptions] | None = None,
) -> DeviceMesh:
    """PyTorch's mesh of all ranks in row-major order, with as few process groups as will do.

    Unlike `init_device_mesh`, it makes no group for an axis of size 1, takes the default group
    for an axis of all ranks, and gives a mesh that is built again the groups it had. All ranks
    must make this call. Without a process group, one is initialised from the launcher's
    variables.

    Args:
        axes: sizes by axis name, outermost first; their product is the world size.
        device_type: "cpu", "cuda" or "npu". Where no device has been chosen yet, the one that
            LOCAL_RANK names is.
        options: for HCCL, by axis name: buffer size and name of the axis's groups.

    Raises:
        TopologyError: the sizes do not multiply to the world size, or options name no axis.
    """
    names, sizes = tuple(axes), tuple(axes.values())
    if not dist.is_initialized():
        dist.init_process_group()
    world_size = dist.get_world_size()
    ranks = torch.arange(world_size)
    if not names or any(size < 1 for size in sizes) or torch.Size(sizes).numel() != world_size:
        raise TopologyError(
            f"a mesh of {dict(axes)} has {torch.Size(sizes).numel()} places, the world has "
            f"{world_size} ranks; give sizes that multiply to {world_size}"
        )
    unknown = sorted(set(options or {}) - set(names))
    if unknown:
        raise TopologyError(f"options for {unknown}: the mesh has axes {names}")
    _choose_device(device_type)
    grid = ranks.view(sizes)
    groups = [
        _group_of_axis(grid, index, name, (options or {}).get(name))
        for index, name in enumerate(names)
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=names)


def _group_of_axis(
    grid: torch.Tensor, index: int, name: str, options: HcclGroupOptions | None
) -> Any:
    size = grid.shape[index]
    if size == 1:
        return _NoGroup(name)
    if size == dist.get_world_size() and options is None:
        return dist.group.WORLD
    lines = grid.movedim(index, -1).reshape(-1, size).tolist()
    own = next(line for line in lines if dist.get_rank() in line)
    return group_of(name, tuple(own), options)


def _choose_device(device_type: str) -> None:
    if device_type == "cpu" or "LOCAL_RANK" not in os.environ:
        return
    module = torch.get_device_module(device_type)
    if not module.is_initialized():
        module.set_device(int(os.environ["LOCAL_RANK"]))
