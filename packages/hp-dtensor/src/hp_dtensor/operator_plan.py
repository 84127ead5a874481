"""What one call of an operator resolves to, and where that is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.rules.own_part import own_shape
from hp_dtensor.rules.recipe import Call, Recipe, Rule
from hp_dtensor.transition import Transition
from hp_platform.collectives import Origin

__all__ = ["Plan", "PlanCache", "Step", "plans_of"]


@frozen
class Step:
    """A transition of one operand; `adjoint_only` leaves values as they are."""

    transition: Transition
    adjoint_only: bool
    origin: Origin


@frozen(slots=False)
class Plan:
    """A recipe with its transitions compiled: what one key resolves to.

    `nested` says that some tensors are inside lists, dicts or keyword arguments; `stated` what is
    wrong with a size, where a module in validate mode makes the call.
    """

    rule: Rule
    recipe: Recipe
    steps: tuple[Step | None, ...] | None
    call: Call
    nested: bool = False
    stated: tuple[str, str] | None = None

    @cached_property
    def local_shape(self) -> torch.Size | None:
        """What this rank's part of a single result must have; None for other results."""
        outputs = self.recipe.outputs
        return torch.Size(own_shape(outputs)) if type(outputs) is Layout else None


class PlanCache:
    """Bounded memory of a pure function: key to plan. Forgets everything when full.

    A copied or pickled one is empty, as its mesh's process groups are made anew.
    """

    def __init__(self, limit: int = 16384) -> None:
        self.limit = limit
        self.plans: dict[Any, Plan] = {}

    def put(self, key: Any, plan: Plan) -> None:
        if len(self.plans) >= self.limit:
            self.plans.clear()
        self.plans[key] = plan

    def __reduce__(self) -> tuple[type[PlanCache], tuple[int]]:
        return PlanCache, (self.limit,)


_of_abstract_meshes = PlanCache()


def plans_of(found: Sequence[Tensor]) -> PlanCache:
    """The plans kept with the mesh object of the first DTensor; they live as long as it does.

    A plan's layouts hold the mesh and so its process groups. A mesh that is made again after
    `destroy_process_group` equals the one before, but must not be given that one's groups.
    """
    for tensor in found:
        try:
            mesh: Any = tensor._layout.mesh  # type: ignore[attr-defined]
        except AttributeError:
            continue
        try:
            return mesh._hp_plans
        except AttributeError:
            if isinstance(mesh, AbstractMesh):
                break
            mesh._hp_plans = PlanCache()
            return mesh._hp_plans
    return _of_abstract_meshes
