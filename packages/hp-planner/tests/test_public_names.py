"""What the package offers."""

import pytest

import hp_dtensor
import hp_planner
from hp_platform import HPError


def test_public_names_are_these():
    errors_and_values = ["Change", "LintError", "Memory", "Message", "PlanDiff", "PlanError"]
    functions = ["diff", "explain", "lint", "memory", "messages", "plan"]
    assert hp_planner.__all__ == [*errors_and_values, "Violation", "Workload", *functions]
    assert all(hasattr(hp_planner, name) for name in hp_planner.__all__)


@pytest.mark.parametrize("family", [HPError, hp_dtensor.PlanError, ValueError])
def test_the_planner_s_errors_are_caught_as_those_of_the_packages(family):
    with pytest.raises(family, match="a mesh without axes"):
        raise hp_planner.LintError("a mesh without axes", ())
