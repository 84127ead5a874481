"""Cross-entropy of logits that are sharded over the vocabulary, on plain local tensors.

What a plan made with `loss_parallel=True` needs in production: each rank holds the scores of its
own range of the vocabulary for every position, and the ranks exchange a maximum, a sum of
exponentials and the target's score a position (as in Megatron-LM, Shoeybi et al. 2019, section 3)
instead of gathering all scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hp_platform import Origin
from hp_platform.axis import MeshAxis
from hp_platform.collectives import all_reduce

__all__ = ["vocabulary_cross_entropy"]

_ORIGIN = Origin("hp_integration", "cross-entropy", "forward")


def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, axis: MeshAxis, *, ignore_index: int = -100
) -> Tensor:
    """Mean cross-entropy over the positions that count; the same on every rank of the axis.

    Args:
        logits: this rank's scores, [positions, vocabulary / ranks], floating point; rank r holds
            the r-th of equal parts of the vocabulary.
        targets: [positions], global token ids, the same on every rank.
        axis: the ranks that share the vocabulary.
        ignore_index: a target that does not count.

    Returns:
        A scalar, nan if no position counts, as `torch.nn.functional.cross_entropy` gives. Its
        gradient is that of this rank's scores; backward communicates nothing.

    Raises:
        ValueError: the shapes do not fit, or a target is no id of the vocabulary.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"vocabulary_cross_entropy takes logits [positions, part of the vocabulary] and "
            f"targets [positions], found {tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    counted = targets != ignore_index
    size = logits.shape[1] * axis.size
    wrong = counted & ((targets < 0) | (targets >= size))
    if bool(wrong.any()):
        raise ValueError(
            f"target {int(targets[wrong][0])} is no id of a vocabulary of {size} and not "
            f"ignore_index={ignore_index}"
        )
    losses: Tensor = _CrossEntropy.apply(logits, targets, counted, axis)
    return losses.sum() / counted.sum()


class _CrossEntropy(torch.autograd.Function):
    """Losses of single positions, 0 where none counts."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, counted: Tensor, axis: MeshAxis
    ) -> Tensor:
        part = logits.shape[1]
        highest = logits.amax(dim=1)
        all_reduce(highest, axis, op="max", origin=_ORIGIN).wait()
        shifted = logits - highest.unsqueeze(1)
        local = targets - axis.rank * part
        own = counted & (local >= 0) & (local < part)
        index = torch.where(own, local, 0).unsqueeze(1)
        scores = torch.where(own, shifted.gather(1, index).squeeze(1), 0)
        exponentials = shifted.exp()
        # One message for both sums.
        sums = torch.stack((exponentials.sum(dim=1), scores))
        all_reduce(sums, axis, origin=_ORIGIN).wait()
        ctx.save_for_backward(exponentials, sums[0], index, own, counted)
        return torch.where(counted, sums[0].log() - sums[1], 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        exponentials, total, index, own, counted = ctx.saved_tensors
        gradient = exponentials / total.unsqueeze(1)
        gradient.scatter_add_(1, index, -own.to(gradient.dtype).unsqueeze(1))
        scale = torch.where(counted, gradients[0], 0)
        return (gradient * scale.unsqueeze(1), None, None, None)
