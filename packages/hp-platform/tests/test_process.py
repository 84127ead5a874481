"""A process that a rank forks, as a loader does, disturbs nothing and is told what it may not."""

import gc
import os
import sys
import time
import warnings

import pytest
import torch

from hp_platform import CollectiveError, MeshAxis, all_gather
from hp_platform.meeting import share_memory
from hp_platform.process import Process
from hp_platform.testing import run_ranks


def in_a_fork(body, timeout=20.0):
    """Runs `body` in a forked process; whether it ended, and well."""
    child = os.fork()
    if not child:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


def test_a_forked_process_has_another_identity():
    before = Process.identity

    def differs():
        assert Process.identity is not before

    assert in_a_fork(differs)
    assert Process.identity is before


@pytest.mark.ranks
@pytest.mark.parametrize("lends", [False, True])
def test_a_forked_process_drops_its_copies_of_handles_and_can_make_no_calls(lends):
    def body(rank):
        axis = MeshAxis.of_group(name="dp")
        if lends:
            share_memory(axis)
        output = torch.empty(2 * axis.size)
        for step in range(3):
            part = torch.full((2,), float(10 * step + rank))
            held = [all_gather(part, axis, output=output, lends=lends)]

            def drop(held=held):
                said = []
                sys.unraisablehook = said.append  # what a `__del__` raises
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    held.clear()
                    gc.collect()
                assert not said
                assert not [each for each in warned if each.category is ResourceWarning]

            def use(held=held, part=part):
                for call in (held[0].wait, lambda: all_gather(part, axis, lends=lends)):
                    with pytest.raises(CollectiveError, match=r"'dp'.*forked from the rank's own"):
                        call()

            # The one that is late finds what its peer's child has left, and may not believe it.
            if rank == 1:
                time.sleep(0.2)
            assert in_a_fork(drop if step < 2 else use)
            assert held[0].wait().view(axis.size, 2)[:, 0].tolist() == [10 * step, 10 * step + 1]
            held[0].wait_for_readers()

    run_ranks(body, 2, timeout=60)
