"""How ranks find out whose memory they can read: afresh in every attempt, and leaving nothing."""

import gc
import os
import platform
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hp_platform import MeshAxis, all_gather, lookout
from hp_platform.meeting import share_memory
from hp_platform.store import default_store
from hp_platform.testing import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64",
        reason="ranks read one another's memory on Linux on x86-64 only",
    ),
]


def held():
    """How many descriptors this process has open, and how many maps it shares with ranks."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd")


def test_nothing_is_left_in_the_store_for_the_next_attempt_of_torchrun(monkeypatch):
    monkeypatch.setattr(lookout, "_FIRST", 1000.0)

    def body():
        axis = MeshAxis.of_group()
        all_gather(torch.ones(1), axis).wait()
        before = default_store().num_keys()
        share_memory(axis)
        assert default_store().num_keys() == before

    run_ranks(body, 2)


def test_what_was_opened_is_closed_where_the_system_refuses_the_rest(monkeypatch):
    opened, opens = [], os.pidfd_open

    def refused_at_second(process):
        if opened:
            raise OSError("planted")
        opened.append(opens(process))
        return opened[0]

    def body(rank):
        axis = MeshAxis.of_group()
        all_gather(torch.ones(1), axis).wait()
        before = held()
        if rank == 1:
            monkeypatch.setattr(os, "pidfd_open", refused_at_second)
        assert not share_memory(axis)
        gc.collect()
        assert held() == before
        assert len(opened) == (rank == 1)

    run_ranks(body, 3)


def test_groups_that_are_destroyed_leave_neither_descriptors_nor_maps(tmp_path):
    def once(name, rank):
        dist.init_process_group("gloo", f"file://{tmp_path / name}", rank=rank, world_size=2)
        axis = MeshAxis.of_group()
        shares = share_memory(axis)
        handle = all_gather(torch.ones(2), axis, lends=True)
        assert handle.wait().tolist() == [1.0] * 4
        handle.wait_for_readers()
        dist.destroy_process_group()
        return shares

    def body(rank):
        dist.destroy_process_group()
        once("first", rank)
        gc.collect()
        before = held()
        for number in range(20):
            once(str(number), rank)
        gc.collect()
        assert held() == before
        # What ends a rank destroys the group.
        dist.init_process_group("gloo", f"file://{tmp_path / 'last'}", rank=rank, world_size=2)

    run_ranks(body, 2)
