"""Functions that `torch.utils.checkpoint` runs again in backward (validate mode).

They are held to what they were held to in forward. The form without `use_reentrant` keeps the
function in a frame, which only the hooks on saved tensors know; whoever computes under them can
give the frame a function that restores the context. The other form is a `torch.autograd.Function`
and is followed as one (`hp_dtensor.function_bridge`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from attrs import field, frozen

from hp_dtensor.implicit import Implicit, allowed, implicit

__all__ = ["Followed", "follow_checkpoint", "saving_hooks"]

# Private names of PyTorch, which has no public way to learn what will be recomputed:
# `test_recomputation` fails if their meaning changes.
saving_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""The hooks on what autograd saves here; None, the usual case, where there are none."""
_PACKING = "_checkpoint_hook.__init__.<locals>.pack_hook"


@frozen(eq=False)
class Followed:
    """A function, run in the context in which it ran at first.

    Attributes:
        run: the function.
        within: makes the context in which plain tensors are followed.
        policy: what operators may do by themselves.
    """

    run: Callable[..., Any]
    within: Callable[[], AbstractContextManager[None]]
    policy: Implicit = field(factory=allowed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        policy = self.policy
        with (
            implicit(reductions=policy.reductions, adjoints=policy.adjoints, plain=policy.plain),
            self.within(),
        ):
            try:
                return self.run(*args, **kwargs)
            except Exception as error:
                if not getattr(error, "_hp_placed", False):
                    error.add_note("in code that runs in backward")
                raise


def follow_checkpoint(within: Callable[[], AbstractContextManager[None]]) -> None:
    """Where a checkpointed function runs now, lets it run in the same context in backward.

    Args:
        within: makes the context in which plain tensors are followed.
    """
    hooks = saving_hooks(True)
    if hooks is None or getattr(hooks[0], "__qualname__", "") != _PACKING:
        return
    packing = hooks[0]
    at = packing.__code__.co_freevars.index("frame")
    frame = packing.__closure__[at].cell_contents
    if type(frame.recompute_fn) is not Followed:
        frame.recompute_fn = Followed(frame.recompute_fn, within)
