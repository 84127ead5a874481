"""The names that the package offers."""

from __future__ import annotations

import hp_muon


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
