"""Checks of what a user gave: the optimizer's arguments, a group's settings, views by name."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hp_muon.coefficients import coefficient_set
from hp_muon.errors import MuonError
from hp_muon.newton_schulz import check_gram
from hp_muon.rules import update_scale
from hp_muon.slots import named
from hp_muon.split import global_shape
from hp_muon.views import MatrixView, ResolvedView

Views = Mapping[str, MatrixView]


def check_settings(settings: Mapping[str, Any]) -> None:
    """Checks what holds for the whole optimizer.

    Raises:
        MuonError: a value cannot be used.
    """
    dtype, eps = settings["ns_dtype"], settings["ns_eps"]
    if not dtype.is_floating_point or eps <= 0:
        raise MuonError(
            f"Muon needs a floating-point ns_dtype and ns_eps > 0, found {dtype}, {eps}"
        )
    for pattern, view in settings["views"].items():
        if not isinstance(view, MatrixView):
            raise MuonError(
                f"view {pattern!r}: expected a MatrixView, found {type(view).__name__}; write "
                "MatrixView('(h d) m -> h d m', h=8)"
            )
    for name in ("orthogonalize", "momentum_rule", "post_update"):
        if settings[name] is not None and not callable(settings[name]):
            raise MuonError(
                f"{name} must be a function or None, found {type(settings[name]).__name__}"
            )
    if settings["max_batch_elements"] < 1:
        raise MuonError(f"max_batch_elements must be > 0, found {settings['max_batch_elements']}")
    wrong = {shape: cost for shape, cost in (settings["costs"] or {}).items() if not cost > 0}
    if wrong:
        raise MuonError(f"costs must be above 0, found {wrong}")


def check_group(
    number: int, group: dict[str, Any], defaults: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Checks a parameter group.

    Raises:
        MuonError: a setting or parameter cannot be used.
    """
    where = f"parameter group {number}"
    _check_keys(where, group, defaults, settings)
    names = [name for name, _ in named(number, group)]
    if len({id(parameter) for parameter in group["params"]}) < len(names):
        raise MuonError(
            f"{where} holds a parameter more than once, so that it would be stepped as often; "
            f"keep one of {names[:10]}"
        )
    for key in ("lr", "weight_decay"):
        if not 0 <= float(group[key]) < math.inf:
            raise MuonError(f"{where}: {key} must be >= 0 and finite, got {group[key]}")
    if not group["use_muon"]:
        betas, eps = group["betas"], group["eps"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas) or not eps >= 0:
            raise MuonError(
                f"{where}: betas must be two numbers in [0, 1) and eps >= 0, got {betas} and {eps}"
            )
        return
    if not 0 <= group["momentum"] < 1:
        raise MuonError(f"{where}: momentum must be in [0, 1), got {group['momentum']}")
    beta2 = group["normuon_beta2"]
    if beta2 is not None and not 0 <= beta2 < 1:
        raise MuonError(f"{where}: normuon_beta2 must be in [0, 1) or None, got {beta2}")
    if not isinstance(group["ns_steps"], int):
        raise MuonError(f"{where}: ns_steps must be an integer, got {group['ns_steps']!r}")
    coefficient_set(group["coefficients"]).steps(group["ns_steps"])
    check_gram(settings["gram"], group["coefficients"])
    if group["scale"] != "custom" or settings["scale"] is None:
        update_scale(group["scale"], 1, 1)
    for name, parameter in named(number, group):
        if not parameter.is_floating_point():
            raise MuonError(
                f"parameter {name!r} is {parameter.dtype}; Muon steps floating-point tensors"
            )
        kinds_of(name, parameter, settings["views"])


def _check_keys(
    where: str, group: Mapping[str, Any], defaults: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Other keys are a scheduler's or the user's own, unless they look like a setting."""
    for key in set(group) - set(defaults):
        if key in settings:
            raise MuonError(
                f"{where}: {key} holds for the whole optimizer; pass it to Muon(...), not in a "
                "group"
            )
        meant = difflib.get_close_matches(key, defaults, n=1, cutoff=0.85)
        if meant:
            raise MuonError(f"{where}: unknown setting {key!r}; {meant[0]!r} was meant?")


def kinds_of(name: str, parameter: Tensor, views: Views) -> tuple[ResolvedView, ...]:
    """The parameter's logical matrices by kind; decided on its global shape.

    Raises:
        MuonError: several views match its name, the view does not fit, or without one its last
            two dims are no matrices or it has more than three.
    """
    shape = global_shape(parameter)
    patterns = [pattern for pattern in views if fnmatch.fnmatchcase(name, pattern)]
    if len(patterns) > 1:
        raise MuonError(f"parameter {name!r} matches several views: {patterns}; keep one")
    if patterns:
        return views[patterns[0]].kinds(shape, f"parameter {name!r}")
    if len(shape) < 2 or (len(shape) > 2 and 1 in shape[-2:]):
        raise MuonError(
            f"parameter {name!r} of shape {shape} holds no matrices in its last two dims; put "
            "it into a group with use_muon=False (split_parameters does), or give a MatrixView"
        )
    if len(shape) > 3:
        raise MuonError(
            f"parameter {name!r} of shape {shape} has {len(shape)} dims, which do not say what its "
            "matrices are: give a MatrixView, 'o i h w -> o (i h w)' for a convolution kernel, "
            "'l e i o -> l e i o' for matrices in the last two dims; or put it into a group with "
            "use_muon=False (split_parameters does)"
        )
    return MatrixView.default(len(shape)).kinds(shape, f"parameter {name!r}")


def check_views_are_used(views: Views, names: Sequence[str]) -> None:
    """A view that matches nothing is a mistake.

    Raises:
        MuonError: names the view.
    """
    for pattern in views:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise MuonError(
                f"view {pattern!r} matches no parameter; names are known only for named "
                f"parameters, here {names[:5]}{' ...' if len(names) > 5 else ''}"
            )
