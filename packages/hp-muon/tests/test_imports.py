"""What importing the package loads, and the names it offers."""

from __future__ import annotations

import subprocess
import sys

import hp_muon


def test_importing_loads_neither_operator_rules_nor_other_packages():
    code = (
        "import hp_muon, sys; "
        "bad = ('hp_dtensor.rules', 'hp_dtensor.dispatch', 'hp_dtensor.dtensor', "
        "'hp_dtensor.parallelize', 'hp_planner', 'hp_fsdp', 'hp_integration', 'transformers'); "
        "print([m for m in sys.modules if m.startswith(bad)])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == "[]"


def test_the_public_names_are_these():
    assert sorted(hp_muon.__all__) == [
        "COEFFICIENTS",
        "MatrixView",
        "Muon",
        "MuonError",
        "QKClip",
        "newton_schulz",
        "split_parameters",
    ]
    assert all(hasattr(hp_muon, name) for name in hp_muon.__all__)
