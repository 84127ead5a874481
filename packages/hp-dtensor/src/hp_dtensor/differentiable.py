"""Autograd of a DTensor: it runs on the local tensor, which is the leaf and holds the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from hp_dtensor.dispatch import move, of_function
from hp_dtensor.function_gradient import expect_function, watch
from hp_dtensor.implicit import any_requires_grad
from hp_dtensor.layout import Layout
from hp_dtensor.placements import describe
from hp_dtensor.transition import Transition
from hp_dtensor.whole_values import unfollowed
from hp_dtensor.wrapper import Wrapper
from hp_platform.collectives import Origin

__all__ = ["Differentiable"]

_ORIGIN = Origin("hp_dtensor", "redistribute")


class Differentiable(Wrapper):
    """A wrapper whose gradients are laid out by the layout's gradient placements."""

    _gradient: Self | None = None

    def _checked_local(self) -> Tensor:
        local = self._local
        if not local.requires_grad and any_requires_grad(self):
            return of_function("to_local", self)
        if local.requires_grad and not torch.is_grad_enabled():
            expect_function(self)
        return local

    def _to(self, layout: Layout) -> Self:
        if layout == self._layout:
            return self
        transition, local = Transition.compile(self._layout, layout), self._checked_local()
        with unfollowed():
            return self._of(move(transition, local, _ORIGIN), layout)

    @property
    def requires_grad(self) -> bool:
        # What an autograd.Function gave has its gradient on the wrapper until it is used.
        return self._local.requires_grad or any_requires_grad(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self._local.requires_grad_(requires_grad)
        self._follow_local()
        if requires_grad and self._local.is_leaf:
            watch(self)
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self._local.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return self._local.grad_fn

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._local.retains_grad

    @property
    def output_nr(self) -> int:  # type: ignore[override]
        return self._local.output_nr

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self._local._version

    def retain_grad(self) -> None:
        self._local.retain_grad()

    @property
    def grad_layout(self) -> Layout:
        """Layout of the gradient: the gradient placements as placements of a value."""
        return self._layout.of_gradient

    @property  # type: ignore[override]
    def grad(self) -> Self | None:
        """The gradient as a DTensor, over the local tensor's own gradient."""
        local = self._local.grad
        if local is None:
            self._gradient = None
            return None
        held = self._gradient
        if held is None or held._local is not local:
            layout = self.grad_layout if held is None else held._layout
            self._gradient = held = self._of(local, layout)
        return held

    @grad.setter
    def grad(self, value: Self | None) -> None:
        if value is None:
            self._local.grad = None
            self._gradient = None
            return
        if not isinstance(value, Differentiable):
            raise TypeError(
                f"the gradient of a DTensor must be a DTensor or None, found "
                f"{type(value).__name__}; wrap it with DTensor.from_local"
            )
        settled = [
            Replicate() if isinstance(grad, Partial) else grad
            for grad in self._layout.grad_placements
        ]
        if value._layout.mesh != self._layout.mesh or value._layout.placements not in (
            self._layout.grad_placements,
            tuple(settled),
        ):
            raise ValueError(
                f"the gradient of {self._layout} must be placed "
                f"{describe(self._layout.grad_placements)}, or {describe(settled)} once it is "
                f"summed; found {value._layout}"
            )
        self._local.grad = value._local
        self._gradient = self._of(value._local, value._layout)

    @grad.deleter
    def grad(self) -> None:
        self._local.grad = None
        self._gradient = None

    @property  # type: ignore[override]
    def data(self) -> Self:
        return self._of(self._local.data, self._layout)

    @data.setter
    def data(self, value: Self) -> None:
        if not isinstance(value, Differentiable) or not self._is_laid_out_like(value):
            found = (
                value._layout
                if isinstance(value, Differentiable)
                else f"a plain {type(value).__name__} of shape {tuple(value.shape)}"
            )
            raise ValueError(
                f"the data of a DTensor laid out {self._layout} was set to {found}; expected a "
                "DTensor of the same layout: hp_dtensor.distribute_tensor(full, mesh, placements)"
            )
        if value.dtype != self.dtype or value.device != self.device:
            raise ValueError(
                f"data of {self.dtype} on {self.device} cannot become {value.dtype} on "
                f"{value.device}; make a new parameter"
            )
        self._local.data = value._local

    def _is_laid_out_like(self, other: Self) -> bool:
        """Whether local tensors may be exchanged; what is declared of gradients may differ."""
        mine, theirs = self._layout, other._layout
        same = mine.placements == theirs.placements and mine.shape == theirs.shape
        return same and mine.mesh == theirs.mesh

    def backward(
        self,
        gradient: Self | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Runs the local backward pass on every rank.

        Raises:
            ValueError: `gradient` is not a DTensor, or it is missing and this is not a scalar.
        """
        output = self._with_plain_gradient()
        local_inputs = inputs
        if inputs is not None:
            given = inputs if isinstance(inputs, tuple | list) else [inputs]
            local_inputs = [getattr(each, "_local", each) for each in given]
        seed = output._seed(gradient)
        output._checked_local().backward(seed, retain_graph, create_graph, inputs=local_inputs)

    def _with_plain_gradient(self) -> Self:
        """Where each rank would have to seed a summand, let every rank seed the whole."""
        if self._layout.of_gradient.partial_axes():
            return self._to(self._layout.with_placements(self._layout.placements))
        return self

    def _seed(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            if self.numel() != 1:
                raise ValueError(
                    f"backward() needs a gradient for an output of shape {tuple(self.shape)}"
                )
            # A sharded output of one element has an empty part on all ranks but one.
            return None if self._local.numel() == 1 else torch.ones_like(self._local)
        if not isinstance(gradient, Differentiable):
            raise ValueError(
                f"the gradient must be a DTensor laid out like {self.grad_layout}, found "
                f"{type(gradient).__name__}"
            )
        return gradient._to(self.grad_layout)._local

    def register_hook(self, hook: Callable[[Self], Self | None]) -> Any:
        """`hook` gets the gradient as a DTensor and may return another one."""
        layout = self.grad_layout

        def on_local(gradient: Tensor) -> Tensor | None:
            answer = hook(self._of(gradient, layout))
            return None if answer is None else answer._to(layout)._local

        return self._local.register_hook(on_local)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Self], None]) -> Any:
        """`hook` gets this DTensor once its gradient has been accumulated."""
        # Python's collector does not see what such a hook holds: this would live for ever.
        wrapper, of, layout = ref(self), type(self)._of, self._layout

        def on_local(local: Tensor) -> None:
            alive = wrapper()
            hook(of(local, layout) if alive is None else alive)

        return self._local.register_post_accumulate_grad_hook(on_local)

    def detach(self) -> Self:
        """Shares this rank's memory; outside the graph."""
        made = self._of(self._local.detach(), self._layout)
        # What refuses a parameter often detaches it first.
        advice = self.__dict__.get("_hp_advice")
        if advice is not None:
            made._hp_advice = advice  # type: ignore[attr-defined]
        return made

    def detach_(self) -> Self:
        self._local.detach_()
        self._follow_local()
        return self
