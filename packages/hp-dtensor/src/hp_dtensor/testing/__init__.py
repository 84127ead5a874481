"""The fuzzing kit: Hypothesis strategies for layouts, and checks of transitions, rules and plans.

For the tests of this project and for those of its users. Needs the extra `hp-dtensor[testing]`.
"""

from hp_dtensor.testing.lockstep import LockstepMesh, run_lockstep
from hp_dtensor.testing.plan_check import check_plan
from hp_dtensor.testing.rule_check import RuleReport, check_rule
from hp_dtensor.testing.simulated_check import check_simulated
from hp_dtensor.testing.strategies import (
    DistributedValue,
    check_redistribute,
    collect,
    distributed_tensors,
    every_placement,
    layouts,
    meshes,
    pairs_of,
    placements,
    shapes,
    spread,
)

__all__ = [
    "DistributedValue",
    "LockstepMesh",
    "RuleReport",
    "check_plan",
    "check_redistribute",
    "check_rule",
    "check_simulated",
    "collect",
    "distributed_tensors",
    "every_placement",
    "layouts",
    "meshes",
    "pairs_of",
    "placements",
    "run_lockstep",
    "shapes",
    "spread",
]
