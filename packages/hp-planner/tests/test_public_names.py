"""What the package offers, and what importing it must not load."""

import subprocess
import sys

import hp_planner


def test_public_names_are_these():
    assert hp_planner.__all__ == ["LintError", "PlanError", "Violation", "explain", "lint", "plan"]
    assert all(hasattr(hp_planner, name) for name in hp_planner.__all__)


def test_import_loads_neither_transformers_nor_the_operator_rules():
    code = """
import sys
import hp_planner
loaded = [name for name in sys.modules if name.startswith(
    ("transformers", "hp_dtensor.dtensor", "hp_dtensor.rules", "hp_dtensor.dispatch", "hp_fsdp"))]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
