"""A persistent buffer of full size: for gathered parameters, full gradients and scratch.

Autograd keeps views of a gathered parameter between forward and backward. So that the parameter
can be dropped in between and gathered again under those same views, the buffer keeps its tensor
object for ever and only its memory comes and goes.

On accelerators the storage is resized, and the allocator returns blocks that start at multiples
of 512 bytes. The CPU allocator guarantees 64 only and returns another address each time, so
there the buffer is an anonymous memory mapping of its own: page-aligned, at a fixed address, and
its pages are left to other buffers while it is not held.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from hp_fsdp.pages import PagePool, Region
from hp_platform.buffers import aligned_empty

_HAS_PRIVATE_MAPPINGS = hasattr(mmap, "MADV_DONTNEED") and hasattr(mmap, "MAP_PRIVATE")


class FullBuffer:
    """A 1-D tensor of `numel` elements whose memory can be given back and taken again.

    Starts empty. `data` never changes its identity, address range or views.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._nbytes = numel * dtype.itemsize
        self._region: Region | None = None
        self.is_held = False
        if device.type != "cpu":
            self.data = torch.empty(numel, dtype=dtype, device=device)
            self.data.untyped_storage().resize_(0)
        elif numel == 0 or not _HAS_PRIVATE_MAPPINGS:
            self.data = aligned_empty(numel, dtype, device)
        else:
            self._region = Region(self._nbytes)
            self.data = torch.frombuffer(self._region.memory, dtype=dtype, count=numel)

    def hold(self, pages: PagePool | None = None) -> Tensor:
        """Makes the memory available; contents are undefined. Returns `data`.

        Args:
            pages: where memory may be taken from.
        """
        if not self.is_held:
            if self._region is not None:
                if pages is not None:
                    pages.supply(self._region)
            elif self.data.device.type != "cpu":
                self.data.untyped_storage().resize_(self._nbytes)
            self.is_held = True
        return self.data

    def release(self, pages: PagePool | None = None) -> None:
        """Gives the memory back. Nothing may read `data` or its views before the next `hold`.

        Args:
            pages: where to leave it; None returns it to the system.
        """
        if not self.is_held:
            return
        if self._region is not None:
            if pages is None:
                self._region.drop()
            else:
                pages.leave(self._region)
        elif self.data.device.type != "cpu":
            self.data.untyped_storage().resize_(0)
        self.is_held = False
