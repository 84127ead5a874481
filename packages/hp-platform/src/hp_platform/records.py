"""What a ledger holds: collectives as one rank took part in them, and the order of events."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from hp_platform.topology import Tier


@dataclass(frozen=True)
class Origin:
    """Who asks for a collective.

    Attributes:
        package: the package that asks, such as "hp_fsdp".
        name: the unit, parameter or boundary it asks for.
        phase: "forward", "backward", "optimizer" or whatever the package distinguishes.
        detail: what an error that names this adds, such as the parameters it is about.
        advice: what such an error ends with: what to do where only some ranks issue it.
    """

    package: str
    name: str = ""
    phase: str = ""
    detail: str = field(default="", compare=False, repr=False)
    advice: str = field(default="", compare=False, repr=False)

    @cached_property
    def tag(self) -> int:
        """A number, the same in every process, that others hardly have; a multiple of 8."""
        return zlib.crc32(f"{self.package}\n{self.name}\n{self.phase}".encode()) & 0x3FFFFFF8

    def __str__(self) -> str:
        return " ".join(part for part in (self.package, self.name, self.phase) if part)


class Event(NamedTuple):
    """One thing that happened: `subject` is a record's index, or a mark's or phase's label.

    `kind` is "issue", "wait" (it begins), "complete" (it has returned), "mark", "enter" or
    "leave" (of a phase).
    """

    kind: str
    subject: int | str


@dataclass(frozen=True)
class Record:
    """One collective as one rank took part in it.

    Attributes:
        index: position in `Ledger.records`.
        operation: the function's name in `hp_platform.collectives`.
        axis: name of the mesh axis; axis_size: its number of ranks; tier: how they connect.
        bytes: the payload: size of the whole message that this rank takes part in. The output
            of an all-gather, the input of a reduce-scatter or all-to-all, what an exchange sends
            and receives, the tensor of the others. A barrier has none.
        aligned: whether every tensor starts at and is a multiple of 512 bytes.
        dtype: element type, None where there is none (a barrier, pickled objects).
        origin: who asked.
        issued, waited, completed: seconds since the ledger was opened: when the call was
            made, when the first `wait()` began and when it returned; None if it has not. On an
            accelerator a wait orders the stream and returns before the data has arrived.
        issue_order, wait_order, complete_order: positions in `Ledger.events`, comparable with
            each other.
        wire: bytes that this rank's link must carry; crossing: bytes that must cross between
            fast domains on its account. See `hp_platform.traffic` for both.
        started: when the backend's call, which only starts the work, returned.
        issued_in, waited_in: phases that were going on, outermost first: blocks opened with
            `phase`, and "backward" whenever autograd was running in the calling thread.
        thread, wait_thread: numbers of the threads that issued and waited, in order of
            appearance.
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
    complete_order: int | None = None
    wire: int = 0
    crossing: int = 0
    started: float | None = None
    issued_in: tuple[str, ...] = ()
    waited_in: tuple[str, ...] = ()
    thread: int = 0
    wait_thread: int | None = None

    @property
    def phase(self) -> str:
        """What it was asked for, as the origin says, or else the innermost phase of its issue."""
        return self.origin.phase or (self.issued_in[-1] if self.issued_in else "")

    def within(self, phase: str) -> bool:
        """Whether it belongs to `phase`: by what its origin says, or by when it was issued."""
        return phase == self.origin.phase or phase in self.issued_in
