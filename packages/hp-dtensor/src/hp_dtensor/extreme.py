"""The gradient of a maximum or minimum over ranks (`Partial("max")`, `Partial("min")`).

Which rank's value won depends on the values, so there is no adjoint that a transition could
compile. The gradient goes to the ranks whose value is the extreme; ranks that tie share it
equally, as elements do in `torch.amax`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial, Placement, Replicate, is_partial
from hp_dtensor.rules.along import carried, to_summands
from hp_dtensor.transition import Transition
from hp_platform.ledger import Origin


def is_extreme(placement: Placement) -> bool:
    return is_partial(placement) and placement.reduce_op in ("max", "min")


def takes_extreme(transition: Transition) -> bool:
    """Whether the transition finishes a maximum or minimum along every axis that has one."""
    if not any(is_extreme(placement) for placement in transition.source.placements):
        return False
    return not any(is_extreme(placement) for placement in transition.target.placements)


def finish(transition: Transition, local: Tensor, origin: Origin) -> Tensor:
    """`transition.apply`, with the gradient of the extreme."""
    source = transition.source
    finished = _with(source, Replicate())
    value = Transition.compile(source, finished).run_forward(local.detach(), origin=origin)
    ties = (local.detach() == value).to(local.dtype)
    counting = Transition.compile(_with(source, Partial()), finished)
    share = ties / counting.run_forward(ties, origin=origin)
    axes = [axis for axis, p in enumerate(source.placements) if is_extreme(p)]
    found = carried(value, local * share, "redistribute", to_summands(finished, axes))
    return Transition.compile(finished, transition.target).apply(found, origin=origin)


def _with(layout: Layout, instead: Placement) -> Layout:
    values = [instead if is_extreme(p) else p for p in layout.placements]
    grads = [
        Replicate() if is_extreme(p) else g
        for p, g in zip(layout.placements, layout.grad_placements)
    ]
    return Layout(layout.mesh, values, layout.shape, grads)


def needs_gradient(local: Tensor) -> bool:
    return local.requires_grad and torch.is_grad_enabled()
