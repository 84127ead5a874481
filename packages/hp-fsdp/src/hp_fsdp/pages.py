"""Memory that one buffer leaves to the next, without going through the kernel's zeroed pages.

On the CPU the first touch of a fresh page costs several times as much as writing it. Gathered
units and gradients come and go at every step, so the pages that a released buffer leaves are moved
to the address of the buffer that is held next; no value is copied. Moving pages is Linux's
`mremap`; where there is none, pages go back to the kernel.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
Move = Callable[[int, int, int], bool]
"""(from, to, length), in bytes and multiples of the page size: whether the pages have moved."""


class Region:
    """Page-aligned private memory at a fixed address; its pages come and go.

    Attributes:
        memory: the mapping; what is not resident reads as zeros.
        address: where it begins.
        length: bytes, whole pages.
    """

    def __init__(self, nbytes: int) -> None:
        self.length = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, self.length, flags=flags)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def drop(self, start: int = 0) -> None:
        """Gives the pages from byte `start` on back to the kernel."""
        if start < self.length:
            self.memory.madvise(mmap.MADV_DONTNEED, start, self.length - start)


class PagePool:
    """Pages that released regions have left, for those that are needed next.

    Holds no more than has been in use at one time: whatever is needed is taken from here first.

    Attributes:
        in_use: bytes of the buffers that are held now, on any device.
        most_in_use: the most there have been at one time.
    """

    def __init__(self) -> None:
        self.in_use = 0
        self.most_in_use = 0
        # How many bytes of each released region, from its beginning, still have their pages.
        self._spare: dict[Region, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that wait for their next use."""
        return sum(self._spare.values())

    def count(self, nbytes: int) -> None:
        """A buffer of `nbytes` is held from now on; of `-nbytes`, no longer."""
        self.in_use += nbytes
        self.most_in_use = max(self.most_in_use, self.in_use)

    def leave(self, region: Region) -> None:
        """`region` is not needed for now; its contents are lost."""
        if _mover() is None:
            region.drop()
        else:
            self._spare[region] = region.length

    def supply(self, region: Region) -> None:
        """Provides `region` with the pages left by others, as far as there are any."""
        present = self._spare.pop(region, 0)
        move = _mover()
        while present < region.length and self._spare and move is not None:
            donor = self._best(region.length - present)
            left = self._spare.pop(donor)
            size = min(left, region.length - present)
            if not move(donor.address + left - size, region.address + present, size):
                donor.drop()
                return
            if left > size:
                self._spare[donor] = left - size
            present += size

    def clear(self) -> None:
        """Gives everything back to the kernel."""
        for region in self._spare:
            region.drop()
        self._spare.clear()

    def _best(self, wanted: int) -> Region:
        """The smallest region that has enough, otherwise the largest."""
        enough = [region for region, size in self._spare.items() if size >= wanted]
        if enough:
            return min(enough, key=self._spare.__getitem__)
        return max(self._spare, key=self._spare.__getitem__)


@functools.cache
def _mover() -> Move | None:
    """The kernel's way to move pages, tried once; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "mremap", None)
    if call is None:
        return None
    call.restype = ctypes.c_void_p
    call.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    )

    def move(source: int, target: int, length: int) -> bool:
        flags = _MAYMOVE | _FIXED | _DONTUNMAP
        return bool(call(source, length, length, flags, target) == target)

    first, second = Region(1), Region(1)
    first.memory[0] = 7
    works = move(first.address, second.address, first.length)
    return move if works and second.memory[0] == 7 and first.memory[0] == 0 else None
