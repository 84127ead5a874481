"""Regions that bring their own communication, found by the name that a plan gives them.

A plan is data and depends on no package above this one, so a region that has to exchange data
inside (expert dispatch, context-parallel attention) is named in it: `"package.module:function"`.
`parallelize` looks the name up when it applies the plan and lets the function install itself on
the boundary's module, between the boundary's entry and its exit: what the function's hooks take
and return is the boundary's *inside*, on plain local tensors, in either mode.

A plan file therefore names code that will run. Apply plans that you trust, as with any program.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Protocol, cast

from torch import nn

from hp_dtensor.contracts import ModelAxes, PlanError
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.plan import BoundarySpec, RegionKind

__all__ = ["RegionFunction", "install_region", "region_findings", "resolve_region"]

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class RegionFunction(Protocol):
    """What a region's name stands for.

    It is called once on every rank, communicates nothing, and registers forward pre-hooks and
    forward hooks on `module` (or sets what the module's forward calls). Obligations: with inputs
    laid out as the boundary's `inside` says, the outputs are laid out as its `inside` says, and
    backward gives gradients laid out as both say. All ranks of an axis run the same collectives
    in the same order, forward and backward, however uneven the load.
    """

    def __call__(self, module: nn.Module, boundary: BoundarySpec, axes: ModelAxes) -> None: ...


def resolve_region(name: str) -> RegionFunction:
    """The function that a plan calls `name`.

    Raises:
        PlanError: it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    try:
        return cast(RegionFunction, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"the plan's region {name!r} cannot be found ({error}); install the package "
            f"{module.partition('.')[0]!r}, or make the plan without the axis that needs it"
        ) from error


def region_findings(boundary: BoundarySpec) -> Iterator[str]:
    """What is wrong with a boundary's region; the same on every rank."""
    region = boundary.region
    if region is None or not region.function:
        return
    where = f"boundary {boundary.module or '(root)'}"
    if region.kind is not RegionKind.OPAQUE:
        yield f"{where}: a region with a function of its own is opaque; declare it so"
    if not _NAME.fullmatch(region.function):
        yield f"{where}: region function {region.function!r} is not 'package.module:function'"
        return
    try:
        resolve_region(region.function)
    except PlanError as error:
        yield f"{where}: {error}"


def install_region(module: nn.Module, boundary: BoundarySpec, axes: ModelAxes) -> None:
    """Lets the boundary's region, if it has a function, install itself.

    Without process groups (tensors without values) nothing is exchanged and nothing is installed:
    the declared contracts stand for the region.
    """
    region = boundary.region
    alone = isinstance(axes.mesh, AbstractMesh)
    if region is not None and region.function and not alone:
        resolve_region(region.function)(module, boundary, axes)
