"""Muon for sharded training that needs nothing but the parameters' layouts."""

from hp_muon.coefficients import COEFFICIENTS
from hp_muon.errors import MuonError
from hp_muon.muon import Muon
from hp_muon.newton_schulz import newton_schulz
from hp_muon.qk_clip import QKClip
from hp_muon.split import split_parameters
from hp_muon.views import MatrixView

__all__ = [
    "COEFFICIENTS",
    "MatrixView",
    "Muon",
    "MuonError",
    "QKClip",
    "newton_schulz",
    "split_parameters",
]
