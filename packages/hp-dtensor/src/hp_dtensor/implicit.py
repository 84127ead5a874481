"""What operators may do by themselves to operands that do not fit, in the current context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from attrs import frozen

__all__ = ["Implicit", "allowed", "any_requires_grad", "implicit"]

# The wrapper's own flag, past __torch_function__; PyTorch has no public name for it that is as
# fast. `test_dispatch` fails if its meaning changes.
any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad


@frozen
class Implicit:
    """What an operator may do by itself to operands whose layouts do not fit.

    Attributes:
        reductions: bring an operand to the layout that the others need: reduce a pending sum,
            turn a replicated summand into one, take a part of a whole tensor, cut another dim,
            read a value that is on no rank alone.
        adjoints: sum a gradient backward where a replicated operand meets sharded ones without
            having declared that its gradient is `Partial`.
        plain: take a plain tensor for a replicated one. On a mesh of one rank it is.
    """

    reductions: bool = True
    adjoints: bool = True
    plain: bool = False


_PERMISSIVE = Implicit()
_current: ContextVar[Implicit] = ContextVar("hp_dtensor_implicit", default=_PERMISSIVE)

allowed: Callable[[], Implicit] = _current.get
"""What holds now."""


@contextmanager
def implicit(*, reductions: bool, adjoints: bool, plain: bool = False) -> Iterator[None]:
    """Within the context, refuse what is switched off instead of inserting it.

    Example:
        `with implicit(reductions=False, adjoints=True): ...` makes a missing all-reduce an error.
    """
    token = _current.set(Implicit(reductions, adjoints, plain))
    try:
        yield
    finally:
        _current.reset(token)
