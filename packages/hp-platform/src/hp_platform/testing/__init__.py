"""Tools for testing code that communicates: real ranks by fork, and simulated ranks.

`two_tier` puts real ranks on hosts with a slow link between them.
`hp_platform.testing.conformance` holds the laws of a backend, `hp_platform.testing.strategies`
the Hypothesis strategies; both are imported by name.
"""

from hp_platform.testing.ranks import run_ranks
from hp_platform.testing.simulator import Simulator
from hp_platform.testing.two_tier import TwoTierNetwork, TwoTierUnavailable, two_tier

__all__ = ["Simulator", "TwoTierNetwork", "TwoTierUnavailable", "run_ranks", "two_tier"]
