"""Rules of functions that make a new tensor like an old one."""

from __future__ import annotations

from collections.abc import Mapping

from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial, Replicate
from hp_dtensor.rules.pointwise import no_generator
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule, words


def _like(call: Call) -> Recipe:
    """A new tensor where the old one is. A pending sum of ones would count the ranks."""
    layout = call.input.layout
    if isinstance(call.get("other"), Operand):
        raise call.error("a tensor as fill value has no rule", "pass a number")
    placements = [Replicate() if isinstance(p, Partial) else p for p in layout.placements]
    return Recipe(None, layout.with_placements(placements))


def _new(call: Call) -> Recipe:
    """`x.new_zeros(size)` and its kin: the same new tensor on every rank."""
    layout = call.input.layout
    size = call.get("size", ())
    size = (size,) if isinstance(size, int) else size
    return Recipe(None, Layout(layout.mesh, [Replicate()] * len(layout.placements), size))


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
    for name in words(
        """
    rand_like randn_like randint_like bernoulli bernoulli_ normal_ uniform_ random_ exponential_
    native_dropout pca_lowrank svd_lowrank cauchy_ log_normal_ geometric_ multinomial normal
    poisson binomial rrelu kaiming_uniform_
    kaiming_normal_ xavier_uniform_ xavier_normal_ trunc_normal_ orthogonal_ sparse_
    gumbel_softmax feature_alpha_dropout fractional_max_pool2d fractional_max_pool3d
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
    """
    ):
        found[name] = Rule(name, no_generator, ("*all",), refuses=True)
    return found
