"""Tools for testing code that communicates: real ranks by fork, and simulated ranks.

`hp_platform.testing.conformance` holds the laws of a backend, `hp_platform.testing.strategies`
the Hypothesis strategies; both are imported by name.
"""

from hp_platform.testing.ranks import run_ranks
from hp_platform.testing.simulator import Simulator

__all__ = ["Simulator", "run_ranks"]
