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
from contextlib import ExitStack, contextmanager

import torch

from hp_platform.axis import MeshAxis
from hp_platform.buffers import ALIGNMENT
from hp_platform.records import Event, Origin, Record
from hp_platform.summary import Summary, SummaryLine, table_of
from hp_platform.topology import Tier
from hp_platform.trace import Phase, chrome_trace
from hp_platform.traffic import Parts, bytes_between

__all__ = [
    "Entries",
    "Event",
    "Ledger",
    "Origin",
    "Record",
    "Summary",
    "SummaryLine",
    "enter_completion",
    "enter_issue",
    "enter_start",
    "enter_wait",
    "ledger",
    "mark",
    "phase",
]


class _Entry:
    """A record in the making: cheap to create and to change."""

    __slots__ = (
        "aligned", "axis", "complete_order", "completed", "dtype", "index", "issue_order",
        "issued", "issued_in", "operation", "origin", "parts", "size", "started", "thread",
        "wait_order", "wait_thread", "waited", "waited_in",
    )  # fmt: skip

    def __init__(
        self,
        operation: str,
        axis: MeshAxis,
        size: int,
        aligned: bool,
        dtype: torch.dtype | None,
        origin: Origin,
        parts: Parts,
        issued: float,
    ) -> None:
        self.operation = operation
        self.axis = axis
        self.size = size
        self.aligned = aligned
        self.dtype = dtype
        self.origin = origin
        self.parts = parts
        self.issued = issued
        self.index = self.issue_order = self.thread = -1
        self.issued_in: tuple[str, ...] = ()
        self.waited_in: tuple[str, ...] = ()
        self.started: float | None = None
        self.waited: float | None = None
        self.completed: float | None = None
        self.wait_order: int | None = None
        self.complete_order: int | None = None
        self.wait_thread: int | None = None

    def record(self, start: float) -> Record:
        """The finished record; its times count from `start`."""
        axis = self.axis
        everyone = range(axis.size)
        domains: Sequence[object] = axis.domains
        if not domains:
            domains = everyone if axis.tier is Tier.SLOW else (0,) * axis.size
        return Record(
            index=self.index,
            operation=self.operation,
            axis=axis.name,
            axis_size=axis.size,
            tier=axis.tier,
            bytes=self.size,
            aligned=self.aligned,
            dtype=self.dtype,
            origin=self.origin,
            issued=self.issued - start,
            issue_order=self.issue_order,
            waited=_since(self.waited, start),
            completed=_since(self.completed, start),
            wait_order=self.wait_order,
            complete_order=self.complete_order,
            wire=bytes_between(self.operation, self.size, self.parts, everyone, axis.rank),
            crossing=bytes_between(self.operation, self.size, self.parts, domains, axis.rank),
            started=_since(self.started, start),
            issued_in=self.issued_in,
            waited_in=self.waited_in,
            thread=self.thread,
            wait_thread=self.wait_thread,
        )


class Ledger:
    """Records of the collectives issued while it is open; made by `ledger()`."""

    def __init__(self) -> None:
        # The garbage collector may end a call, which is entered, while this thread holds it.
        self._lock = threading.RLock()
        self._entries: list[_Entry] = []
        self._events: list[Event] = []
        self._marks: list[tuple[str, float]] = []
        self._phases: list[Phase] = []
        self._open_phases: tuple[str, ...] = ()
        self._threads: dict[int, int] = {}
        self._start = time.perf_counter()
        self._owner = threading.get_ident()

    @property
    def records(self) -> list[Record]:
        """All records so far, in order of issue."""
        with self._lock:
            return [entry.record(self._start) for entry in self._entries]

    @property
    def events(self) -> list[Event]:
        """What happened, in order: issues, waits, completions, marks and phases."""
        with self._lock:
            return list(self._events)

    def mark(self, label: str) -> None:
        """Enters `label` between the events before and after this call."""
        with self._lock:
            self._events.append(Event("mark", label))
            self._marks.append((label, time.perf_counter() - self._start))

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """Everything that any thread enters until the block ends happens in phase `label`."""
        begin = time.perf_counter() - self._start
        with self._lock:
            thread = self._thread()
            self._open_phases = (*self._open_phases, label)
            self._events.append(Event("enter", label))
        try:
            yield
        finally:
            with self._lock:
                # Another thread may have opened one meanwhile.
                last = len(self._open_phases) - 1 - self._open_phases[::-1].index(label)
                self._open_phases = (*self._open_phases[:last], *self._open_phases[last + 1 :])
                self._events.append(Event("leave", label))
                end = time.perf_counter() - self._start
                self._phases.append(Phase(label, thread, begin, end))

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

    def waits(self, *, tier: Tier | None = None, phase: str | None = None) -> list[Record]:
        """The collectives that were waited for, in the order in which the waits began.

        Args:
            tier: only those on this tier.
            phase: only those whose wait began in this phase. "backward" needs no block: it is
                noticed whenever autograd runs in the waiting thread.
        """
        waited = [(r.wait_order, r) for r in self.records if r.wait_order is not None]
        return [
            record
            for _, record in sorted(waited, key=lambda pair: pair[0])
            if tier in (None, record.tier) and (phase is None or phase in record.waited_in)
        ]

    def unaligned(self) -> list[Record]:
        """The collectives with a tensor that does not start at and fill multiples of 512 bytes."""
        return [record for record in self.records if not record.aligned]

    def crossing(self, phase: str | None = None) -> int:
        """Bytes that had to cross between hosts (or super-nodes, where these are declared).

        Counted on this rank's account: the sum over all ranks is all that had to cross.

        Args:
            phase: only what was asked for or issued in this phase, such as "optimizer".
        """
        return sum(r.crossing for r in self.records if phase is None or r.within(phase))

    def table(self) -> str:
        """One line for every record."""
        return table_of(self.records)

    def summary(self) -> Summary:
        """Counts and bytes by tier, axis, phase and operation."""
        return Summary.of(self.records)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON trace that Perfetto and chrome://tracing open; see `trace`."""
        records = self.records
        with self._lock:
            marks, phases = list(self._marks), list(self._phases)
        trace = chrome_trace(records, marks, phases, int(os.environ.get("RANK", "0")))
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace, file)

    def _issue(self, entry: _Entry) -> None:
        with self._lock:
            entry.index = len(self._entries)
            entry.issue_order = len(self._events)
            entry.issued_in, entry.thread = self._going_on(), self._thread()
            self._entries.append(entry)
            self._events.append(Event("issue", entry.index))

    def _wait(self, entry: _Entry) -> None:
        with self._lock:
            entry.wait_order = len(self._events)
            entry.waited_in, entry.wait_thread = self._going_on(), self._thread()
            self._events.append(Event("wait", entry.index))

    def _complete(self, entry: _Entry) -> None:
        with self._lock:
            entry.complete_order = len(self._events)
            self._events.append(Event("complete", entry.index))

    def _going_on(self) -> tuple[str, ...]:
        if _autograd_runs() and "backward" not in self._open_phases:
            return (*self._open_phases, "backward")
        return self._open_phases

    def _thread(self) -> int:
        return self._threads.setdefault(threading.get_ident(), len(self._threads))


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


@contextmanager
def phase(label: str) -> Iterator[None]:
    """Opens phase `label` in every ledger that a collective called here would be entered in."""
    with ExitStack() as stack:
        for log in _open.of_this_thread():
            stack.enter_context(log.phase(label))
        yield


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
    parts: Parts = None,
) -> Entries:
    """Enters a collective about to be issued; the result goes to the other `enter` functions."""
    if not _open.all:
        return ()
    aligned = all(not (t.data_ptr() % ALIGNMENT or t.nbytes % ALIGNMENT) for t in tensors)
    now = time.perf_counter()
    entries = tuple(
        (log, _Entry(operation, axis, size, aligned, dtype, origin, parts, now))
        for log in _open.of_this_thread()
    )
    for log, entry in entries:
        log._issue(entry)
    return entries


def enter_start(entries: Entries) -> None:
    """Enters that the backend has taken the call."""
    now = time.perf_counter()
    for _, entry in entries:
        entry.started = now


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
            log._complete(entry)


def _autograd_runs() -> bool:
    """Whether autograd's engine runs in this thread.

    Private to PyTorch, which has no public way to ask; `test_ledger` fails if its meaning changes.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def _since(moment: float | None, start: float) -> float | None:
    return None if moment is None else moment - start
