"""The persistent buffer into which one parameter is gathered.

Autograd keeps views of a gathered parameter between forward and backward. So that the parameter
can be dropped in between and gathered again under those same views, the buffer keeps its tensor
object for ever and only its memory comes and goes.

On accelerators the storage is resized, and the allocator returns blocks that start at multiples
of 512 bytes. The CPU allocator guarantees 64 only and returns another address each time, so
there the buffer is an anonymous memory mapping of its own: page-aligned, at a fixed address, and
emptied by giving its pages back to the kernel.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from hp_platform.buffers import ALIGNMENT, aligned_empty

_HAS_PRIVATE_MAPPINGS = hasattr(mmap, "MADV_DONTNEED") and hasattr(mmap, "MAP_PRIVATE")


class FullBuffer:
    """A 1-D tensor of `numel` elements whose memory can be given back and taken again.

    Starts empty. `data` never changes its identity, address range or views.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._nbytes = numel * dtype.itemsize
        self._mapping: mmap.mmap | None = None
        self.is_held = False
        if device.type != "cpu":
            self.data = torch.empty(numel, dtype=dtype, device=device)
            self.data.untyped_storage().resize_(0)
        elif numel == 0 or not _HAS_PRIVATE_MAPPINGS:
            self.data = aligned_empty(numel, dtype, device)
        else:
            length = -(-self._nbytes // ALIGNMENT) * ALIGNMENT
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._mapping = mmap.mmap(-1, length, flags=flags)
            self.data = torch.frombuffer(self._mapping, dtype=dtype, count=numel)

    def hold(self) -> Tensor:
        """Makes the memory available; contents are undefined. Returns `data`."""
        if not self.is_held and self.data.device.type != "cpu":
            self.data.untyped_storage().resize_(self._nbytes)
        self.is_held = True
        return self.data

    def release(self) -> None:
        """Gives the memory back. Nothing may read `data` or its views before the next `hold`."""
        if not self.is_held:
            return
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
        elif self.data.device.type != "cpu":
            self.data.untyped_storage().resize_(0)
        self.is_held = False
