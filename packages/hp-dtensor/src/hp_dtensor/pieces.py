"""Pieces: how a local tensor is shared out among the ranks of an axis, or put together from theirs.

Along one mesh axis ranks hold different parts of one dim at most, before a move and after it. So
what one rank has for the others, or gets from them, is one block of its local tensor, divided
along one dim of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from hp_dtensor.blocks import Block, block_at
from hp_dtensor.cuts import Runs, length, merged


@frozen(eq=False, slots=False)
class Pieces:
    """A block of a local tensor, divided along a dim; in a message, piece after piece.

    Attributes:
        view: the shape in which the local tensor is seen.
        block: all pieces together, in their order along `dim`.
        dim: the dim that is divided.
        lengths: of the pieces along `dim`.
        sizes: of the pieces, in elements.
        whole: the block is the whole local tensor, in its order.
        as_they_lie: one after the other the pieces are the block, row-major.
        copies: how many coordinates get the same; above 1 there is one piece.
    """

    view: tuple[int, ...]
    block: Block
    dim: int
    lengths: tuple[int, ...]
    sizes: tuple[int, ...]
    as_they_lie: bool
    whole: bool
    copies: int = 1

    @classmethod
    def of(
        cls,
        view: tuple[int, ...],
        positions: Sequence[Runs],
        dim: int = 0,
        along: Sequence[Runs] | None = None,
        copies: int = 1,
    ) -> Pieces:
        """Pieces that lie `along` a dim at these positions, and at `positions` of the other dims;
        None for one piece at `positions` of every dim."""
        if along is None:
            block = block_at(positions, view)
            sizes = (math.prod(block.shape),) * copies
            return cls(view, block, dim, block.shape[:1], sizes, True, not block.chosen, copies)
        together = list(positions)
        together[dim] = merged([run for runs in along for run in runs])
        block = block_at(together, view)
        before, after = math.prod(block.shape[:dim]), math.prod(block.shape[dim + 1 :])
        lengths = tuple([length(runs) for runs in along])
        sizes = tuple([before * after * each for each in lengths])
        return cls(view, block, dim, lengths, sizes, before <= 1, not block.chosen)

    @property
    def is_message(self) -> bool:
        """Whether the local tensor, flattened, is the message."""
        return self.whole and self.as_they_lie and self.copies == 1

    def _even(self) -> tuple[int, ...] | None:
        """The shape of the block with the divided dim as two, if all pieces are alike."""
        shape, dim, count = self.block.shape, self.dim, len(self.lengths)
        if self.lengths.count(self.lengths[0]) != count:
            return None
        return (*shape[:dim], count, self.lengths[0], *shape[dim + 1 :])

    def packed(self, tensor: Tensor) -> Tensor:
        """The message for a local tensor: 1-D, contiguous. It shares the tensor's memory where the
        pieces lie there one after the other."""
        if tensor.shape != self.view:
            tensor = tensor.reshape(self.view)
        block = self.block.take(tensor)
        if self.as_they_lie:
            message = flat(block)
            return message if self.copies == 1 else message.repeat(self.copies)
        even = self._even()
        if even is not None:
            return flat(block.reshape(even).movedim(self.dim, 0))
        pieces = torch.split_with_sizes(block, self.lengths, self.dim)
        return torch.cat([piece.reshape(-1) for piece in pieces])

    def unpacked(self, message: Tensor) -> Tensor:
        """The local tensor, seen as `view`, from a message: the opposite of `packed`."""
        block = self._block(message)
        if self.whole:
            return block
        target = message.new_empty(self.view)
        self.block.put(target, block)
        return target

    def _block(self, message: Tensor) -> Tensor:
        shape, dim = self.block.shape, self.dim
        if self.as_they_lie:
            return message.view(shape)
        if self._even() is not None:
            stacked = (len(self.lengths), *shape[:dim], self.lengths[0], *shape[dim + 1 :])
            # Where each sent one, reshaping is a view, and what reads the result calls `view`.
            return message.view(stacked).movedim(0, dim).reshape(shape).contiguous()
        pieces = torch.split_with_sizes(message, self.sizes)
        before, after = shape[:dim], shape[dim + 1 :]
        return torch.cat(
            [piece.view((*before, n, *after)) for piece, n in zip(pieces, self.lengths)], dim
        )


def flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1)
