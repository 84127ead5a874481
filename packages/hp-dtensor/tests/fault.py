"""A planted fault, and how plans are changed to plant one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from attrs import evolve, frozen
from dtensor_block import (
    HIDDEN,
    WHOLE,
    Tiny,
    with_boundary,
    with_parameter,
)
from torch import nn
from torch.distributed.tensor import Partial

from hp_dtensor.plan import (
    BoundarySpec,
    Contract,
    ParameterSpec,
    Region,
    RegionKind,
    ShardingPlan,
)

AVERAGED = Contract({"tp": Partial("avg")})
LARGEST = Contract({"tp": Partial("max")})
OPAQUE = Region(RegionKind.OPAQUE)
Change = Callable[[ShardingPlan], ShardingPlan]


@frozen
class Fault:
    """A planted fault.

    Attributes:
        change: of the plan.
        message: what the error, or the report's first difference, must match.
        stops: "plan", "error" or "report".
        model: makes the model; the dense reference is the same code.
        sequence_parallel: of the good plan.
        plant: a fault in this package, for the time of the check.
    """

    change: Change
    message: str
    stops: str = "error"
    model: Callable[[], nn.Module] = Tiny
    sequence_parallel: bool = True
    plant: Callable[[], AbstractContextManager[Any]] = nullcontext


def same(plan: ShardingPlan) -> ShardingPlan:
    return plan


def parameter(name: str, contract: Contract) -> Change:
    return lambda plan: with_parameter(plan, name, contract=contract)


def changed(module: str, direction: str, where: str, **changes: Any) -> Change:
    """One tensor of one boundary, changed."""

    def change(plan: ShardingPlan) -> ShardingPlan:
        tensors = getattr(plan.boundary(module), direction)
        assert any(tensor.where == where for tensor in tensors)
        new = [evolve(t, **changes) if t.where == where else t for t in tensors]
        return with_boundary(plan, module, **{direction: new})

    return change


def opaque(module: str) -> Change:
    return lambda plan: with_boundary(plan, module, region=OPAQUE)


def both(*changes: Change) -> Change:
    def change(plan: ShardingPlan) -> ShardingPlan:
        for each in changes:
            plan = each(plan)
        return plan

    return change


def output_bias(plan: ShardingPlan) -> ShardingPlan:
    """The output projection's bias, replicated beside a weight that is cut by columns."""
    extra = [
        ParameterSpec(f"layers.{i}.attention.o.bias", "bias", (HIDDEN,), WHOLE, "")
        for i in range(2)
    ]
    return evolve(plan, parameters=[*plan.parameters, *extra])


def without_boundary(name: str) -> Change:
    def change(plan: ShardingPlan) -> ShardingPlan:
        return evolve(plan, boundaries=[b for b in plan.boundaries if b.module != name])

    return change


def without_parameter(name: str) -> Change:
    def change(plan: ShardingPlan) -> ShardingPlan:
        return evolve(plan, parameters=[p for p in plan.parameters if p.name != name])

    return change


def more_boundaries(*boundaries: BoundarySpec) -> Change:
    return lambda plan: evolve(plan, boundaries=[*plan.boundaries, *boundaries])
