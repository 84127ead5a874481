"""How the ranks of a group find out whether they can read one another's memory.

They tell one another in collectives of the group itself, not through the store: torchrun gives the
ranks of its next attempt the store of the last one, with all that is in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import secrets
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hp_platform.axis import MeshAxis
from hp_platform.collectives import gather_objects
from hp_platform.peer_memory import (
    PeerMemory,
    board_length,
    enter_group,
    is_known,
    memory_of_group,
)
from hp_platform.records import Origin
from hp_platform.topology import Tier
from hp_platform.trail import trail_of

SWITCH = "HP_PLATFORM_PEER_MEMORY"
"""Environment variable: "0" on any rank has all shares of its groups travel by their backend."""

_ORIGIN = Origin("hp_platform", "peer memory", "meeting")
_COOKIE = 16
_Place = tuple[int, int, bytes, int]
"""A process, where in it its cookie lies, the cookie, and the first rank's descriptor."""


def share_memory(axis: MeshAxis) -> bool:
    """Lets the ranks of an axis read one another's memory where they can; all must call it.

    Calls that lend their tensors then use it: see `all_gather`. It is looked into once a group.

    Returns:
        Whether they can.

    Raises:
        PeerError: a rank was not there to be asked.
    """
    group = axis.process_group
    if trail_of(axis) is None or not isinstance(group, dist.ProcessGroup):
        return False
    if axis.backend != "gloo" or axis.tier is not Tier.FAST or axis.device.type != "cpu":
        return False
    if not is_known(group):
        enter_group(group, _meet(axis, group))
    return memory_of_group(group) is not None


def _meet(axis: MeshAxis, group: dist.ProcessGroup) -> PeerMemory | None:
    cookie = ctypes.create_string_buffer(secrets.token_bytes(_COOKIE), _COOKIE)
    length = board_length(axis.size)
    descriptor, own = -1, None
    found: PeerMemory | None = None
    try:
        if _has_calls() and os.environ.get(SWITCH) != "0":
            # Peers wait for an answer: where the system refuses, it is no.
            with contextlib.suppress(OSError):
                if axis.rank == 0:
                    descriptor = os.memfd_create("hp_platform")
                    os.ftruncate(descriptor, length)
                own = (os.getpid(), ctypes.addressof(cookie), cookie.raw, descriptor)
        places: list[_Place | None] = gather_objects(own, axis, origin=_ORIGIN)
        known = [place for place in places if place is not None]
        if len(known) == axis.size:
            try:
                board = _board(known, length)
                processes = [process for process, *_ in known]
                found = PeerMemory(axis.rank, processes, board, _timeout_of(group))
                _read_cookies(found, known)
            except (OSError, RuntimeError, ValueError):  # the last by mmap, of a stranger's file
                found = None
        # Nobody may go on, or close what is mapped, before all have looked.
        able = gather_objects(found is not None, axis, origin=_ORIGIN)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return found if all(able) else None


def _board(places: Sequence[_Place], length: int) -> mmap.mmap:
    """Memory that all ranks map: the first one's, for whoever may read that one's memory."""
    process, _, _, descriptor = places[0]
    with open(f"/proc/{process}/fd/{descriptor}", "r+b") as file:
        return mmap.mmap(file.fileno(), length)


def _read_cookies(memory: PeerMemory, places: Sequence[_Place]) -> None:
    """Raises RuntimeError or OSError unless every process is the peer and can be read."""
    found = ctypes.create_string_buffer(_COOKIE)
    for peer, (process, address, cookie, _) in enumerate(places):
        if peer == memory.rank:
            continue
        if process == os.getpid():
            raise OSError("ranks are threads of one process")
        memory.read(peer, address, ctypes.addressof(found), _COOKIE)
        if found.raw != cookie:
            raise OSError("processes are numbered differently where the peer runs")


def _has_calls() -> bool:
    known = sys.platform == "linux" and platform.machine() == "x86_64"
    return known and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that a call on the group may take.

    Private to PyTorch, which has no public way to ask. `test_peer_memory` fails if it changes.
    """
    options: Any = group._get_backend(torch.device("cpu")).options
    return float(options._timeout.total_seconds())
