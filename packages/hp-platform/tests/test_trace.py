"""The trace obeys the format that Perfetto and chrome://tracing read."""

import json
import threading

import pytest
import torch

from hp_platform import MeshAxis, Origin, Tier, ledger, phase
from hp_platform.handle import issue

AXIS = MeshAxis(
    "dp", 2, 0, (0, 1), Tier.SLOW, torch.device("cpu"), process_group=object(), backend="gloo"
)


def send():
    """A collective that is only entered: no backend takes part."""
    tensor = torch.ones(4)
    origin = Origin("hp_fsdp", "layers.3", "backward")
    return issue("all_reduce", AXIS, origin, lambda: [], tensor, 16, (tensor,))


@pytest.fixture
def events(tmp_path, monkeypatch):
    """A step with overlapping collectives, two threads, a phase, a mark, and one never awaited."""
    monkeypatch.setenv("RANK", "3")
    with ledger() as log:
        with phase("step"):
            first, second = send(), send()
            first.wait()
            log.mark("backward begins")
            thread = threading.Thread(target=second.wait)
            thread.start()
            thread.join()
        unfinished = send()
    unfinished.wait()
    log.to_chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    return trace["traceEvents"]


def of_kind(events, kind):
    return [event for event in events if event["ph"] == kind]


def test_every_event_has_the_fields_of_its_kind(events):
    needed = {
        "M": {"args"},
        "X": {"ts", "dur", "cat"},
        "b": {"ts", "id", "cat"},
        "e": {"ts", "id", "cat"},
        "s": {"ts", "id", "cat"},
        "f": {"ts", "id", "cat", "bp"},
        "i": {"ts", "s"},
    }
    assert {event["ph"] for event in events} == set(needed)
    for event in events:
        assert {"name", "ph", "pid", "tid"} | needed[event["ph"]] <= set(event), event
        assert event["pid"] == 3
        assert type(event["tid"]) is int
        for field in ("ts", "dur"):
            assert event.get(field, 0) >= 0
    assert {event["s"] for event in of_kind(events, "i")} <= {"g", "p", "t"}


def test_slices_of_a_track_nest(events):
    slices = of_kind(events, "X")
    assert sorted({event["tid"] for event in slices}) == [1, 2]
    for track in (1, 2):
        begun = []
        spans = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in slices if e["tid"] == track]
        for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
            while begun and begun[-1] <= begin:
                begun.pop()
            assert not begun or end <= begun[-1], name
            begun.append(end)
    names = {event["name"]: event["tid"] for event in slices if event["cat"] == "phase"}
    assert names == {"step": 1}


def test_asynchronous_spans_are_balanced(events):
    begins = {(e["cat"], e["id"], e["name"]): e["ts"] for e in of_kind(events, "b")}
    ends = {(e["cat"], e["id"], e["name"]): e["ts"] for e in of_kind(events, "e")}
    assert begins.keys() == ends.keys()
    assert len(begins) == 3
    assert all(ends[key] >= begins[key] for key in begins)


def test_an_arrow_leads_from_each_start_to_its_wait(events):
    starts = {e["id"]: e for e in of_kind(events, "s")}
    ends = {e["id"]: e for e in of_kind(events, "f")}
    assert starts.keys() == ends.keys() == {0, 1}  # the third is not waited for in time
    arrows = [(e, "issue") for e in starts.values()] + [(e, "wait") for e in ends.values()]
    for arrow, kind in arrows:
        inside = [
            event
            for event in of_kind(events, "X")
            if (event["cat"], event["tid"]) == (kind, arrow["tid"])
            and event["ts"] <= arrow["ts"] <= event["ts"] + event["dur"]
        ]
        assert len(inside) == 1, arrow
    assert [ends[identity]["tid"] for identity in (0, 1)] == [1, 2]
    assert all(end["bp"] == "e" and end["ts"] >= starts[key]["ts"] for key, end in ends.items())


def test_slices_say_what_was_sent_and_for_whom(events):
    found = next(event for event in of_kind(events, "X") if event["cat"] == "wait")
    assert found["name"] == "wait all_reduce"
    assert found["args"] == {
        "bytes": 16,
        "crossing": 16,
        "axis": "dp",
        "tier": "slow",
        "aligned": False,
        "phase": "backward",
        "asked by": "hp_fsdp layers.3 backward",
    }
