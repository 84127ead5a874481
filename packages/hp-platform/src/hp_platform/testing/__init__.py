"""Tools for testing code that communicates: real ranks by fork, and simulated ranks."""

from hp_platform.testing.ranks import run_ranks

__all__ = ["run_ranks"]
