"""Tools for testing code that communicates: real ranks by fork, and simulated ranks."""

from hp_platform.testing.ranks import run_ranks
from hp_platform.testing.simulator import Simulator

__all__ = ["Simulator", "run_ranks"]
