"""The ledger: who communicated what, over which tier, issued and waited for in which order.

A ledger is a measuring instrument and never changes what is measured: with none open a
collective pays one test of an empty tuple.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hp_platform.axis import MeshAxis
from hp_platform.buffers import ALIGNMENT
from hp_platform.topology import Tier


@dataclass(frozen=True)
class Origin:
    """Who asks for a collective.

    Attributes:
        package: the package that asks, such as "hp_fsdp".
        name: the unit, parameter or boundary it asks for.
        phase: "forward", "backward", "optimizer" or whatever the package distinguishes.
    """

    package: str
    name: str = ""
    phase: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.package, self.name, self.phase) if part)


class Event(NamedTuple):
    """One thing that happened: `subject` is a record's index, or a mark's label."""

    kind: str
    subject: int | str


@dataclass(frozen=True)
class Record:
    """One collective as one rank took part in it.

    Attributes:
        index: position in `Ledger.records`.
        operation: the function's name in `hp_platform.collectives`.
        axis: name of the mesh axis; axis_size: its number of ranks; tier: how they connect.
        bytes: size of the whole message: the output of an all-gather, the input of a
            reduce-scatter, the tensor of the others.
        aligned: whether every tensor starts at and is a multiple of 512 bytes.
        dtype: element type, None where there is none (a barrier, pickled objects).
        origin: who asked.
        issued, waited, completed: seconds since the ledger was opened: when the call was
            made, when the first `wait()` began and when it returned; None if it has not.
        issue_order, wait_order: positions in `Ledger.events`, comparable with each other.
    """

    index: int
    operation: str
    axis: str
    axis_size: int
    tier: Tier
    bytes: int
    aligned: bool
    dtype: torch.dtype | None
    origin: Origin
    issued: float
    issue_order: int
    waited: float | None = None
    completed: float | None = None
    wait_order: int | None = None


@dataclass(frozen=True)
class SummaryLine:
    """Totals of the records that share tier, axis and operation."""

    tier: Tier
    axis: str
    operation: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Summary:
    """Totals by (tier, axis, operation), in order of first occurrence; `str()` is a table."""

    lines: tuple[SummaryLine, ...]

    @property
    def count(self) -> int:
        """Number of collectives."""
        return sum(line.count for line in self.lines)

    @property
    def bytes(self) -> int:
        """Sum of the messages' sizes."""
        return sum(line.bytes for line in self.lines)

    def __getitem__(self, key: tuple[Tier, str, str]) -> SummaryLine:
        for line in self.lines:
            if (line.tier, line.axis, line.operation) == key:
                return line
        raise KeyError(key)

    def __str__(self) -> str:
        header = ("tier", "axis", "operation", "count", "bytes")
        rows = [
            (line.tier.value, line.axis, line.operation, f"{line.count:,}", f"{line.bytes:,}")
            for line in self.lines
        ]
        rows.append(("total", "", "", f"{self.count:,}", f"{self.bytes:,}"))
        return _format_table(header, rows, numeric=2)


class _Entry:
    """A record in the making: cheap to create and to change."""

    __slots__ = (
        "aligned", "axis", "completed", "dtype", "index", "issue_order", "issued",
        "operation", "origin", "size", "wait_order", "waited",
    )  # fmt: skip

    def __init__(
        self,
        operation: str,
        axis: MeshAxis,
        size: int,
        aligned: bool,
        dtype: torch.dtype | None,
        origin: Origin,
        issued: float,
    ) -> None:
        self.operation = operation
        self.axis = axis
        self.size = size
        self.aligned = aligned
        self.dtype = dtype
        self.origin = origin
        self.issued = issued
        self.index = self.issue_order = -1
        self.waited: float | None = None
        self.completed: float | None = None
        self.wait_order: int | None = None

    def record(self, start: float) -> Record:
        """The finished record; its times count from `start`."""
        return Record(
            index=self.index,
            operation=self.operation,
            axis=self.axis.name,
            axis_size=self.axis.size,
            tier=self.axis.tier,
            bytes=self.size,
            aligned=self.aligned,
            dtype=self.dtype,
            origin=self.origin,
            issued=self.issued - start,
            issue_order=self.issue_order,
            waited=None if self.waited is None else self.waited - start,
            completed=None if self.completed is None else self.completed - start,
            wait_order=self.wait_order,
        )


class Ledger:
    """Records of the collectives issued while it is open; made by `ledger()`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._events: list[Event] = []
        self._marks: list[tuple[str, float]] = []
        self._start = time.perf_counter()
        self._owner = threading.get_ident()

    @property
    def records(self) -> list[Record]:
        """All records so far, in order of issue."""
        with self._lock:
            return [entry.record(self._start) for entry in self._entries]

    @property
    def events(self) -> list[Event]:
        """Issues, waits and marks in the order in which they happened."""
        with self._lock:
            return list(self._events)

    def mark(self, label: str) -> None:
        """Enters `label` between the events before and after this call."""
        with self._lock:
            self._events.append(Event("mark", label))
            self._marks.append((label, time.perf_counter() - self._start))

    def between(self, first: str, last: str) -> list[Event]:
        """The events after the first mark `first` and before the next mark `last`.

        Raises:
            KeyError: no such marks, in this order.
        """
        events = self.events
        try:
            begin = events.index(Event("mark", first))
            end = events.index(Event("mark", last), begin + 1)
        except ValueError:
            marks = [event.subject for event in events if event.kind == "mark"]
            raise KeyError(f"no marks {first!r} then {last!r}; marks are {marks}") from None
        return events[begin + 1 : end]

    def table(self) -> str:
        """One line for every record."""
        header = (
            "#", "operation", "axis", "tier", "dtype", "aligned", "asked by",
            "ranks", "bytes", "issued ms", "waited ms", "issue", "wait",
        )  # fmt: skip
        rows = [
            (
                str(r.index),
                r.operation,
                r.axis,
                r.tier.value,
                str(r.dtype).removeprefix("torch.") if r.dtype else "-",
                "yes" if r.aligned else "no",
                str(r.origin),
                str(r.axis_size),
                f"{r.bytes:,}",
                f"{r.issued * 1e3:.3f}",
                "-" if r.waited is None else f"{r.waited * 1e3:.3f}",
                str(r.issue_order),
                "-" if r.wait_order is None else str(r.wait_order),
            )
            for r in self.records
        ]
        return _format_table(header, rows, numeric=6)

    def summary(self) -> Summary:
        """Counts and bytes by (tier, axis, operation)."""
        totals: dict[tuple[Tier, str, str], tuple[int, int]] = {}
        for record in self.records:
            key = (record.tier, record.axis, record.operation)
            count, size = totals.get(key, (0, 0))
            totals[key] = (count + 1, size + record.bytes)
        return Summary(tuple(SummaryLine(*key, *total) for key, total in totals.items()))

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON trace that chrome://tracing and Perfetto open.

        Each mesh axis is a track. A collective is an asynchronous span from its issue to the
        return of its wait, with a span "wait" for the time the waiting thread was blocked;
        marks are instant events.
        """
        process = int(os.environ.get("RANK", "0"))
        records = self.records
        with self._lock:
            marks = list(self._marks)
        tracks = {axis: i + 1 for i, axis in enumerate(dict.fromkeys(r.axis for r in records))}
        events: list[dict[str, Any]] = [
            _metadata("process_name", process, 0, f"rank {process}"),
            *(_metadata("thread_name", process, i, f"axis {axis}") for axis, i in tracks.items()),
        ]
        for record in records:
            events.extend(_trace_events(record, process, tracks[record.axis]))
        for label, seconds in marks:
            events.append(
                {"name": label, "ph": "i", "s": "p", "pid": process, "tid": 0, "ts": seconds * 1e6}
            )
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def _issue(self, entry: _Entry) -> None:
        with self._lock:
            entry.index = len(self._entries)
            entry.issue_order = len(self._events)
            self._entries.append(entry)
            self._events.append(Event("issue", entry.index))

    def _wait(self, entry: _Entry) -> None:
        with self._lock:
            entry.wait_order = len(self._events)
            self._events.append(Event("wait", entry.index))


class _OpenLedgers:
    """The ledgers open in this process.

    They are found through the process and not through a context variable or a thread-local,
    because autograd runs backward hooks in threads of its own, which inherit neither. A
    thread that has opened ledgers itself writes to its own and no others, so two threads
    that each measure something do not see one another; a thread that has opened none (an
    autograd thread) cannot be told whom it works for, and writes to all.
    """

    def __init__(self) -> None:
        self.all: tuple[Ledger, ...] = ()
        self._lock = threading.Lock()

    def add(self, log: Ledger) -> None:
        with self._lock:
            self.all = (*self.all, log)

    def remove(self, log: Ledger) -> None:
        with self._lock:
            self.all = tuple(other for other in self.all if other is not log)

    def of_this_thread(self) -> tuple[Ledger, ...]:
        here = threading.get_ident()
        return tuple(log for log in self.all if log._owner == here) or self.all


_open = _OpenLedgers()

Entries = tuple[tuple[Ledger, _Entry], ...]
"""Where one collective has been entered."""


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Opens a ledger for the duration of the `with` block.

    May be nested: inner and outer ledgers record the same collectives. A wait that happens
    after the block has ended is not entered.
    """
    log = Ledger()
    _open.add(log)
    try:
        yield log
    finally:
        _open.remove(log)


def mark(label: str) -> None:
    """Enters `label` in every ledger that a collective called here would be entered in."""
    if _open.all:
        for log in _open.of_this_thread():
            log.mark(label)


# `hp_platform.ledger` is this function once the package has exported it; callers who reach
# the module by attribute still find `mark`.
ledger.mark = mark  # type: ignore[attr-defined]


def enter_issue(
    operation: str,
    axis: MeshAxis,
    size: int,
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype | None,
    origin: Origin,
) -> Entries:
    """Enters a collective about to be issued; the result goes to `enter_wait`."""
    if not _open.all:
        return ()
    aligned = all(not (t.data_ptr() % ALIGNMENT or t.nbytes % ALIGNMENT) for t in tensors)
    now = time.perf_counter()
    entries = tuple(
        (log, _Entry(operation, axis, size, aligned, dtype, origin, now))
        for log in _open.of_this_thread()
    )
    for log, entry in entries:
        log._issue(entry)
    return entries


def enter_wait(entries: Entries) -> None:
    """Enters that a wait for the collective begins, in those ledgers that are still open."""
    now = time.perf_counter()
    for log, entry in entries:
        if log in _open.all:
            entry.waited = now
            log._wait(entry)


def enter_completion(entries: Entries) -> None:
    """Enters that the wait has returned."""
    now = time.perf_counter()
    for log, entry in entries:
        if log in _open.all:
            entry.completed = now


def _metadata(name: str, process: int, track: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": track, "args": {"name": value}}


def _trace_events(record: Record, process: int, track: int) -> list[dict[str, Any]]:
    common = {"cat": record.tier.value, "pid": process, "tid": track}
    start = record.issued * 1e6
    end = start if record.completed is None else record.completed * 1e6
    arguments = {
        "bytes": record.bytes,
        "axis": record.axis,
        "tier": record.tier.value,
        "aligned": record.aligned,
        "asked by": str(record.origin),
    }
    span: dict[str, Any] = {"name": record.operation, "id": record.index, **common}
    events: list[dict[str, Any]] = [
        {**span, "ph": "b", "ts": start, "args": arguments},
        {**span, "ph": "e", "ts": end},
    ]
    if record.waited is not None:
        blocked = max(end - record.waited * 1e6, 0.0)
        wait: dict[str, Any] = {
            "name": f"wait {record.operation}",
            "ph": "X",
            "ts": record.waited * 1e6,
        }
        events.append({**wait, "dur": blocked, **common, "args": {"asked by": str(record.origin)}})
    return events


def _format_table(header: Sequence[str], rows: Sequence[Sequence[str]], numeric: int) -> str:
    """A plain-text table whose last `numeric` columns are right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows)]
    first_numeric = len(header) - numeric
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [
            cell.rjust(width) if i >= first_numeric else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
