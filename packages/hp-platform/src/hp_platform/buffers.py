"""Flat buffers whose parts start on 512-byte boundaries, so that transfers are aligned.

Published measurements on NPUs show gathers between unaligned addresses at about half the
bandwidth of aligned ones; the caching allocators there align by themselves, PyTorch's CPU
allocator to 64 bytes only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hp_platform.errors import HPError

ALIGNMENT = 512
"""Bytes."""


def pad_to_alignment(numel: int, dtype: torch.dtype) -> int:
    """The least number of elements that is not below `numel` and fills whole 512-byte units."""
    unit = ALIGNMENT // dtype.itemsize
    return -(-numel // unit) * unit


def aligned_empty(numel: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """An uninitialised 1-D tensor of `numel` elements with `data_ptr() % 512 == 0`.

    On the meta device there is no address, and the tensor is an ordinary one.
    """
    if numel < 0:
        raise HPError(f"a buffer cannot have {numel} elements")
    if torch.device(device).type != "cpu":
        tensor = torch.empty(numel, dtype=dtype, device=device)
        if tensor.data_ptr() % ALIGNMENT == 0:
            return tensor
    spare = ALIGNMENT // dtype.itemsize
    longer = torch.empty(numel + spare, dtype=dtype, device=device)
    skipped = -longer.data_ptr() % ALIGNMENT // dtype.itemsize
    return longer[skipped : skipped + numel]


@dataclass(frozen=True)
class BufferLayout:
    """Where parts lie in one flat buffer; every part starts on a 512-byte boundary.

    Attributes:
        numels: elements of every part.
        dtype: element type of the buffer.
        offsets: first element of every part.
        total: elements of the buffer; a multiple of 512 bytes.
    """

    numels: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, numels: Sequence[int], dtype: torch.dtype) -> BufferLayout:
        """Lays the parts out one after another, each padded to whole 512-byte units."""
        padded = [pad_to_alignment(numel, dtype) for numel in numels]
        ends = tuple(accumulate(padded, initial=0))
        return cls(tuple(numels), dtype, ends[:-1], ends[-1])

    def allocate(self, device: torch.device | str) -> Tensor:
        """A zeroed, aligned buffer of this layout; the padding between parts stays zero."""
        return aligned_empty(self.total, self.dtype, device).zero_()

    def views(self, buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Every part of `buffer` in its shape, without copying.

        Raises:
            HPError: the buffer or the shapes are not those of this layout.
        """
        if buffer.ndim != 1 or buffer.numel() != self.total or buffer.dtype != self.dtype:
            raise HPError(
                f"this layout describes {self.total} elements of {self.dtype}, the buffer has "
                f"shape {tuple(buffer.shape)} and dtype {buffer.dtype}"
            )
        numels = tuple(math.prod(shape) for shape in shapes)
        if numels != self.numels:
            raise HPError(f"shapes with {numels} elements do not fit parts of {self.numels}")
        return [
            buffer[offset : offset + numel].view(tuple(shape))
            for offset, numel, shape in zip(self.offsets, numels, shapes)
        ]
