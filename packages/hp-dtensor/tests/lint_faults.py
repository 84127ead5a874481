"""Faults that are found when a plan is applied."""

from __future__ import annotations

from attrs import evolve
from dtensor_block import (
    HEADS,
    HIDDEN,
    WHOLE,
    cut,
    with_boundary,
    with_parameter,
)
from fault import (
    Fault,
    changed,
    more_boundaries,
    parameter,
    without_parameter,
)
from torch.distributed.tensor import Partial

from hp_dtensor.placements import RaggedShard, StridedShard
from hp_dtensor.plan import (
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    LocalAttribute,
    ParameterSpec,
)

ATTENTION, MLP = "layers.0.attention", "layers.0.mlp"

LINT_FAULTS: dict[str, Fault] = {
    # Found when the plan is applied.
    "parameter unknown": Fault(
        lambda plan: evolve(
            plan, parameters=[*plan.parameters, ParameterSpec("gone.weight", "x", (2,), WHOLE, "")]
        ),
        "parameter gone.weight",
        "plan",
    ),
    "parameter forgotten": Fault(
        without_parameter("layers.1.first.weight"), "parameter layers.1.first.weight", "plan"
    ),
    "parameter of another shape": Fault(
        lambda plan: with_parameter(plan, "norm.weight", shape=(HIDDEN + 1,)),
        "parameter norm.weight has shape",
        "plan",
    ),
    "dim that the parameter lacks": Fault(
        parameter("norm.weight", cut(1)), "parameter norm.weight", "plan"
    ),
    "axis that the plan does not shard over": Fault(
        parameter("norm.weight", Contract({"dp": cut(0).placement("tp")})),
        "parameter norm.weight is placed on",
        "plan",
    ),
    "uneven cut": Fault(
        parameter(f"{ATTENTION}.q.weight", Contract({"tp": RaggedShard((0,), (3, 5))})),
        "parameter layers.0.attention.q.weight",
        "plan",
    ),
    "ragged tensor at a boundary": Fault(
        changed(ATTENTION, "inputs", "x", inside=Contract({"tp": RaggedShard((1,), (1, 1))})),
        "boundary layers.0.attention, tensor 'x'",
        "plan",
    ),
    "boundary unknown": Fault(
        more_boundaries(BoundarySpec("layers.9", BoundaryKind.LAYER)), "boundary layers.9", "plan"
    ),
    "boundary twice": Fault(
        more_boundaries(BoundarySpec("norm", BoundaryKind.NORM)),
        "boundary norm is in the plan",
        "plan",
    ),
    "argument unknown": Fault(
        lambda plan: with_boundary(plan, "norm", inputs=[BoundaryTensor("y", cut(1), cut(1))]),
        "boundary norm: Norm.forward takes no argument 'y'",
        "plan",
    ),
    "output declared twice": Fault(
        lambda plan: with_boundary(
            plan,
            "norm",
            outputs=[BoundaryTensor("", WHOLE, cut(1)), BoundaryTensor("", WHOLE, cut(1))],
        ),
        "boundary norm: output '' is declared twice",
        "plan",
    ),
    "size localized over another axis": Fault(
        lambda plan: with_boundary(
            plan, ATTENTION, localize=[LocalAttribute("heads", "dp", HEADS)]
        ),
        "boundary layers.0.attention: attribute 'heads'",
        "plan",
    ),
    "attribute unknown": Fault(
        lambda plan: with_boundary(
            plan, ATTENTION, localize=[LocalAttribute("groups", "tp", HEADS)]
        ),
        "boundary layers.0.attention: attribute 'groups'",
        "plan",
    ),
    "tie unknown to the module": Fault(
        lambda plan: evolve(plan, tied=[("embed.weight", "head.weight")]),
        "'embed.weight', 'head.weight'",
        "plan",
    ),
    "vocabulary in pieces that are not one range": Fault(
        parameter("embed.weight", Contract({"tp": StridedShard(0, 2)})),
        "parameter embed.weight",
        "plan",
    ),
    "contract with a gradient that cannot be": Fault(
        lambda plan: parameter(
            "norm.weight", Contract({"tp": cut(0).placement("tp")}, {"tp": Partial()})
        )(plan),
        "mesh axis 'tp'",
        "error",
    ),
}
