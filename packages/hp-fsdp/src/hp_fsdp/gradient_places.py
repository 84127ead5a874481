"""Where the gradients of one bucket lie in the buffer that its reduce-scatter reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import ref

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

T = TypeVar("T")


@frozen(eq=False)
class GradientPlaces:
    """Views of one flat buffer.

    Attributes:
        views: every parameter's place, in its shape.
        gaps: what lies between and behind them, which must be zero.
    """

    views: tuple[Tensor, ...]
    gaps: tuple[Tensor, ...]

    @classmethod
    def of(cls, buffer: Tensor, views: Sequence[Tensor]) -> GradientPlaces:
        """The places at `views` of `buffer`, in any order, which do not overlap."""
        first = buffer.storage_offset()
        starts = [view.storage_offset() - first for view in views]
        extents = sorted((start, start + view.numel()) for start, view in zip(starts, views))
        begins = [start for start, _ in extents]
        ends = [end for _, end in extents]
        between = zip([0, *ends], [*begins, buffer.numel()])
        gaps = tuple(buffer[start:stop] for start, stop in between if start < stop)
        return cls(tuple(views), gaps)

    def land(self, index: int, gradient: Tensor) -> Tensor | None:
        """Puts the first gradient that autograd has for a parameter into its place.

        Returns:
            A view of its own of the place, which autograd may keep as it is; None, with nothing
            done, where the gradient is part of a graph or is not dense.
        """
        if torch.is_grad_enabled() or gradient.layout is not torch.strided:
            return None
        place = self.views[index]
        place.copy_(gradient)
        return place.view(place.shape)

    def complete(self, found: Sequence[tuple[int, Tensor]], *, clear: bool) -> None:
        """Brings in the gradients that autograd has put elsewhere.

        Args:
            found: the gradients that there are, with their parameters' indexes.
            clear: whether whatever else is in the buffer counts as zero.
        """
        if clear:
            present = {index for index, _ in found}
            for gap in self.gaps:
                gap.zero_()
            for index, place in enumerate(self.views):
                if index not in present:
                    place.zero_()
        for index, gradient in found:
            # The unit's outputs did not lead here, or the gradient is part of a graph.
            place = self.views[index]
            if gradient.data_ptr() != place.data_ptr() and gradient.numel():
                place.copy_(gradient)


def before_accumulation(
    leaf: Tensor, owner: T, replace: Callable[[T, Tensor], Tensor | None]
) -> Node:
    """Calls `replace` with a gradient that autograd is about to add to `leaf.grad`.

    What it returns, unless None, takes the gradient's place. Hooks on the leaf itself would also be
    called by `torch.autograd.grad`, whose results are the caller's.

    Args:
        owner: handed to `replace`, which must not refer to it: only a weak reference is kept, for
            the garbage collector does not see through autograd's nodes.

    Returns:
        What must be kept for as long as this is to hold.
    """
    node, owner_ref = get_gradient_edge(leaf).node, ref(owner)

    def before(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor] | None:
        gradient, present = gradients[0], owner_ref()
        if gradient is None or present is None:
            return None
        replaced = replace(present, gradient)
        return None if replaced is None else (replaced,)

    node.register_prehook(before)
    return node
