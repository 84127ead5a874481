"""Gradient settlement at the end of a backward pass (paper section 4.4, fourth consequence).

Where a replicated parameter meets sharded activations, each rank's gradient is a summand
(gradient placement `Partial`). The sum over the mesh axis is taken once per backward pass, fused
over all such parameters, when the pass has ended.

Only what this pass adds may be summed: a gradient accumulated by earlier passes is a sum already.
So the earlier gradient is set aside when the new one arrives, and the new one is added to it once
it is settled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import Partial, Placement, Replicate
from hp_dtensor.settlement import Settlement

__all__ = ["EndOfBackward", "SettledGradient", "queue_at_end_of_backward", "settled_placements"]


def queue_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` when the backward pass that is running now has ended.

    Uses the engine's private `queue_callback`: PyTorch has no public way to learn that a backward
    pass has ended, and its own FSDP and DDP use this one. `test_end_of_backward` fails if its
    meaning changes.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def settled_placements(layout: Layout) -> tuple[Placement, ...]:
    """Where the gradient of a parameter laid out like this is after settlement."""
    return tuple(Replicate() if isinstance(g, Partial) else g for g in layout.grad_placements)


@frozen(eq=False)
class SettledGradient:
    """A leaf whose gradient is a summand on each rank.

    Attributes:
        leaf: the plain local tensor that autograd accumulates into.
        layout: its layout; `Partial` gradient placements are what is settled.
        name: qualified parameter name, for errors.
        settled: called after settlement, to tell a wrapper that the gradient is whole.
    """

    leaf: Tensor
    layout: Layout
    name: str
    settled: Callable[[], None] | None = None

    @property
    def is_unvalued(self) -> bool:
        """Whether there is nothing to settle yet: no values, or no ranks."""
        return self.leaf.is_meta or isinstance(self.layout.mesh, AbstractMesh)


@frozen(eq=False)
class _Planned:
    """The settlement of some leaves, in the module's order."""

    order: list[int]
    dtypes: list[torch.dtype]
    settlement: Settlement


def _nothing() -> None:
    return None


class _Pass:
    """One backward pass that has reached a parameter. The engine holds the only strong reference
    to its `end`, so a pass that fails is recognised by its death."""

    def __init__(self, owner: EndOfBackward) -> None:
        self.owner = owner

    def end(self) -> None:
        self.owner._settle()


@define(eq=False)
class EndOfBackward:
    """Settles the gradients of one module's parameters, once per backward pass.

    Passes that run inside another one (reentrant checkpointing) belong to the outer pass when
    that has already reached a parameter, and are passes of their own otherwise.

    `dtype` is what the sums are taken in, each gradient's own by default.

    Gradients obtained with `torch.autograd.grad` are not accumulated into leaves and stay this
    rank's summands.
    """

    gradients: Sequence[SettledGradient]
    dtype: torch.dtype | None = None
    _planned: list[_Planned] = field(factory=list, init=False)
    _usual: frozenset[int] = field(default=frozenset(), init=False)
    _handles: list[RemovableHandle] = field(factory=list, init=False)
    _earlier: dict[int, Tensor | None] = field(factory=dict, init=False)
    _running: Callable[[], _Pass | None] = field(default=_nothing, init=False)

    def install(self) -> None:
        """Hooks every leaf, frozen ones too, so that unfreezing one later is not missed.

        What the usual pass settles, one that reaches every leaf that is not frozen, is worked out
        here.
        """
        usual = []
        for index, gradient in enumerate(self.gradients):
            leaf, required = gradient.leaf, gradient.leaf.requires_grad
            if not leaf.dtype.is_floating_point and not leaf.dtype.is_complex:
                continue
            leaf.requires_grad_(True)
            self._handles.append(leaf.register_hook(_Arrival(self, index)))
            leaf.requires_grad_(required)
            if required:
                usual.append(index)
        if usual and not any(self.gradients[index].is_unvalued for index in usual):
            self._usual = frozenset(usual)
            self._settlement(usual, [self.gradients[index].leaf for index in usual])

    def remove(self) -> None:
        """Takes the hooks away, where others take the leaves over."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self) -> None:
        if self._earlier:
            self._drop_failed_pass()
        now = _Pass(self)
        self._running = weakref.ref(now)
        queue_at_end_of_backward(now.end)

    def _drop_failed_pass(self) -> None:
        """A pass that raised has left parts of a gradient behind: the earlier ones return."""
        for index, earlier in self._earlier.items():
            self.gradients[index].leaf.grad = earlier
        self._earlier.clear()

    def _settle(self) -> None:
        earlier, self._earlier = self._earlier, {}
        self._running = _nothing
        reached: list[int] = []
        fresh: list[Tensor] = []
        # In the order of the module on every rank, whatever order the engine used.
        usual = self._usual and earlier.keys() == self._usual
        for index in self._planned[0].order if usual else sorted(earlier):
            leaf = self.gradients[index].leaf
            gradient = leaf.grad
            if gradient is None:  # torch.autograd.grad: nothing was accumulated
                leaf.grad = earlier[index]
                continue
            if not gradient.is_contiguous():
                # Memory that may be written: an expanded gradient is copied.
                leaf.grad = gradient = gradient.contiguous()
            reached.append(index)
            fresh.append(gradient)
        self._settlement(reached, fresh).run(fresh)
        for index, gradient in zip(reached, fresh):
            each, old = self.gradients[index], earlier[index]
            if old is not None:
                each.leaf.grad = old.add_(gradient)
            if each.settled is not None:
                each.settled()

    def _settlement(self, order: list[int], fresh: Sequence[Tensor]) -> Settlement:
        """The one worked out for these leaves; a model has one or two of them."""
        dtypes = [gradient.dtype for gradient in fresh]
        for planned in self._planned:
            if planned.order == order and planned.dtypes == dtypes:
                return planned.settlement
        if len(self._planned) > 8:  # parameters are frozen or unused in turn
            del self._planned[1:]
        layouts = [self.gradients[index].layout for index in order]
        made = Settlement.of(fresh, layouts, self.dtype)
        self._planned.append(_Planned(order, dtypes, made))
        return made

    def __deepcopy__(self, memo: object) -> EndOfBackward:
        return self


class _Arrival:
    """The hook on one leaf. It runs before the engine accumulates a gradient into it."""

    __slots__ = ("index", "leaf", "owner")

    def __init__(self, owner: EndOfBackward, index: int) -> None:
        self.owner, self.index, self.leaf = owner, index, owner.gradients[index].leaf

    def __call__(self, gradient: Tensor) -> None:
        owner, index = self.owner, self.index
        if gradient.requires_grad:
            raise RuntimeError(
                f"parameter {owner.gradients[index].name!r}: create_graph=True asks for a gradient "
                "that can be differentiated again, but its sum over the mesh axis is taken after "
                "the pass, outside the graph; use check_gradients or full tensors for that"
            )
        if owner._running() is None:
            owner._begin()
        earlier = owner._earlier
        if index not in earlier:
            earlier[index] = before = self.leaf.grad
            if before is not None:
                self.leaf.grad = None
