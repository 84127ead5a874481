"""What a handle promises when things go wrong, across threads and in inference mode."""

import gc
import threading

import pytest
import torch
import torch.distributed as dist

from hp_platform import (
    CollectiveError,
    MeshAxis,
    Receive,
    Send,
    Tier,
    all_gather,
    all_reduce,
    all_reduce_fused,
    exchange,
    ledger,
    reduce_scatter,
)
from hp_platform.handle import NOBODY, Handle, issue
from hp_platform.ledger import _Entry
from hp_platform.testing import run_ranks

AXIS = MeshAxis(
    "dp", 2, 0, (0, 1), Tier.FAST, torch.device("cpu"), process_group=object(), backend="gloo"
)


class Work:
    """A backend's work that may be waited for once, as gloo's receives."""

    def __init__(self):
        self.waits = 0

    def wait(self):
        self.waits += 1
        assert self.waits == 1


def test_an_error_after_the_backends_wait_is_raised_again_and_not_waited_for_again():
    def finish():
        raise ArithmeticError("cannot divide")

    handle = Handle(torch.ones(1), [Work()], "all_reduce", AXIS, finish=finish)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="cannot divide"):
            handle.wait()


def test_threads_that_wait_at_once_all_get_the_finished_result():
    started, work = threading.Event(), Work()
    tensor = torch.zeros(1)

    def finish():
        started.set()
        threading.Event().wait(0.2)
        tensor.add_(1)

    handle = Handle(tensor, [work], "all_reduce", AXIS, finish=finish)
    found = []
    thread = threading.Thread(target=lambda: found.append(handle.wait().item()))
    thread.start()
    assert started.wait(30)
    found.append(handle.wait().item())  # while the other is in the middle of it
    thread.join()
    assert found == [1.0, 1.0]


@pytest.mark.ranks
def test_a_call_in_inference_mode_may_be_waited_for_outside_of_it():
    def run():
        axis = MeshAxis.of_group()
        with torch.inference_mode():
            handles = [
                all_reduce(torch.ones(4), axis, op="avg"),
                all_gather(torch.ones(2), axis),
                reduce_scatter(torch.ones(4), axis, op="avg"),
                reduce_scatter(torch.ones(4), axis, sizes=[2, 2], op="avg"),
                all_reduce_fused([torch.ones(2), torch.ones(2)], axis, op="avg"),
            ]
        found = [handle.wait() for handle in handles]
        return [t.tolist() for t in (*found[:-1], *found[-1])]

    ones = [[1.0] * length for length in (4, 4, 2, 2, 2, 2)]
    assert run_ranks(run, 2) == [ones] * 2


@pytest.mark.ranks
def test_a_group_destroyed_with_calls_in_flight_still_delivers_them_and_refuses_more():
    def run(rank):
        group = dist.new_group([0, 1])
        axis = MeshAxis.of_group(group, "pair")
        pending = [all_reduce(torch.ones(2), axis, op="avg"), all_gather(torch.ones(1), axis)]
        dist.destroy_process_group(group)
        found = [handle.wait().tolist() for handle in pending]
        batch = [Send(torch.ones(2), 1 - rank), Receive(torch.ones(2), 1 - rank)]
        with pytest.raises(CollectiveError, match="the backend refused the call: Group"):
            exchange(batch, axis)
        return found

    assert run_ranks(run, 2) == [[[1.0, 1.0], [1.0, 1.0]]] * 2


class Cycle:
    """Holds a handle, and itself: only Python's collector ends it."""

    def __init__(self, handle):
        self.itself, self.handle = self, handle


def test_a_handle_that_is_collected_while_the_ledger_is_read_is_entered_in_it(monkeypatch):
    record = _Entry.record

    def interrupted(*arguments):
        gc.collect()
        return record(*arguments)

    def read():
        with ledger() as log:
            gc.disable()
            start = lambda: [Work()]  # noqa: E731
            Cycle(issue("all_reduce", AXIS, NOBODY, start, torch.ones(1), 4, ()))
            monkeypatch.setattr(_Entry, "record", interrupted)
            found.extend(log.records)
            gc.enable()

    found = []
    # A thread of its own, which may be left where it waits for itself.
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert [each.completed is not None for each in found] == [True]
