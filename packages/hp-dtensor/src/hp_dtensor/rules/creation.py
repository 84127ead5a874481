"""Rules of functions that make a new tensor like an old one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.rules.own_part import own_shape
from hp_dtensor.rules.pointwise import no_generator
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule, words

RANDOM = words(
    """
    rand_like randn_like randint_like bernoulli bernoulli_ normal_ uniform_ random_ exponential_
    native_dropout pca_lowrank svd_lowrank cauchy_ log_normal_ geometric_ multinomial normal
    poisson binomial rrelu kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_
    trunc_normal_ orthogonal_ sparse_ gumbel_softmax feature_alpha_dropout fractional_max_pool2d
    fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
    """
)
"""Functions that draw from the rank's own generator."""


def _like(call: Call) -> Recipe:
    """A new tensor where the old one is. A pending sum of ones would count the ranks."""
    layout = call.input.layout
    if isinstance(call.get("other"), Operand):
        raise call.error("a tensor as fill value has no rule", "pass a number")
    placements = [Replicate() if isinstance(p, Partial) else p for p in layout.placements]
    return Recipe(None, layout.with_placements(placements))


def _new(call: Call) -> Recipe:
    """`x.new_zeros(size)` and its kin: as `x` is along the dims whose sizes it has, else whole.

    Code that gives the leading sizes of `x` gives in production those of its part. All elements are
    the same, so which part of them a rank holds is free.
    """
    layout = call.input.layout
    size = call.get("size", ())
    size = (size,) if isinstance(size, int) else tuple(size)
    alike = 0
    while alike < min(len(size), len(layout.shape)) and size[alike] == layout.shape[alike]:
        alike += 1
    placements = [_kept(placement, alike) for placement in layout.placements]
    made = Layout(layout.mesh, placements, size)
    if not made.is_even:
        made = Layout(layout.mesh, [Replicate()] * len(placements), size)
    return Recipe(
        None, made, run=functools.partial(_run_new, made) if made.sharding_axes() else None
    )


def _kept(placement: Placement, alike: int) -> Placement:
    """`Shard` of one of the first `alike` dims; negative dims have been resolved by the layout."""
    kept = type(placement) is Shard and placement.dim < alike
    return placement if kept else Replicate()


def _run_new(made: Layout, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The function with this rank's size, which is the first argument after the tensor."""
    own = own_shape(made)
    if "size" in kwargs:
        return func(*args, **{**kwargs, "size": own})
    rest = args[2:] if func.__name__ == "new_full" else ()
    return func(args[0], own, *rest, **kwargs)


def _new_tensor(call: Call) -> Recipe | None:
    raise call.error(
        "the values given are this rank's, and no layout says what they are of",
        "use DTensor.from_local(torch.tensor(...), mesh, placements)",
    )


def rules() -> Mapping[str, Rule]:
    found: dict[str, Rule] = {}
    for name in ("zeros_like", "empty_like", "ones_like", "full_like"):
        found[name] = Rule(name, _like, ("input", "other"))
    for name in ("new_zeros", "new_ones", "new_empty"):
        found[name] = Rule(name, _new, ("input", "*size"))
    found["new_full"] = Rule("new_full", _new, ("input", "size", "fill_value"))
    found["new_tensor"] = Rule("new_tensor", _new_tensor, ("input", "data"), refuses=True)
    for name in RANDOM:
        found[name] = Rule(name, no_generator, ("*all",), refuses=True)
    return found
