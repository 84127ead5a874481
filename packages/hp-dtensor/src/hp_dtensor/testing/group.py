"""Where a check runs: in the process group there is, or on ranks forked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor.mesh import mesh_axis
from hp_platform import HPError, Origin, gather_objects
from hp_platform.errors import RankFailure
from hp_platform.testing import run_ranks

T = TypeVar("T")


def on_ranks(body: Callable[[], T], world_size: int, timeout: float) -> T:
    """What `body` returns on rank 0 of `world_size` forked ranks.

    Raises:
        AssertionError, HPError: what a rank raised, as if it had been raised here.
        RankFailure: a rank failed in another way; the message has every rank's traceback.
    """
    assert not dist.is_initialized()
    try:
        result: T = run_ranks(body, world_size, timeout=timeout)[0]
    except RankFailure as failure:
        cause = failure.__cause__
        if isinstance(cause, (AssertionError, HPError)):
            raise cause from None
        raise
    return result


def from_everyone(value: Any, mesh: DeviceMesh, origin: Origin) -> list[Any]:
    """The values of all ranks of the mesh, by axis, the same list on every rank up to order."""
    values = [value]
    for axis in range(mesh.ndim):
        gathered = gather_objects(values, mesh_axis(mesh, axis), origin=origin)
        values = [each for part in gathered for each in part]
    return values
