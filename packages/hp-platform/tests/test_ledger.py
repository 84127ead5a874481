"""The ledger: order of events, threads, summaries and the trace."""

import json
import threading

import pytest
import torch

from hp_platform import Event, MeshAxis, Origin, Tier, all_gather, all_reduce, ledger, mark
from hp_platform.handle import issue
from hp_platform.testing import run_ranks

AXIS = MeshAxis(
    "dp", 2, 0, (0, 1), Tier.SLOW, torch.device("cpu"), process_group=object(), backend="gloo"
)
ORIGIN = Origin("hp_fsdp", "layers.3", "backward")


def send(name="all_reduce", axis=AXIS, tensor=None):
    """A collective that is only entered: no backend takes part."""
    tensor = torch.ones(4) if tensor is None else tensor
    return issue(name, axis, ORIGIN, lambda: [], tensor, tensor.nbytes, (tensor,), dtype=None)


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
        Event("wait", 0),
    ]
    one, two = log.records
    assert (one.issue_order, one.wait_order, two.issue_order, two.wait_order) == (0, 4, 1, 3)
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
        assert len(log.events) == 100


def test_a_thread_without_a_ledger_writes_to_the_open_ones():
    with ledger() as log:
        thread = threading.Thread(target=lambda: send().wait())
        thread.start()
        thread.join()
    assert [event.kind for event in log.events] == ["issue", "wait"]


def test_concurrent_entries_lose_nothing():
    with ledger() as log:
        threads = [
            threading.Thread(target=lambda: [send().wait() for _ in range(200)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [record.index for record in log.records] == list(range(800))
    orders = sorted(o for r in log.records for o in (r.issue_order, r.wait_order))
    assert orders == list(range(1600))


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


def test_the_summary_adds_up_by_tier_axis_and_operation():
    fast = MeshAxis(
        "tp", 2, 0, (0, 1), Tier.FAST, torch.device("cpu"), process_group=object(), backend="gloo"
    )
    with ledger() as log:
        for _ in range(3):
            send().wait()
        send("all_gather", axis=fast, tensor=torch.ones(100)).wait()
    summary = log.summary()
    assert (summary.count, summary.bytes) == (4, 3 * 16 + 400)
    line = summary[Tier.SLOW, "dp", "all_reduce"]
    assert (line.count, line.bytes) == (3, 48)
    assert str(summary).splitlines()[2].split() == ["slow", "dp", "all_reduce", "3", "48"]
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


def test_the_trace_is_what_chrome_reads(tmp_path):
    with ledger() as log:
        send().wait()
        log.mark("backward begins")
        unfinished = send()
    log.to_chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    events = trace["traceEvents"]
    assert all({"name", "ph", "pid", "tid"} <= set(event) for event in events)
    assert all("ts" in event for event in events if event["ph"] != "M")
    # Every asynchronous span that begins also ends, and not earlier.
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert begins.keys() == ends.keys() == {0, 1}
    assert all(ends[key] >= begins[key] for key in begins)
    waits = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["dur"] >= 0) for event in waits] == [("wait all_reduce", True)]
    assert [event["name"] for event in events if event["ph"] == "i"] == ["backward begins"]
    unfinished.wait()


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
