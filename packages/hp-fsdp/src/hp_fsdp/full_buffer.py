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

import functools
import mmap

import torch
from torch import Tensor

from hp_fsdp.pages import PagePool, Region
from hp_platform.buffers import aligned_empty, pad_to_alignment

_HAS_PRIVATE_MAPPINGS = hasattr(mmap, "MADV_DONTNEED") and hasattr(mmap, "MAP_PRIVATE")


class FullBuffer:
    """A 1-D tensor of `numel` elements whose memory can be given back and taken again.

    Starts empty. `data` never changes its identity, address range or views.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._nbytes = numel * dtype.itemsize
        self.dtype = dtype
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
            if pages is not None:
                pages.count(self._nbytes)
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
        if pages is not None:
            pages.count(-self._nbytes)
        if self._region is not None:
            if pages is None:
                self._region.drop()
            else:
                pages.leave(self._region)
        elif self.data.device.type != "cpu":
            self.data.untyped_storage().resize_(0)
        self.is_held = False


class Arena:
    """One full-size buffer that several tensors share: its memory comes and goes as a whole.

    All parts are reserved before the first is held. The memory is there while any part is held.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nbytes = 0
        self._buffer: FullBuffer | None = None
        self._held = 0

    def reserve(self, numel: int, dtype: torch.dtype) -> ArenaPart:
        """A part of `numel` elements, which begins at a multiple of 512 bytes."""
        if self._buffer is not None:
            raise RuntimeError("an arena cannot grow after its first use")
        start = self._nbytes
        self._nbytes += pad_to_alignment(numel, dtype) * dtype.itemsize
        return ArenaPart(self, start, numel, dtype)

    def part(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The tensor of a part."""
        if self._buffer is None:
            self._buffer = FullBuffer(self._nbytes, torch.uint8, self._device)
        return self._buffer.data[start : start + numel * dtype.itemsize].view(dtype)

    def hold(self, pages: PagePool | None) -> None:
        assert self._buffer is not None
        if self._held == 0:
            self._buffer.hold(pages)
        self._held += 1

    def release(self, pages: PagePool | None) -> None:
        assert self._buffer is not None
        self._held -= 1
        if self._held == 0:
            self._buffer.release(pages)


class ArenaPart:
    """A 1-D tensor in an arena; as a `FullBuffer`, but for the memory that it shares."""

    def __init__(self, arena: Arena, start: int, numel: int, dtype: torch.dtype) -> None:
        self._arena = arena
        self._place = (start, numel, dtype)
        self.dtype = dtype
        self.is_held = False

    @functools.cached_property
    def data(self) -> Tensor:
        return self._arena.part(*self._place)

    def hold(self, pages: PagePool | None = None) -> Tensor:
        """As `FullBuffer.hold`."""
        data = self.data
        if not self.is_held:
            self._arena.hold(pages)
            self.is_held = True
        return data

    def release(self, pages: PagePool | None = None) -> None:
        """As `FullBuffer.release`; the memory stays while other parts are held."""
        if self.is_held:
            self.is_held = False
            self._arena.release(pages)
