"""The ranks of this run, and how they report one mistake once.

Under torchrun the ranks are its processes; without it the run is one process. A mistake in the
inputs that any rank finds is exchanged first, so that every rank stops with the same line.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from attrs import frozen
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from hp_integration.errors import InputError
from hp_platform.axis import MeshAxis
from hp_platform.collectives import Origin, barrier, gather_objects
from hp_platform.mesh import make_mesh
from hp_platform.topology import Topology

T = TypeVar("T")


@frozen
class World:
    """All ranks of the run as one axis."""

    axis: MeshAxis

    @classmethod
    def current(cls) -> World:
        """The ranks of the process group that is already there."""
        return cls(MeshAxis.of_group())

    @property
    def rank(self) -> int:
        return self.axis.global_rank

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def is_leader(self) -> bool:
        """True on the one rank that prints and renames files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        barrier(self.axis, origin=Origin("hp_integration", "barrier"))

    def together(self, prepare: Callable[[], T]) -> T:
        """Runs `prepare` on every rank; a mistake found by one stops all with the same line.

        Raises:
            InputError: what the lowest rank with a mistake found.
        """
        value, problem = None, None
        try:
            value = prepare()
        except InputError as error:
            problem = str(error)
        origin = Origin("hp_integration", "inputs")
        found = [text for text in gather_objects(problem, self.axis, origin=origin) if text]
        if found:
            raise InputError(found[0])
        return value  # type: ignore[return-value]


@contextmanager
def process_group() -> Iterator[World]:
    """The ranks that torchrun started, or this process alone.

    The group is destroyed at the end of the block, but not after an exception: peers may be inside
    a collective, and an orderly end would wait for them.
    """
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield World.current()
    dist.destroy_process_group()


def declare_hosts(devices_per_host: int | None, world_size: int) -> None:
    """Makes every package see hosts of `devices_per_host` consecutive ranks, if it is given.

    It holds as long as the process group.
    """
    if devices_per_host is not None:
        hosts = [f"host{rank // devices_per_host}" for rank in range(world_size)]
        Topology.from_hosts(hosts).declare()


def device_mesh(sizes: dict[str, int]) -> DeviceMesh:
    """The mesh of all ranks on the CPU, axes in the order of `sizes`.

    Axes of size 1 have no groups, and the same mesh made again has the groups it had.
    """
    return make_mesh(sizes)


def require_shared_folder(folder: Path, world: World) -> None:
    """Makes `folder` and checks that every rank can write there and sees what rank 0 writes.

    Raises:
        InputError: the folder cannot be made or written, or the hosts do not share it.
    """
    world.together(lambda: _require_writable(folder))
    probe = folder / ".shared-by-all-hosts"
    if world.is_leader:
        probe.touch()
    world.barrier()
    seen = probe.exists()

    def require_seen() -> None:
        if not seen:
            raise InputError(
                f"--out {folder}: rank {world.rank} does not see what rank 0 writes there; "
                "give a folder that all hosts share"
            )

    try:
        world.together(require_seen)
    finally:
        if world.is_leader:
            probe.unlink(missing_ok=True)


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"--out {folder}: cannot write there: {error.strerror}") from None
