"""Benchmarks: each call of ours followed by one of every peer, on the same ranks.

`python -m hp_integration.bench NAME [--json] [--quick]`.
"""
