"""Tensors that peers read where they are: results, waits in any order, and what goes wrong."""

import gc
import os
import platform
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hp_platform import AgreementError, MeshAxis, Origin, PeerError, all_gather, reduce_scatter
from hp_platform.meeting import SWITCH, _timeout_of, share_memory
from hp_platform.peer_memory import PeerMemory, peer_memory
from hp_platform.repeatable import repeatable_all_gather, repeatable_reduce_scatter
from hp_platform.testing import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64",
        reason="ranks read one another's memory on Linux on x86-64 only",
    ),
]

ORIGIN = Origin("test", "lent")


@pytest.fixture(scope="module")
def readable():
    """Skips where the system lets no process read another's memory."""
    # Asked of ranks, for it depends on them; skipped here, for a rank that skips has failed.
    if not all(run_ranks(lambda: share_memory(MeshAxis.of_group()), 2)):
        pytest.skip("this system lets no process read another's memory")


def shared_axis():
    axis = MeshAxis.of_group()
    assert peer_memory(axis) is None
    assert share_memory(axis)
    assert peer_memory(axis) is not None
    assert share_memory(axis)
    return axis


@pytest.mark.parametrize("world", [2, 4])
def test_lent_tensors_give_what_sent_ones_do(readable, world):
    def body(rank):
        axis = shared_axis()
        generator = torch.Generator().manual_seed(rank)
        # Longer than one block, too.
        for length, dtype in [(1, torch.float32), (300_001, torch.float32), (77, torch.bfloat16)]:
            rows = torch.randn(length * world, generator=generator).to(dtype)
            part = rows[:length].clone()
            sent = all_gather(part, axis).wait()
            output = torch.empty_like(sent)
            # The part may lie at its place in the output, as the own share in a reduced tensor.
            output[rank * length : (rank + 1) * length] = part
            place = output[rank * length : (rank + 1) * length]
            again = repeatable_all_gather(place, axis, output=output, lends=True)
            summed = reduce_scatter(rows, axis, op="avg").wait()
            scatter = repeatable_reduce_scatter(rows, axis, scratch=rows.clone(), lends=True)
            for _ in range(2):
                handles = [
                    all_gather(part, axis, lends=True),
                    again(ORIGIN),
                    reduce_scatter(rows, axis, op="avg", lends=True),
                    scatter(rows.new_empty(length), ORIGIN),
                ]
                assert all(handle.lends for handle in handles)
                # Ranks wait in different orders, and for readers before others have come to read.
                for handle in handles[:: 1 if rank % 2 else -1]:
                    handle.wait()
                    handle.wait_for_readers()
                assert not any(handle.lends for handle in handles)
                gathered, repeated, averaged, scattered = (handle.wait() for handle in handles)
                assert torch.equal(gathered, sent)
                assert torch.equal(repeated, sent)
                assert torch.equal(averaged, summed)
                assert torch.equal(scattered / world, summed)
        # More calls than can be in use at one time, of which no readers were waited for.
        for step in range(150):
            value = torch.full((3,), float(step + rank))
            found = all_gather(value, axis, lends=True).wait().view(world, 3)
            assert found[:, 0].tolist() == [float(step + other) for other in range(world)]
        # Waited for outside of the mode in which it was issued.
        with torch.inference_mode():
            handle = reduce_scatter(torch.ones(2 * world), axis, lends=True)
        assert handle.wait().tolist() == [world, world]
        handle.wait_for_readers()
        if (
            world == 2
        ):  # one rank waits, in the program's own call, for the other, which waits for it
            crossed = all_gather(torch.ones(1), axis, lends=True)
            if rank == 0:
                crossed.wait()
                crossed.wait_for_readers()
                dist.send(torch.ones(1), 1)
            else:
                dist.recv(torch.empty(1), 0)
        uneven = all_gather(torch.ones(2 + rank), axis, lends=True)
        with pytest.raises(AgreementError, match=rf"bytes, this rank's has {4 * (2 + rank)}"):
            uneven.wait()

    run_ranks(body, world)


def test_groups_that_differ_or_may_not_send_as_before(monkeypatch):
    def refused(_):
        raise OSError("planted")

    def body(rank):
        if rank == 1:
            os.environ[SWITCH] = "0"
        axis = MeshAxis.of_group()
        assert not share_memory(axis)
        handle = all_gather(torch.tensor([rank]), axis, lends=True)
        assert not handle.lends
        assert handle.wait().tolist() == [0, 1]
        # Private to PyTorch.
        group = dist.new_group([0, 1], timeout=timedelta(seconds=77))
        assert _timeout_of(group) == 77
        # The system refuses one rank what the others have.
        os.environ.pop(SWITCH, None)
        monkeypatch.setattr(os, "memfd_create", refused)
        assert not share_memory(MeshAxis.of_group(group))

    run_ranks(body, 2)


def test_a_peer_that_ends_is_named_by_those_that_wait_for_it(readable):
    def body(rank):
        axis = shared_axis()
        all_gather(torch.ones(2), axis, lends=True).wait()
        if rank == 1:
            os._exit(0)
        late = all_gather(torch.ones(2), axis, lends=True)
        with pytest.raises(PeerError, match=r"all_gather on axis world.*process \d+\) has ended"):
            late.wait()
        for _ in range(2):
            with pytest.raises(PeerError, match="has ended"):
                late.wait_for_readers()
        return "named"

    with pytest.raises(Exception, match="rank 1") as raised:
        run_ranks(body, 2)
    assert "rank 0" not in str(raised.value).split("---")[0]


class Cycle:
    """Holds a handle, and itself: only Python's collector ends it."""

    def __init__(self, handle):
        self.itself, self.handle = self, handle


@pytest.mark.parametrize("waits", [False, True])
def test_a_call_whose_handle_is_collected_while_it_is_read_is_finished_by_its_reader(
    readable, monkeypatch, waits
):
    read = PeerMemory.read

    def interrupted(*arguments):
        gc.collect()
        read(*arguments)

    def body(rank):
        axis = shared_axis()
        memory = peer_memory(axis)
        output = torch.empty(3)
        gc.disable()
        # An average: something is left to do when it has been read.
        Cycle(
            reduce_scatter(
                torch.full((6,), 1.0 + 2 * rank), axis, op="avg", output=output, lends=True
            )
        )
        later = all_gather(torch.ones(1), axis, lends=True)
        monkeypatch.setattr(PeerMemory, "read", interrupted)
        dist.barrier()
        if waits:
            later.wait()
        memory.read_what_has_come()
        later.wait()
        assert output.tolist() == [2.0] * 3
        later.wait_for_readers()
        assert not memory._unread

    run_ranks(body, 2, timeout=30)


def test_a_call_that_cannot_be_read_is_told_of_to_who_waits_for_it_only(readable):
    def body(rank):
        axis = shared_axis()
        uneven = all_gather(torch.ones(2 + rank), axis, lends=True)
        even = all_gather(torch.ones(2), axis, lends=True)
        dist.barrier()
        peer_memory(axis).read_what_has_come()
        assert even.wait().tolist() == [1.0] * 4
        with pytest.raises(AgreementError, match="bytes, this rank's has"):
            uneven.wait()

    run_ranks(body, 2)
