"""The bucket whose parameter does not travel as it lies in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from hp_fsdp.bucket import Bucket
from hp_fsdp.cut import AnyCut, Cut
from hp_fsdp.param import ShardedParameter
from hp_platform import Origin
from hp_platform.buffers import aligned_empty


class PackedBucket(Bucket):
    """One parameter cut along a dim that is not leading: chunked and concatenated on the way."""

    _chunks: Tensor | None = None

    @property
    def _cut(self) -> Cut:
        cut = self.parameters[0].cut
        assert isinstance(cut, Cut)
        return cut

    @property
    def _storage_numel(self) -> int:
        """Stored without padding."""
        return self._cut.local_numel

    @property
    def _full_numel(self) -> int:
        return self._cut.numel

    def _chooses_place(self, cut: AnyCut) -> bool:
        return False

    def _travelling_part(self) -> Tensor:
        cut, piece = self._cut, self._on_device(self.storage)
        if cut.local_shape != cut.padded_shape:
            padded = aligned_empty(cut.padded_numel, piece.dtype, piece.device).zero_()
            target = padded.view(cut.padded_shape).narrow(cut.dim, 0, cut.length(cut.rank))
            target.copy_(piece.view(cut.local_shape))
            piece = padded
        if piece.dtype == self.compute_dtype:
            return piece
        return aligned_empty(piece.numel(), self.compute_dtype, piece.device).copy_(piece)

    def _issue_gather(self, part: Tensor, output: Tensor, origin: Origin) -> None:
        self._chunks = aligned_empty(self.gathered_numel, part.dtype, part.device)
        self._gathering.issue(part, self._data.shard, self._chunks, origin)

    def keep_part(self) -> None:
        """Nothing: backward gathers from the shards."""

    def _unpack(self) -> None:
        assert self._chunks is not None
        cut, chunks = self._cut, self._chunks
        pieces = [
            piece.view(cut.padded_shape).narrow(cut.dim, 0, cut.length(rank))
            for rank, piece in enumerate(chunks.split(cut.padded_numel))
        ]
        assert self.parameters[0].full is not None
        torch.cat(pieces, dim=cut.dim, out=self.parameters[0].full.data)
        self._chunks = None

    def _packed(self, gradients: Tensor) -> Tensor:
        cut = self._cut
        gradient = gradients.view(cut.shape)
        flat = aligned_empty(cut.gathered_numel, gradient.dtype, gradient.device)
        for rank, piece in enumerate(flat.split(cut.padded_numel)):
            length = cut.length(rank)
            if length < cut.chunk:
                piece.zero_()
            target = piece.view(cut.padded_shape).narrow(cut.dim, 0, length)
            start = min(rank * cut.chunk, cut.shape[cut.dim])
            target.copy_(gradient.narrow(cut.dim, start, length))
        return flat

    def local_gradient(self, parameter: ShardedParameter, part: Tensor) -> Tensor:
        cut = self._cut
        return part.view(cut.padded_shape).narrow(cut.dim, 0, cut.length(cut.rank))
