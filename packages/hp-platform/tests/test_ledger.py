"""The ledger: order of events, threads, summaries and the trace."""

import threading

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from hp_platform import (
    Event,
    HPError,
    MeshAxis,
    Origin,
    Tier,
    Topology,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather_objects,
    ledger,
    mark,
    phase,
    reduce,
    reduce_scatter,
)
from hp_platform.handle import issue
from hp_platform.testing import run_ranks
from hp_platform.traffic import bytes_between
from hp_platform.transfers import Receive, Send, exchange, receive
from hp_platform.transfers import send as send_to

AXIS = MeshAxis(
    "dp", 2, 0, (0, 1), Tier.SLOW, torch.device("cpu"), process_group=object(), backend="gloo"
)
ORIGIN = Origin("hp_fsdp", "layers.3", "backward")


def send(name="all_reduce", axis=AXIS, tensor=None, origin=ORIGIN):
    """A collective that is only entered: no backend takes part."""
    tensor = torch.ones(4) if tensor is None else tensor
    return issue(name, axis, origin, lambda: [], tensor, tensor.nbytes, (tensor,), dtype=None)


def test_issues_waits_and_marks_are_in_order():
    with ledger() as log:
        first = send()
        second = send("all_gather")
        mark("backward begins")
        second.wait()
        first.wait()
        first.wait()
    assert log.events == [
        Event("issue", 0),
        Event("issue", 1),
        Event("mark", "backward begins"),
        Event("wait", 1),
        Event("complete", 1),
        Event("wait", 0),
        Event("complete", 0),
    ]
    one, two = log.records
    assert (one.issue_order, one.wait_order, one.complete_order) == (0, 5, 6)
    assert (two.issue_order, two.wait_order, two.complete_order) == (1, 3, 4)
    assert 0 <= one.issued <= two.issued <= two.waited <= two.completed <= one.waited
    assert (one.origin, one.axis, one.axis_size, one.tier) == (ORIGIN, "dp", 2, Tier.SLOW)


def test_a_collective_not_waited_for_in_time_has_no_wait():
    with ledger() as log:
        handle = send()
    handle.wait()
    assert log.records[0].waited is None
    assert log.events == [Event("issue", 0)]


def test_nothing_is_entered_while_no_ledger_is_open():
    with ledger() as log:
        pass
    send().wait()
    mark("late")
    assert log.records == []
    assert log.events == []


def test_nested_ledgers_record_the_same_collectives():
    with ledger() as outer:
        send().wait()
        with ledger() as inner:
            send("broadcast").wait()
        send().wait()
    assert [record.operation for record in inner.records] == ["broadcast"]
    assert [r.operation for r in outer.records] == ["all_reduce", "broadcast", "all_reduce"]
    assert inner.records[0].index == 0
    assert outer.records[1].index == 1


def test_threads_with_ledgers_of_their_own_do_not_see_one_another():
    together = threading.Barrier(2)
    logs = {}

    def work(name):
        with ledger() as log:
            together.wait()
            for _ in range(50):
                send(name).wait()
            together.wait()
        logs[name] = log

    threads = [threading.Thread(target=work, args=(name,)) for name in ("reduce", "broadcast")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, log in logs.items():
        assert [record.operation for record in log.records] == [name] * 50
        assert len(log.events) == 150


def test_a_thread_without_a_ledger_writes_to_the_open_ones():
    with ledger() as log:
        thread = threading.Thread(target=lambda: send().wait())
        thread.start()
        thread.join()
    assert [event.kind for event in log.events] == ["issue", "wait", "complete"]


def test_concurrent_entries_lose_nothing():
    together = threading.Barrier(4)

    def work():
        together.wait()
        for _ in range(200):
            send().wait()
        together.wait()  # the number of a thread that has ended is given again

    with ledger() as log:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [record.index for record in log.records] == list(range(800))
    orders = sorted(
        order
        for record in log.records
        for order in (record.issue_order, record.wait_order, record.complete_order)
    )
    assert orders == list(range(2400))
    assert {record.thread for record in log.records} == {0, 1, 2, 3}


@pytest.mark.ranks
def test_a_collective_issued_by_a_backward_hook_is_entered():
    def body():
        axis = MeshAxis.of_group(name="dp")
        weight = torch.ones(4, requires_grad=True)
        weight.register_hook(lambda grad: all_reduce(grad.clone(), axis, origin=ORIGIN).wait())
        with ledger() as log:
            (weight * 2).sum().backward()
        return [record.origin for record in log.records], weight.grad.tolist()

    assert run_ranks(body, 2) == [([ORIGIN], [4.0] * 4)] * 2


def test_alignment_means_address_and_length():
    buffer = torch.empty(1024)
    start = -buffer.data_ptr() % 512 // 4
    with ledger() as log:
        send(tensor=buffer[start : start + 128]).wait()
        send(tensor=buffer[start + 1 : start + 129]).wait()
        send(tensor=buffer[start : start + 127]).wait()
    assert [record.aligned for record in log.records] == [True, False, False]


def test_the_summary_adds_up_by_tier_axis_phase_and_operation():
    fast = MeshAxis(
        "tp", 2, 0, (0, 1), Tier.FAST, torch.device("cpu"), process_group=object(), backend="gloo"
    )
    with ledger() as log:
        for _ in range(3):
            send().wait()
        send(origin=Origin("hp_muon", "", "optimizer")).wait()
        send("all_gather", axis=fast, tensor=torch.ones(100)).wait()
    summary = log.summary()
    assert (summary.count, summary.bytes, summary.crossing) == (5, 4 * 16 + 400, 4 * 16)
    line = summary[Tier.SLOW, "dp", "all_reduce"]
    assert (line.count, line.bytes, [part.phase for part in line.lines]) == (
        *(4, 64),
        ["backward", "optimizer"],
    )
    assert summary.where(phase="optimizer").bytes == 16
    assert summary.where(tier=Tier.FAST, phase="optimizer").count == 0
    text = str(summary).splitlines()
    assert text[2].split() == ["slow", "dp", "backward", "all_reduce", "3", "48", "48"]
    assert text[-1].split() == ["total", "5", "464", "64"]
    with pytest.raises(KeyError):
        summary[Tier.FAST, "dp", "all_reduce"]


def test_the_table_has_a_line_for_every_record():
    with ledger() as log:
        send().wait()
        unfinished = send("all_gather")
    header, _, first, second = log.table().splitlines()
    assert header.split()[:4] == ["#", "operation", "axis", "tier"]
    assert "hp_fsdp layers.3 backward" in first
    assert second.split()[-1] == "-"
    unfinished.wait()


def test_events_between_two_marks_can_be_asked_for():
    with ledger() as log:
        send().wait()
        log.mark("backward begins")
        handle = send()
        log.mark("backward ends")
        handle.wait()
    assert log.between("backward begins", "backward ends") == [Event("issue", 1)]
    with pytest.raises(KeyError, match="backward ends"):
        log.between("backward ends", "backward begins")


@pytest.mark.ranks
def test_order_of_issue_and_wait_shows_what_overlaps():
    def body():
        axis = MeshAxis.of_group()
        with ledger() as log:
            first = all_gather(torch.ones(2), axis)
            second = all_gather(torch.ones(2), axis)
            first.wait()
            second.wait()
        return log.records[1].issue_order < log.records[0].wait_order

    assert run_ranks(body, 2) == [True, True]


def test_phases_are_blocks_and_nest():
    with ledger() as log:
        send().wait()
        with phase("step"), phase("optimizer"):
            early = send(origin=Origin("somebody"))
        with log.phase("evaluation"):
            early.wait()
        send(origin=Origin("somebody"))
    first, early, last = log.records
    assert (first.issued_in, first.waited_in, first.phase) == ((), (), "backward")
    assert (early.issued_in, early.waited_in) == (("step", "optimizer"), ("evaluation",))
    assert (early.phase, last.phase) == ("optimizer", "")
    within = {label: early.within(label) for label in ("step", "optimizer", "evaluation")}
    assert within == {"step": True, "optimizer": True, "evaluation": False}
    assert [e for e in log.events if e.kind in ("enter", "leave")] == [
        Event("enter", "step"),
        Event("enter", "optimizer"),
        Event("leave", "optimizer"),
        Event("leave", "step"),
        Event("enter", "evaluation"),
        Event("leave", "evaluation"),
    ]


def test_a_phase_ends_with_an_error_and_without_a_ledger_it_is_nothing():
    with ledger() as log:
        with pytest.raises(KeyError), phase("step"):
            raise KeyError
        send().wait()
    assert log.records[0].issued_in == ()
    with phase("nobody listens"):
        send().wait()


def test_unaligned_collectives_can_be_asked_for():
    buffer = torch.empty(1024)
    start = -buffer.data_ptr() % 512 // 4
    with ledger() as log:
        send(tensor=buffer[start : start + 128]).wait()
        send("all_gather", tensor=buffer[start + 1 : start + 129]).wait()
    assert [record.operation for record in log.unaligned()] == ["all_gather"]


class Sum(torch.autograd.Function):
    """Shards summed over `AXIS` in the backward pass, and waited for only then."""

    @staticmethod
    def forward(ctx, tensor, handle):
        ctx.handle = handle
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.handle.wait()
        send(origin=Origin("hp_fsdp", "late", "backward")).wait()
        return gradient, None


def test_waits_on_the_slow_tier_inside_the_backward_pass_can_be_asked_for():
    """By when the wait happened, not by what the collective was for."""
    fast = MeshAxis(
        "tp", 2, 0, (0, 1), Tier.FAST, torch.device("cpu"), process_group=object(), backend="gloo"
    )
    weight = torch.ones(4, requires_grad=True)
    weight.register_hook(lambda gradient: send(axis=fast, tensor=gradient).wait())
    with ledger() as log:
        forward = send(origin=Origin("hp_fsdp", "prefetched in forward", "forward"))
        gradient = send(origin=Origin("hp_fsdp", "waited for at the end", "backward"))
        Sum.apply(weight, forward).sum().backward()
        gradient.wait()
    inside = log.waits(tier=Tier.SLOW, phase="backward")
    assert [record.origin.name for record in inside] == ["prefetched in forward", "late"]
    assert all(record.wait_order < log.records[1].wait_order for record in inside)
    assert [record.axis for record in log.waits(tier=Tier.FAST, phase="backward")] == ["tp"]
    assert len(log.waits()) == 4
    assert log.records[1].waited_in == ()


def test_being_in_the_backward_pass_is_noticed_in_hooks_and_final_callbacks():
    """Guards the private call that tells whether autograd runs."""
    seen = []

    def hook(tensor):
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: send().wait())
        send().wait()

    weight = torch.ones(4, requires_grad=True)
    weight.register_post_accumulate_grad_hook(hook)
    with ledger() as log:
        (weight * 2).sum().backward()
        send().wait()
    seen = [(record.issued_in, record.waited_in) for record in log.records]
    assert seen == [(("backward",),) * 2, (("backward",),) * 2, ((), ())]


@pytest.mark.ranks
def test_bytes_and_crossings_of_a_known_step_are_those_computed_by_hand():
    """Two hosts of two ranks: sharding inside a host, replicas across, then an optimizer step."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        hosts = Topology.regular(2, 2)
        replicate, shard = (MeshAxis.of_mesh(mesh, name, hosts) for name in ("replicate", "shard"))
        world = MeshAxis.of_group(name="world", topology=hosts)
        rows = (3, 1)
        with ledger() as log:
            weight = all_gather(torch.ones(rows[shard.rank], 8), shard, sizes=rows).wait()
            part = reduce_scatter(weight, shard, sizes=rows).wait()  # 4 rows of 32 bytes
            all_reduce(part, replicate).wait()
            with phase("optimizer"):
                shares = (1, 2, 3, 4)
                all_gather(torch.ones(shares[rank], 8), world, sizes=shares).wait()
                reduce_scatter(torch.ones(10, 8), world, sizes=shares).wait()
                all_reduce(torch.ones(8), world).wait()
                broadcast(torch.ones(8), world, source=3).wait()
                reduce(torch.ones(8), world, destination=0).wait()
                blocks = [[1, 2, 3, 4], [2, 2, 2, 2], [3, 2, 1, 0], [4, 2, 0, 1]]
                all_to_all(
                    torch.ones(sum(blocks[rank]), 8),
                    world,
                    input_sizes=blocks[rank],
                    output_sizes=[line[rank] for line in blocks],
                ).wait()
                barrier(world)
        sizes = [record.bytes for record in log.records]
        crossings = [record.crossing for record in log.records]
        optimizer = log.summary().where(phase="optimizer")
        assert log.crossing("optimizer") == sum(crossings[3:]) == optimizer.crossing
        assert log.crossing() == sum(crossings) == log.summary().crossing
        return sizes, crossings, [record.wire for record in log.records]

    sizes, crossings, wires = zip(*run_ranks(body, 4))
    row = 32
    assert [size[:3] for size in sizes] == [
        [4 * row, 4 * row, (3, 1)[r % 2] * row] for r in range(4)
    ]
    sent = [10, 8, 6, 7]
    assert [size[3:] for size in sizes] == [
        [10 * row, 10 * row, row, row, row, sent[r] * row, 0] for r in range(4)
    ]
    # An all-reduce of two ranks is one message each way; what stays on a host does not cross.
    assert [found[:3] for found in crossings] == [[0, 0, (3, 1)[r % 2] * row] for r in range(4)]
    # Host 0 owns 3 of 10 rows and host 1 owns 7: the others must enter, and partial sums leave.
    # Each host has two ranks, which share what is the host's; blocks are each rank's own.
    assert [[byte / row for byte in found[3:]] for found in crossings] == [
        [3.5, 3.5, 0.5, 0.5, 0, 7, 0],
        [3.5, 3.5, 0.5, 0.5, 0, 4, 0],
        [1.5, 1.5, 0.5, 0, 0.5, 5, 0],
        [1.5, 1.5, 0.5, 0, 0.5, 6, 0],
    ]
    assert [[byte / row for byte in found] for found in wires] == [
        [1, 1, 3, 9, 9, 1.5, 1, 0, 9, 0],
        [3, 3, 1, 8, 8, 1.5, 1, 1, 6, 0],
        [1, 1, 3, 7, 7, 1.5, 1, 1, 5, 0],
        [3, 3, 1, 6, 6, 1.5, 0, 1, 6, 0],
    ]


@pytest.mark.ranks
def test_messages_between_two_ranks_count_where_they_are_sent():
    """Ranks 0 and 1 share a host, 2 is on another."""

    def body(rank):
        axis = MeshAxis.of_group(topology=Topology.from_hosts(["a", "a", "b"]))
        with ledger() as log:
            if rank == 0:
                send_to(torch.ones(2), axis, destination=2).wait()
            elif rank == 2:
                receive(torch.ones(2), axis, source=0).wait()
            transfers = [Send(torch.ones(1 + rank), peer) for peer in range(3)]
            transfers += [Receive(torch.ones(1 + peer), peer) for peer in range(3)]
            exchange(transfers, axis).wait()
            gather_objects("small", axis)
        return [(record.operation, record.crossing) for record in log.records][:-2]

    found = run_ranks(body, 3)
    assert found[0] == [("send", 8), ("exchange", 4)]
    assert found[1] == [("exchange", 8)]
    assert found[2] == [("receive", 0), ("exchange", 2 * 12)]


def test_an_operation_without_a_rule_is_named():
    with pytest.raises(HPError, match="'scan' moves is not known"):
        bytes_between("scan", 4, None, range(2), 0)
    assert bytes_between("scan", 4, None, ["a", "a"], 0) == 0
