"""A reduce-scatter of gradients on its way, and what must stay until it has arrived."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define
from torch import Tensor

from hp_fsdp.pages import PagePool
from hp_fsdp.unit_memory import Memory
from hp_platform import Handle
from hp_platform.division import divide_


@define(eq=False)
class Scatter:
    """A reduce-scatter in flight, with the memory that it uses meanwhile."""

    handle: Handle[Tensor]
    gradients: Memory | None
    scratch: Memory | None
    give_back: Callable[[Memory], None]
    divisor: float = 1
    """What this rank's share is still to be divided by."""

    def wait(self) -> None:
        """Waits until this rank has its share; others may still read what this one lends."""
        share, divisor = self.handle.wait(), self.divisor
        self.divisor = 1
        divide_(share, divisor)

    def close(self, pages: PagePool) -> None:
        """After `wait`: waits until no rank reads the full gradients, whose memory is free then."""
        self.handle.wait_for_readers()
        if self.gradients is not None:
            self.gradients.release(pages)
            self.give_back(self.gradients)
        if self.scratch is not None:
            self.scratch.release(pages)
