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

    def wait(self, pages: PagePool) -> None:
        """Waits; the full gradients' memory is free then."""
        self.handle.wait()
        if self.gradients is not None:
            self.gradients.release(pages)
            self.give_back(self.gradients)
        if self.scratch is not None:
            self.scratch.release(pages)
