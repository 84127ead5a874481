"""A reduce-scatter of gradients on its way, and what must stay until it has arrived."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define
from torch import Tensor

from hp_fsdp.pages import PagePool
from hp_fsdp.unit_memory import Memory
from hp_platform import Handle


@define(eq=False)
class Scatter:
    """A reduce-scatter in flight, with the memory that it uses meanwhile."""

    handle: Handle[Tensor]
    gradients: Memory | None
    scratch: Memory | None
    give_back: Callable[[Memory], None]

    def wait(self) -> None:
        """Waits until this rank has its share; others may still read what this one lends."""
        self.handle.wait()

    def close(self, pages: PagePool) -> None:
        """After `wait`: waits until no rank reads the full gradients, whose memory is free then."""
        self.handle.wait_for_readers()
        if self.gradients is not None:
            self.gradients.release(pages)
            self.give_back(self.gradients)
        if self.scratch is not None:
            self.scratch.release(pages)
