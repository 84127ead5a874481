"""One unit's reduced gradients, end to end in one aligned buffer (paper section 5.2).

Every reduce-scatter writes into its own view and one all-reduce covers the whole buffer, so no
gradient moves between the two tiers. Views start at 512-byte boundaries; the gaps between them
and the tail are zero and therefore neutral under SUM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from hp_platform.buffers import BufferLayout, aligned_empty


@frozen
class GradientSlots:
    """Where the gradients of some parameters lie in a buffer of one element type."""

    layout: BufferLayout

    @classmethod
    def of(cls, numels: Sequence[int], dtype: torch.dtype) -> GradientSlots:
        """Slots for parameters whose reduced gradients have `numels` elements."""
        return cls(BufferLayout.of(numels, dtype))

    def allocate(self, device: torch.device) -> GradientBuffer:
        """A fresh buffer. Only the gaps are zeroed: reduce-scatters overwrite every view."""
        layout = self.layout
        data = aligned_empty(layout.total, layout.dtype, device)
        position = 0
        for offset, numel in zip(layout.offsets, layout.numels):
            data[position:offset].zero_()
            position = offset + numel
        data[position:].zero_()
        return GradientBuffer(data, tuple(layout.views(data, [(n,) for n in layout.numels])))


@frozen
class GradientBuffer:
    """`data`: flat, aligned, padded. `views`: one 1-D view of it per parameter, in slot order."""

    data: Tensor
    views: tuple[Tensor, ...]
