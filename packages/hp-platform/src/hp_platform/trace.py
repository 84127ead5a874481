"""A ledger as a trace in Chrome's JSON format, which Perfetto and chrome://tracing open.

Every thread is a track: a slice for each call that starts a collective, one for each wait, and
around them the phases. An arrow leads from the start to the wait. Between the two the collective
itself is an asynchronous span in a track of its axis's name. Marks are instants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_platform.records import Record


@dataclass(frozen=True)
class Phase:
    """A phase's block: its label, thread number, and when it began and ended, in seconds."""

    label: str
    thread: int
    begin: float
    end: float


def chrome_trace(
    records: Sequence[Record],
    marks: Sequence[tuple[str, float]],
    phases: Sequence[Phase],
    process: int,
) -> dict[str, Any]:
    """The trace as a value for `json.dump`.

    Args:
        marks: label and seconds.
        process: number of the process's track, the global rank.
    """
    threads = {r.thread for r in records} | {p.thread for p in phases}
    threads |= {r.wait_thread for r in records if r.wait_thread is not None}
    events = [_metadata("process_name", process, 0, f"rank {process}")]
    events += [
        _metadata("thread_name", process, _track(thread), f"thread {thread}")
        for thread in sorted(threads)
    ]
    events += [
        _slice(phase.label, "phase", process, phase.thread, phase.begin, phase.end, {})
        for phase in phases
    ]
    for record in records:
        events += _of_record(record, process)
    events += [
        {
            **{"name": label, "cat": "mark", "ph": "i", "s": "p"},
            **{"pid": process, "tid": 0, "ts": seconds * 1e6},
        }
        for label, seconds in marks
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_record(record: Record, process: int) -> list[dict[str, Any]]:
    name, about = record.operation, _about(record)
    started = record.issued if record.started is None else record.started
    completed = started if record.completed is None else record.completed
    span = {"name": f"{name} on {record.axis}", "cat": record.axis, "id": record.index}
    place = {"pid": process, "tid": _track(record.thread)}
    events = [
        _slice(f"issue {name}", "issue", process, record.thread, record.issued, started, about),
        {**span, "ph": "b", "ts": record.issued * 1e6, **place, "args": about},
        {**span, "ph": "e", "ts": completed * 1e6, **place},
    ]
    if record.waited is None or record.wait_thread is None:
        return events
    thread, end = record.wait_thread, max(completed, record.waited)
    events.append(_slice(f"wait {name}", "wait", process, thread, record.waited, end, about))
    arrow = {"name": name, "cat": "collective", "id": record.index}
    events.append({**arrow, "ph": "s", "ts": record.issued * 1e6, **place})
    place = {"pid": process, "tid": _track(thread)}
    events.append({**arrow, "ph": "f", "bp": "e", "ts": record.waited * 1e6, **place})
    return events


def _about(record: Record) -> dict[str, Any]:
    return {
        "bytes": record.bytes,
        "crossing": record.crossing,
        "axis": record.axis,
        "tier": record.tier.value,
        "aligned": record.aligned,
        "phase": record.phase,
        "asked by": str(record.origin),
    }


def _slice(
    name: str, kind: str, process: int, thread: int, begin: float, end: float, about: dict[str, Any]
) -> dict[str, Any]:
    return {
        **{"name": name, "cat": kind, "ph": "X", "pid": process, "tid": _track(thread)},
        **{"ts": begin * 1e6, "dur": (end - begin) * 1e6, "args": about},
    }


def _track(thread: int) -> int:
    # Track 0 holds the marks, which belong to the whole process.
    return thread + 1


def _metadata(name: str, process: int, track: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": track, "args": {"name": value}}
