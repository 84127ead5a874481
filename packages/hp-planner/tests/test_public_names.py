"""What the package offers, and what importing it must not load."""

import subprocess
import sys

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


def test_import_loads_neither_transformers_nor_the_operator_rules():
    code = """
import sys
import hp_planner
loaded = [name for name in sys.modules if name.startswith(
    ("transformers", "hp_dtensor.dtensor", "hp_dtensor.rules", "hp_dtensor.dispatch", "hp_fsdp"))]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
