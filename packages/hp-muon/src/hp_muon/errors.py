"""The package's own error."""

from __future__ import annotations

from hp_platform import HPError


class MuonError(HPError, ValueError):
    """An optimizer, view or parameter was given what Muon cannot take."""
