"""Cross-entropy of logits that are sharded over the vocabulary, on plain local tensors.

What a plan made with `loss_parallel=True` needs in production: each rank holds the scores of its
own range of the vocabulary for every position, and the ranks exchange a maximum, a sum of
exponentials and the target's score a position (as in Megatron-LM, Shoeybi et al. 2019, section 3)
instead of gathering all scores.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hp_platform import Origin
from hp_platform.axis import MeshAxis
from hp_platform.collectives import all_reduce

__all__ = ["vocabulary_cross_entropy"]

_ORIGIN = Origin("hp_integration", "cross-entropy", "forward")


def vocabulary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: MeshAxis,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Mean cross-entropy over the positions that count; the same on every rank of the axis.

    Args:
        logits: this rank's scores, [positions, vocabulary / ranks], floating point; rank r holds
            the r-th of equal parts of the vocabulary.
        targets: [positions], global token ids, the same on every rank.
        axis: the ranks that share the vocabulary.
        weight: [vocabulary], of the whole one on every rank; the mean is weighted by the targets'.
        ignore_index: a target that does not count.
        label_smoothing: in [0, 1], the part of the target that is spread evenly over the
            vocabulary (Szegedy et al. 2016, section 7).

    Returns:
        A scalar, nan if no position counts, as `torch.nn.functional.cross_entropy` gives for the
        same arguments. Its gradient is that of this rank's scores; backward communicates nothing.

    Raises:
        ValueError: the shapes do not fit, a target is no id of the vocabulary, or the smoothing is
            no part.
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
    if weight is not None and weight.shape != (size,):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, expected [{size}], one for every id of the "
            "whole vocabulary on every rank"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], found {label_smoothing}")
    target = _Target.of(targets, counted, weight, label_smoothing, logits, axis)
    losses: Tensor = _CrossEntropy.apply(logits, target, axis)
    return losses.sum() / target.weight.sum()


@frozen(eq=False)
class _Target:
    """What the scores are held to.

    Attributes:
        own: positions whose target is in this rank's part; index: its place there, [positions, 1].
        weight: of each position, 0 where it does not count.
        smoothing: part of the target spread over the vocabulary; 0 for none.
        spread: what of it is on each id of this rank's part: a number, or [part] if weighted.
        total: what of it is on all ids together.
    """

    own: Tensor
    index: Tensor
    weight: Tensor
    counted: Tensor
    smoothing: float
    spread: Tensor
    total: Tensor

    @classmethod
    def of(
        cls,
        targets: Tensor,
        counted: Tensor,
        weight: Tensor | None,
        smoothing: float,
        logits: Tensor,
        axis: MeshAxis,
    ) -> _Target:
        part, first = logits.shape[1], axis.rank * logits.shape[1]
        local = targets - first
        own = counted & (local >= 0) & (local < part)
        index = torch.where(own, local, 0).unsqueeze(1)
        size = part * axis.size
        # A single number stands for equal weights.
        all_weights = logits.new_ones(1) if weight is None else weight.to(logits.dtype)
        one = all_weights.expand(size) if weight is None else all_weights
        each = torch.where(counted, one[torch.where(counted, targets, 0)], 0)
        mine = all_weights if weight is None else all_weights[first : first + part]
        return cls(
            own,
            index,
            each,
            counted,
            smoothing,
            mine * smoothing / size,
            one.sum() * smoothing / size,
        )


class _CrossEntropy(torch.autograd.Function):
    """Losses of single positions, 0 where none counts."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: _Target, axis: MeshAxis) -> Tensor:
        highest = logits.amax(dim=1)
        all_reduce(highest, axis, op="max", origin=_ORIGIN).wait()
        shifted = logits - highest.unsqueeze(1)
        scores = torch.where(target.own, shifted.gather(1, target.index).squeeze(1), 0)
        exponentials = shifted.exp()
        parts = [exponentials.sum(dim=1), scores]
        if target.smoothing:
            parts.append((shifted * target.spread).sum(dim=1))
        # One message for all sums.
        sums = torch.stack(parts)
        all_reduce(sums, axis, origin=_ORIGIN).wait()
        ctx.save_for_backward(exponentials, sums[0])
        ctx.target = target
        losses = (1 - target.smoothing) * target.weight * (sums[0].log() - sums[1])
        if target.smoothing:
            losses = losses + target.total * sums[0].log() - sums[2]
        return torch.where(target.counted, losses, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        exponentials, total = ctx.saved_tensors
        target: _Target = ctx.target
        sharp = (1 - target.smoothing) * target.weight
        gradient = exponentials * ((sharp + target.total) / total).unsqueeze(1)
        own = torch.where(target.own, sharp, 0).to(gradient.dtype)
        gradient.scatter_add_(1, target.index, -own.unsqueeze(1))
        if target.smoothing:
            gradient -= target.spread
        scale = torch.where(target.counted, gradients[0], 0)
        return (gradient * scale.unsqueeze(1), None, None)
