"""One unit's reduced gradients, end to end in one aligned buffer (paper section 5.2).

Every reduce-scatter writes into its own view and one all-reduce covers the whole buffer, so no
gradient moves between the two tiers. Views start at 512-byte boundaries; the gaps between them
and the tail are zero and therefore neutral under SUM.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import sub

import torch
from attrs import frozen
from torch import Tensor

from hp_platform.buffers import BufferLayout, aligned_empty


@frozen(slots=False)
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
        for start, stop in self._gaps:
            data[start:stop].zero_()
        return GradientBuffer(data, data.split_with_sizes(self._pieces)[::2])

    @cached_property
    def _pieces(self) -> list[int]:
        """Lengths of the parts and of what follows each, one after another."""
        layout = self.layout
        nexts = [*layout.offsets[1:], layout.total]
        ends = [o + n for o, n in zip(layout.offsets, layout.numels)]
        return [n for pair in zip(layout.numels, map(sub, nexts, ends)) for n in pair]

    @cached_property
    def _gaps(self) -> tuple[tuple[int, int], ...]:
        """Where no gradient lies, as (start, stop) in elements."""
        ends = [o + n for o, n in zip(self.layout.offsets, self.layout.numels)]
        bounds = zip([0, *ends], [*self.layout.offsets, self.layout.total])
        return tuple((start, stop) for start, stop in bounds if start < stop)


@frozen
class GradientBuffer:
    """`data`: flat, aligned, padded. `views`: one 1-D view of it per parameter, in slot order."""

    data: Tensor
    views: tuple[Tensor, ...]
