"""The bucket whose gradients peers read where autograd has left them.

There is no place that gradients are brought together in, unless their type changes on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hp_fsdp.bucket import Bucket
from hp_fsdp.cut import AnyCut
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.pages import PagePool
from hp_fsdp.scatter import Scatter
from hp_platform import Origin
from hp_platform.buffers import aligned_empty
from hp_platform.lent_pieces import (
    SCRATCH_BYTES,
    PieceLayout,
    PiecewiseReduceScatter,
    piecewise_reduce_scatter,
)
from hp_platform.peer_memory import peer_memory


def can_lend(data: DataMesh) -> bool:
    """Whether the ranks of the shard axis read one another's memory."""
    return peer_memory(data.shard) is not None


class PiecewiseBucket(Bucket):
    """Gradients travel from where they are, each rank reading its share of each."""

    divides = True

    # Gradients of earlier micro-steps, until backward comes here again.
    _kept: list[Tensor | None] | None = None
    # The reduce-scatter, and the type that it was made for.
    _known: tuple[torch.dtype, PiecewiseReduceScatter] | None = None

    def _chooses_place(self, cut: AnyCut) -> bool:
        return False

    @property
    def _scratch_numel(self) -> int:
        return min(super()._scratch_numel, SCRATCH_BYTES // self.reduce_dtype.itemsize)

    def _change_type(self, dtype: torch.dtype) -> None:
        super()._change_type(dtype)
        if self._kept is not None:
            self._kept = [None if g is None else g.to(self.compute_dtype) for g in self._kept]

    def make_room(self, pages: PagePool) -> None:
        """Has autograd add to the gradients of earlier micro-steps."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        for index, (parameter, gradient) in enumerate(zip(self.parameters, kept)):
            full = parameter.full
            if full is None or gradient is None or not full.requires_grad:
                continue
            if full.grad is None and full.grad_dtype in (None, gradient.dtype):
                full.grad = gradient.view(full.shape)
                kept[index] = None
        if any(gradient is not None for gradient in kept):
            self._kept = kept

    def _take(self, keeps: bool = False) -> list[Tensor | None]:
        """Takes autograd's gradients, with those of earlier micro-steps, flat.

        Args:
            keeps: more is added to them later, so memory that others see is left to those.
        """
        taken: list[Tensor | None] = []
        kept, self._kept = self._kept, None
        for index, parameter in enumerate(self.parameters):
            earlier = None if kept is None else kept[index]
            gradient = None if parameter.full is None else parameter.full.grad
            if gradient is not None:
                assert parameter.full is not None
                parameter.full.grad = None
                is_shared = keeps and _is_shared(gradient)
                gradient = _flat(gradient, self.compute_dtype)
                gradient = gradient.clone() if is_shared else gradient
                earlier = gradient if earlier is None else earlier.add_(gradient)
            taken.append(earlier)
        self.has_gradients = False
        return taken

    def accumulate(self, pages: PagePool) -> None:
        """As `Bucket.accumulate`; nothing is moved unless its type changes."""
        if not self.has_gradients:
            return
        stays = self._accumulated is None and self.reduce_dtype == self.compute_dtype
        taken = self._take(keeps=stays)
        self.has_gradients = True
        if stays:
            self._kept = taken
        else:
            self._accumulated = self._sum_of(taken)

    def drop_room(self, pages: PagePool) -> None:
        """Nothing: autograd was given no place."""

    def forget(self, pages: PagePool) -> None:
        """As `Bucket.forget`."""
        self._take()
        self._accumulated = None

    def scatter(self, output: Tensor, pages: PagePool, divisor: float, origin: Origin) -> Scatter:
        """As `Bucket.scatter`."""
        pieces: Sequence[Tensor | None] = self._take()
        if self._accumulated is not None or self.reduce_dtype != self.compute_dtype:
            total = self._sum_of(pieces)
            self._accumulated = None
            pieces = [self._full_view(p, total).view(-1) for p in self.parameters]
        scratch = self._hold_scratch(pages)
        place = output.new_empty(self._scratch_numel) if scratch is None else scratch.data
        handle = self._scattering(pieces, output, place, divisor, origin)
        return Scatter(handle, None, scratch, self._recycle)

    @property
    def _scattering(self) -> PiecewiseReduceScatter:
        dtype = self.reduce_dtype
        if self._known is None or self._known[0] != dtype:
            cuts = [parameter.cut for parameter in self.parameters]
            places = tuple(cut.offset for cut in cuts), tuple(cut.numel for cut in cuts)
            layout = PieceLayout(*places, self.gathered_numel)
            made = piecewise_reduce_scatter(layout, dtype, self._data.shard)
            assert made is not None
            self._known = dtype, made
        return self._known[1]

    def _sum_of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Everything accumulated so far, flat, in the type of the reduction."""
        total = self._accumulated
        if total is None:
            total = aligned_empty(self._full_numel, self.reduce_dtype, self._data.shard.device)
            total.zero_()
        for parameter, gradient in zip(self.parameters, gradients):
            if gradient is not None:
                self._full_view(parameter, total).view(-1).add_(gradient)
        return total


def _flat(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient as peers read it: outside the graph, dense and contiguous, its memory the values.

    Lazily conjugated or negated ones are not, nor those of a `grad_dtype` of the program's.
    """
    dense = gradient.detach()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    if dense.is_neg() or dense.is_conj() or dense.dtype is not dtype:
        dense = dense.resolve_conj().resolve_neg().to(dtype)
    return dense.contiguous().view(-1)


def _is_shared(gradient: Tensor) -> bool:
    """Whether other tensors see its memory: autograd takes over views that a backward returns.

    Private to PyTorch, which has no public way to ask; `test_gradient_memory` fails if it changes.
    """
    if gradient.layout is not torch.strided:
        return False
    storage = gradient.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count > _OWNERS


_OWNERS = 2
"""The gradient and `storage`."""
